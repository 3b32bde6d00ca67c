"""The baseline of a probe through NeMo-RL's own workers: what they score, and what is read back of them.

``make nemo-rl`` runs it.
"""

import argparse
import json

import pytest

from nemo_geomask.cli import probe

# A probe starts the workers as a rehearsal does.
real_runs = pytest.importorskip("tests.tools.rehearse.test_real")
pytestmark = real_runs.needs_nemo_rl


def run(folder, *words):
    parser = argparse.ArgumentParser()
    probe.add_arguments(parser)
    arguments = [str(real_runs.RECIPE), *words, "--out", str(folder / "out"), "--json", str(folder / "result.json")]
    return probe.run(parser.parse_args(arguments))


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """One start: the budget suffices for no other."""
    folder = tmp_path_factory.mktemp("probe")
    switches = "engine_precision,trainer_precision,logprob_batch_size"
    status = run(folder, "--switches", switches, "--budget", "0.01", "--timeout", "1100")
    stored = json.loads(next((folder / "out" / "starts").glob("baseline-*.json")).read_text())["content"]
    return status, json.loads((folder / "result.json").read_text()), stored["scores"]


def test_the_engine_decodes_its_own_samples_again_with_the_same_logprobs(scored):
    _, result, _ = scored
    checks = {check["name"]: check["outcome"] for check in result["checks"]}
    # In bfloat16, a processor's kernels may round other shapes in another way: those of prefill, or of another padding.
    for name in ("decode and prefill", "trainer repeats the samples"):
        assert checks.pop(name) in ("fine", "noted")
    assert set(checks.values()) == {"fine"}


def test_bfloat16_makes_sampler_and_trainer_disagree_as_in_a_healthy_tiny_model(scored):
    _, result, _ = scored
    ledger = result["ledger"]
    assert 1e-5 < ledger["baseline"]["k3"] < 1e-2
    assert all(gap["k3"] < 1e-6 for name, gap in ledger["repetitions"].items() if "twice" in name)


def test_settings_are_read_back_from_what_ran(scored):
    _, _, scores = scored
    assert "bfloat16" in scores["engine_settings"]["engine.weights"]
    forward = {name: request["settings"]["trainer.forward"] for name, request in scores["trainer"].items()}
    assert "training False" in forward["base"]
    assert "tokens 1×" in forward["logprob_batch_size"]
    assert forward["base"] != forward["logprob_batch_size"]


def test_a_spent_budget_leaves_arms_untried_and_the_status_says_so(scored):
    status, result, _ = scored
    verdicts = {row["switch"]["id"]: row["verdict"] for row in result["ledger"]["rows"]}
    assert verdicts["engine_precision"] == verdicts["trainer_precision"] == "not tried"
    assert (status, result["ledger"]["is_complete"]) == (1, False)
