from __future__ import annotations

import json
import sys

import pytest

from nemo_geomask import build_loss
from nemo_geomask.cli import main
from nemo_geomask.errors import ConfigError

pytest.importorskip("transformers", reason="the policy is a transformers model (demo extra)")
pytest.importorskip("matplotlib", reason="the lab draws a plot (demo extra)")
pytest.importorskip("yaml", reason="recipes are YAML (demo extra)")
pytest.importorskip("pyarrow", reason="the lab writes Parquet (demo extra)")

import pyarrow.parquet as parquet
import yaml

from nemo_geomask.tools.lab.run_store import read_curves
from nemo_geomask.tools.lab.train_recipe import plan_runs

pytestmark = pytest.mark.slow


@pytest.fixture
def recipe(tmp_path):
    from tests.tools.lab.tiny_recipe import TINY

    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY), encoding="utf-8")
    return path


def test_compare_writes_all_outputs(recipe, tmp_path, capsys):
    out = tmp_path / "out"
    specs = "gspo:none,gspo:sequence_mean+geometric"
    arguments = ["lab", str(recipe), "grpo.max_num_steps=3", "--seed", "5", "--jobs", "1", "--out", str(out)]
    assert main([*arguments, "lab.rollouts_every=2", "--compare", specs]) == 0

    curves = read_curves([out])
    assert [(curve.label, curve.seed, curve.steps, curve.finished) for curve in curves] == [
        (spec, 5, 3, True) for spec in specs.split(",")
    ]
    nemo_rl = {"loss", "probs_ratio", "token_mult_prob_error", "gen_kl_error", "sampling_importance_ratio"}
    assert all(nemo_rl | {"reward", "geomask/mismatch_abs", "grad_norm"} <= curve.columns.keys() for curve in curves)
    assert curves[0].series("reward")[0] == curves[1].series("reward")[0]  # Same weights, same prompts.
    assert curves[0].facts["settings"]["grpo"]["max_num_steps"] == 3
    assert [curve.facts["corrected"] for curve in curves] == [False, True]
    assert curves[1].facts["loss_fn"]["is_correction_level"] == "sequence_mean"
    table = parquet.read_table(out / "steps")
    assert {"step", "seed", "variant", "reward"} <= set(table.column_names)
    assert table.num_rows == 6
    for curve in curves:
        dumps = {path.name for path in (out / f"{curve.facts['variant']}-seed5").iterdir()}
        assert dumps == {"train_data_step2.jsonl", "train_data_step3.jsonl"}

    summary = json.loads((out / "summary.json").read_text())
    assert [row["variant"] for row in summary["variants"]] == specs.split(",")
    assert summary["variants"][1]["removed"] >= 0
    assert (out / "lab.png").read_bytes().startswith(b"\x89PNG")

    printed = " ".join(capsys.readouterr().out.split())  # Undo the wrapping.
    for words in ("reward, last 10 steps", "Nothing was injected", "One seed does not rank variants", "lab.png"):
        assert words in printed

    # What is finished is not trained again; what comes to it is.
    written = {path: path.stat().st_mtime_ns for path in (out / "steps").iterdir()}
    assert main([*arguments, "lab.rollouts_every=2", "--compare", f"{specs},cispo"]) == 0
    assert "2 of 3 runs are finished already." in capsys.readouterr().out
    assert all(path.stat().st_mtime_ns == before for path, before in written.items())
    assert len(read_curves([out])) == 3


