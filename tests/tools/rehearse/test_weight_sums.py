"""Sums in workers: of weights on both sides of a refit, as NeMo-RL and vLLM name and lay them out, and of losses."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest
import torch

from nemo_geomask.tools.rehearse import weight_groups, weight_sums, worker_counts

SHAPES = {
    "model.embed_tokens.weight": (32, 8),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.self_attn.k_proj.weight": (4, 8),
    "model.layers.0.self_attn.v_proj.weight": (4, 8),
    "model.layers.1.mlp.experts.0.gate_proj.weight": (6, 8),
    "model.layers.1.mlp.experts.0.up_proj.weight": (6, 8),
    "model.layers.1.mlp.experts.1.gate_proj.weight": (6, 8),
    "model.layers.1.mlp.experts.1.up_proj.weight": (6, 8),
    "lm_head.weight": (32, 8),
}


@pytest.fixture
def weights():
    random = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}


@pytest.fixture
def sent():
    """What a worker has summed of the weights that it sent through a wrapped function of NeMo-RL's."""

    def send(weights):
        received = []

        def stream(params_generator, buffer_size_bytes):
            received.extend(params_generator)

        weight_sums.sum_streamed(stream)(params_generator=iter(weights.items()), buffer_size_bytes=1)
        assert [name for name, _ in received] == list(weights)
        return weight_sums.read_sent_sums()["sums"]

    return send


def differences(sums, held, before=None):
    return weight_groups.compare(sums, held, before)[0]


def engine_with(named_parameters):
    """A generation worker whose vLLM engine, of one process, has a model with these parameters."""
    model = SimpleNamespace(named_parameters=named_parameters, named_modules=dict)
    worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
    return SimpleNamespace(llm=SimpleNamespace(collective_rpc=lambda function: [function(worker)]))


def held_by(worker):
    """The sums of a worker's engine, by group."""
    return weight_groups.merge_processes([sums for sums, _ in weight_sums.engine_sums(worker)])


