"""``nemo-geomask lab`` with vLLM as its generation engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make vllm")

import vllm

LAB = Path(__file__).parents[3] / "recipes" / "lab"
SMALL = ["grpo.num_prompts_per_step=8", "policy.train_global_batch_size=32", "policy.train_micro_batch_size=32"]


def lab(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "nemo_geomask.cli", "lab", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.timeout(300)
def test_variants_train_on_what_vllm_sampled(tmp_path):
    done = lab(LAB / "vllm.yaml", *SMALL, "--steps", 3, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    variants = ["gspo:none", "gspo:sequence_mean+geometric"]
    assert [(line["variant"], line["step"]) for line in lines] == [
        (name, step) for name in variants for step in (1, 2, 3)
    ]
    for line in lines:
        # Two engines, one in bfloat16; stale or garbled weights are from 0.5 upwards.
        assert 1e-3 < line["geomask/mismatch_abs"] < 0.1
        assert 1e-6 < line["geomask/mismatch_k3"] < 0.02
        assert line["skipped_update"] == 0
        assert line["grad_norm"] > 0
    # Same weights, prompts and seeds, so the same responses; then their ways part.
    first, second = lines[0], lines[3]
    for key in ("reward", "mean_response_length", "geomask/mismatch_abs"):
        assert first[key] == second[key], key
    assert lines[1]["geomask/mismatch_abs"] != lines[4]["geomask/mismatch_abs"]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["sampler"] == f"vLLM {vllm.__version__} in bfloat16"
    printed = " ".join(done.stdout.split())
    assert f"the mismatch is vLLM {vllm.__version__} in bfloat16 against float32 training" in printed
    assert "Starting vLLM." in printed
