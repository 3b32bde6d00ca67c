"""Every rule of ``nemo-geomask check``: a recipe in which it fires, and a near one in which it doesn't."""

import math
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from nemo_geomask.cli import main
from nemo_geomask.config.loss_config import LossConfig
from nemo_geomask.config.masks import MaskRule
from nemo_geomask.errors import ConfigError
from nemo_geomask.hosts.nemo_rl.facts import LOSS_FIELDS, SETTING_READERS, merges_expert_adapters
from nemo_geomask.recipe import read_recipe
from nemo_geomask.recipe import recipe_file as recipes
from nemo_geomask.tools.check import RULES, RecipeFacts, check
from nemo_geomask.tools.check.expectation import clipped_fractions, kept_fraction, median_weight
from tests.tools.check.rule_cases import (
    ASYNC,
    BATCH,
    CASES,
    CLASSES,
    CLEAN,
    CORRECT,
    DPO,
    DYNAMIC,
    GEOMASK,
    GEOMETRIC,
    GYM_FITS,
    KL,
    KL_TYPE,
    LEVEL,
    MASKS,
    MODE,
    MOE,
    NEWEST,
    PACKING,
    PADDING,
    REPLAY,
    SAVED,
    SCORED,
    SCORING,
    SCRIPT,
    SHAPED,
    SINGLE_FITS,
    TEMPERATURE,
    TOP_P,
    TP,
    TRAINED,
    TYPED,
    V2,
    changed,
)
from tests.tools.check.stand_in_source import write_source

PAIRS = [
    pytest.param(rule, *pair, id=f"{rule}-{index}", marks=pytest.mark.slow if index else ())
    for rule, pairs in CASES.items()
    for index, pair in enumerate(pairs)
]


@pytest.fixture
def findings(tmp_path, monkeypatch):
    """Findings, in order, in CLEAN with changes; without a NeMo-RL unless ``reads`` says what one reads."""

    def find(changes, *, ignore=(), header=""):
        changes = dict(changes)
        reads, gpu, kl = changes.pop("reads", None), changes.pop("gpu", None), changes.pop("kl", 1e-3)
        megatron = changes.pop("megatron", "")
        # What a checkout has is cached by its path.
        folder = tmp_path / ("RL" if not (tmp_path / "RL").exists() else f"RL{len(list(tmp_path.iterdir()))}")
        classes, script = changes.pop("classes", ""), changes.pop("script", "")
        root = checkout(folder, reads, classes, megatron) if reads else None
        if script:
            (root / "examples/run_grpo.py").write_text(script)
        monkeypatch.setattr(recipes, "nemo_rl_root", lambda: root)
        if inherited := changes.pop("inherited", None):
            (tmp_path / "parent.yaml").write_text(written(changed(inherited, {})), encoding="utf-8")
            header += "defaults: parent.yaml\n"
        path = tmp_path / "recipe.yaml"
        path.write_text(header + written(changed(changes)), encoding="utf-8")
        recipe = read_recipe(path, leave=("data",))
        return check(RecipeFacts.from_recipe(recipe, mismatch_kl=kl, gpu=gpu), ignore=ignore).findings

    return find


def written(data) -> str:
    """As YAML, by libyaml where there is one: it is written hundreds of times."""
    return yaml.dump(data, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper))


def checkout(root: Path, reads, classes: str = "", megatron: str = "") -> Path:
    """As much of a NeMo-RL checkout as the rules look at.

    ``classes`` are those of its configuration, ``megatron`` is what its Megatron-LM's ``layers.py`` says.
    """
    shutil.rmtree(root, ignore_errors=True)
    layers = root / "3rdparty/Megatron-LM-workspace/Megatron-LM/megatron/core/tensor_parallel/layers.py"
    if megatron:
        layers.parent.mkdir(parents=True)
        layers.write_text(megatron)
    if classes:
        for module, start in (
            ("algorithms/grpo.py", 0),
            ("models/policy/__init__.py", classes.index("class PolicyConfig")),
        ):
            path = root / "nemo_rl" / module
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(classes[start:])
    for key, (module, word) in SETTING_READERS.items():
        path = root / "nemo_rl" / module
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text() if path.exists() else ""
        path.write_text(text + (f"{word}\n" if reads[key] else "nothing\n"))
    write_source(root)
    configs = root / "examples" / "configs"
    configs.mkdir(parents=True)
    known = {PADDING: 1, "policy.router_replay.enabled": False, "policy.generation.bad_words": [], "value_loss_fn": {}}
    (configs / "grpo.yaml").write_text(written({"defaults": "base.yaml", **changed(known)}))
    return root


