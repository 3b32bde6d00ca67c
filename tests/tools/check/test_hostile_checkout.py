"""A hostile NeMo-RL checkout, whose source ``check`` reads, ends in findings or in one error."""

from __future__ import annotations

import os

import pytest

from nemo_geomask.cli import main
from nemo_geomask.hosts.nemo_rl.facts import LOSS_MODULE

pytest.importorskip("omegaconf", reason="recipes are read through omegaconf (recipes extra)")

RECIPE = """\
grpo: {num_prompts_per_step: 4}
loss_fn: {name: clipped_pg}
policy:
  precision: bfloat16
  model_name: Qwen/Qwen3-30B-A3B
  megatron_cfg: {enabled: true, tensor_model_parallel_size: 2}
"""
MODULES = (
    LOSS_MODULE.replace(".", "/") + ".py",
    "nemo_rl/algorithms/grpo.py",
    "nemo_rl/algorithms/utils.py",
    "nemo_rl/models/policy/__init__.py",
    "nemo_rl/models/policy/workers/dtensor_policy_worker_v2.py",
    "3rdparty/Megatron-LM-workspace/Megatron-LM/megatron/core/tensor_parallel/layers.py",
    "3rdparty/Automodel-workspace/Automodel/nemo_automodel/components/checkpoint/checkpointing.py",
)
CLASS = """class MasterConfig(BaseModel):
    grpo: GRPOConfig
    policy: {}


class GRPOConfig(TypedDict):
    a: int
"""


def fifo(path):
    os.mkfifo(path)


HOSTILE = {
    "FIFO": fifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "large": lambda path: path.write_bytes(b"#" * 20_000_000),
    "no UTF-8": lambda path: path.write_bytes(b"a = '\xff'\n"),
    "null character": lambda path: path.write_bytes(b"a = '\0'\n"),
    "parentheses": lambda path: path.write_text(CLASS.format("(" * 5000)),
    "long chain": lambda path: path.write_text(CLASS.format("a" + ".b" * 100_000)),
    "alias of many lines": lambda path: path.write_text(CLASS.format("Other") + "Other = (\n" + "[\n" * 1000),
    "classes that contain each other": lambda path: path.write_text(
        "class MasterConfig(Other):\n    grpo: Other\n\n\nclass Other(MasterConfig):\n    a: MasterConfig\n"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("write", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_module_is_no_traceback(write, module, tmp_path, monkeypatch, capsys):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    checkout = tmp_path / "checkout"
    for name in MODULES:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text(CLASS.format("dict"))
    (checkout / "nemo_rl/__init__.py").write_text("")
    (checkout / "examples/configs").mkdir(parents=True)
    (checkout / module).unlink()
    write(checkout / module)
    monkeypatch.setenv("NEMO_RL_ROOT", str(checkout))
    assert main(["check", str(tmp_path / "recipe.yaml")]) in (0, 2)
    printed = "".join(capsys.readouterr())
    assert printed
    assert len(printed) < 10_000
