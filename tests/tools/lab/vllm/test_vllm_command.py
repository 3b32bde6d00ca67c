"""``nemo-geomask lab`` with vLLM as its generation engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make vllm")

import vllm

from nemo_geomask.tools.lab.run_store import read_curves

LAB = Path(__file__).parents[4] / "recipes" / "lab"
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
    curves = read_curves([tmp_path / "out"])
    assert [(curve.label, curve.steps) for curve in curves] == [("gspo:none", 3), ("gspo:sequence_mean+geometric", 3)]
    for curve in curves:
        # Two engines, one in bfloat16; stale or garbled weights are from 0.5 upwards.
        assert all(1e-3 < value < 0.1 for value in curve.series("geomask/mismatch_abs"))
        assert all(1e-6 < value < 0.02 for value in curve.series("geomask/mismatch_k3"))
        assert not any(curve.series("skipped_update"))
        assert all(value > 0 for value in curve.series("grad_norm"))
    # Same weights, prompts and seeds, so the same responses; then their ways part.
    first, second = curves
    for key in ("reward", "mean_response_length", "geomask/mismatch_abs"):
        assert first.series(key)[0] == second.series(key)[0], key
    assert first.series("geomask/mismatch_abs")[1] != second.series("geomask/mismatch_abs")[1]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["sampler"] == f"vLLM {vllm.__version__} in bfloat16"
    printed = " ".join(done.stdout.split())
    assert f"the mismatch is vLLM {vllm.__version__} in bfloat16 against float32 training" in printed
    assert "Starting vLLM." in printed
