"""Restart of an engine within its worker: which settings the new one gets, and what is told to whom."""

import sys
import types
from dataclasses import dataclass, field
from unittest import mock

import pytest

from nemo_geomask.errors import EngineError
from nemo_geomask.tools.probe.engine_scores import restart_engine

CONFIG = {"temperature": 1.0, "vllm_cfg": {"precision": "bfloat16"}, "vllm_kwargs": {"hf_overrides": {"a": 1}}}


class Worker:
    """As NeMo-RL's worker: its constructor makes the engine."""

    def __init__(self, config, bundle_indices=None, fraction_of_gpus=1.0, seed=None):
        self.cfg, self.seed, self.fraction_of_gpus = config, seed, fraction_of_gpus
        self.is_owner = bundle_indices is not None
        self.tensor_parallel_size = self.pipeline_parallel_size = 1
        model = types.SimpleNamespace(seed=seed)
        configuration = types.SimpleNamespace(model_config=model)
        self.llm = types.SimpleNamespace(llm_engine=types.SimpleNamespace(vllm_config=configuration))
        self.calls = []

    def shutdown(self):
        self.llm = None
        CALLS.append("shutdown")

    def post_init(self):
        CALLS.append("post_init")


CALLS = []


@dataclass
class FP8State:
    """As NeMo-RL's."""

    vllm_patches: list = field(default_factory=list)
    seen_params: set = field(default_factory=set)


@pytest.fixture
def worker(monkeypatch):
    state = types.ModuleType("vllm.distributed.parallel_state")
    state.cleanup_dist_env_and_memory = lambda: CALLS.append("cleanup")
    for name in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", state)
    CALLS.clear()
    return Worker(CONFIG, [0], 0.5, 7)


def test_the_new_engine_has_the_values_the_seed_and_the_share_of_the_gpu(worker):
    restart_engine(worker, {"vllm_cfg.precision": "float32", "vllm_kwargs.max_num_seqs": 1})
    assert worker.cfg["vllm_cfg"] == {"precision": "float32"}
    assert worker.cfg["vllm_kwargs"] == {"hf_overrides": {"a": 1}, "max_num_seqs": 1}
    assert (worker.seed, worker.fraction_of_gpus, worker.is_owner) == (7, 0.5, True)
    assert CALLS == ["shutdown", "cleanup", "post_init"]


def test_values_are_those_of_one_arm_and_not_of_the_arms_before(worker):
    restart_engine(worker, {"vllm_cfg.precision": "float32"})
    restart_engine(worker, {"vllm_kwargs.hf_overrides": {}})
    assert worker.cfg == {**CONFIG, "vllm_kwargs": {"hf_overrides": {}}}
    restart_engine(worker, {})
    assert worker.cfg == CONFIG


def test_an_engine_of_several_processes_is_refused(worker):
    worker.tensor_parallel_size = 2
    with pytest.raises(EngineError, match="several processes"):
        restart_engine(worker, {})


def test_an_engine_with_fp8_weights_can_be_replaced(worker, monkeypatch):
    """``init_fp8`` asserts that the process has no patches yet."""
    target = types.SimpleNamespace(load="vLLM's")
    patcher = mock.patch.object(target, "load", "NeMo-RL's")
    patcher.start()
    module = types.ModuleType("fp8")
    module.fp8_state, module.fp8_patches_applied = FP8State([patcher], {"seen"}), True
    monkeypatch.setitem(sys.modules, "nemo_rl.models.generation.vllm.quantization.fp8", module)
    restart_engine(worker, {})
    assert target.load == "vLLM's"
    assert (module.fp8_state, module.fp8_patches_applied) == (FP8State(), False)
    restart_engine(worker, {})
