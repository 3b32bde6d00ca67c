"""The loss_fn block: NeMo-RL's fields, strictness, and errors that say what to do."""

import json
import math
import pickle
import subprocess
import sys
import warnings
from typing import ClassVar

import pytest
import torch
import yaml
from pydantic import BaseModel, ValidationError

from nemo_geomask import LossConfig, build_loss
from nemo_geomask.config import parse
from nemo_geomask.errors import ConfigError
from tests.helpers import batches

# Name and default of every field of NeMo-RL's ClippedPGLossConfig at main of August 2026, which has all of
# v0.7.0's and v0.6.0's.
NEMO_RL_DEFAULTS = {
    "disable_ppo_ratio": False,
    "token_level_loss": True,
    "sequence_level_importance_ratios": False,
    "ratio_clip_min": 0.2,
    "ratio_clip_max": 0.2,
    "ratio_clip_c": None,
    "reference_policy_kl_penalty": 0.01,
    "reference_policy_kl_type": "k3",
    "kl_input_clamp_value": 20.0,
    "kl_output_clamp_value": 10.0,
    "use_kl_in_reward": False,
    "use_importance_sampling_correction": False,
    "truncated_importance_sampling_type": None,
    "truncated_importance_sampling_ratio": None,
    "truncated_importance_sampling_ratio_min": None,
    "use_on_policy_kl_approximation": False,
    "force_on_policy_ratio": False,
    "use_cispo": False,
    "positive_example_nll_weight": 0.0,
}

V060_BASE_RECIPE = {
    "reference_policy_kl_penalty": 0.01,
    "reference_policy_kl_type": "k3",
    "kl_input_clamp_value": 20.0,
    "kl_output_clamp_value": 10.0,
    "ratio_clip_min": 0.2,
    "ratio_clip_max": 0.2,
    "ratio_clip_c": None,
    "use_on_policy_kl_approximation": False,
    "use_importance_sampling_correction": False,
    "truncated_importance_sampling_ratio": None,
    "truncated_importance_sampling_ratio_min": None,
    "truncated_importance_sampling_type": "tis",
    "sequence_level_importance_ratios": False,
    "token_level_loss": True,
    "force_on_policy_ratio": False,
    "use_kl_in_reward": False,
}

CORRECTED = {"use_importance_sampling_correction": True}
TOKEN = {"log_ratio": "mismatch", "level": "token"}
BOUNDS = {"truncated_importance_sampling_ratio": 2.0, "truncated_importance_sampling_ratio_min": 0.5}


def config(**settings):
    return parse(LossConfig, settings, prefix="loss_fn")


def test_nemo_rl_fields_keep_name_and_default():
    fields = LossConfig.model_fields
    assert {name: fields[name].default for name in NEMO_RL_DEFAULTS} == NEMO_RL_DEFAULTS


def test_v060_base_recipe_is_accepted_and_says_that_its_truncation_does_nothing():
    with pytest.warns(UserWarning, match="truncated_importance_sampling_ratio is null"):
        built = build_loss(V060_BASE_RECIPE)
    assert built.config.truncation is None


