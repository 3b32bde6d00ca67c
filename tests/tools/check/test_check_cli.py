"""What ``nemo-geomask check`` prints in addition to findings: which loss trains, and why a recipe can't be checked."""

from __future__ import annotations

import json

import pytest

from nemo_geomask.cli import main
from tests.helpers.closed_pipe import run_unread

NAMELESS = """\
loss_fn:
  ratio_clip_max: 0.3
  use_importance_sampling_correction: true
  is_correction_level: sequence_mean
  masks: [{preset: veto, max: 9.0, min: 0.1}]
  loss_normalization: documents
policy: {megatron_cfg: {enabled: true}}
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    pytest.importorskip("omegaconf", reason="recipes need it")
    monkeypatch.chdir(tmp_path)

    def write(text):
        (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
        return "recipe.yaml"

    return write


class TestWhichLossTrains:
    def checked(self, capsys, *words):
        status = main(["check", *words, "--format", "json"])
        return status, json.loads(capsys.readouterr().out)

    def test_without_a_name_it_is_nemo_rls_own(self, write, capsys):
        assert main(["check", write(NAMELESS)]) == 2
        printed = capsys.readouterr().out
        head, formula = (
            printed.index("loss_fn has no name, so NeMo-RL's own ClippedPGLossFn trains."),
            printed.index("L = "),
        )
        assert head < formula
        assert "not masked" in printed
        assert "k_veto" not in printed
        assert "c_t = 1 / N_tok" in printed
        assert "w_t = exp(x_t)" in printed  # token level, NeMo-RL's
        for key in ("is_correction_level", "masks", "loss_normalization"):
            assert f"error GM003 loss_fn.{key}" in printed
        assert (
            "of `clipped_pg` without loss_fn.is_correction_level, loss_fn.loss_normalization, loss_fn.masks, "
            in printed
        )
        assert main(["check", write("grpo: {}\nloss_fn: {reference_policy_kl_penalty: 0.0}\n")]) in (0, 2)
        assert "Its objective is that of `clipped_pg`:\n" in capsys.readouterr().out

    def test_json_names_it(self, write, capsys):
        status, found = self.checked(capsys, write(NAMELESS))
        assert (status, found["loss_of"], found["settings"]["masks"]) == (2, "nemo_rl", [])
        assert found["objective"][0]["formula"] == "L = Σ_t c_t · (w_t · ℓ_t + 0.01 · KL_t)"
        assert "GM003" in {finding["rule"] for finding in found["findings"]}
        _, found = self.checked(capsys, "recipe.yaml", "++loss_fn.name=clipped_pg")
        assert (found["loss_of"], len(found["settings"]["masks"])) == ("nemo_geomask", 1)
        _, found = self.checked(capsys, "recipe.yaml", "++lab.tp=1")  # the lab's are this package's
        assert (found["loss_of"], len(found["settings"]["masks"])) == ("nemo_geomask", 1)
        _, found = self.checked(capsys, "recipe.yaml", "++loss_fn.name=null", "++loss_fn.ratio_clip_mx=1")
        assert (found["loss_of"], found["settings"]) == (None, None)

    def test_with_a_name_it_is_this_packages(self, write, capsys):
        main(["check", write(NAMELESS), "++loss_fn.name=clipped_pg"])
        printed = capsys.readouterr().out
        assert "ClippedPGLossFn" not in printed
        assert "k_veto" in printed

    def test_a_block_that_only_ignored_keys_make_valid_is_an_error(self, write, capsys):
        # GSPO's ratio needs a loss over sequences, which NeMo-RL reads from token_level_loss alone.
        recipe = write("loss_fn: {sequence_level_importance_ratios: true, loss_normalization: sequences}\n")
        status, found = self.checked(capsys, recipe)
        assert (status, found["findings"][0]["rule"]) == (2, "GM001")
        assert "token_level_loss" in found["findings"][0]["message"]


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        (None, ["nosuch.yaml"], "nosuch.yaml: the recipe can't be read"),
        ("loss_fn: {name: [", ["recipe.yaml"], "recipe.yaml: not valid YAML"),
        ("loss_fn: {}\n", ["recipe.yaml", "--ignore", "GM9999"], "--ignore: there is no rule GM9999"),
        ("loss_fn: {}\n", ["recipe.yaml", "nonsense"], "override 'nonsense'"),
        ("loss_fn: {}\n", ["recipe.yaml", "--gpu", "abacus"], "--gpu: 'abacus' is not known"),
        (None, [], "check needs a recipe"),
    ],
)
def test_json_of_a_recipe_that_cant_be_checked(text, words, message, write, capsys):
    # A recipe with an error that a rule finds, for the shape of the object.
    write("loss_fn: {ratio_clip_mn: 1}\n")
    main(["check", "recipe.yaml", "--format", "json"])
    shape = json.loads(capsys.readouterr().out)
    if text is not None:
        write(text)
    assert main(["check", *words, "--format", "json"]) == 2
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found.keys() == shape.keys()
    (finding,) = found["findings"]
    assert finding.keys() == shape["findings"][0].keys()
    assert (finding["rule"], finding["severity"]) == (None, "error")
    assert message in finding["message"]
    assert message in printed.err
    assert found["summary"] == {"error": 1, "warning": 0, "note": 0}


@pytest.mark.parametrize("value", ["abc", "0", "-1", "inf", "nan", ""])
def test_an_invalid_mismatch_kl_is_named(value, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["check", "recipe.yaml", f"--mismatch-kl={value}"])
    assert caught.value.code == 2
    assert f"argument --mismatch-kl: '{value}' is not a number above 0" in capsys.readouterr().err


@pytest.mark.parametrize(("word", "hint"), [("chek", "did you mean 'check'?")])
def test_a_mistyped_command_names_the_nearest(word, hint, capsys):
    with pytest.raises(SystemExit) as caught:
        main([word])
    assert caught.value.code == 2
    assert f"there is no command '{word}'; {hint}" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("words", ["check --list-rules", "check --help"])
def test_output_that_nobody_reads_is_no_error(words):
    done = run_unread(words.split())
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.slow
def test_both_streams_may_be_closed():
    assert run_unread(["check", "nowhere.yaml", "--format", "json"], stderr_too=True).returncode == 141