def test_every_rule_has_a_case_and_a_number_of_its_own():
    ids = [rule.id for rule in RULES]
    assert len(set(ids)) == len(ids)
    assert not set(ids) - set(CASES), "give these rules a pair in CASES: a recipe that fires, one that does not"
    assert not set(CASES) - set(ids), "no rule has these ids"


def test_the_base_of_the_cases_is_clean(findings):
    assert findings({"gpu": "H100", "reads": NEWEST}) == ()


@pytest.mark.parametrize(("rule", "fires", "silent"), PAIRS)
def test_rule_fires_there_and_not_here(rule, fires, silent, findings):
    hits = [finding for finding in findings(fires) if finding.rule.id == rule]
    assert hits, f"{rule} did not fire"
    for hit in hits:
        # The place is the key's own, or that of a section around it.
        assert hit.origin is None or hit.origin.line is not None
        assert len(hit.message) > 30
    assert rule not in [finding.rule.id for finding in findings(silent)]


def test_a_single_controller_that_reads_a_switch_does_not_ignore_it(findings, tmp_path):
    changes = {**SINGLE_FITS, "grpo.overlong_filtering": True, "reads": NEWEST}
    assert "GM225" not in [finding.rule.id for finding in findings(changes)]  # has no single controller
    algorithms = tmp_path / "RL/nemo_rl/algorithms"
    (algorithms / "single_controller_utils").mkdir(parents=True)
    for text, fires in (("", True), ("if config.grpo.overlong_filtering:\n    pass\n", False)):
        (algorithms / "single_controller.py").write_text("class SingleController:\n    pass\n")
        (algorithms / "single_controller_utils" / "setup.py").write_text(text)
        facts_of = RecipeFacts.from_recipe(read_recipe(tmp_path / "recipe.yaml", leave=("data",)))
        assert ("GM225" in [finding.rule.id for finding in check(facts_of).findings]) == fires


def test_a_length_penalty_is_moved_to_where_responses_end(findings):
    changes = {"grpo.reward_shaping.enabled": True, **SHAPED, "policy.generation.max_new_tokens": 512}
    (hit,) = (finding for finding in findings(changes) if finding.rule.id == "GM410")
    assert "begins at 1024 tokens" in hit.message
    assert hit.message.endswith("so it never applies; set 512")
    (hit,) = (
        finding
        for finding in findings({**changes, "grpo.reward_shaping.overlong_buffer_length": 600})
        if finding.rule.id == "GM410"
    )
    assert list(hit.fix.values()) == [512, 128]


@pytest.mark.parametrize(
    ("after", "fires"), [("", True), ("        self.checkpoint_manager.load_checkpoint(model=self.model)\n", False)]
)
def test_a_reference_copied_before_the_checkpoint_is_loaded_is_right(after, fires, findings, tmp_path):
    root = tmp_path / "RL"
    changes = {**V2, **KL, **SAVED, "reads": NEWEST}
    assert "GM209" not in [finding.rule.id for finding in findings(changes)]  # has no such worker
    worker = root / "nemo_rl/models/policy/workers/dtensor_policy_worker_v2.py"
    source = f"class W:\n    def __init__(self):\n        x = setup_reference_model_state(self.model)\n{after}"
    source += "\n    def load(self):\n        self.load_checkpoint()\n"
    worker.parent.mkdir(parents=True)
    worker.write_text(source)
    facts_of = RecipeFacts.from_recipe(read_recipe(tmp_path / "recipe.yaml", leave=("data",)))
    assert ("GM209" in [finding.rule.id for finding in check(facts_of).findings]) == fires


