"""Hidden states of two models with equal weights, one as vLLM writes models and one as Hugging Face or Megatron do."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from nemo_geomask.errors import EngineError
from nemo_geomask.tools.probe import layer_states

WIDTH, LAYERS, EXPERTS, TOP_K, LENGTH = 8, 3, 6, 2, 7


class Norm(nn.Module):
    """As vLLM's: adds the residual where there is one, and returns the sum too."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.eps = 1e-6

    def forward(self, hidden, residual=None):
        total = hidden if residual is None else hidden + residual
        normed = total / (total.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight
        return normed if residual is None else (normed, total)


class Attention(nn.Module):
    """A causal mean in place of attention: position matters, and so does every earlier token."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states, axis=-2):
        ages = torch.arange(1, hidden_states.shape[axis] + 1, dtype=hidden_states.dtype)
        ages = ages.unsqueeze(-1) if axis == -2 else ages.reshape(-1, 1, 1)
        return self.linear(hidden_states.cumsum(axis) / ages)


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = Router()
        self.linear = nn.Linear(WIDTH, WIDTH)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(), Norm()
        self.self_attn, self.mlp = Attention(), MLP()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        self.model.embed = nn.Embedding(20, WIDTH)
        self.model.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.model.norm = Norm()
        self.lm_head = nn.Linear(WIDTH, 20, bias=False)


class EngineRouter(Router):
    def forward(self, hidden):
        return hidden @ self.weight.T, None


class EngineMLP(MLP):
    def forward(self, hidden):
        self.gate(hidden)
        return self.linear(hidden).relu()


class EngineLayer(Layer):
    def forward(self, positions, hidden, residual):
        if residual is None:
            residual = hidden
            hidden = self.input_layernorm(hidden)
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(hidden_states=hidden)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class EngineModel(Model):
    def forward(self, tokens):
        hidden, residual = self.model.embed(tokens), None
        for layer in self.model.layers:
            hidden, residual = layer(torch.arange(len(tokens)), hidden, residual)
        hidden, _ = self.model.norm(hidden, residual)
        return self.lm_head(hidden)


class TrainerRouter(Router):
    def forward(self, hidden):
        logits = hidden.reshape(-1, WIDTH) @ self.weight.T
        scores, indices = logits.topk(TOP_K)
        return logits, scores, indices


class TrainerMLP(EngineMLP):
    pass


class TrainerLayer(Layer):
    def forward(self, hidden_states):
        hidden_states = hidden_states + self.self_attn(hidden_states=self.input_layernorm(hidden_states))
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class TrainerModel(Model):
    def forward(self, tokens):
        hidden = self.model.embed(tokens)
        for layer in self.model.layers:
            hidden = layer(hidden_states=hidden)
        return self.lm_head(self.model.norm(hidden))


def cast(model, model_class, layer_class, mlp_class, router_class):
    """A copy of a model with other classes and the same weights."""
    model = copy.deepcopy(model)
    model.__class__ = model_class
    for layer in model.model.layers:
        layer.__class__, layer.mlp.__class__, layer.mlp.gate.__class__ = layer_class, mlp_class, router_class
    return model


class Engine:
    """In place of vLLM: one process, in which requests run the model."""

    def __init__(self, model):
        self.worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
        self.model = model

    def collective_rpc(self, function, args=()):
        return [function(self.worker, *args)]

    def reset_prefix_cache(self):
        pass

    def generate(self, prompts, parameters, use_tqdm):
        with torch.no_grad():
            self.model(torch.tensor(prompts[0]["prompt_token_ids"]))
            self.model(torch.tensor([3]))  # the token that every request asks for


@pytest.fixture
def weights():
    torch.manual_seed(3)
    return Model()


@pytest.fixture
def tokens():
    return torch.tensor([5, 3, 9, 12, 1, 7, 2])


def engine_states(weights, tokens):
    model = cast(weights, EngineModel, EngineLayer, EngineMLP, EngineRouter)
    actor = SimpleNamespace(llm=Engine(model), SamplingParams=lambda **fields: fields)
    states = layer_states.capture_engine(actor, tokens.tolist())
    with torch.no_grad():
        return states, model(tokens)


def trainer(weights):
    return cast(weights, TrainerModel, TrainerLayer, TrainerMLP, TrainerRouter)


def differences(model, states, tokens, *, replay):
    """Differences of a pass over a padded batch of two rows, of which the first is the sequence."""
    actor = SimpleNamespace(model=model)
    batch = torch.zeros(2, LENGTH + 2, dtype=torch.long)
    batch[:, :LENGTH] = tokens
    layer_states.watch_trainer(actor, states, replay)
    with torch.no_grad():
        logits = model(batch)
    found = layer_states.compare_trainer(actor, states, TOP_K, tokens.tolist())
    layer_states.stop_trainer(actor)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return found, logits[0, :LENGTH]


def test_equal_weights_agree_at_every_operator(weights, tokens):
    states, logits = engine_states(weights, tokens)
    for replay in (False, True):
        found, trainer_logits = differences(trainer(weights), states, tokens, replay=replay)
        parts = ("attention norm", "attention", "MLP norm", "MLP", "layer", "router")
        assert set(found) == {f"{number} {part}" for number in range(LAYERS) for part in parts} | {"final norm"}
        assert max(found.values()) < 1e-6
        torch.testing.assert_close(trainer_logits, logits, rtol=1e-5, atol=1e-5)


PLANTS = {
    "attention": lambda layer: layer.self_attn.linear.weight,
    "MLP": lambda layer: layer.mlp.linear.weight,
    "attention norm": lambda layer: layer.input_layernorm.weight,
    "MLP norm": lambda layer: layer.post_attention_layernorm.weight,
}


@pytest.mark.parametrize("part", PLANTS)
def test_replayed_inputs_show_the_operator_and_a_free_pass_all_that_follow(part, weights, tokens):
    states, _ = engine_states(weights, tokens)
    other = trainer(weights)
    with torch.no_grad():
        PLANTS[part](other.model.layers[1]).mul_(1.1)
    found, _ = differences(other, states, tokens, replay=True)
    # Norms scale by a known factor; the layer's own output contains its operators'.
    beyond = {name for name, value in found.items() if value > 1e-5 and "router" not in name}
    assert beyond - {"1 layer"} == {f"1 {part}"}
    if "norm" in part:
        assert found[f"1 {part}"] == pytest.approx(0.1, rel=1e-4)
    free, _ = differences(other, states, tokens, replay=False)
    assert free["0 layer"] < 1e-6
    assert min(free["1 layer"], free["2 layer"], free["final norm"]) > 1e-4


def test_the_head_gets_the_engines_last_hidden_states(weights, tokens):
    states, logits = engine_states(weights, tokens)
    other = trainer(weights)
    with torch.no_grad():
        other.model.layers[0].self_attn.linear.weight.mul_(3.0)
    _, replayed = differences(other, states, tokens, replay=True)
    torch.testing.assert_close(replayed, logits, rtol=1e-5, atol=1e-5)
    _, free = differences(other, states, tokens, replay=False)
    assert (free - logits).abs().max() > 0.01


def test_tokens_with_other_experts_are_counted(weights, tokens):
    states, _ = engine_states(weights, tokens)
    other = trainer(weights)
    with torch.no_grad():
        other.model.layers[2].mlp.gate.weight.copy_(other.model.layers[2].mlp.gate.weight.flip(0))
    found, _ = differences(other, states, tokens, replay=True)
    engine_logits = states["2 router"][1]
    wanted, chosen = (
        torch.zeros(LENGTH, EXPERTS).scatter_(1, each.topk(TOP_K).indices, 1.0)
        for each in (engine_logits, engine_logits.flip(1))
    )
    share = sum(bool((wanted[row] != chosen[row]).any()) for row in range(LENGTH)) / LENGTH
    assert found["2 router"] == pytest.approx(share)
    assert share > 0.5
    assert found["1 router"] == 0.0


class AutomodelLayer(TrainerLayer):
    def forward(self, x):
        return super().forward(x)


class AutomodelModel(Model):
    def forward(self, tokens):
        hidden = self.model.embed(tokens)
        for layer in self.model.layers.values():
            hidden = layer(x=hidden)
        return self.lm_head(self.model.norm(hidden))


def test_automodels_layers_are_a_dictionary_and_take_their_input_by_another_name(weights, tokens):
    states, _ = engine_states(weights, tokens)
    model = cast(weights, AutomodelModel, AutomodelLayer, TrainerMLP, TrainerRouter)
    model.model.layers = nn.ModuleDict({str(number): layer for number, layer in enumerate(model.model.layers)})
    with torch.no_grad():
        model.model.layers["0"].mlp.linear.weight.mul_(1.1)
    found, _ = differences(model, states, tokens, replay=True)
    # The input of each layer is the engine's, so that nothing of the first one's change is left in the next.
    assert {name for name, value in found.items() if value > 1e-5} == {"0 MLP", "0 layer"}
    assert {"1 layer", "1 attention", "1 router"} < set(found)


class TokensFirst(TrainerModel):
    """As Megatron's: hidden states are [tokens, rows, width]; with ``share``, this rank has every second token."""

    share = slice(None)

    def forward(self, tokens):
        hidden = self.model.embed(tokens.T)[self.share]
        for layer in self.model.layers:
            hidden = layer(hidden_states=hidden)
        return self.lm_head(self.model.norm(hidden))


def tokens_first(weights):
    model = cast(weights, TokensFirst, TrainerLayer, TrainerMLP, TrainerRouter)
    for layer in model.model.layers:
        layer.self_attn.forward = lambda hidden_states, own=layer.self_attn: Attention.forward(own, hidden_states, 0)
    return model


def test_megatrons_layout_of_tokens_before_rows_is_read(weights, tokens):
    states, _ = engine_states(weights, tokens)
    for replay in (False, True):
        found, _ = differences(tokens_first(weights), states, tokens, replay=replay)
        assert max(value for name, value in found.items() if "router" not in name) < 1e-6
        assert len(found) >= 5 * LAYERS


@pytest.mark.parametrize("replay", [False, True])
def test_a_rank_with_other_tokens_compares_nothing(replay, weights, tokens):
    """Context parallelism gives each rank parts of every sequence."""
    states, _ = engine_states(weights, tokens)
    actor, batch = SimpleNamespace(model=trainer(weights)), torch.cat([tokens[:2], tokens[5:], tokens]).unsqueeze(0)
    layer_states.watch_trainer(actor, states, replay)
    with torch.no_grad():
        actor.model(batch)
    with pytest.raises(EngineError, match="has other tokens than the sequence, as context parallelism"):
        layer_states.compare_trainer(actor, states, TOP_K, tokens.tolist())
    layer_states.stop_trainer(actor)


@pytest.mark.parametrize("replay", [False, True])
def test_a_rank_with_some_of_the_hidden_states_compares_nothing(replay, weights, tokens):
    """Sequence parallelism: the rank has all token ids, and every second hidden state of two long rows."""
    states, _ = engine_states(weights, tokens)
    model = tokens_first(weights)
    model.share = slice(None, None, 2)
    actor, batch = SimpleNamespace(model=[model]), torch.zeros(2, 4 * LENGTH, dtype=torch.long)
    batch[:, :LENGTH] = tokens
    layer_states.watch_trainer(actor, states, replay)
    with torch.no_grad():
        model(batch)
    with pytest.raises(EngineError, match="has all tokens of the sequence, as under sequence parallelism"):
        layer_states.compare_trainer(actor, states, TOP_K, tokens.tolist())
    layer_states.stop_trainer(actor)


def test_layers_of_a_later_pipeline_stage_keep_their_numbers(weights, tokens):
    states, _ = engine_states(weights, tokens)
    stage = trainer(weights)
    for number, layer in enumerate(stage.model.layers, start=1):
        layer.layer_number = number
    stage.model.layers = stage.model.layers[1:]
    found, _ = differences(stage, states, tokens, replay=True)
    assert {name.split()[0] for name in found} == {"1", "2", "final"}
    assert max(found.values()) < 1e-6


def test_a_fused_norm_is_left_out_and_attention_gets_its_input(weights, tokens):
    states, _ = engine_states(weights, tokens)

    class Fused(nn.Module):
        def __init__(self, norm, attention):
            super().__init__()
            self.norm, self.attention = norm, attention

        def forward(self, hidden_states):
            return self.attention(self.norm(hidden_states))

    model = trainer(weights)
    for layer in model.model.layers:
        layer.self_attn = Fused(layer.input_layernorm, layer.self_attn)
        layer.input_layernorm = nn.Identity()
    found, _ = differences(model, states, tokens, replay=True)
    assert "1 attention norm" not in found
    assert max(found.values()) < 1e-6