@pytest.mark.long
def test_settings_vary_in_every_combination_on_every_seed(recipe, tmp_path, capsys):
    arguments = ["lab", str(recipe), "--steps", "2", "--vary", "policy.lr=1e-3,2e-3"]
    arguments += [
        "--vary",
        "loss_fn.masks=[],[{preset: veto, max: 9.0}]",
        "grpo.val_period=1",
        "grpo.max_val_samples=4",
    ]
    columns = []
    for jobs, seeds in (("1", "2"), ("2", "1..2")):
        out = tmp_path / jobs
        assert main([*arguments, "--seeds", seeds, "--jobs", jobs, "--out", str(out)]) == 0
        columns.append({(curve.label, curve.seed): curve.columns for curve in read_curves([out])})
    assert (len(columns[0]), len(columns[1])) == (4, 8)
    assert ("gspo policy.lr=0.001 loss_fn.masks=[{preset:veto,max:9.0}]", 2) in columns[0]
    # Each process takes the course that one alone takes.
    for name, curve in columns[0].items():
        other = columns[1][name]
        for key in curve.keys() - {"generation_seconds", "step_seconds"}:
            assert curve[key] == other[key], (name, key)
        assert len(curve["validation/reward"]) == 2
    assert "seeds finished" in capsys.readouterr().out
    assert main(["lab", "report", str(tmp_path / "2"), "--out", str(tmp_path / "told")]) == 0
    rows = json.loads((tmp_path / "told" / "summary.json").read_text())["variants"]
    assert [row["seeds"] for row in rows] == [[1, 2]] * 4
    assert rows[0]["interval"] is None
    low, high = rows[1]["interval"]
    assert low <= rows[1]["difference"] <= high


def test_the_loss_of_a_nemo_rl_recipe(recipe, tmp_path):
    other = tmp_path / "nemo_rl.yaml"
    other.write_text("grpo: {num_prompts_per_step: 999}\nloss_fn: {name: cispo, ratio_clip_max: 4.0}\n")
    flags = {"compare": None, "vary": (), "seeds": None, "out": tmp_path}
    (run,) = plan_runs(recipe, ["loss_fn.ratio_clip_min=0.5"], loss_from=other, **flags)
    assert run.recipe.loss_fn == {"name": "cispo", "ratio_clip_max": 4.0, "ratio_clip_min": 0.5}
    assert run.recipe.grpo.num_prompts_per_step == 4
    compared = ["lab.compare=[gspo:none,gspo:sequence]"]
    with_variants = tmp_path / "with_variants.yaml"  # of another loss
    with_variants.write_text(f"defaults: {recipe}\nlab: {{compare: [gspo:none, gspo:sequence]}}\n")
    assert [run.label for run in plan_runs(with_variants, [], loss_from=other, **flags)] == ["cispo"]
    assert len(plan_runs(recipe, compared, loss_from=other, **flags)) == 2
    other.write_text("grpo: {}\n")
    with pytest.raises(ConfigError, match="has no loss_fn: block"):
        plan_runs(recipe, [], loss_from=other, **flags)


@pytest.mark.parametrize("vary", ["loss_fn.options.tau_pos=1.0,2.0", "++loss_fn.options={tau_pos: 1.0},{tau_pos: 2.0}"])
def test_options_are_of_the_recipes_own_loss_and_others_are_trained_once(recipe, tmp_path, vary):
    flags = {"compare": "gspo:none,sapo:none", "vary": [vary], "seeds": None, "loss_from": None, "out": tmp_path}
    runs = plan_runs(recipe, ["loss_fn.name=sapo", "loss_fn.options={tau_pos: 3.0}"], **flags)
    assert [run.label.partition(" ")[0] for run in runs] == ["gspo:none", "sapo:none", "sapo:none"]
    assert [run.recipe.loss_fn.get("options") for run in runs] == [None, {"tau_pos": 1.0}, {"tau_pos": 2.0}]
    assert [run.position for run in runs] == [0, 1, 2]
    for run in runs:
        build_loss(run.recipe.loss_fn)


