from __future__ import annotations

import json
import subprocess
import sys

import pytest

from nemo_geomask.cli import main

pytest.importorskip("transformers", reason="the policy is a transformers model (demo extra)")
pytest.importorskip("matplotlib", reason="the lab draws a plot (demo extra)")
pytest.importorskip("rich", reason="the lab prints a table (demo extra)")
yaml = pytest.importorskip("yaml", reason="recipes are YAML (demo extra)")

pytestmark = pytest.mark.slow


@pytest.fixture
def recipe(tmp_path):
    from tests.helpers.tiny_recipe import TINY

    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY), encoding="utf-8")
    return path


def test_compare_writes_all_outputs(recipe, tmp_path, capsys):
    out = tmp_path / "out"
    specs = "gspo:none,gspo:sequence_mean+geometric"
    arguments = ["lab", str(recipe), "grpo.max_num_steps=3", "--seed", "5", "--compare", specs, "--out", str(out)]
    assert main([*arguments, "lab.rollouts_every=2"]) == 0

    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [(line["variant"], line["step"]) for line in lines] == [
        (spec, step) for spec in specs.split(",") for step in (1, 2, 3)
    ]
    nemo_rl = {"loss", "probs_ratio", "token_mult_prob_error", "gen_kl_error", "sampling_importance_ratio"}
    assert all(nemo_rl | {"reward", "geomask/mismatch_abs", "grad_norm"} <= line.keys() for line in lines)
    assert {line["seed"] for line in lines} == {5}
    assert lines[0]["reward"] == lines[3]["reward"]  # Same weights, same prompts.

    for folder in ("gspo-none", "gspo-sequence_mean+geometric"):
        dumps = {path.name for path in (out / folder).iterdir()}
        assert dumps == {"train_data_step2.jsonl", "train_data_step3.jsonl"}

    config = yaml.safe_load((out / "config.yaml").read_text())
    assert config["grpo"]["max_num_steps"] == 3
    assert config["variants"]["gspo:sequence_mean+geometric"]["is_correction_level"] == "sequence_mean"

    summary = json.loads((out / "summary.json").read_text())
    assert [row["variant"] for row in summary["variants"]] == specs.split(",")
    assert [row["corrected"] for row in summary["variants"]] == [False, True]
    assert summary["variants"][1]["removed"] >= 0
    assert (out / "lab.png").read_bytes().startswith(b"\x89PNG")

    printed = " ".join(capsys.readouterr().out.split())  # Undo the wrapping.
    for words in ("reward, last 10 steps", "Nothing was injected", "One seed does not rank variants", "lab.png"):
        assert words in printed

    assert main(arguments) == 2
    assert "is not empty (it holds config.yaml)" in capsys.readouterr().err


