"""The sweep command prints tables, a recommended block, or JSON."""

import json
from itertools import pairwise

import numpy as np
import pytest
import yaml

pytest.importorskip("pyarrow")

from nemo_geomask import build_loss
from nemo_geomask.cli import main
from tests.evidence.diagnose.planted_causes import planted_step
from tests.evidence.diagnose.planted_logs import RunShape, write_step
from tests.helpers.logs import log_rows, write_log

SHAPE = RunShape(prompts=6, samples=8, length=30)
"""Enough sequences for a recommendation; those of a group with equal rewards have an advantage of 0."""


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    for step in (1, 2, 3):
        planted = planted_step(0, step, "precision", 15.0, shape=SHAPE)
        write_log(directory, step, list(log_rows(planted)))
    return directory


def test_tables_and_a_recommendation(logs, capsys):
    assert main(["sweep", str(logs), "--steps", "2"]) == 0
    out = capsys.readouterr().out
    assert "; steps 1, 3; *" in out
    assert "→" in out
    assert "A response has " in out
    assert "for clipped_pg (NeMo-RL's default, as the records name none; --recipe names another):" in out
    block = yaml.safe_load(out[out.index("loss_fn:") :])
    assert build_loss(block["loss_fn"]).config.use_importance_sampling_correction


def test_the_table_says_over_which_tokens_its_shares_are(tmp_path, capsys):
    planted = planted_step(0, 1, "precision", 15.0, shape=SHAPE)
    trained = int(planted.tokens["mask"].sum())
    everything, some = tmp_path / "everything", tmp_path / "some"
    for directory in (everything, some):
        directory.mkdir()
    planted.tokens["advantages"][planted.tokens["mask"]] = 0.5
    write_log(everything, 1, list(log_rows(planted)))
    assert main(["sweep", str(everything)]) == 0
    out = capsys.readouterr().out
    assert f"; over {trained:,} trained tokens\n" in out
    first = slice(planted.offsets[0], planted.offsets[1])
    planted.tokens["advantages"][first] = 0
    left_out = int(planted.tokens["mask"][first].sum())
    write_log(some, 1, list(log_rows(planted)))
    assert main(["sweep", str(some)]) == 0
    out = capsys.readouterr().out
    assert f"over {trained - left_out:,} of {trained:,} trained tokens, without those whose advantage is 0" in out
    assert main(["sweep", str(some), "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["tokens"] == {"with_gradient": trained - left_out, "trained": trained}


def test_the_recipe_is_one_of_the_candidates(logs, tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("loss_fn: {name: clipped_pg, masks: [{preset: icepop, min: 0.8, max: 1.25}]}\n")
    assert main(["sweep", str(logs), "--last", "--steps", "1", "--recipe", str(recipe), "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["steps"] == [3]
    assert [one["name"] for one in output["candidates"][:2]] == ["nothing", "the recipe's own"]
    own = output["candidates"][1]
    assert own["removed"]["value"] > 0
    assert yaml.safe_load(output["loss_fn"])["loss_fn"]["name"] == "clipped_pg"


def test_candidates_that_contradict_the_recipe_are_listed(logs, tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("loss_fn: {name: clipped_pg, ratio_anchor: gen, audit_fraction: 0.1, record: {dir: x}}\n")
    arguments = ["sweep", str(logs), "--steps", "1", "--recipe", str(recipe)]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "incompatible with this loss_fn: weight token, " in out
    assert yaml.safe_load(out[out.index("loss_fn:\n") :])["loss_fn"]["record"] == {"dir": "x"}
    assert main([*arguments, "--json"]) == 0
    assert "is_correction_level" in json.loads(capsys.readouterr().out)["does_not_fit"]["weight token"]


def record(directory, step, name, **settings):
    config = build_loss({"name": name, **settings}).config
    planted = planted_step(0, step, "precision", 15.0, shape=SHAPE)
    write_step(directory, planted, settings=config.model_dump(mode="json"))


def test_the_recorded_objective_is_the_one_that_is_judged(tmp_path, capsys):
    """A token weight hardly helps GSPO, which has one coefficient for a sequence; the records are not of PPO."""
    for step in (1, 2):
        record(tmp_path, step, "gspo", ratio_clip_min=0.05)
    assert main(["sweep", str(tmp_path), "--recommend"]) == 0
    out = capsys.readouterr().out
    first, bias, *_ = out.splitlines()
    assert first.endswith("for gspo (as recorded):")
    block = yaml.safe_load(out)["loss_fn"]
    assert (block["name"], block["ratio_clip_min"]) == ("gspo", 0.05)
    if "use_importance_sampling_correction" in block or "masks" in block:
        assert bias.endswith(": a correction hardly helps this objective")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("loss_fn: {name: clipped_pg}\n")
    assert main(["sweep", str(tmp_path), "--recommend", "--recipe", str(recipe)]) == 0
    first, bias, *_ = capsys.readouterr().out.splitlines()
    assert first.endswith("for clipped_pg (of the recipe; the records are of gspo):")
    assert "hardly helps" not in bias


def test_the_recorded_correction_is_a_candidate_and_steps_must_agree(tmp_path, capsys):
    weight = {"use_importance_sampling_correction": True, "is_correction_level": "token"}
    record(tmp_path, 1, "clipped_pg", **weight)
    assert main(["sweep", str(tmp_path), "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in output["candidates"][:2]] == ["nothing", "the run's own"]
    assert output["candidates"][1]["settings"] == weight
    record(tmp_path, 2, "cispo")
    assert main(["sweep", str(tmp_path)]) == 2
    assert "the steps are of different loss_fn" in capsys.readouterr().err
    assert main(["sweep", str(tmp_path), "--last", "--steps", "1"]) == 0
    assert capsys.readouterr().out.strip().startswith("cispo (as recorded); steps 2;")


@pytest.mark.parametrize("folder", ["/runs/lr=1e-6,kl=0.001/records", "null", "007"])
def test_the_block_keeps_the_recipes_strings(logs, tmp_path, capsys, folder):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"loss_fn: {{name: clipped_pg, record: {{dir: '{folder}'}}}}\n")
    assert main(["sweep", str(logs), "--steps", "1", "--recipe", str(recipe), "--recommend"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["loss_fn"]["record"] == {"dir": folder}


FEW = RunShape(prompts=3, samples=3, length=30)


def test_too_few_sequences_give_no_recommendation(tmp_path, capsys):
    write_log(tmp_path, 1, list(log_rows(planted_step(0, 1, "precision", 15.0, shape=FEW))))
    assert main(["sweep", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert "candidate" in out
    assert "loss_fn" not in out
    assert "no recommendation: only 6 sequences have a token with a gradient" in err
    assert main(["sweep", str(tmp_path), "--recommend"]) == 1
    assert not capsys.readouterr().out
    assert main(["sweep", str(tmp_path), "--json"]) == 1
    output = json.loads(capsys.readouterr().out)
    assert (output["recommended"], output["loss_fn"]) == (None, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"advantages": [[0.0] * 1000]}, "trained tokens of the replayed steps have an advantage of 0"),
        ({"token_loss_mask": [[0.0] * 1000]}, "no token of the replayed steps is trained"),
        ({"sample_loss_mask": [0.0]}, "no token of the replayed steps is trained"),
    ],
)
def test_steps_without_a_gradient_are_an_error(tmp_path, capsys, change, message):
    rows = list(log_rows(planted_step(0, 1, "precision", 15.0, shape=SHAPE)))
    write_log(tmp_path, 1, [row | change for row in rows])
    assert main(["sweep", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert message in err


def break_positive(block, share):
    block.tokens["gen"][np.flatnonzero(block.tokens["mask"])[:: round(1 / share)]] = 1.0


def break_nonfinite(block, share):
    block.tokens["gen"][np.flatnonzero(block.tokens["mask"])[:: round(1 / share)]] = np.nan


def break_shifted(block, share):
    for first, last in pairwise(block.offsets[: max(2, round(share * len(block.offsets)))]):
        block.tokens["gen"][first + 1 : last] = block.tokens["gen"][first : last - 1].copy()


def break_scaled(block, share):
    block.tokens["prev"] *= np.float32(1 + share)


def break_biased(block, share):
    block.tokens["prev"] += np.float32(share) * -np.expm1(block.tokens["gen"])


@pytest.mark.parametrize(
    ("damage", "share", "message"),
    [
        (break_scaled, 0.1, "log-probs that one engine multiplied by a factor"),
        (break_biased, 0.3, "log-probs that are not of the distribution that was sampled from"),
        (break_positive, 0.05, "log-probs above 0, which no distribution has"),
        (break_nonfinite, 0.01, "log-probs that are NaN or infinite"),
        (break_nonfinite, 1.0, "log-probs that are NaN or infinite"),
        (break_shifted, 0.5, "log-probs shifted by one token"),
    ],
)
@pytest.mark.parametrize("output", [[], ["--recommend"], ["--json"]], ids=lambda output: "".join(output) or "tables")
def test_log_probs_that_diagnose_refuses_give_no_recommendation(tmp_path, capsys, damage, share, message, output):
    for step in (1, 2):
        planted = planted_step(0, step, shape=SHAPE)
        damage(planted, share)
        write_log(tmp_path, step, list(log_rows(planted)))
    assert main(["diagnose", str(tmp_path)]) == 3
    assert message in capsys.readouterr().out
    assert main(["sweep", str(tmp_path), *output]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert message in err
    assert "would be computed from wrong log-probs" in err


def test_a_trace_of_non_finite_log_probs_is_left_out(tmp_path, capsys):
    planted = planted_step(0, 1, shape=SHAPE)
    break_nonfinite(planted, 0.0005)
    write_log(tmp_path, 1, list(log_rows(planted)))
    assert main(["sweep", str(tmp_path)]) == 0
    assert "loss_fn:" in capsys.readouterr().out


def test_several_runs_and_no_step_are_errors(logs, tmp_path, capsys):
    for name in ("a", "b"):
        write_log(tmp_path, 1, []).rename((tmp_path / name).mkdir() or tmp_path / name / "train_data_step1.jsonl")
    assert main(["sweep", str(tmp_path)]) == 2
    assert "several runs" in capsys.readouterr().err
    assert main(["sweep", str(logs), "--steps", "0"]) == 2