def test_pydantic_config_counts_only_what_was_given():
    class Theirs(BaseModel, extra="allow"):
        token_level_loss: bool = True
        ratio_clip_min: float = 0.2

    loss = build_loss(Theirs(name="gspo", ratio_clip_max=0.3))
    assert loss.loss_type.value == "sequence_level"
    assert (loss.config.ratio_clip_min, loss.config.ratio_clip_max) == (3e-4, 0.3)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"ratio_clip_mim": 0.1}, ["loss_fn.ratio_clip_mim", "did you mean 'ratio_clip_min'?"]),
        ({"zzz": 1}, ["loss_fn.zzz", "known keys:", "ratio_clip_min"]),
        ({"masks": [{"preset": "geometric", "mn": 1.0, "max": 2.0}]}, ["loss_fn.masks[0].mn", "did you mean 'min'?"]),
        ({"masks": [{"preset": "geometrc", "max": 2.0}]}, ["[0].preset", "did you mean 'geometric'?"]),
        ({"name": "sapo", "options": {"tau_poss": 1.0}}, ["loss_fn.options.tau_poss", "did you mean 'tau_pos'?"]),
        ({"options": {"tau_pos": 1.0}}, ["loss_fn.options.tau_pos", "unknown key"]),
        (
            {"is_correction_level": "seq"},
            ["loss_fn.is_correction_level", "'sequence_mean' or 'masks_only'", "'seq'"],
        ),
        ({"ratio_clip_min": -0.1}, ["loss_fn.ratio_clip_min", "greater than or equal to 0", "-0.1"]),
        ({"ratio_clip_c": 1.0}, ["loss_fn.ratio_clip_c", "greater than 1"]),
        ({"ratio_clip_min": math.nan}, ["loss_fn.ratio_clip_min", "finite"]),
        ({"masks": [{"preset": "opsm", "delta": -1.0}]}, ["loss_fn.masks[0].delta", "greater than or equal to 0"]),
        ({"masks": [{"preset": "geometric"}]}, ["loss_fn.masks[0]", "removes nothing"]),
        (
            {"masks": [{"preset": "icepop", "min": 5.0, "max": 0.5}]},
            ["loss_fn.masks[0]", "'min' (5.0) exceeds 'max' (0.5)"],
        ),
        ({"masks": [{"preset": "icepop", "max": 2.0, "label": "w_max"}]}, ["loss_fn.masks[0]", "'_max'"]),
        ({"masks": [{"log_ratio": "mismatch", "level": "sequence"}]}, ["loss_fn.masks[0]", "removes nothing"]),
        ({"masks": [{**TOKEN, "min": -0.5}]}, ["loss_fn.masks[0]", "'min' (-0.5) must be at least 0, as ratio is"]),
        ({"masks": [{**TOKEN, "statistic": "prob_diff"}]}, ["loss_fn.masks[0]", "removes nothing"]),
        ({"masks": [{**TOKEN, "statistic": "prob_diff", "max": 1.5}]}, ["loss_fn.masks[0]", "1.5", "removes nothing"]),
        (
            {"masks": [{**TOKEN, "statistic": "binary_kl", "min": 0.1}]},
            ["loss_fn.masks[0]", "'min' (0.1) must be below 0"],
        ),
        (
            {"masks": [{**TOKEN, "level": "sequence_mean", "statistic": "binary_kl", "max": 0.1}]},
            ["loss_fn.masks[0]", "whose signs cancel; choose token, sequence_max, prefix_min or prefix_max"],
        ),
        ({"masks": [{"preset": "dppo_tv", "delta": 2.0}]}, ["loss_fn.masks[0].delta", "less than 1"]),
        (
            {"masks": [{**TOKEN, "statistic": "k3", "max": 0.1, "when": "pushing"}]},
            ["loss_fn.masks[0]", "when: pushing needs a direction, which k3 does not have"],
        ),
        ({"masks": [{"preset": "dppo", "delta": 0.2}]}, ["loss_fn.masks[0].preset", "did you mean 'dppo_"]),
    ],
)
def test_bad_value_names_the_key_and_the_way_out(settings, expected):
    with pytest.raises(ConfigError) as error:
        build_loss(settings)
    for part in expected:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        ({"sequence_level_importance_ratios": True}, ["sequence_level_importance_ratios", "token_level_loss: false"]),
        ({"token_level_loss": True, "loss_normalization": "sequences"}, ["token_level_loss", "loss_normalization"]),
        ({"token_level_loss": False, "loss_normalization": "tokens"}, ["token_level_loss", "loss_normalization"]),
        ({"loss_normalization": "constant"}, ["loss_normalization: constant", "loss_normalization_constant"]),
        ({"loss_normalization_constant": 9.0}, ["loss_normalization: constant", "loss_normalization_constant"]),
        ({"use_cispo": True, "disable_ppo_ratio": True}, ["use_cispo", "disable_ppo_ratio"]),
        ({"use_cispo": True, "force_on_policy_ratio": True}, ["use_cispo", "force_on_policy_ratio"]),
        (
            {"use_cispo": True, "sequence_level_importance_ratios": True, "token_level_loss": False},
            ["use_cispo", "sequence_level_importance_ratios"],
        ),
        ({"use_cispo": True, "ratio_clip_c": 3.0}, ["use_cispo", "ratio_clip_c: null"]),
        ({"use_cispo": True, "token_level_loss": False}, ["use_cispo", "token_level_loss: true"]),
        (
            {"truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 2.0},
            ["truncated_importance_sampling_type", "use_importance_sampling_correction"],
        ),
        (
            {**CORRECTED, "truncated_importance_sampling_type": "icepop"},
            ["truncated_importance_sampling_type: icepop", "needs truncated_importance_sampling_ratio;"],
        ),
        (
            {**CORRECTED, "truncated_importance_sampling_type": "icepop", "truncated_importance_sampling_ratio": 2.0},
            ["truncated_importance_sampling_type: icepop", "truncated_importance_sampling_ratio_min"],
        ),
        ({**CORRECTED, "truncated_importance_sampling_ratio": 2.0}, ["truncated_importance_sampling_type"]),
        (
            {
                **CORRECTED,
                "truncated_importance_sampling_type": "tis",
                "truncated_importance_sampling_ratio": 1.0,
                "truncated_importance_sampling_ratio_min": 2.0,
            },
            ["truncated_importance_sampling_ratio_min", "exceeds truncated_importance_sampling_ratio"],
        ),
        (
            {
                **CORRECTED,
                **BOUNDS,
                "truncated_importance_sampling_type": "seq-mask-tis",
                "is_correction_level": "sequence",
            },
            ["seq-mask-tis", "is_correction_level: token"],
        ),
        ({"is_correction_level": "sequence"}, ["is_correction_level", "use_importance_sampling_correction"]),
        (
            {"reference_policy_kl_gradient": "k2", "use_kl_in_reward": True},
            ["reference_policy_kl_gradient", "use_kl_in_reward"],
        ),
        (
            {"reference_policy_kl_gradient": "k2", "reference_policy_kl_penalty": 0.0},
            ["reference_policy_kl_gradient", "reference_policy_kl_penalty"],
        ),
        (
            {"positive_example_nll_normalization": "loss"},
            ["positive_example_nll_normalization", "positive_example_nll_weight"],
        ),
        ({"name": "gspo", "use_cispo": True}, ["use_cispo", "name: gspo"]),
        ({"name": "gspo", "token_level_loss": True}, ["token_level_loss: false", "name: gspo"]),
        ({"name": "gmpo", "ratio_clip_c": 3.0}, ["ratio_clip_c", "name: gmpo"]),
        ({"name": "sapo", "disable_ppo_ratio": True}, ["disable_ppo_ratio", "name: sapo"]),
        ({"name": "cispo", "force_on_policy_ratio": True}, ["force_on_policy_ratio", "name: cispo"]),
    ],
)
def test_settings_at_odds_name_both_keys(settings, keys):
    with pytest.raises(ConfigError) as error:
        build_loss(settings)
    for key in keys:
        assert key in str(error.value)