def test_what_was_recorded_is_diagnosed(recipe, tmp_path, capsys, monkeypatch):
    for module in ("pyarrow", "plotly", "jinja2"):
        pytest.importorskip(module, reason="records and their report (diagnose extra)")
    specs = "gspo:none,gspo:sequence_mean+geometric"
    out, arguments = tmp_path / "out", ["lab", str(recipe), "--steps", "3", "--compare", specs, "loss_fn.record.dir=r"]
    assert main([*arguments, "--out", str(out)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for spec in specs.split(","):
        assert f"{spec}: healthy: " in printed or f"{spec}: not judged: " in printed
    assert "report.html" in printed
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "gspo:sequence_mean+geometric" in page
    assert "mask geometric" in page
    assert "grad_norm" in page  # the lab's own metrics
    assert main(["diagnose", str(out), "--brief"]) in (0, 2)  # 24 sequences may be too few
    assert len(capsys.readouterr().out.splitlines()) == 2
    from rich.console import Console

    from nemo_geomask.lab.diagnosed import print_diagnosis
    from nemo_geomask.lab.results import LabResult, VariantResult

    variant = VariantResult("a [bold]", {"record": {"dir": str(out / "gspo-none" / "r")}}, False)
    result = LabResult([variant], 0.1, 1, "bfloat16", "float32", out)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    print_diagnosis(result, Console())
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.startswith("a [bold]: ")
    assert "No diagnosis: a report needs jinja2" in printed


def test_two_processes_write_what_one_writes(recipe, tmp_path, capsys):
    common = [str(recipe), "--steps", "2", "--docs-per-step", "12", "policy.generation.precision=float32"]
    lines, files = [], []
    for out, layout in ((tmp_path / "one", []), (tmp_path / "two", ["--cp", "2"])):
        assert main(["lab", *common, *layout, "--compare", "gspo:none,cispo", "--out", str(out)]) == 0
        lines.append([json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()])
        files.append(sorted(str(path.relative_to(out)) for path in out.rglob("*")))
    assert files[0] == files[1]
    assert [list(line) for line in lines[0]] == [list(line) for line in lines[1]]
    for ours, theirs in zip(*lines, strict=True):
        assert (ours["variant"], ours["step"]) == (theirs["variant"], theirs["step"])
        for key in ("reward", "loss", "grad_norm", "probs_ratio_max", "approx_entropy"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-6), key
    settings = yaml.safe_load((tmp_path / "two" / "config.yaml").read_text())
    assert settings["lab"]["cp"] == 2
    assert (settings["policy"]["docs_per_step"], settings["policy"]["train_global_batch_size"]) == (12, None)
    assert "Starting 2 processes: tp 1, cp 2, dp 1." in capsys.readouterr().out


def test_an_interrupt_keeps_what_was_trained(recipe, tmp_path, monkeypatch, capsys):
    from nemo_geomask.lab import trainer

    step = trainer.Trainer.step
    done = []

    def interrupted(self):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(1)
        return step(self)

    monkeypatch.setattr(trainer.Trainer, "step", interrupted)
    out = tmp_path / "out"
    assert main(["lab", str(recipe), "--compare", "gspo:none,gspo:token,cispo", "--out", str(out)]) == 130
    summary = json.loads((out / "summary.json").read_text())
    assert [(row["variant"], row["steps"], row["complete"]) for row in summary["variants"]] == [
        ("gspo:none", 2, True),
        ("gspo:token", 1, False),
    ]
    assert (out / "gspo-token" / "train_data_step1.jsonl").exists()
    assert (out / "lab.png").exists()
    assert "interrupted" in capsys.readouterr().out.lower()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["grpo.max_num_step=3"], "tiny.yaml: grpo.max_num_step: unknown key; did you mean 'max_num_steps'?"),
        (["loss_fn.ratio_clip_mn=3"], "loss_fn.ratio_clip_mn: unknown key"),
        (["--compare", "gspo:none,gspoo"], "variant 'gspoo': loss_fn.name: no loss named 'gspoo'"),
        (["--compare", "gspo:tokn"], "unknown correction level 'tokn'; did you mean 'token'? levels: token, sequence,"),
        (["--compare", "gspo:UNCLIPPED"], "unknown correction level 'UNCLIPPED'; levels: token, sequence,"),
        (["--compare", "gspo:"], "unknown correction level ''; levels: token,"),
        (["--compare", "my_losses:X:tokn"], "did you mean 'token'? levels: token, sequence, sequence_mean, none. What"),
        (["--compare", "gspoo:sequence"], "no loss named 'gspoo' in entry-point group"),
        (["--compare", "no_such_module:X"], "'no_such_module:X' (given as module:attribute"),
        (["--steps", "0"], "grpo.max_num_steps"),
        (["--tp", "3"], "tiny.yaml: lab.tp: Input should be 1, 2 or 4 (found 3)"),
        (["--docs-per-step", "17"], "policy.docs_per_step (17) exceeds"),
        (["policy.docs_per_step=12"], "policy: train_global_batch_size (8) and docs_per_step (12) both say"),
        (["policy.train_global_batch_size=4", "--docs-per-step", "12"], "(4) and docs_per_step (12) both say"),
        (["--dp", "4"], "must be a multiple of policy.train_micro_batch_size x lab.dp (4 x 4)"),
        (["--out", "/proc"], "--out: /proc is not empty"),
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


def test_unknown_options_are_refused(recipe, capsys):
    with pytest.raises(SystemExit):
        main(["lab", str(recipe), "--stepps", "3"])
    assert "--stepps" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("nemo-geomask ")


def test_the_command_line_imports_nothing_heavy():
    code = (
        "import sys, nemo_geomask.cli; "
        "sys.exit(' '.join({'transformers', 'omegaconf', 'matplotlib', 'rich', 'yaml'} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_files_of_the_users_are_not_overwritten(recipe, tmp_path, capsys):
    mine = tmp_path / "project"
    mine.mkdir()
    (mine / "config.yaml").write_text("mine")
    assert main(["lab", str(recipe), "--out", str(mine)]) == 2
    assert "project is not empty (it holds config.yaml)" in capsys.readouterr().err
    assert (mine / "config.yaml").read_text() == "mine"


def test_a_run_that_breaks_says_so(recipe, tmp_path, capsys):
    main(["lab", str(recipe), "policy.lr=1e30", "--out", str(tmp_path / "out")])
    printed = " ".join(capsys.readouterr().out.split())
    assert "of the updates had a non-finite gradient and were skipped" in printed
    assert "means are over finite values alone" in printed


@pytest.fixture
def own_losses(tmp_path, monkeypatch):
    (tmp_path / "my_own_losses.py").write_text(
        "from nemo_geomask.losses.variants import CISPO as MINE\ntoken = MINE\n", encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    yield
    sys.modules.pop("my_own_losses", None)


def test_module_attribute_is_found_in_the_current_folder(recipe, tmp_path, own_losses):
    specs = "my_own_losses:MINE,my_own_losses:MINE:sequence_mean+geometric"
    assert main(["lab", str(recipe), "--steps", "1", "--compare", specs, "--out", str(tmp_path / "out")]) == 0
    variants = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())["variants"]
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
    from nemo_geomask.lab.compare import parse_spec
    from nemo_geomask.lab.recipe import LabConfig

    block = parse_spec(spec, {}, LabConfig()).loss_fn
    assert block["name"] == name
    assert block.get("use_importance_sampling_correction") == {None: None, "none": False}.get(level, True)
    assert block.get("is_correction_level") == (None if level == "none" else level)


def test_without_arguments_only_the_recipe_is_missing(capsys):
    with pytest.raises(SystemExit):
        main(["lab"])
    assert capsys.readouterr().err.endswith("the following arguments are required: RECIPE.yaml\n")