def engine(weights, dtype=torch.bfloat16):
    """A generation worker whose vLLM has fused the weights."""
    values = list(weights.values())
    fused = {
        "model.embed_tokens.weight": values[0],
        "model.layers.0.self_attn.qkv_proj.weight": torch.cat(values[1:4]),
        "model.layers.1.mlp.experts.w13_weight": torch.stack([torch.cat(values[4:6]), torch.cat(values[6:8])]),
        "lm_head.weight": torch.cat([values[8], torch.zeros(32, 8)]),  # padded
    }
    return engine_with(lambda: ((name, value.to(dtype)) for name, value in fused.items()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_that_arrived_are_equal_in_any_dtype(weights, sent, dtype):
    held = held_by(engine(weights, dtype))
    assert differences(sent(weights), held) == []
    assert set(held) == {"embed_tokens.weight", "layers.0.self_attn.qkv_proj", "layers.1.mlp.experts", "lm_head.weight"}


def test_one_weight_that_is_stale_by_one_step_of_bfloat16(weights, sent):
    held = held_by(engine(weights))
    key = "model.layers.1.mlp.experts.1.up_proj.weight"
    trained = {**weights, key: weights[key].clone()}
    trained[key][0, 0] *= 1 + 2.0**-7
    (difference,) = differences(sent(trained), held)
    assert difference.group == "layers.1.mlp.experts"
    assert difference.size > 0


def test_shards_add_up_and_copies_count_once(weights, sent):
    """Two processes with halves of K, V and experts, each with a copy of the embedding; one may be out of date."""
    values = list(weights.values())
    halves = [
        {
            "model.embed_tokens.weight": values[0].bfloat16(),
            "model.layers.0.self_attn.qkv_proj.weight": torch.cat(
                [value.chunk(2)[rank] for value in values[1:4]]
            ).bfloat16(),
            "model.layers.1.mlp.experts.w13_weight": torch.cat(values[4 + 2 * rank : 6 + 2 * rank]).bfloat16(),
            "lm_head.weight": values[8].chunk(2)[rank].bfloat16(),
        }
        for rank in range(2)
    ]

    def held():
        return weight_groups.merge_processes(
            [weight_sums.engine_sums(engine_with(half.items))[0][0] for half in halves]
        )

    sums = sent(weights)
    assert differences(sums, held()) == []
    halves[1]["model.embed_tokens.weight"] = halves[1]["model.embed_tokens.weight"] * 1.01
    assert [each.group for each in differences(sums, held())] == ["embed_tokens.weight"]


def test_heads_that_several_processes_hold_count_once():
    module = torch.nn.Linear(2, 6, bias=False)  # 2 heads of Q here, and the only one of K and V, each of 1.5 rows
    module.num_heads, module.head_size, module.num_kv_head_replicas = 2, 2, 2
    module.weight.data = torch.arange(12.0).reshape(6, 2)
    model = torch.nn.ModuleDict({"qkv_proj": module})
    sums = weight_sums.sum_parameters(model)
    q, kv = sum(range(8)), sum(range(8, 12))
    assert sums["qkv_proj.weight"]["float32"] == [q + kv / 2, q + kv / 2, 8 + 4 / 2]


def test_a_layer_that_one_side_lacks(weights, sent):
    held = held_by(engine(weights))
    first = {name: value for name, value in weights.items() if "layers.1" not in name}
    assert [each.group for each in differences(sent(first), held)] == ["layers.1"]
    sums = sent(weights)
    del held["layers.0.self_attn.qkv_proj"]
    assert [each.group for each in differences(sums, held)] == ["layers.0"]


def test_a_module_is_named_and_what_the_engine_has_kept(weights, sent):
    before = held_by(engine(weights))
    trained = {name: value * 1.01 if "layers.1" in name else value for name, value in weights.items()}
    found = differences(sent(trained), before, before)
    assert [(each.group, each.why) for each in found] == [("layers.1.mlp.experts", "as before the refit")]
    renamed = {name.replace("self_attn", "mixer"): sums for name, sums in before.items()}
    (other,) = differences(sent({**weights, "model.layers.0.self_attn.k_proj.weight": torch.ones(4, 8)}), renamed)
    assert (other.group, other.why) == ("layers.0", "")  # trainer and engine name its modules differently


def quantised(weight, scale):
    """[N, K] float8 under the scale, as vLLM's fp8 methods keep a weight."""
    factors = scale.repeat_interleave(128, 0)[: len(weight)].repeat_interleave(128, 1)[:, : weight.shape[1]]
    return (weight / factors).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("factor", [1.0, 1.02])
def test_a_quantised_weight_is_dequantised_and_may_differ_by_what_that_rounds(sent, factor):
    weight = torch.randn(300, 200, generator=torch.Generator().manual_seed(0))
    name, scale = "model.layers.0.mlp.down_proj.weight", torch.rand(3, 2) / 100 + 0.01
    held = {name: quantised(weight * factor, scale), f"{name}_scale_inv": scale}
    found, compared, unknown = weight_groups.compare(sent({name: weight}), held_by(engine_with(held.items)))
    assert (compared, unknown) == (["layers.0.mlp.down_proj"], [])
    assert [each.group for each in found] == ([] if factor == 1 else ["layers.0.mlp.down_proj"])
    packed = {name: torch.zeros(300, 100, dtype=torch.uint8), f"{name}_scale": torch.ones(300, 13)}
    found, compared, unknown = weight_groups.compare(sent({name: weight}), held_by(engine_with(packed.items)))
    assert (found, compared, unknown) == ([], [], ["layers.0.mlp.down_proj"])


def test_values_that_are_rounded_to_few_bits():
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    assert weight_groups.rounded_bits(weight.bfloat16()) == ""
    assert weight_groups.rounded_bits((weight.to(torch.float8_e4m3fn).float() * 0.3).bfloat16()) == "8 bits"
    sixteen = weight.reshape(-1, 16)
    scale = sixteen.abs().amax(1, keepdim=True) / 7
    assert weight_groups.rounded_bits(((sixteen / scale).round() * scale).reshape(64, 64).bfloat16()) == "4 bits"
    assert weight_groups.rounded_bits(torch.ones(64, 64)) == weight_groups.rounded_bits(weight[0]) == ""


def test_what_a_model_has_quantised_and_what_its_routers_compute_in():
    class Layer(torch.nn.Module):
        def __init__(self, number):
            super().__init__()
            self.layer_number = number
            self.mlp = torch.nn.ModuleDict({"router": torch.nn.Linear(8, 4), "linear_fc1": torch.nn.Linear(8, 8)})

    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([Layer(3), Layer(4)])})  # a second stage of a pipeline
    model["layers"][0].mlp.router.config = SimpleNamespace(moe_router_dtype="fp64")
    model["layers"][1].mlp.linear_fc1.fp8 = True
    assert weight_sums.read_precision(model) == {
        "quantised": {"layers.3": "fp8"},
        "rounded": {},
        "routers": {"layers.2.mlp.router": "float64", "layers.3.mlp.router": "weights in float32"},
    }


def test_large_tensors_are_summed_in_parts(monkeypatch):
    values = torch.arange(-50.0, 60.0).reshape(10, 11)
    whole = weight_groups.sums_of(values, "bfloat16")
    monkeypatch.setattr(weight_groups, "PART", 7)
    assert weight_groups.sums_of(values.t(), "bfloat16") == whole == [495.0, 3045.0, 110.0]


