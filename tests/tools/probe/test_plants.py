"""Planted causes are found and explain the mismatch; nothing is found where nothing was planted.

They are planted in NeMo-RL's own workers, which are kept for all of them, or started anew where the cause is in the
layout of the trainer. That takes about ten minutes each.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nemo_geomask.tools.rehearse", reason="its stand-ins run NeMo-RL's workers on CPUs")

from nemo_geomask.tools.rehearse.launch_environment import supports_fp8_cache
from tests.tools.probe.planted_probes import FP8_CACHE, PLANTS, STARTED_PLANTS
from tests.tools.rehearse.real_runs import ROOT, needs_nemo_rl

PACKAGE = Path(__file__).parents[3]

pytestmark = [pytest.mark.timeout(7200), *needs_nemo_rl, pytest.mark.long]  # the first limit of time holds


def run_plants(folder, names):
    """Results of the script by name of the plant, and the end of what it wrote."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.tools.probe.planted_probes", str(folder), names],
        env={**os.environ, "PYTHONPATH": str(PACKAGE), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
    )
    found = (folder / "found.jsonl").read_text().splitlines() if (folder / "found.jsonl").is_file() else []
    return {content["plant"]: content for content in map(json.loads, found)}, done.stderr[-3000:]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """All plants in the same workers, whose engine is started for each arm."""
    folder = tmp_path_factory.mktemp("plants")
    found, output = run_plants(folder, "")
    assert len(found) == len(PLANTS), output
    return found


@pytest.mark.parametrize("name", [name for name, plant in PLANTS.items() if isinstance(plant.expected, tuple)])
def test_switches_are_named_first_and_explain_the_mismatch(name, results):
    if PLANTS[name].values == FP8_CACHE and not supports_fp8_cache():
        pytest.skip("vLLM's fp8 KV cache needs a processor with AVX-512")
    result, expected = results[name], PLANTS[name].expected
    assert "error" not in result, result["error"]
    assert result["faults"] == []
    found = {switch: (verdict, share, is_confirmed) for switch, verdict, share, is_confirmed in result["found"]}
    assert set(found) == set(expected)
    if expected:
        assert result["found"][0][0] in expected
        assert sum(share for _, share, _ in found.values()) > 0.8
        assert all(is_confirmed for _, _, is_confirmed in found.values())


@pytest.mark.parametrize("name", [name for name, plant in PLANTS.items() if isinstance(plant.expected, str)])
def test_faults_of_the_code_are_found_by_their_check(name, results):
    result = results[name]
    assert "error" not in result, result["error"]
    assert result["faults"] == [PLANTS[name].expected]


def test_a_key_that_this_nemo_rl_ignores_is_not_effective(results):
    """NeMo-RL reads ``kv_cache_dtype`` with ``precision: fp8`` alone."""
    assert results["nothing"]["others"]["kv_cache_dtype"] == "not effective"


@pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None and not (ROOT and (ROOT / "3rdparty").is_dir()),
    reason="the trainer is Megatron",
)
@pytest.mark.parametrize("name", STARTED_PLANTS)
def test_causes_in_the_trainers_layout_are_found(name, tmp_path):
    found, output = run_plants(tmp_path, name)
    assert name in found, output
    result = found[name]
    assert "error" not in result, result["error"]
    assert result["faults"] == []
    by_switch = {switch: (verdict, share, is_confirmed) for switch, verdict, share, is_confirmed in result["found"]}
    assert set(by_switch) == set(STARTED_PLANTS[name].expected)
    if by_switch:
        assert sum(share for _, share, _ in by_switch.values()) > 0.8
        assert all(is_confirmed for _, _, is_confirmed in by_switch.values())
