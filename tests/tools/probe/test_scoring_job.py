"""Jobs of a session: what is asked of which side, and that hidden states never cost the scores."""

import json
import sys
import types
from types import SimpleNamespace

import pytest
import torch

from nemo_geomask.errors import ConfigError, EngineError
from nemo_geomask.tools.probe import engine_scores, layer_states, resolved_settings, scoring_job


class Actor:
    """A worker in this process."""

    def __init__(self, **attributes):
        vars(self).update(attributes)

    @property
    def __ray_call__(self):
        return SimpleNamespace(remote=lambda function, *arguments: function(self, *arguments))


class Batch(dict):
    pass


FROZEN = {
    "sequences": [[1, 2, 5, 6], [1, 7, 8]],
    "prompt_lengths": [2, 1],
    "prompts": [0, 1],
    "sampled": [[0.0] * 2] * 2,
}


@pytest.fixture
def session(monkeypatch, tmp_path):
    ray = types.ModuleType("ray")
    ray.get = lambda value, timeout=None: value
    ray.put = lambda value: value
    batches = types.ModuleType("nemo_rl.distributed.batched_data_dict")
    batches.BatchedDataDict = Batch
    for name in ("nemo_rl", "nemo_rl.distributed", "nemo_rl.algorithms", "nemo_rl.algorithms.utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "nemo_rl.distributed.batched_data_dict", batches)
    monkeypatch.setattr(scoring_job, "refit", lambda session: None)
    monkeypatch.setattr(engine_scores, "decode_scores", lambda actor, *arguments: {"logprobs": [[-1.0] * 2] * 2})
    monkeypatch.setattr(engine_scores, "prefill_scores", lambda actor, *arguments: {"logprobs": [[-1.0] * 2] * 2})
    monkeypatch.setattr(resolved_settings, "engine_settings", lambda actor: {"engine.weights": "float32"})
    engine = Actor(llm=SimpleNamespace(llm_engine=None))
    trainer = Actor(
        cfg={"logprob_batch_size": 2},
        sampling_params=SimpleNamespace(temperature=0.7, top_p=1.0, top_k=None),
        model=None,
    )
    seen = []

    def get_logprobs(data):
        seen.append((trainer.cfg["logprob_batch_size"], trainer.sampling_params.temperature, data["input_ids"]))
        return {"logprobs": torch.arange(data["input_ids"].numel()).reshape(data["input_ids"].shape).float()}

    policy = SimpleNamespace(
        worker_group=SimpleNamespace(workers=[trainer]),
        get_logprobs=get_logprobs,
        prepare_for_lp_inference=lambda: None,
    )
    generation = SimpleNamespace(
        worker_group=SimpleNamespace(workers=[engine]),
        finish_generation=lambda: None,
        prepare_refit_info=lambda info: None,
    )
    (tmp_path / "frozen.json").write_text(json.dumps(FROZEN))
    config = {"policy": {"logprob_batch_size": 2, "make_sequence_length_divisible_by": 8}}
    made = scoring_job.Session(policy, generation, config, SimpleNamespace(pad_token_id=0), {})
    job = {"frozen": str(tmp_path / "frozen.json"), "engine": None, "states": 1}
    return SimpleNamespace(session=made, job=job, seen=seen, trainer=trainer)


def test_requests_change_the_trainers_settings_for_themselves_alone(session):
    requests = {"base": {}, "one": {"logprob_batch_size": 1}, "hot": {"temperature": 1.0}, "back": {"reversed": True}}
    answer = session.session.answer({**session.job, "decode": {}, "trainer": requests, "states": 0})
    assert [(size, temperature) for size, temperature, _ in session.seen] == [(2, 0.7), (1, 0.7), (2, 1.0), (2, 0.7)]
    assert (session.trainer.cfg["logprob_batch_size"], session.trainer.sampling_params.temperature) == (2, 0.7)
    tokens = session.seen[0][2]
    assert tokens.tolist() == [[1, 2, 5, 6, 0, 0, 0, 0], [1, 7, 8, 0, 0, 0, 0, 0]]
    # Responses alone, in the order of the sequences whatever that of the batch.
    assert answer["trainer"]["base"]["logprobs"] == [[2.0, 3.0], [9.0, 10.0]]
    assert answer["trainer"]["back"]["logprobs"] == [[10.0, 11.0], [1.0, 2.0]]
    assert "layers" not in answer


@pytest.mark.parametrize(
    ("capture", "message"),
    [
        (lambda actor, sequence: 1 / 0, "ZeroDivisionError"),
        (lambda actor, sequence: {}, "layers were not called as modules: it is compiled, or has other names"),
    ],
)
def test_hidden_states_that_cannot_be_read_leave_the_scores(session, monkeypatch, capture, message):
    monkeypatch.setattr(layer_states, "capture_engine", capture)
    actor = session.session.actors[0]
    configuration = SimpleNamespace(hf_text_config=SimpleNamespace(num_experts_per_tok=None))
    actor.llm.llm_engine = SimpleNamespace(vllm_config=SimpleNamespace(model_config=configuration))
    answer = session.session.answer({**session.job, "decode": {"base": {}}, "trainer": {"base": {}}})
    assert message in answer["layers"]["error"]
    assert answer["decode"]["base"]["logprobs"] == [[-1.0] * 2] * 2
    assert answer["trainer"]["base"]["logprobs"] == [[2.0, 3.0], [9.0, 10.0]]


class Adapted(torch.nn.Module):
    """A layer with an adapter, as Automodel names its parts."""

    def __init__(self):
        super().__init__()
        self.lora_A, self.lora_B = torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(2, 3, bias=False)
        torch.nn.init.zeros_(self.lora_B.weight)


@pytest.mark.parametrize("is_delivered", [True, False])
def test_adapters_get_values_once_and_a_refit_that_loses_them_is_seen(session, monkeypatch, is_delivered):
    trainer, engine = session.trainer, session.session.actors[0]
    trainer.model, engine.weight = Adapted(), 0.0

    def refit(session):
        if is_delivered:
            engine.weight = float(trainer.model.lora_B.weight.detach().abs().sum())

    monkeypatch.setattr(scoring_job, "refit", refit)
    monkeypatch.setattr(resolved_settings, "engine_settings", lambda actor: {"engine.checksum": str(actor.weight)})
    job = {**session.job, "decode": {}, "trainer": {}, "states": 0}
    first, filled = session.session.answer(job), trainer.model.lora_B.weight.clone()
    assert first["adapters"] == {"count": 1, "is_delivered": is_delivered}
    assert float(filled.detach().abs().min()) > 0
    assert session.session.answer(job)["adapters"] == first["adapters"]
    assert torch.equal(trainer.model.lora_B.weight, filled)
    # Another start fills an adapter of this name and shape alike.
    other = Actor(model=[Adapted()])
    assert scoring_job.fill_adapters(other) == 1
    assert torch.equal(other.model[0].lora_B.weight, filled)


def test_watched_passes_score_without_temperature_and_filters_as_prefill_does(session, monkeypatch):
    monkeypatch.setattr(layer_states, "capture_engine", lambda actor, sequence: {"final norm": []})
    monkeypatch.setattr(layer_states, "watch_trainer", lambda actor, states, replay: None)
    monkeypatch.setattr(layer_states, "compare_trainer", lambda actor, states, experts, sequence: {"final norm": 0.0})
    monkeypatch.setattr(layer_states, "stop_trainer", lambda actor: None)
    configuration = SimpleNamespace(hf_text_config=SimpleNamespace(num_experts_per_tok=None))
    engine = SimpleNamespace(vllm_config=SimpleNamespace(model_config=configuration))
    session.session.actors[0].llm.llm_engine = engine
    answer = session.session.answer({**session.job, "decode": {}, "trainer": {"base": {}}})
    assert answer["layers"]["error"] == ""
    assert [temperature for _, temperature, _ in session.seen] == [0.7, 1.0, 1.0]
    assert session.trainer.sampling_params.temperature == 0.7


def test_an_engine_that_does_not_wake_is_an_error(session):
    session.session.generation.prepare_for_generation = lambda: False
    session.session.policy.get_topk_logits = lambda data, k: 1 / 0
    with pytest.raises(EngineError, match="could not wake the engine"):
        session.session.sample_by_trainer(json.loads(json.dumps(FROZEN)))


def test_a_trainer_that_cannot_sample_leaves_the_engines_responses(session):
    session.session.generation.prepare_for_generation = lambda: True
    frozen = json.loads(json.dumps(FROZEN))
    session.session.sample_by_trainer(frozen)
    assert frozen["by_trainer"] == [False, False]
    assert frozen["trainer_error"].startswith("AttributeError")
    assert frozen["sequences"] == FROZEN["sequences"]


def test_a_generation_without_a_synchronous_engine_is_refused():
    generation = SimpleNamespace(worker_group=SimpleNamespace(workers=[]))
    with pytest.raises(ConfigError, match="synchronous engine"):
        scoring_job.Session(None, generation, {"policy": {}}, None, {})


def test_an_engine_that_does_not_end_its_generation_is_an_error(session):
    session.session.generation.finish_generation = lambda: False
    with pytest.raises(EngineError, match="NeMo-RL could not end the engine's generation"):
        session.session.answer({**session.job, "decode": {"base": {}}, "trainer": {}})


def test_a_data_set_of_too_few_prompts_is_an_error(session, monkeypatch, tmp_path):
    messages = types.ModuleType("nemo_rl.data.llm_message_utils")
    messages.batched_message_log_to_flat_message = None
    monkeypatch.setitem(sys.modules, "nemo_rl.data", types.ModuleType("nemo_rl.data"))
    monkeypatch.setitem(sys.modules, "nemo_rl.data.llm_message_utils", messages)
    made = session.session
    config = {"policy": made.config}
    empty = scoring_job.Session(made.policy, made.generation, config, SimpleNamespace(), {"dataloader": []})
    job = session.job | {"frozen": str(tmp_path / "none.json"), "prompts": 4, "generations": 2}
    with pytest.raises(EngineError, match="^the data set has 0 prompts, and the probe was asked for 4$"):
        empty.answer(job)
    assert not (tmp_path / "none.json").exists()