def test_half_precision_logits_are_named_where_they_halve_the_memory(findings):
    def message(changes):
        return next(finding.message for finding in findings(changes) if finding.rule.id == "GM408")

    wide = {TRAINED: 16_000, GEOMASK: "geomask"}
    halved = "policy.megatron_cfg.defer_fp32_logits: true takes 8.21 GB"
    assert halved in message(wide)
    assert "takes 16.4 GB" in message(wide)
    # GM101 says why not.
    assert "defer_fp32_logits" not in message({**wide, TEMPERATURE: 0.7})
    scoring = message({TRAINED: 4000, SCORED: 16_000})
    assert "a scoring microbatch of 16000 rows by 128256 columns has logits of 8.21 GB" in scoring
    assert "logprob_chunk_size" not in scoring


def test_errors_come_first(findings):
    severities = [
        finding.rule.severity for finding in findings({**MOE, REPLAY: True, BATCH: 100, "policy.precision": "float16"})
    ]
    assert severities == ["error", "warning", "note"]


PACKED_DPO = {
    "grpo": None,
    **DPO,
    PACKING: True,
    "reads": NEWEST,
    "classes": """
from nemo_rl.models.policy import PolicyConfig


class MasterConfig(BaseModel, extra="allow"):
    policy: PolicyConfig


class PolicyConfig(TypedDict):
    sequence_packing: Packed | Unpacked


class Packed(TypedDict):
    enabled: Literal[True]
    algorithm: str


class Unpacked(TypedDict):
    enabled: Literal[False]
""",
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # Keys for what DPO refuses altogether, and log-probs for what NeMo-Gym does.
        (PACKED_DPO, ["GM352"]),
        ({**GYM_FITS, MODE: "raw_logprobs", "policy.generation.top_k": 50}, ["GM352"]),
    ],
)
def test_advice_about_what_is_refused_anyway_is_left_out(changes, expected, findings):
    ids = {finding.rule.id for finding in findings(changes)}
    assert sorted(ids & {"GM009", "GM102", "GM352", "GM409"}) == expected


def test_a_word_that_the_recipe_can_not_have_is_not_proposed(findings):
    key = "policy.generation.refit_transport"
    changes = {key: "nccl", "reads": NEWEST, "script": SCRIPT}
    for backend, fix in ((V2, {}), ({}, {key: "nccl_reshard"})):
        (hit,) = (each for each in findings({**changes, **backend}) if each.rule.id == "GM324")
        assert hit.fix == fix
        assert ("set nccl_reshard" in hit.message) == bool(fix)


@pytest.mark.parametrize(
    ("changes", "fix", "words"),
    [
        # The newest setting is given back, or has its usual word; what no value mends has no way out.
        ({DYNAMIC: True, PACKING: False}, {DYNAMIC: False}, "does not start: the stand-in takes no dynamic batches"),
        ({"policy.size": 7}, {"grpo.num_prompts_per_step": 7}, "7 is another size"),
        ({"policy.optimizer": None}, {}, "needs an optimizer"),
        ({"policy.generation.quick": True, TOP_P: 0.9}, {TOP_P: 1.0}, "0.9: NeMo-RL does not start: quick samples"),
        # A setting that the recipe has is named, not the one that it lacks.
        ({"policy.save_format": "x"}, {"policy.save_format": None}, "x, beside policy.saves: null: NeMo-RL does not"),
    ],
)
def test_a_refusal_of_the_source_is_told_in_its_words_with_a_way_out_that_was_tried(changes, fix, words, findings):
    (hit,) = (each for each in findings({**changes, "reads": NEWEST, "script": SCRIPT}) if each.rule.id == "GM360")
    assert hit.fix == fix
    assert words in hit.message
    assert "(examples/run_grpo.py:" in hit.message


def test_of_several_classes_the_words_of_all_are_named(findings):
    (hit,) = (
        each for each in findings({"policy.dtensor_cfg": {"enabled": "maybe"}, **TYPED}) if each.rule.id == "GM008"
    )
    assert "takes true or false at this place" in hit.message


def test_a_bound_of_zero_is_not_copied_to_what_exceeds_it(findings):
    rates = {"policy.megatron_cfg.optimizer": {"lr": 0, "min_lr": 0}}
    warmup = "policy.megatron_cfg.scheduler.lr_warmup_init"
    fixes = {(each.rule.id, each.key): each.fix for each in findings({**rates, warmup: 3e-8})}
    assert fixes["GM341", warmup] == {}
    rates["policy.megatron_cfg.optimizer"]["lr"] = 1e-8
    assert {warmup: 1e-8} in [each.fix for each in findings({**rates, warmup: 3e-8})]