def test_seq_mask_tis_needs_token_weights_not_a_token_ratio():
    loss = build_loss(
        {
            "sequence_level_importance_ratios": True,
            "token_level_loss": False,
            **CORRECTED,
            **BOUNDS,
            "truncated_importance_sampling_type": "seq-mask-tis",
            "is_correction_level": "token",
        }
    )
    assert loss.config.correction_level == "token"


def test_every_problem_is_listed_at_once():
    with pytest.raises(ConfigError) as error:
        config(ratio_clip_mim=0.1, ratio_clip_maxx=0.1)
    assert [problem.keys for problem in error.value.problems] == [
        ("loss_fn.ratio_clip_mim",),
        ("loss_fn.ratio_clip_maxx",),
    ]
    assert str(error.value) == "\n".join(map(str, error.value.problems))


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("loss_mode", "PR 4069 has it; here write name, or for dppo_binary_tv masks: [{preset: dppo_tv"),
        ("sapo_enabled", "PR 2464 has it; here write name: sapo"),
        ("actor_loss_type", "PR 2455 has it; here write name: sapo, or for ppo_clip name: clipped_pg"),
        ("sapo_tau_neg", "here write options: {tau_neg: …}"),
        ("metrics_level", "here write metrics: full, or for minimal metrics: nemo_rl"),
        ("enable_torch_compile", "here write compile"),
        ("seq_logprob_error_in_loss", "PR 4171 has it; here write the threshold as max of a mask, {log_ratio: total"),
    ],
)
def test_a_setting_of_an_open_pull_request_is_answered_with_ours(key, answer):
    assert answer in message(**{key: 1})


