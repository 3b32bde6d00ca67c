"""What the lab does about vLLM before there is any: refusals, and the weights' names. Needs no vLLM."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the policy is a transformers model (demo extra)")
pytest.importorskip("omegaconf", reason="recipes are read through omegaconf (demo extra)")

from nemo_geomask.errors import ConfigError, MissingDependencyError
from nemo_geomask.recipe import load_recipe
from nemo_geomask.tools.lab.lab_recipe import LabRecipe
from nemo_geomask.tools.lab.policy_model import checkpoint_weights
from nemo_geomask.tools.lab.samplers import CopySampler, build_sampler

LAB = Path(__file__).parents[4] / "recipes" / "lab"


def read(name, *overrides):
    return LabRecipe.read(load_recipe(LAB / name, overrides), source=name)


def test_the_recipe_asks_for_vllm_and_the_usual_one_does_not():
    assert read("vllm.yaml").policy.generation.backend == "vllm"
    usual = read("bfloat16.yaml")
    assert isinstance(build_sampler(usual), CopySampler)


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("bfloat16.yaml", ["policy.generation.backend=vllm"], "64 / 4 = 16. Change one of them, or start from"),
        ("vllm.yaml", ["lab.tp=2"], r"lab.tp, lab.cp and lab.dp \(2, 1, 1\) need it too"),
        (
            "vllm.yaml",
            ["policy.generation.vllm_kwargs.model=x"],
            r"vllm_kwargs \(model\): the lab sets these arguments",
        ),
        (
            "vllm.yaml",
            ["grpo.async_grpo.enabled=true", "grpo.async_grpo.in_flight_weight_updates=true"],
            "in_flight_weight_updates needs policy.generation.backend: copy",
        ),
        ("vllm.yaml", ["policy.generation.backend=vlm"], "backend.*'copy' or 'vllm'"),
    ],
)
def test_what_vllm_cant_do_is_refused_by_the_recipe(name, overrides, message):
    with pytest.raises(ConfigError, match=message):
        read(name, *overrides)


def test_a_missing_vllm_is_named_with_the_extra_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # Restored afterwards.
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_LOGGING_LEVEL", "VLLM_NO_USAGE_STATS"):
        monkeypatch.setenv(name, "set by a test")
    with pytest.raises(MissingDependencyError, match=r'backend: vllm needs vLLM.*"nemo-geomask\[vllm\]"'):
        build_sampler(read("vllm.yaml"))


def test_the_weights_go_by_the_names_of_a_saved_checkpoint(policy, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch", reason="checkpoints are written by it (demo extra)")
    policy.save_pretrained(tmp_path)
    saved = {}
    for path in tmp_path.glob("*.safetensors"):
        saved.update(safetensors.load_file(path))
    ours = dict(checkpoint_weights(policy))
    assert ours.keys() == saved.keys()
    assert sum("experts.7." in name for name in ours) == 6
    assert all(torch.equal(ours[name], weight) for name, weight in saved.items())