@pytest.mark.parametrize(
    ("key", "value", "meant"),
    [
        ("clip_ratio_high", 0.28, "loss_fn.ratio_clip_max"),
        ("ratio_clip_high", 0.28, "loss_fn.ratio_clip_max"),
        ("eps_clip", 0.1, "loss_fn.ratio_clip_min and loss_fn.ratio_clip_max"),
        ("beta", 0.04, "loss_fn.reference_policy_kl_penalty"),
        ("tis_clip", 3.0, "loss_fn.truncated_importance_sampling_ratio"),
    ],
)
def test_the_key_of_another_system_is_translated(key, value, meant, findings):
    hit = next(each for each in findings({f"loss_fn.{key}": value}) if each.rule.id == "GM001")
    assert hit.message == f"unknown key; what other systems call so is {meant}"


def test_no_message_says_its_fix_twice(findings):
    for pairs in CASES.values():
        for fires, _ in pairs[:1]:
            for finding in findings(fires):
                assert not re.search(r"(set [^;,]+); \1$", finding.message), finding.message


def test_an_invalid_setting_of_the_loss_hides_no_other_rule(findings):
    found = findings({"loss_fn.ratio_clip_mim": 0.1, "loss_fn.zzz": 1, BATCH: 100, MASKS: [GEOMETRIC, GEOMETRIC]})
    assert [(finding.rule.id, finding.key) for finding in found] == [
        ("GM001", "loss_fn.ratio_clip_mim"),
        ("GM001", "loss_fn.zzz"),
        ("GM306", BATCH),
        ("GM202", "loss_fn.masks[1]"),
    ]
    assert "did you mean 'ratio_clip_min'?" in found[0].message


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # What follows from an invalid setting, or from one that was probably meant, is not reported.
        ({**ASYNC, "loss_fn.use_importance_sampling_correction": "maybe"}, {"GM001"}),
        ({"loss_fn.use_importance_sampling_corection": True, **ASYNC, CORRECT: False}, {"GM001"}),
        ({MASKS: [{"preset": "geometirc"}, GEOMETRIC, GEOMETRIC], TP: 4, SCORING: 8}, {"GM001", "GM307"}),
        ({"loss_fn.name": "gsppo", "loss_fn.ratio_clip_max": 1.2, TP: 4, SCORING: 8}, {"GM001", "GM307"}),
        ({"loss_fn": "gspo", BATCH: 100}, {"GM001", "GM306"}),
        ({"loss_fn": None, BATCH: 100}, {"GM001", "GM306"}),
        # A contradiction removes both settings.
        ({LEVEL: "sequence", BATCH: 100}, {"GM001", "GM306"}),
    ],
)
def test_rules_are_checked_without_what_is_invalid(changes, expected, findings):
    assert {finding.rule.id for finding in findings(changes)} == expected


def test_bounds_beyond_reach_on_one_side_are_not_said_to_remove_nothing(findings):
    def message(low, high):
        mask = {"preset": "geometric", "min": low, "max": high}
        return next(finding.message for finding in findings({MASKS: [mask]}) if finding.rule.id == "GM201")

    assert "removes nothing" in message(0.5, 2.0)
    for low, high in ((1.5, 3.0), (0.1, 0.5)):
        assert "keeps only means that no working run has" in message(low, high)


class TestMisplacedKeys:
    """Keys in a section that NeMo-RL's classes declare, but that has no such key."""

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"policy.num_prompts_per_step": 8}, "did you mean grpo.num_prompts_per_step?"),
            ({"policy.masks": []}, "did you mean loss_fn.masks?"),
            ({"policy.learning_speed": 1}, "nothing in its source reads such a setting"),
            ({"policy.read_elsewhere": 1}, None),
            ({"grpo.anything_goes": 1}, None),
        ],
    )
    def test_a_misplaced_key_is_named_with_its_place_if_it_has_one(self, changes, message, findings):
        classes = f"{CLASSES}\nconfig['policy']['read_elsewhere']\n"
        found = [each for each in findings({**changes, "reads": NEWEST, "classes": classes}) if each.rule.id == "GM006"]
        assert [each.key for each in found] == (list(changes) if message else [])
        assert all(message in each.message for each in found)

    def test_of_thousands_the_rest_are_counted(self, findings):
        changes = {f"policy.learning_speed_{i}": 1 for i in range(2000)}
        found = [each for each in findings({**changes, "reads": NEWEST, "classes": CLASSES}) if each.rule.id == "GM006"]
        assert len(found) == 101
        assert sum("the 1,899 unknown ones after it" in each.message for each in found) == 1