def test_direct_construction_is_as_strict():
    with pytest.raises(
        ConfigError, match=r"^loss_fn.ratio_clip_mim: unknown key; did you mean 'ratio_clip_min'\?"
    ) as error:
        LossConfig(ratio_clip_mim=0.1, token_level_loss=False, loss_normalization="tokens")
    assert isinstance(error.value, ValueError)
    with pytest.raises(ConfigError) as error:
        LossConfig(token_level_loss=False, loss_normalization="tokens")
    assert error.value.problems[0].keys == ("loss_fn.token_level_loss", "loss_fn.loss_normalization")
    with pytest.raises(ValidationError, match="did you mean 'ratio_clip_min'"):
        LossConfig.model_validate({"ratio_clip_mim": 0.1})
    with pytest.raises(ValidationError, match="frozen"):
        LossConfig().ratio_clip_min = 1.0


def test_pydantics_own_entry_keeps_each_problem_at_its_key():
    with pytest.raises(ConfigError) as error:
        config(ratio_clip_min=-1.0, nonfinite="drop", masks=[{"preset": "opsm"}])
    assert [problem.keys for problem in error.value.problems] == [
        ("loss_fn.ratio_clip_min",),
        ("loss_fn.masks[0].delta",),
        ("loss_fn.nonfinite",),
    ]


@pytest.mark.parametrize("wrong", [None, 3, "gspo", ["name"]])
def test_not_a_mapping_is_an_error(wrong):
    with pytest.raises(ConfigError, match="^loss_fn: must be a mapping"):
        build_loss(wrong)


@pytest.mark.parametrize(
    ("sequence_ratio", "level", "derived"),
    [
        (False, None, "token"),
        (True, None, "sequence"),
        (True, "token", "token"),
        (False, "sequence_mean", "sequence_mean"),
    ],
)
def test_correction_level_is_derived_only_when_not_given(sequence_ratio, level, derived):
    made = config(
        sequence_level_importance_ratios=sequence_ratio, token_level_loss=False, is_correction_level=level, **CORRECTED
    )
    assert made.correction_level == derived


def test_gspo_weights_by_sequence_even_where_a_base_recipe_spells_out_the_false_default():
    inherited = {**NEMO_RL_DEFAULTS, "token_level_loss": False, "name": "gspo"}
    with pytest.warns(UserWarning, match="ratio_clip_min: 0.2 is NeMo-RL.s default, but name: gspo prescribes 0.0003"):
        assert build_loss(inherited).config.correction_level == "sequence"


@pytest.mark.parametrize(
    ("name", "clip"),
    [
        ("clipped_pg", (0.2, 0.2)),
        ("gspo", (3e-4, 4e-4)),
        ("gspo_token", (3e-4, 4e-4)),
        ("gmpo", (1 - math.exp(-0.4), math.exp(0.4) - 1)),
        ("cispo", (1.0, 4.0)),
    ],
)
def test_variant_defaults_are_the_papers_and_yield_to_the_recipe(name, clip):
    loss = build_loss({"name": name})
    assert (loss.config.ratio_clip_min, loss.config.ratio_clip_max) == pytest.approx(clip)
    assert build_loss({"name": name, "ratio_clip_max": 0.7}).config.ratio_clip_max == 0.7


def test_repeated_masks_get_labels_of_their_own():
    masks = [
        {"preset": "geometric", "max": 2.0},
        {"preset": "geometric", "max": 3.0},
        {"preset": "veto", "max": 9.0, "label": "worst"},
    ]
    assert [rule.label for rule in config(masks=masks).mask_rules] == ["geometric", "geometric_2", "worst"]


def test_config_survives_pickle_and_json():
    made = config(
        name="gspo", masks=[{"preset": "opsm", "delta": 0.5}, {"log_ratio": "policy", "level": "token", "max": 2.0}]
    )
    assert pickle.loads(pickle.dumps(made)) == made
    assert LossConfig(**json.loads(made.model_dump_json(exclude_unset=True))) == made


def test_valid_settings_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_loss({**CORRECTED, **BOUNDS, "truncated_importance_sampling_type": "tis"})


def message(**settings):
    """What is said of the one thing that is wrong, after its key."""
    with pytest.raises(ConfigError) as error:
        LossConfig(**settings)
    (problem,) = error.value.problems
    return problem.message


