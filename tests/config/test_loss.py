"""The loss_fn block: NeMo-RL's fields, strictness, and errors that say what to do."""

import json
import math
import pickle
import warnings

import pytest
from pydantic import BaseModel, ValidationError

from nemo_geomask import LossConfig, build_loss
from nemo_geomask.config import parse
from nemo_geomask.errors import ConfigError, GeomaskError

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
BOUNDS = {"truncated_importance_sampling_ratio": 2.0, "truncated_importance_sampling_ratio_min": 0.5}


def config(**settings):
    return parse(LossConfig, settings, prefix="loss_fn")


def test_nemo_rl_fields_keep_name_and_default():
    fields = LossConfig.model_fields
    assert {name: fields[name].default for name in NEMO_RL_DEFAULTS} == NEMO_RL_DEFAULTS


def test_nemo_rl_own_class_has_no_field_that_is_missing_here():
    loss_functions = pytest.importorskip(
        "nemo_rl.algorithms.loss.loss_functions", reason="needs NeMo-RL, which is not on PyPI", exc_type=ImportError
    )
    theirs = loss_functions.ClippedPGLossConfig
    if isinstance(theirs, type) and issubclass(theirs, BaseModel):
        assert {name: field.default for name, field in theirs.model_fields.items()} == {
            name: LossConfig.model_fields[name].default for name in theirs.model_fields
        }
    else:  # v0.6.0: a TypedDict
        assert set(theirs.__annotations__) <= set(LossConfig.model_fields)


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
            ["loss_fn.is_correction_level", "'token', 'sequence' or 'sequence_mean'", "'seq'"],
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
        ({"disable_ppo_ratio": True, "ratio_clip_c": 3.0}, ["disable_ppo_ratio", "ratio_clip_c: null"]),
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
    assert len(str(error.value).splitlines()) == 2


def test_direct_construction_is_as_strict():
    with pytest.raises(ValidationError, match="did you mean 'ratio_clip_min'"):
        LossConfig(ratio_clip_mim=0.1)
    with pytest.raises(ValidationError, match="frozen"):
        LossConfig().ratio_clip_min = 1.0


@pytest.mark.parametrize("wrong", [None, 3, "gspo", ["name"]])
def test_not_a_mapping_is_an_error(wrong):
    with pytest.raises(ConfigError, match="loss_fn must be a mapping"):
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


def test_errors_survive_pickle_and_fit_built_ins():
    error = ConfigError("loss_fn.x: wrong")
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, (GeomaskError, ValueError))
    assert str(copy) == "loss_fn.x: wrong"


def test_valid_settings_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_loss({**CORRECTED, **BOUNDS, "truncated_importance_sampling_type": "tis"})