def test_a_plugin_that_fails_in_several_lines_is_one_finding_about_the_name(findings, tmp_path, monkeypatch):
    (tmp_path / "noisy_loss.py").write_text(
        "raise ImportError('first\\nloss_fn.ratio_clip_min: greater than 0\\nlast')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    (found,) = findings({"loss_fn.name": "noisy_loss:LOSS", "loss_fn.ratio_clip_min": 0.2})
    assert (found.rule.id, found.key) == ("GM001", "loss_fn.name")
    assert "ImportError: first loss_fn.ratio_clip_min: greater than 0 last" in found.message


def test_masks_are_counted_as_the_recipe_writes_them(findings):
    product = {"preset": "product", "min": 0.5, "max": 2.0}
    (found,) = findings({"loss_fn.name": "dppo", MASKS: [product]})
    assert (found.rule.id, found.key) == ("GM402", "loss_fn.masks[0]")


def test_a_doubt_about_a_clip_bound_is_not_said_again(findings):
    gspo = {"loss_fn.name": "gspo", "loss_fn.token_level_loss": False, "loss_fn.ratio_clip_max": 0.2}
    gspo["loss_fn.ratio_clip_min"] = 3e-4
    assert [found.rule.id for found in findings(gspo)] == ["GM002"]
    assert [found.rule.id for found in findings({**gspo, "loss_fn.ratio_clip_max": 0.3})] == ["GM204"]


def test_problems_between_settings_are_put_at_one_that_was_given(findings):
    (found,) = findings({"loss_fn.name": "gspo", "loss_fn.token_level_loss": True})
    assert found.key == "loss_fn.token_level_loss"
    (found,) = findings({LEVEL: "sequence"})
    assert found.key == LEVEL
    (found,) = findings({"loss_fn.name": "gsppo"})
    assert (found.key, "did you mean 'gspo'?" in found.message) == ("loss_fn.name", True)


class TestPlaceOfAContradiction:
    """At the setting nearest the user: an override, the recipe's own file, its parents, NeMo-RL's files."""

    BASE = "loss_fn:\n  token_level_loss: true\n  sequence_level_importance_ratios: false\n  ratio_clip_min: 0.2\n"

    @pytest.fixture
    def find(self, tmp_path, monkeypatch):
        root = checkout(tmp_path / "RL", NEWEST)
        monkeypatch.setattr(recipes, "nemo_rl_root", lambda: root)
        (root / "examples" / "configs" / "base.yaml").write_text(self.BASE, encoding="utf-8")

        def find(own, *overrides, parent="", rules=("GM001",)):
            (tmp_path / "parent.yaml").write_text(f"defaults: RL/examples/configs/base.yaml\n{parent}")
            path = tmp_path / "recipe.yaml"
            path.write_text(f"defaults: [parent.yaml, RL/examples/configs/base.yaml]\n{own}", encoding="utf-8")
            recipe = read_recipe(path, overrides)
            found = check(RecipeFacts.from_recipe(recipe)).findings
            return [
                (finding.key.removeprefix("loss_fn."), Path(finding.origin.where).name, finding.origin.line)
                for finding in found
                if finding.rule.id in rules
            ]

        return find

    def test_not_at_a_line_of_nemo_rls(self, find):
        own = "loss_fn:\n  name: clipped_pg\n  use_cispo: true\n  loss_normalization: constant\n"
        assert find(own) == [
            ("loss_normalization", "recipe.yaml", 5),
            ("loss_normalization", "recipe.yaml", 5),
            ("use_cispo", "recipe.yaml", 4),
        ]

    def test_what_a_variant_implies_is_at_its_name(self, find):
        assert find("loss_fn:\n  name: gspo\n") == [("name", "recipe.yaml", 3)]
        assert find("", parent="loss_fn: {name: gspo}\n") == [("name", "parent.yaml", 2)]

    def test_an_inherited_value_that_the_variant_gives_otherwise_is_a_warning_at_its_name(self, find):
        own = "loss_fn:\n  name: gspo\n  token_level_loss: false\n"
        assert find(own) == []
        assert find(own, rules=("GM002",)) == [("name", "recipe.yaml", 3)]

    def test_the_own_file_before_a_parent_and_an_override_before_both(self, find):
        own, parent = (
            "loss_fn:\n  is_correction_level: token\n",
            "loss_fn:\n  use_importance_sampling_correction: false\n",
        )
        assert find(own, parent=parent) == [("is_correction_level", "recipe.yaml", 3)]
        assert find(parent, parent=own) == [("use_importance_sampling_correction", "recipe.yaml", 3)]
        override = "loss_fn.use_importance_sampling_correction=false"
        assert find(own, override, parent=parent) == [("use_importance_sampling_correction", override, None)]

    def test_what_nobody_wrote_is_at_what_somebody_did(self, find):
        assert find("loss_fn:\n  loss_normalization_constant: 8.0\n") == [
            ("loss_normalization_constant", "recipe.yaml", 3)
        ]


class TestUnknownKeys:
    def test_an_override_counts_at_whatever_depth(self, tmp_path, monkeypatch):
        root = checkout(tmp_path / "RL", NEWEST)
        monkeypatch.setattr(recipes, "nemo_rl_root", lambda: root)
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(CLEAN), encoding="utf-8")
        for override, key in {
            "++lossfn.name=gspo": "lossfn",
            "++polcy={model_name: x}": "polcy",
            "++policy.generation={temprature: 1.0}": "policy.generation.temprature",
        }.items():
            recipe = read_recipe(path, [override])
            (found,) = check(RecipeFacts(recipe, None)).findings
            assert (found.key, str(found.origin)) == (key, f"override '{override}'")

    def test_what_nemo_rls_own_parents_have_is_known(self, tmp_path, monkeypatch):
        root = checkout(tmp_path / "RL", NEWEST)
        monkeypatch.setattr(recipes, "nemo_rl_root", lambda: root)
        parent = root / "examples" / "configs" / "recipes" / "parent.yaml"
        parent.parent.mkdir()
        parent.write_text("rare: {x: 1}\npolicy: {train_micro_batch_siz: 1}\n", encoding="utf-8")
        path = tmp_path / "recipe.yaml"
        own = "rare: {x: 2}\npolicy: {train_micro_batch_siz: 2, megatron_cfg: {enabled: true}}\n"
        path.write_text(f"defaults: {parent}\n{own}", encoding="utf-8")
        assert check(RecipeFacts(read_recipe(path), None)).findings == ()
        path.write_text(own, encoding="utf-8")
        assert [found.rule.id for found in check(RecipeFacts(read_recipe(path), None)).findings] == ["GM005", "GM006"]

    def test_the_examples_are_only_read_for_a_key_that_is_declared_nowhere(self, tmp_path, monkeypatch):
        root = checkout(tmp_path / "RL", NEWEST, CLASSES)
        monkeypatch.setattr(recipes, "nemo_rl_root", lambda: root)
        broken = root / "examples" / "configs" / "broken.yaml"
        broken.write_text("a: [", encoding="utf-8")
        path = tmp_path / "recipe.yaml"
        own = "grpo: {}\nloss_fn: {name: gspo}\npolicy: {train_micro_batch_size: 1, precision: a, names: [a, b]"
        path.write_text(f"{own}}}\n", encoding="utf-8")
        check(RecipeFacts(read_recipe(path), None))
        path.write_text(f"{own}, other: 1}}\n", encoding="utf-8")
        with pytest.raises(ConfigError, match=r"broken.yaml: not valid YAML"):
            check(RecipeFacts(read_recipe(path), None))