class TestNearestValue:
    @pytest.mark.parametrize(
        ("settings", "guess"),
        [
            ({"is_correction_level": "seq_mean"}, "sequence_mean"),
            ({"is_correction_level": "Sequence-Mean"}, "sequence_mean"),
            ({"is_correction_level": "TOKEN"}, "token"),
            ({"truncated_importance_sampling_type": "seq_mask_tis"}, "seq-mask-tis"),
            ({"truncated_importance_sampling_type": "IcePop"}, "icepop"),
            ({"reference_policy_kl_type": "K3"}, "k3"),
            ({"reference_policy_kl_gradient": "K2"}, "k2"),
            ({"loss_normalization": "token"}, "tokens"),
            ({"denominator": "keep"}, "kept"),
            ({"nonfinite": "drop-seq"}, "drop_sequence"),
            ({"positive_example_nll_normalization": "micro_batch"}, "microbatch"),
            ({"logprob_backend": "nemo-rl"}, "nemo_rl"),
            ({"batch_veto": {"max": 0.1, "estimator": "K1"}}, "k1"),
            ({"masks": [{"preset": "Geometric", "max": 2.0}]}, "geometric"),
            (
                {"masks": [{"preset": "trust-region", "statistic": "k3", "level": "sequence_max", "max": 1}]},
                "trust_region",
            ),
            ({"masks": [{"preset": "trust_region", "statistic": "K3", "level": "sequence_max", "max": 1}]}, "k3"),
            ({"masks": [{"preset": "opsm", "delta": 0.1, "log_ratio": "Policy"}]}, "policy"),
            ({"masks": [{"log_ratio": "mismatch", "level": "seq_max", "max": 2.0}]}, "sequence_max"),
            ({"masks": [{"log_ratio": "mismach", "level": "token", "max": 2.0}]}, "mismatch"),
            (
                {"masks": [{"log_ratio": "policy", "level": "token", "max": 2.0, "when": "negative"}]},
                "negative_advantage",
            ),
        ],
    )
    def test_is_named_once(self, settings, guess):
        said = message(**settings)
        assert f"; did you mean '{guess}'?" in said
        assert said.count("did you mean") == 1

    def test_of_nothing_alike_none(self):
        assert "did you mean" not in message(is_correction_level="everything")

    @pytest.mark.parametrize("number", [0.1, 1])
    def test_a_bare_number_for_a_mapping_is_told_its_key(self, number):
        assert message(batch_veto=number) == f"must be a mapping, or null; write {{max: {number}}} (found {number})"

    def test_what_no_key_can_be_told_of_is_told_none(self):
        assert message(batch_veto=True) == "must be a mapping, or null (found true)"
        assert message(batch_veto="k3") == "must be a mapping, or null (found 'k3')"

    def test_a_bare_preset_for_a_mask_is_told_its_form(self):
        assert message(masks=["icepop"]) == "must be a mapping, such as {preset: icepop, …} (found 'icepop')"


class TestLookAlikes:
    """Python takes a truth value for a number and pydantic a text for either; a recipe means something else."""

    @pytest.mark.parametrize("wrong", [True, False])
    @pytest.mark.parametrize("key", ["ratio_clip_min", "ratio_clip_c", "reference_policy_kl_penalty"])
    def test_a_truth_value_is_no_number(self, key, wrong):
        assert message(**{key: wrong}).startswith("must be a number")

    def test_nor_is_it_in_masks_vetoes_and_options(self):
        assert message(masks=[{"preset": "geometric", "max": True}]).startswith("must be a number, or null")
        assert message(batch_veto={"max": True}) == "must be a number (found true)"
        assert message(batch_veto={"max": 0.1, "max_in_a_row": True}) == "must be a number (found true)"
        with pytest.raises(ConfigError, match=r"^loss_fn.options.tau_pos: must be a number \(found true\)$"):
            build_loss({"name": "sapo", "options": {"tau_pos": True}})

    @pytest.mark.parametrize("wrong", [0, 1, 1.0, "true", "yes", "on", ""])
    def test_a_number_or_a_text_is_no_truth_value(self, wrong):
        assert message(token_level_loss=wrong).startswith("must be true or false (found ")

    @pytest.mark.parametrize(
        ("text", "hint"),
        [
            ("3e-4", "YAML 1.1 reads 3e-4 as text, write 3.0e-4"),
            ("1.5e5", "YAML 1.1 reads 1.5e5 as text, write 1.5e+5"),
            ("0.2", "'0.2' is text, write it without quotes"),
        ],
    )
    def test_a_text_is_told_how_to_be_a_number(self, text, hint):
        assert message(ratio_clip_min=text) == f"must be a number; {hint} (found '{text}')"

    @pytest.mark.parametrize("text", ["3e-4", "1.5e5"])
    def test_the_way_out_is_a_number_to_yaml(self, text):
        written = message(ratio_clip_min=text).rpartition("write ")[2].partition(" ")[0]
        assert yaml.safe_load(text) == text
        assert yaml.safe_load(written) == float(text)

    def test_any_other_text_is_just_no_number(self):
        assert message(ratio_clip_min="small") == "must be a number (found 'small')"

    @pytest.mark.parametrize("whole", [0, 1])
    def test_a_whole_number_is_a_number(self, whole):
        assert LossConfig(ratio_clip_min=whole).ratio_clip_min == float(whole)


