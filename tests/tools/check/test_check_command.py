"""``nemo-geomask check`` as a command: locations in files, output formats, exit status."""

import json
from pathlib import Path

import pytest

from nemo_geomask import LossConfig
from nemo_geomask.cli import main
from nemo_geomask.recipe import recipe_file as recipes
from nemo_geomask.tools.check import RULES
from nemo_geomask.tools.check.expectation import kept_fraction, median_weight
from tests.helpers.closed_pipe import run_unread
from tests.helpers.logs import log_rows, write_log

DOCS = Path(__file__).parents[3] / "docs"

BASE = """\
policy:
  megatron_cfg: {enabled: true}
  model_name: some/dense-8B
loss_fn:
  reference_policy_kl_penalty: 0.01
  ratio_clip_min: 0.2
  masks:
    - {preset: veto, max: 9.0}
    - preset: icepop
      max: 5.0
"""
NAMED = BASE.replace("loss_fn:\n", "loss_fn:\n  name: clipped_pg\n")
CHILD = """\
defaults: base.yaml
loss_fn:
  name: clipped_pg
  ratio_clip_max: 0.3
"""


@pytest.fixture(autouse=True)
def without_nemo_rl(monkeypatch, tmp_path):
    monkeypatch.delenv("NEMO_RL_ROOT", raising=False)
    monkeypatch.setattr(recipes, "nemo_rl_root", lambda: None)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def write(tmp_path):
    def write(**files):
        for name, text in files.items():
            (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
        return tmp_path / f"{name}.yaml"

    return write


@pytest.fixture
def check(capsys):
    def check(*arguments):
        status = main(["check", *map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return check


class TestCommand:
    @pytest.mark.parametrize("ending", ["", ".yaml"])
    def test_a_name_that_no_file_can_have(self, check, ending):
        status, _, err = check("a" * 5000 + ending)
        assert (status, err.endswith("the recipe can't be read: File name too long\n")) == (2, True)

    def test_a_key_twice_and_an_inherited_one(self, write, check):
        status, _, err = check(write(base=BASE, child=f"{CHILD}loss_fn: {{}}\n"))
        assert (status, "duplicate key loss_fn" in err, "merge it into the existing block" in err) == (2, True, True)
        base = BASE.replace("  ratio_clip_min: 0.2\n", "  use_cispo: true\n")
        child = "defaults: base.yaml\nloss_fn: {name: gspo, token_level_loss: false, ratio_clip_min: 3.0e-4}\n"
        _, out, _ = check(write(base=base, child=child))
        assert "use name: cispo; set loss_fn.use_cispo: false (inherited from base.yaml:6), or choose" in out

    def test_many_findings_of_a_rule_are_one_list(self, write, check):
        sizes = ", ".join(f"{name}: 0" for name in ("train_global_batch_size", "train_micro_batch_size"))
        zeros = f"policy: {{{sizes}, logprob_batch_size: 0, max_grad_norm: 0, max_total_sequence_length: 0}}\n"
        _, out, _ = check(write(base=BASE, child=f"{CHILD}{zeros}cluster: {{num_nodes: 0, gpus_per_node: 0}}\n"))
        assert "error GM339, 7 times: Number out of its range\n  child.yaml:5: policy.train_global_batch_size: 0" in out

    def test_a_clean_recipe(self, write, check):
        status, out, err = check(write(base=BASE, child=CHILD), "--gpu", "H100")
        assert (status, err) == (0, "")
        assert "L = Σ_t c_t · (k_t · ℓ_t + 0.01 · KL_t)" in out
        assert "clip(r_t, 0.8, 1.3)" in out
        assert "0 errors, 0 warnings, 0 notes" in out
        assert "not checked without NeMo-RL's source (set NEMO_RL_ROOT to a checkout): GM004, GM005, GM006," in out

    def test_an_asynchronous_recipe_says_how_old_its_samples_may_be(self, write, check):
        settings = ("+grpo.async_grpo.enabled=true", "+grpo.async_grpo.max_trajectory_age_steps=2")
        _, out, _ = check(write(base=BASE, child=CHILD), *settings)
        assert "asynchronous: samples may be up to 2 weight updates older than the policy that they train" in out

    def test_an_inherited_typo_is_located_at_its_line(self, write, check):
        status, out, _ = check(write(base=BASE.replace("max: 5.0", "mx: 5.0"), child=CHILD))
        assert status == 2
        assert "base.yaml:10: error GM001 loss_fn.masks[1].mx\n  unknown key; did you mean 'max'?" in out
        assert "not checked until loss_fn is valid" in out

    def test_a_null_block_names_the_line_that_sets_it(self, write, check):
        recipe = write(base=BASE, child="defaults: base.yaml\nloss_fn:\n")
        assert "child.yaml:2 sets it to null or deletes it" in check(recipe)[1]
        assert "override '~loss_fn' sets it to null or deletes it" in check(write(base=BASE), "~loss_fn")[1]

    def test_a_problem_caused_by_an_override_is_located_at_it(self, write, check):
        status, out, _ = check(write(base=BASE, child=CHILD), "loss_fn.ratio_clip_min=-1")
        assert status == 2
        assert "override 'loss_fn.ratio_clip_min=-1': error GM001 loss_fn.ratio_clip_min" in out

    def test_a_contradiction_is_located_at_one_of_its_settings(self, write, check):
        _, out, _ = check(write(base=BASE, child=CHILD + "  is_correction_level: sequence\n"))
        assert "child.yaml:5: error GM001 loss_fn.is_correction_level" in out

    def test_warnings_fail_under_strict_and_errors_always(self, write, check):
        gspo = "defaults: base.yaml\nloss_fn: {name: gspo, token_level_loss: false, ratio_clip_max: 4.0e-4}\n"
        recipe = write(base=BASE, child=gspo)
        assert check(recipe)[0] == 0
        assert check(recipe, "--strict")[0] == 1
        assert check(recipe, "--strict", "--ignore", "GM002")[0] == 0
        assert check(recipe, "--strict", "--ignore", "GM108,gm002")[0] == 0
        assert check(recipe, "policy.megatron_cfg.enabled=false")[0] == 2
        assert check(recipe, "policy.megatron_cfg.enabled=false", "--ignore", "GM312")[0] == 0

    def test_notes_never_change_the_exit_status(self, write, check):
        moe = ["policy.model_name=Qwen/Qwen3-30B-A3B", "++policy.megatron_cfg.moe_router_bias_update_rate=0.1"]
        status, out, _ = check(write(base=BASE, child=CHILD), *moe, "--strict")
        assert (status, "note GM113" in out, "0 errors, 0 warnings, 1 note\n" in out) == (0, True, True)
        status, out, _ = check(write(base=BASE, child=CHILD), *moe, "--ignore", "GM113")
        assert (status, "note GM113" in out, "ignored: GM113" in out) == (0, False, True)

    def test_expected_mismatch_and_gpu(self, write, check):
        mask = "loss_fn.masks=[{preset: product, min: 0.5, max: 2.0}]"
        recipe = write(base=BASE, child=CHILD)
        sizes = ["++policy.generation={backend: vllm, max_new_tokens: 1000}"]
        assert "GM402" in check(recipe, mask, *sizes, "--mismatch-kl", "1e-2")[1]
        assert "GM402" not in check(recipe, mask, *sizes, "--mismatch-kl", "1e-4")[1]
        assert "warning GM106" in check(recipe, *sizes, "--gpu", "A100")[1]
        assert "not checked without --gpu: GM106" in check(recipe, *sizes)[1]

    def test_json_has_places_settings_and_what_is_unjudged(self, write, check):
        status, out, _ = check(write(base=BASE, child=CHILD), "++loss_fn.ratio_clip_mn=1", "--format", "json")
        result = json.loads(out)
        assert status == 2
        assert result["settings"] is None
        (finding,) = result["findings"]
        assert finding["rule"] == "GM001"
        assert finding["severity"] == "error"
        assert finding["override"] == "++loss_fn.ratio_clip_mn=1"
        assert result["summary"] == {"error": 1, "warning": 0, "note": 0}

        status, out, _ = check(write(base=BASE, child=CHILD), "++policy.dtensor_cfg.enabled=true", "--format", "json")
        result = json.loads(out)
        (finding,) = result["findings"]
        assert (finding["rule"], finding["file"], finding["line"]) == ("GM312", "base.yaml", 2)
        assert result["settings"]["ratio_clip_max"] == 0.3
        assert result["objective"][0]["formula"].startswith("L = ")
        assert {"rule": "GM106", "needs": "--gpu"} in result["unjudged"]

    def test_settings_that_a_probe_would_try_are_named(self, write, check):
        recipe = write(
            child="""
policy:
  precision: bfloat16
  dtensor_cfg: {enabled: true, tensor_parallel_size: 1}
  megatron_cfg: {enabled: false, apply_rope_fusion: true}
  generation: {backend: vllm, temperature: 1.0, vllm_cfg: {enforce_eager: false}}
loss_fn: {name: clipped_pg}
"""
        )
        _, out, _ = check(recipe)
        line = next(line for line in out.splitlines() if "nemo-geomask probe" in line)
        assert "disagree: policy.generation.vllm_cfg.enforce_eager, policy.precision; nemo-geomask probe" in line
        _, out, _ = check(recipe, "--format", "json")
        assert {"key": "policy.precision", "value": "bfloat16", "conservative": "float32"} in json.loads(out)[
            "mismatch_settings"
        ]

    def test_what_masks_keep_at_the_mismatch_and_at_five_times_as_much(self, write, check):
        write(
            child="""
policy: {max_total_sequence_length: 4096}
loss_fn:
  name: clipped_pg
  masks: [{preset: geometric, min: 0.999, max: 1.002}, {preset: opsm, delta: 0.02}, {preset: dppo_tv, delta: 0.2}]
"""
        )
        _, out, _ = check("child.yaml")
        assert (
            "that each mask keeps, for responses of 4096 tokens at a mismatch KL of 0.001 | 0.005 nats per token:"
            in out
        )
        assert "  geometric: 50 % | 0.523 % of sequences\n" in out
        assert "  opsm: 100 % | 100 % of sequences with negative advantage\n" in out
        assert "dppo_tv:" not in out  # it depends on the tokens' probabilities
        _, out, _ = check("child.yaml", "--format", "json", "--mismatch-kl", "0.0001")
        geometric, opsm = json.loads(out)["expected"]
        assert (geometric["key"], geometric["tokens"], opsm["when"]) == ("loss_fn.masks[0]", 4096, "negative_advantage")
        assert [kept["mismatch_kl"] for kept in geometric["kept"]] == pytest.approx([1e-4, 5e-4])
        assert geometric["kept"][0]["share"] == pytest.approx(1, abs=1e-3)

    @pytest.mark.parametrize("section", ["sft", "dpo", "rm", "distillation", "eval"])
    def test_a_recipe_without_a_policy_loss_is_named_so_and_passes(self, write, check, section):
        write(child=f"{section}: {{seed: 1}}\nloss_fn: {{kl_type: reverse}}\n")
        status, out, _ = check("child.yaml", "--strict")
        assert status == 0
        assert "trains no policy loss" in out
        assert "not checked until" not in out
        write(child=f"{section}: {{seed: 1}}\nloss_fn: {{name: gspo}}\n")
        status, out, _ = check("child.yaml")
        assert status == 2
        assert "error GM001 loss_fn.name" in out
        assert "trains none; remove name, or add a grpo section" in out

    def test_an_unresolved_path_under_data_is_a_note(self, write, check, monkeypatch):
        monkeypatch.delenv("SOMEWHERE", raising=False)
        recipe = "loss_fn: {name: clipped_pg, reference_policy_kl_penalty: 0.0}\n"
        write(child=recipe + "data: {train: [{data_path: '${oc.env:SOMEWHERE}/x'}], n: {p: '${oc.env:SOMEWHERE}'}}\n")
        status, out, _ = check("child.yaml", "--strict")
        assert status == 0
        assert "child.yaml:2: note GM007 data.n.p" in out
        assert "note GM007 data.train[0].data_path" in out
        assert "SOMEWHERE" in out
        # A reference to a missing key is an error in any section, as is an unresolved value that rules read.
        write(child=recipe + "data: {path: '${nowhere.at_all}'}\n")
        assert check("child.yaml")[0] == 2
        write(child=recipe + "policy: {model_name: '${oc.env:SOMEWHERE}'}\n")
        assert check("child.yaml")[0] == 2

    def test_a_recipe_without_the_block_or_with_a_wrong_one(self, write, check):
        for text in ("policy: {megatron_cfg: {enabled: true}}\n", "loss_fn: gspo\n", "loss_fn: null\n"):
            status, out, _ = check(write(child=text))
            assert (status, "error GM001 loss_fn" in out) == (2, True)

    def test_folders_and_several_recipes(self, write, check, tmp_path):
        write(base=NAMED, child=CHILD, bad="loss_fn: {ratio_clip_mn: 1}\n")
        write(notes="unrelated: 1\n", broken="policy: [\n")
        status, out, _ = check(tmp_path)
        assert status == 2
        assert "broken.yaml: can't be checked\n" in out
        assert "error GM001 loss_fn.ratio_clip_mn" in out
        assert "4 recipes: 2 errors, 0 warnings, 0 notes; 1 YAML file without a section of a recipe left out" in out
        status, out, _ = check("base.yaml", "child.yaml", "loss_fn.ratio_clip_min=-1", "--format", "json")
        result = json.loads(out)
        assert (status, result["skipped"], result["summary"]["error"]) == (2, 0, 2)
        assert [each["recipe"] for each in result["recipes"]] == ["base.yaml", "child.yaml"]
        assert check("base.yaml", "child.yaml")[0] == 0
        (tmp_path / "venv" / "share").mkdir(parents=True)
        (tmp_path / "venv" / "pyvenv.cfg").touch()
        (tmp_path / ".hidden").mkdir()
        for place in ("venv/share", ".hidden"):
            (tmp_path / place / "other.yaml").write_text("loss_fn: {ratio_clip_mn: 1}\n", encoding="utf-8")
        assert "4 recipes: 2 errors" in check(tmp_path)[1]
        (tmp_path / "empty").mkdir()
        status, _, err = check("empty")
        assert (status, "there is no recipe in this folder" in err) == (2, True)

    def test_what_applies_to_many_recipes_is_printed_once(self, write, check, tmp_path):
        moe = CHILD + "policy: {model_name: Qwen/Qwen3-30B-A3B, megatron_cfg: {moe_router_bias_update_rate: 0.1}}\n"
        write(base=NAMED, **{f"child{index}": moe for index in range(5)})
        status, out, _ = check(tmp_path, "--strict")
        assert (status, out.count("GM113")) == (0, 1)
        assert "note GM113 in 5 recipes" in out
        assert "child2.yaml and 2 more" in out
        # So is a warning of more than a few recipes, which still counts.
        gspo = "defaults: base.yaml\nloss_fn: {name: gspo, token_level_loss: false, ratio_clip_max: 4.0e-4}\n"
        write(**{f"child{index}": gspo for index in range(5)})
        status, out, _ = check(tmp_path, "--strict")
        assert (status, out.count("GM002"), "warning GM002 in 5 recipes" in out) == (1, 1, True)
        assert "6 recipes: 0 errors, 5 warnings, 0 notes" in out

    def test_list_of_rules(self, check):
        status, out, _ = check("--list-rules")
        assert status == 0
        for rule in RULES:
            assert f"{rule.id}  {rule.severity}" in out
            assert rule.title in out

    def test_the_pages_expectations_are_those_of_the_rules(self):
        page = (DOCS / "reference" / "rules.md").read_text(encoding="utf-8")
        rows = {
            line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
            for line in page.splitlines()
            if line.startswith("| ")
        }
        kl, lengths = 1e-3, [512, 2048, 8192, 32768]
        for power, row in enumerate(("median `sequence` weight, exp(−κT)", "its effective sample size, exp(−2κT)"), 1):
            expected = [median_weight(kl, tokens) ** power for tokens in lengths]
            assert [float(cell) for cell in rows[row]] == [float(f"{value:.2g}") for value in expected]
        masks = {
            "kept by `product [0.5, 2]`": ("product", 0.5, 2.0, kl),
            "kept by `geometric [0.99, 1.01]`": ("geometric", 0.99, 1.01, kl),
            "kept by `geometric [0.999, 1.002]`": ("geometric", 0.999, 1.002, kl),
            "kept by `geometric [0.99, 1.01]` at κ = 5·10⁻³": ("geometric", 0.99, 1.01, 5e-3),
            "kept by `geometric [0.999, 1.002]` at κ = 5·10⁻³": ("geometric", 0.999, 1.002, 5e-3),
        }
        for row, (preset, low, high, at) in masks.items():
            (rule,) = LossConfig(masks=[{"preset": preset, "min": low, "max": high}]).mask_rules
            assert rows[row] == [f"{100 * kept_fraction(rule, at, tokens):.0f} %" for tokens in lengths]


class TestFromARun:
    """``--from``: the values measured in a similar run replace the assumed ones."""

    @pytest.fixture
    def logs(self, tmp_path):
        pytest.importorskip("pyarrow")
        planted_logs = pytest.importorskip("tests.evidence.diagnose.planted_logs")
        directory = tmp_path / "run"
        directory.mkdir()
        for step in (1, 2, 3):
            shape = planted_logs.RunShape(prompts=3, samples=4, length=40)
            planted = planted_logs.planted_step(0, step, planted_logs.PLANTED_CAUSES["precision"], 15.0, shape=shape)
            write_log(directory, step, list(log_rows(planted)))
        return directory

    def test_its_mismatch_and_length_are_used(self, write, check, logs, tmp_path):
        recipe = write(recipe="loss_fn: {name: clipped_pg, masks: [{preset: icepop, min: 0.9, max: 1.1}]}\n")
        _, out, _ = check(recipe, "--from", str(logs), "--format", "json")
        output = json.loads(out)
        measured, (expected,) = output["measured"], output["expected"]
        assert measured["steps"] == [1, 3]
        assert measured["interval"][0] < measured["mismatch_kl"] < measured["interval"][1]
        assert expected["tokens"] == measured["response_tokens"] < 100
        assert expected["kept"][0]["mismatch_kl"] == measured["mismatch_kl"]
        assert 0.3 < measured["kept"]["icepop"] < 0.99
        cache = tmp_path / "elsewhere"
        assert check(recipe, "--from", str(logs), "--cache", str(cache))[0] == 0
        assert sorted(path.suffix for path in cache.rglob("*.parquet"))
        # The fraction that masks keep is measured even if the recipe's metrics leave it out.
        brief = write(recipe="loss_fn: {name: clipped_pg, metrics: nemo_rl, masks: [{preset: icepop, min: 0.9}]}\n")
        assert json.loads(check(brief, "--from", str(logs), "--format", "json")[1])["measured"]["kept"]
        recipe = write(recipe="loss_fn: {name: clipped_pg, masks: [{preset: icepop, min: 0.9, max: 1.1}]}\n")
        _, out, _ = check(recipe, "--from", str(logs), "--mismatch-kl", "0.5")
        assert f"measured in {logs}, steps 1 to 3: mismatch KL " in out
        assert "at a mismatch KL of 0.5 | 2.5" in out


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
def write_recipe(tmp_path):
    def write(text):
        (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
        return "recipe.yaml"

    return write


class TestWhichLossTrains:
    def checked(self, capsys, *words):
        status = main(["check", *words, "--format", "json"])
        return status, json.loads(capsys.readouterr().out)

    def test_without_a_name_it_is_nemo_rls_own(self, write_recipe, capsys):
        assert main(["check", write_recipe(NAMELESS)]) == 2
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
        assert main(["check", write_recipe("grpo: {}\nloss_fn: {reference_policy_kl_penalty: 0.0}\n")]) in (0, 2)
        assert "Its objective is that of `clipped_pg`:\n" in capsys.readouterr().out

    def test_json_names_it(self, write_recipe, capsys):
        status, found = self.checked(capsys, write_recipe(NAMELESS))
        assert (status, found["loss_of"], found["settings"]["masks"]) == (2, "nemo_rl", [])
        assert found["objective"][0]["formula"] == "L = Σ_t c_t · (w_t · ℓ_t + 0.01 · KL_t)"
        assert "GM003" in {finding["rule"] for finding in found["findings"]}
        _, found = self.checked(capsys, "recipe.yaml", "++loss_fn.name=clipped_pg")
        assert (found["loss_of"], len(found["settings"]["masks"])) == ("nemo_geomask", 1)
        _, found = self.checked(capsys, "recipe.yaml", "++lab.tp=1")  # the lab's are this package's
        assert (found["loss_of"], len(found["settings"]["masks"])) == ("nemo_geomask", 1)
        _, found = self.checked(capsys, "recipe.yaml", "++loss_fn.name=null", "++loss_fn.ratio_clip_mx=1")
        assert (found["loss_of"], found["settings"]) == (None, None)

    def test_with_a_name_it_is_this_packages(self, write_recipe, capsys):
        main(["check", write_recipe(NAMELESS), "++loss_fn.name=clipped_pg"])
        printed = capsys.readouterr().out
        assert "ClippedPGLossFn" not in printed
        assert "k_veto" in printed

    def test_a_block_that_only_ignored_keys_make_valid_is_an_error(self, write_recipe, capsys):
        # GSPO's ratio needs a loss over sequences, which NeMo-RL reads from token_level_loss alone.
        recipe = write_recipe("loss_fn: {sequence_level_importance_ratios: true, loss_normalization: sequences}\n")
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
        ("loss_fn: {}\n", ["recipe.yaml", "--gpu", "abacus"], "--gpu: 'abacus' is not known; choose from A2, A10,"),
        (None, [], "check needs a recipe"),
    ],
)
def test_json_of_a_recipe_that_cant_be_checked(text, words, message, write_recipe, capsys):
    # A recipe with an error that a rule finds, for the shape of the object.
    write_recipe("loss_fn: {ratio_clip_mn: 1}\n")
    main(["check", "recipe.yaml", "--format", "json"])
    shape = json.loads(capsys.readouterr().out)
    if text is not None:
        write_recipe(text)
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