def test_ignored_on_request_or_by_comment(findings):
    assert findings(MOE)
    assert not findings(MOE, ignore=["gm108"])
    assert not findings(MOE, header="# nemo-geomask: ignore GM401, GM108 (as planned)\n")
    assert not findings(MOE, header="# nemo_geomask: ignore GM108\n")
    assert not findings(MOE, header="# nemo-geomask ignore GM108\n")
    # Prose.
    assert findings(MOE, header="# nemo_geomask's GM108\n# nemo-geomask ignores GM108\n")
    assert not findings(
        {**MOE, TP: 2, SCORING: 8}, header="# nemo-geomask: ignore GM108\n# nemo-geomask: ignore GM404\n"
    )


@pytest.mark.parametrize(
    ("header", "ignore", "message"),
    [
        ("", ["GM999"], "--ignore: there is no rule GM999; see nemo-geomask check --list-rules"),
        ("", ["GM10"], "there is no rule GM10; see nemo-geomask check --list-rules"),
        ("", ["GM-108"], "there is no rule GM-108; did you mean GM108"),
        ("", ["108"], "did you mean GM108"),
        ("", ["GM001"], "GM001 .* can't be ignored"),
        ("\n# nemo-geomask: ignore GM998\n", [], r"recipe.yaml:2: .*there is no rule GM998"),
        ("# nemo-geomask: ignore everything\n", [], "there is no rule everything"),
        ("# nemo-geomask: ignore\n", [], "write '# nemo-geomask: ignore GM101, GM102'"),
        ("# nemo_geomask: ignore\n", [], "write '# nemo-geomask: ignore GM101, GM102'"),
        ("# nemo-geomask: skip GM101\n", [], "write '# nemo-geomask: ignore GM101, GM102'"),
    ],
)
def test_an_ignore_that_means_nothing_is_an_error(header, ignore, message, findings):
    with pytest.raises(ConfigError, match=message):
        findings({}, header=header, ignore=ignore)