def test_what_was_recorded_is_diagnosed(recipe, tmp_path, capsys):
    pytest.importorskip("orjson", reason="records are read by the diagnosis (diagnose extra)")
    specs = "gspo:none,gspo:sequence_mean+geometric"
    out, arguments = tmp_path / "out", ["lab", str(recipe), "--steps", "3", "--compare", specs, "loss_fn.record.dir=r"]
    assert main([*arguments, "--out", str(out)]) == 0
    assert f"Diagnosis of the records: nemo-geomask diagnose {out}\n" in capsys.readouterr().out
    assert main(["diagnose", str(out), "--brief"]) in (0, 2)  # 24 sequences may be too few
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize(
    "how",
    [["--jobs", "1"], *(pytest.param(how, marks=pytest.mark.long) for how in (["--jobs", "2"], ["lab.cp=2"]))],
    ids=" ".join,
)
def test_a_run_that_raises_leaves_the_others(how, recipe, tmp_path, capsys):
    out = tmp_path / "out"
    veto = "++loss_fn.batch_veto={max: 1.0e-12, max_in_a_row: 1},null"
    command = ["lab", str(recipe), "--compare", "gspo:none", "--vary", veto, "--steps", "3", "--seeds", "1,2", *how]
    for _ in range(2):
        assert main([*command, "--out", str(out)]) == 1
        found = {(curve.facts["loss_fn"]["batch_veto"] is None, curve.seed): curve for curve in read_curves([out])}
        assert {key: curve.finished for key, curve in found.items()} == {
            (False, 1): False, (False, 2): False, (True, 1): True, (True, 2): True
        }  # fmt: skip
        vetoed = found[False, 1]
        assert (vetoed.steps, vetoed.facts["error"][:31]) == (1, "step 2: BatchVetoError: loss_fn")
        printed = " ".join(capsys.readouterr().out.split())
        assert f"{vetoed.label}, seed 1, failed in step 2: BatchVetoError: loss_fn.batch_veto: 2 batches" in printed
        assert "not finished on seeds 1, 2; on seed 1, step 2: BatchVetoError" in printed
    assert "2 of 4 runs are finished already." in printed
    (_, row) = json.loads((out / "summary.json").read_text())["variants"]  # The uncorrected variant comes first.
    assert list(row["errors"]) == ["1", "2"]