def test_nan_is_a_difference_and_a_tied_embedding_is_not(weights, sent):
    held = held_by(engine(weights))
    del held["lm_head.weight"]
    assert differences(sent(weights), held) == []
    broken = {**weights, "model.embed_tokens.weight": weights["model.embed_tokens.weight"] * torch.nan}
    assert [difference.group for difference in differences(sent(broken), held)] == ["embed_tokens.weight"]
    held = held_by(engine(broken))
    assert differences(sent(broken), held) == []  # the engine has what the trainer has


@pytest.mark.parametrize("is_decay", [True, False])
def test_the_decay_of_a_state_space_as_the_engine_keeps_it(sent, is_decay):
    """vLLM's Mamba layers keep A = -exp(A_log), its gated delta nets A_log itself."""
    log = torch.tensor([0.1, 0.7, 1.1])
    sums = sent({"model.layers.0.mixer.in_proj.weight": torch.ones(4, 4), "model.layers.0.mixer.A_log": log})

    def held(value):
        name = f"model.layers.0.mixer.{'A' if is_decay else 'A_log'}"
        weights = {"model.layers.0.mixer.in_proj.weight": torch.ones(4, 4).bfloat16(), name: value}
        return held_by(engine_with(weights.items))

    value = -log.exp() if is_decay else log
    assert differences(sums, held(value)) == []
    (difference,) = differences(sums, held(value * 1.01))
    assert difference.group == f"layers.0.{'A' if is_decay else 'A_log'}"


@pytest.mark.parametrize("held_scale", [0.0125, 1.0])
def test_scales_of_an_fp8_cache_are_compared_but_for_the_one_that_is_never_sent(sent, held_scale):
    prefix = "model.layers.0.self_attn"
    sums = sent({f"{prefix}.o_proj.weight": torch.ones(4, 4), f"{prefix}.k_scale": torch.tensor([0.0125])})
    held = {
        f"{prefix}.o_proj.weight": torch.ones(4, 4).bfloat16(),
        f"{prefix}.attn.k_scale": torch.tensor(held_scale).bfloat16(),
        f"{prefix}.attn.prob_scale": torch.tensor(-1.0).bfloat16(),
    }
    answer = held_by(engine_with(held.items))
    assert [each.group for each in differences(sums, answer)] == ([] if held_scale < 1 else ["layers.0"])


def test_a_broadcast_is_summed_as_it_is_converted(weights, sent):
    by_stream, refits = sent(weights), weight_sums.read_sent_sums()["refits"]

    def producer(iterator, group, src, post_iter_func, *, num_buffers=None):
        for item in iterator:
            post_iter_func(item)

    weight_sums.sum_broadcast(producer)(iter(weights.items()), None, 0, post_iter_func=lambda item: item[1])
    answer = weight_sums.read_sent_sums()
    assert answer["sums"] == by_stream
    assert answer["refits"] == refits + 1


def test_a_workers_own_shard():
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.data = torch.tensor([[1.0, -3.0]])
    assert weight_sums.local_sums(SimpleNamespace(model=model)) == [-2.0, 4.0]
    assert weight_sums.local_sums(SimpleNamespace(model=[model, model])) == [-4.0, 8.0]
    assert weight_sums.local_sums(SimpleNamespace()) is None


def test_a_worker_without_an_engine():
    assert weight_sums.engine_sums(SimpleNamespace(llm=None)) is None


def test_an_asynchronous_engine_answers_on_its_own_loop(weights):
    (expected,) = weight_sums.engine_sums(engine(weights))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asked = engine(weights)

        async def collective_rpc(function):
            assert asyncio.get_running_loop() is loop
            return asked.llm.collective_rpc(function)

        task = SimpleNamespace(get_loop=lambda: loop)
        core = SimpleNamespace(resources=SimpleNamespace(output_queue_task=task))
        llm = SimpleNamespace(collective_rpc=collective_rpc, engine_core=core, output_handler=None)
        assert weight_sums.engine_sums(SimpleNamespace(llm=llm)) == [expected]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_the_losses_of_a_process_are_summed():
    before = worker_counts.read_counts(SimpleNamespace())["losses"]
    loss = worker_counts.counted(lambda value: (torch.tensor(value), {}))
    for value in (0.25, -1.0):
        loss(value)
    after = worker_counts.read_counts(SimpleNamespace())["losses"]
    assert [b - a for a, b in zip(before, after, strict=True)] == [-0.75, 1.25]