def test_values_of_a_wrong_type_stop_no_rule(findings):
    wrong = {TEMPERATURE: "hot", TOP_P: [1], BATCH: "many", TP: None, "policy.generation.vllm_cfg": "none", "grpo": 3}
    assert [finding.rule.id for finding in findings(wrong)] == []


def test_nemo_rls_own_fields_are_the_ones_the_schema_takes_from_it():
    own = {
        name
        for name, field in LossConfig.model_fields.items()
        if str(field.json_schema_extra["source"]).split(";")[0] == "NeMo-RL"
    }
    assert own == LOSS_FIELDS


@pytest.mark.slow
class TestExpectation:
    """The closed forms against simulated sequences."""

    @pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean", "sequence_max"])
    @pytest.mark.parametrize("statistic", ["ratio", "k2", "k3"])
    def test_every_rule_on_log_ratios(self, level, statistic):
        kl, tokens, rows = 4e-3, 256, 6000
        draw = torch.Generator().manual_seed(2)
        ratios = -kl + math.sqrt(2 * kl) * torch.randn(rows, tokens, generator=draw, dtype=torch.float64)
        values = {"ratio": ratios, "k2": ratios.square() / 2, "k3": ratios.expm1() - ratios}[statistic]
        pooled = {"token": values, "sequence": values.sum(-1), "sequence_mean": values.mean(-1)}.get(level)
        if pooled is None:
            # All tokens inside.
            low = torch.quantile(values.amin(-1), 0.4) if statistic == "ratio" else torch.tensor(-math.inf)
            high = torch.quantile(values.amax(-1), 0.7)
            kept = ((values >= low) & (values <= high)).all(-1).double().mean()
        else:
            low, high = (torch.quantile(pooled.flatten()[:100_000], share) for share in (0.1, 0.7))
            kept = ((pooled >= low) & (pooled <= high)).double().mean()
        rule = MaskRule("m", "total", level, statistic, float(low), float(high), "always")
        assert kept_fraction(rule, kl, tokens) == pytest.approx(float(kept), abs=0.03)

    def test_what_depends_on_more_is_not_judged(self):
        def share(log_ratio="mismatch", level="token", statistic="ratio", when="always"):
            return kept_fraction(MaskRule("m", log_ratio, level, statistic, -1.0, 1.0, when), 1e-3, 100)

        assert share() == pytest.approx(1.0)
        for other in (
            {"log_ratio": "policy"},
            {"statistic": "prob_diff"},
            {"when": "pushing"},
            {"level": "prefix_sum"},
        ):
            assert share(**other) is None
        (m2po,) = LossConfig(masks=[{"preset": "m2po", "tau": 0.04}]).mask_rules
        assert kept_fraction(m2po, 1e-3, 100) is None

    @pytest.mark.parametrize(("kl", "tokens"), [(1e-3, 500), (1e-3, 4000), (2e-2, 100)])
    def test_the_median_weight_is_that_of_simulated_sequences(self, kl, tokens):
        draw = torch.Generator().manual_seed(0)
        ratios = -kl + math.sqrt(2 * kl) * torch.randn(4000, tokens, generator=draw, dtype=torch.float64)
        assert float(ratios.exp().mean()) == pytest.approx(1, abs=2e-3)
        assert float(ratios.expm1().sub(ratios).mean()) == pytest.approx(kl, rel=0.02)
        weight = ratios.sum(-1).exp()
        assert median_weight(kl, tokens) == pytest.approx(float(weight.median()), rel=0.1)

    @pytest.mark.parametrize(("kl", "tokens"), [(1e-3, 1000), (1e-3, 200), (1e-6, 1000)])
    def test_clipped_fractions_are_those_of_simulated_sequences(self, kl, tokens):
        draw = torch.Generator().manual_seed(3)
        means = (-kl + math.sqrt(2 * kl) * torch.randn(4000, tokens, generator=draw, dtype=torch.float64)).mean(-1)
        config = LossConfig(name="gspo", ratio_clip_min=3e-4, ratio_clip_max=4e-4)
        found = [float((means.exp() < 1 - 3e-4).double().mean()), float((means.exp() > 1 + 4e-4).double().mean())]
        assert clipped_fractions(config, kl, tokens) == pytest.approx(found, abs=0.02)