def test_too_few_prompts_to_validate_on_are_said_before_the_first_step(recipe, tmp_path, capsys):
    few = ["env.name=lookups", "env.modulus=5", "env.min_terms=14", "env.max_terms=15", "grpo.val_period=2"]
    assert main(["lab", str(recipe), *few, "--steps", "3", "--jobs", "1", "--out", str(tmp_path / "out")]) == 2
    assert "0 belong to the validation split" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_interrupt_keeps_what_was_trained(recipe, tmp_path, monkeypatch, capsys):
    from nemo_geomask.tools.lab import trainer

    step = trainer.Trainer.step
    done = []

    def interrupted(self):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(1)
        return step(self)

    monkeypatch.setattr(trainer.Trainer, "step", interrupted)
    out = tmp_path / "out"
    assert (
        main(["lab", str(recipe), "--compare", "gspo:none,gspo:token,cispo", "--jobs", "1", "--out", str(out)]) == 130
    )
    assert [(curve.label, curve.steps, curve.finished) for curve in read_curves([out])] == [
        ("gspo:none", 2, True),
        ("gspo:token", 1, False),
    ]
    assert (out / "lab.png").exists()
    printed = " ".join(capsys.readouterr().out.split())
    assert "the same command with the same --out continues from here" in printed
    assert "gspo:token: not finished on seeds 3." in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compare", "gspo:none,gspoo"], "variant 'gspoo': loss_fn.name: no loss named 'gspoo'"),
        (
            ["--compare", "gspo+geometrik"],
            "variant 'gspo+geometrik': loss_fn.masks[0].preset: unknown preset; did you mean",
        ),
        (
            ["--compare", "my_losses:X:tokn"],
            "did you mean 'token'? levels: token, turn, turn_mean, sequence, sequence_mean, masks_only, none. The text",
        ),
        (["--compare", "no_such_module:X"], "'no_such_module:X' (given as module:attribute"),
        (["--seeds", "1,4294967296"], "--seeds: '1,4294967296' names 4294967296; a seed is below 4294967296"),
        (["--seeds", "3..1"], "--seeds: '3..1' is not a list of seeds; write 1..10, 1,2,5 or 1..3,7"),
        (["--seeds", "1..3,2"], "names a seed twice"),
        (
            ["--vary", "policy.lr=1"],
            "--vary: 'policy.lr=1': it has only one value; write key=value,value,…",
        ),
        (["--vary", "lab.tp=1,2"], "--vary: lab.tp can't be varied; use an override"),
        (["--vary", "grpo.seed=1,2"], "--vary: grpo.seed can't be varied; use --seeds"),
        (["--vary", "policy.lr=1e-3,0.001"], "have the same settings, so their curves would be equal"),
        (["--jobs", "0"], "--jobs: 0 processes can't train"),
        (["--jobs", "2", "lab.tp=2"], "--jobs: 2 runs at a time can't be combined with lab.tp"),
        (["--baseline", "x"], "--baseline belongs to nemo-geomask lab report DIR"),
    ],
)
def test_mistakes_are_one_message_and_no_folder(recipe, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["lab", str(recipe), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "results").exists()


def test_a_missing_package_names_the_extra(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["lab", str(recipe), "--out", str(tmp_path / "out")]) == 2
    assert 'pip install "nemo-geomask[demo]"' in capsys.readouterr().err


def test_files_of_the_users_are_not_overwritten(recipe, tmp_path, capsys):
    mine = tmp_path / "project"
    mine.mkdir()
    (mine / "config.yaml").write_text("mine")
    assert main(["lab", str(recipe), "--out", str(mine)]) == 2
    assert "project is not empty (it holds config.yaml)" in capsys.readouterr().err
    assert (mine / "config.yaml").read_text() == "mine"


def test_a_run_that_breaks_says_so(recipe, tmp_path, capsys):
    main(["lab", str(recipe), "policy.lr=1e30", "--jobs", "1", "--out", str(tmp_path / "out")])
    printed = " ".join(capsys.readouterr().out.split())
    assert "of the updates had a non-finite gradient and were skipped" in printed
    assert "means are over finite values only" in printed


@pytest.fixture
def own_losses(tmp_path, monkeypatch):
    (tmp_path / "my_own_losses.py").write_text(
        "from nemo_geomask.objectives.clipped_pg import CISPO as MINE\ntoken = MINE\n", encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    yield
    sys.modules.pop("my_own_losses", None)


def test_module_attribute_is_found_in_the_current_folder(recipe, tmp_path, own_losses):
    specs = "my_own_losses:MINE,my_own_losses:MINE:sequence_mean+geometric"
    assert (
        main(["lab", str(recipe), "--steps", "1", "--compare", specs, "--jobs", "1", "--out", str(tmp_path / "out")])
        == 0
    )
    variants = {curve.label: curve.facts["loss_fn"] for curve in read_curves([tmp_path / "out"])}
    assert list(variants) == specs.split(",")
    assert {variant["name"] for variant in variants.values()} == {"my_own_losses:MINE"}
    assert variants[specs.split(",")[1]]["is_correction_level"] == "sequence_mean"


@pytest.mark.parametrize(
    ("spec", "name", "level"),
    [
        ("gspo", "gspo", None),
        ("gspo:token", "gspo", "token"),
        ("my_losses:UNCLIPPED", "my_losses:UNCLIPPED", None),
        ("my_losses:UNCLIPPED+geometric", "my_losses:UNCLIPPED", None),
        ("my_losses:UNCLIPPED:sequence_mean+geometric", "my_losses:UNCLIPPED", "sequence_mean"),
        ("my.losses:Group.UNCLIPPED:none", "my.losses:Group.UNCLIPPED", "none"),
        ("my_losses:token:none", "my_losses:token", "none"),
        ("gspo:token:none", "gspo:token", "none"),  # a module of a loss's name, by its full form
    ],
)
def test_what_a_spec_says(spec, name, level):
    from nemo_geomask.tools.lab.compare_specs import parse_compare
    from nemo_geomask.tools.lab.lab_recipe import LabConfig

    block = parse_compare([spec], {}, LabConfig())[spec]
    assert block["name"] == name
    assert block.get("use_importance_sampling_correction") == {None: None, "none": False}.get(level, True)
    assert block.get("is_correction_level") == (None if level == "none" else level)
