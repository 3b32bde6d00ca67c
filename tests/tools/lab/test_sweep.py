"""A replay of the lab's records says what the lab's loss said when it trained on them."""

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the policy is a transformers model (demo extra)")
pytest.importorskip("pyarrow")
pytest.importorskip("nemo_geomask.tools.diagnose", reason="the sweep is one of its commands")

from nemo_geomask import build_loss
from nemo_geomask.cli import main
from nemo_geomask.tools.diagnose.measure.run_survey import read_step, survey_run
from nemo_geomask.tools.diagnose.measure.thresholds import MAX_PULL
from nemo_geomask.tools.diagnose.read.record_sources import find_runs
from nemo_geomask.tools.diagnose.report.correction_sweep import padded_batch, replay
from nemo_geomask.tools.diagnose.report.sweep_candidates import CANDIDATES, Candidate
from nemo_geomask.tools.lab.trainer import Trainer

pytestmark = pytest.mark.slow

SETTINGS = {
    "use_importance_sampling_correction": True,
    "is_correction_level": "sequence_mean",
    "masks": [{"preset": "geometric", "min": 0.999, "max": 1.001}, {"preset": "m2po", "tau": 1e-6}],
}


def test_the_numbers_are_those_of_training(tiny, tmp_path):
    recipe = tiny(
        policy={"train_global_batch_size": 16, "train_micro_batch_size": 16},
        loss_fn={**SETTINGS, "record": {"dir": str(tmp_path)}, "reference_policy_kl_penalty": 0},
    )
    trainer = Trainer(recipe, build_loss(recipe.loss_fn))
    logged = [metrics for metrics, _ in trainer.steps()]
    trainer.close()
    (run,) = find_runs([tmp_path])
    base = {key: value for key, value in recipe.loss_fn.items() if key not in (*SETTINGS, "record")}
    batches = [(step, padded_batch(read_step(run, step))[0]) for step in run.steps]
    (found,) = replay(batches, [Candidate("own", SETTINGS, "test")], base, at="curr")
    names = [
        "geomask/mask/geometric/removed",
        "geomask/mask/m2po/removed",
        "geomask/weight_mean",
        "geomask/mismatch_k3",
        "gen_kl_error",
        "probs_ratio",
    ]
    for step, metrics in zip(run.steps, logged, strict=True):
        for name in names:
            assert found.metrics[step][name] == pytest.approx(metrics[name], rel=1e-5, abs=1e-7), name
    assert any(found.metrics[step]["geomask/mask/m2po/removed"] > 0 for step in run.steps)
    sums = survey_run(run).steps
    for step, metrics in zip(run.steps, logged, strict=True):
        assert sums[step].mean("k3") == pytest.approx(metrics["geomask/mismatch_k3"], rel=1e-4)
        assert sums[step].mean("prob_error") == pytest.approx(metrics["token_mult_prob_error"], rel=1e-5)


@pytest.mark.long
def test_the_pull_ranks_recorded_engines_and_tasks_as_training_does(tmp_path):
    """docs/background/mismatch.md: int4 with luck does harm, float8 hardly, no luck and an equal engine none."""
    recipe = Path(__file__).parents[3] / "recipes" / "lab" / "search.yaml"
    weights = "policy.generation.quantization.weights=float8_e4m3"
    pulls = {}
    for name, changes in {
        "int4": [],
        "float8": [weights],
        "no luck": ["env.luck=1"],
        "equal": ["policy.generation.quantization=null"],
    }.items():
        folder = tmp_path / name.replace(" ", "_")
        record = f"+loss_fn.record={{dir: {folder / 'records'}}}"
        arguments = ["lab", str(recipe), "--compare", "clipped_pg:none", "--out", str(folder / "out")]
        assert main([*arguments, "grpo.max_num_steps=20", record, *changes]) == 0
        (run,) = find_runs([folder / "records"])
        batches = ((step, padded_batch(read_step(run, step))[0]) for step in run.steps)
        pulls[name] = {outcome.candidate.name: outcome.pull() for outcome in replay(batches, CANDIDATES[:7])}
    limits = {name: values["nothing"] for name, values in pulls.items()}
    assert limits["int4"].low > MAX_PULL > max(limits["no luck"].high, limits["equal"].high)
    assert limits["float8"].low < MAX_PULL
    pulls = {name: {key: pull.value for key, pull in values.items()} for name, values in pulls.items()}
    none = {name: values["nothing"] for name, values in pulls.items()}
    assert none["int4"] > 3 * none["float8"] > 0
    assert none["int4"] > 10 * max(none["no luck"], none["equal"])
    assert pulls["int4"]["weight token tis [0, 2]"] < 0.3 * none["int4"]
    assert pulls["int4"]["weight sequence_mean"] > 0.8 * none["int4"]