def test_a_nemo_rl_that_merges_adapters_of_experts_is_recognised(tmp_path):
    worker = tmp_path / "nemo_rl/models/policy/workers/dtensor_policy_worker_v2.py"
    worker.parent.mkdir(parents=True)
    worker.write_text("if not isinstance(module, LinearLoRA):\n    pass\n", encoding="utf-8")
    assert not merges_expert_adapters(None)
    assert not merges_expert_adapters(tmp_path)
    fixed = tmp_path / "fixed" / worker.relative_to(tmp_path)
    fixed.parent.mkdir(parents=True)
    fixed.write_text("gate_and_up = module.lora_gate_and_up_A\n", encoding="utf-8")
    assert merges_expert_adapters(tmp_path / "fixed")


@pytest.mark.parametrize(("estimator", "fires"), [("k1", True), ("k2", False), ("k3", False)])
@pytest.mark.parametrize("name", [None, "clipped_pg"])
def test_without_a_score_function_the_kl_by_k1_has_no_gradient(findings, tmp_path, monkeypatch, estimator, fires, name):
    """In NeMo-RL v0.6.0; there k2, of which the rule warns elsewhere, has the KL's gradient."""
    utils = tmp_path / "old" / "nemo_rl" / "algorithms" / "utils.py"
    utils.parent.mkdir(parents=True)
    utils.write_text("def calculate_kl(): ...\n", encoding="utf-8")
    data = changed({**KL, KL_TYPE: estimator, "loss_fn.name": name, "loss_fn.ratio_clip_c": None})
    path = tmp_path / "recipe.yaml"
    path.write_text(written(data), encoding="utf-8")
    monkeypatch.setattr(recipes, "nemo_rl_root", lambda: tmp_path / "old")
    found = check(RecipeFacts.from_recipe(read_recipe(path, leave=("data",)))).findings
    messages = [finding.message for finding in found if finding.rule.id == "GM207"]
    if name is None:
        assert bool(messages) == fires
        assert all("differentiates curr - ref without the score function" in message for message in messages)
    else:
        assert bool(messages) == (estimator == "k2")


def test_rules_for_other_algorithms_are_said_to_be_unchecked(tmp_path, capsys):
    path = tmp_path / "recipe.yaml"
    path.write_text(written({**changed({BATCH: 0}, {"dpo": {}, "policy": {}})}), encoding="utf-8")
    assert main(["check", str(path)]) == 2
    out = capsys.readouterr().out
    assert "GM339 policy.train_global_batch_size" in out
    assert re.search(r"not checked: \d+ of \d+ rules, which are about GRPO and PPO; this recipe trains DPO", out)