class TestFloat32:
    @pytest.mark.parametrize("wrong", [1e39, 10**39, 10**400, 3.4028236e38])
    def test_nothing_beyond_its_largest(self, wrong):
        assert message(ratio_clip_max=wrong).startswith("must fit float32, whose largest number is 3.4e+38")

    @pytest.mark.parametrize("wrong", [1e-40, 1.1e-38])
    def test_nothing_below_its_smallest_normal(self, wrong):
        assert message(ratio_clip_min=wrong).startswith("must fit float32, whose smallest normal number is 1.2e-38")
        assert message(masks=[{"preset": "icepop", "min": wrong}]).startswith("must fit float32")

    def test_its_ends_fit(self):
        ends = torch.finfo(torch.float32)
        for fits in (0.0, ends.tiny, ends.max):
            assert LossConfig(ratio_clip_max=fits).ratio_clip_max == fits

    @pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
    def test_neither_nan_nor_infinity(self, wrong):
        assert "finite number" in message(ratio_clip_max=wrong)
        assert "finite number, or null" in message(masks=[{"preset": "icepop", "max": wrong}])


class TestOmegaConf:
    SETTINGS: ClassVar = {
        "name": "sapo",
        "options": {"tau_pos": 2.0},
        "ratio_clip_max": "${clip}",
        "clip": 0.3,
        "batch_veto": {"max": 0.5},
        "masks": [{"preset": "geometric", "max": 1.02}],
    }

    @pytest.fixture
    def block(self):
        omegaconf = pytest.importorskip("omegaconf", reason="omegaconf is not installed")
        config = omegaconf.OmegaConf.create(self.SETTINGS)
        resolved = omegaconf.OmegaConf.masked_copy(config, [key for key in self.SETTINGS if key != "clip"])
        resolved.ratio_clip_max = config.ratio_clip_max
        return resolved

    def test_a_block_is_read_whole(self, block):
        loss = build_loss(block)
        assert (
            loss.config
            == build_loss({**{k: v for k, v in self.SETTINGS.items() if k != "clip"}, "ratio_clip_max": 0.3}).config
        )
        assert loss.options.tau_pos == 2.0
        assert LossConfig.model_validate(block) == LossConfig(**block)

    def test_in_parts_and_nothing_of_it_stays(self, block):
        made = LossConfig(masks=block.masks, options=block.options, batch_veto=block.batch_veto)
        assert type(made.options) is dict
        assert [rule.label for rule in made.mask_rules] == ["geometric"]
        assert made.batch_veto.max == 0.5
        assert b"omegaconf" not in pickle.dumps(made)

    def test_it_is_not_imported_for_that(self):
        code = "import sys, nemo_geomask; nemo_geomask.LossConfig(masks=[]); print('omegaconf' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_a_dual_clip_without_a_ratio_has_no_effect_as_in_nemo_rl():
    batch = batches.rollouts(3)
    expected = batches.evaluate({"disable_ppo_ratio": True}, batch)
    with pytest.warns(UserWarning, match="ratio_clip_c: 3 has no effect.*set ratio_clip_c: null"):
        found = batches.evaluate({"disable_ppo_ratio": True, "ratio_clip_c": 3.0}, batch)
    assert torch.equal(found.loss, expected.loss)
