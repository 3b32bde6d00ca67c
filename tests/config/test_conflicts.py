"""Settings at odds: one problem a contradiction, with the settings it is between, and nothing that only follows."""

import math

import pytest

from nemo_geomask import LossConfig, build_loss
from nemo_geomask.config import parse
from nemo_geomask.config.conflicts import find_conflicts
from nemo_geomask.config.loss_settings import LossSettings
from nemo_geomask.errors import ConfigError, PluginError

TYPE = "truncated_importance_sampling_type"
HIGH = "truncated_importance_sampling_ratio"
LOW = "truncated_importance_sampling_ratio_min"
SWITCH = "use_importance_sampling_correction"
LEVEL = "is_correction_level"
BY_SEQUENCE = "sequence_level_importance_ratios"
TRUNCATED = {SWITCH: True, TYPE: "seq-mask-tis", HIGH: 1.01, LOW: 0.99}


def keys(**settings):
    return [conflict.keys for conflict in find_conflicts(LossSettings(**settings))]


def lines(settings):
    """The problems of a block: keys without the section, and the message."""
    with pytest.raises(ConfigError) as error:
        build_loss(settings)
    return {
        tuple(key.removeprefix("loss_fn.") for key in problem.keys): problem.message for problem in error.value.problems
    }


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, []),
        (
            {"use_cispo": True, "loss_normalization": "constant", "token_level_loss": True},
            [
                ("token_level_loss", "loss_normalization"),
                ("loss_normalization", "loss_normalization_constant"),
                ("use_cispo", "loss_normalization"),
            ],
        ),
        (
            {"use_cispo": True, "disable_ppo_ratio": True, "ratio_clip_c": 3.0},
            [("use_cispo", "disable_ppo_ratio"), ("ratio_clip_c", "use_cispo")],
        ),
        # With every bound missing and the correction off, all of it is said at once.
        ({TYPE: "icepop"}, [(TYPE, HIGH), (TYPE, LOW), (TYPE, SWITCH)]),
        ({TYPE: "tis"}, []),
        # A bound that nothing applies.
        ({LOW: 0.5}, [(LOW, TYPE)]),
        ({LOW: 0.5, HIGH: 2.0}, [(LOW, HIGH, TYPE)]),
        ({LOW: 0.5, TYPE: "tis", SWITCH: True}, [(LOW, HIGH)]),
        (
            {"denominator": "kept", "force_on_policy_ratio": True},
            [("denominator", "masks"), ("denominator", "force_on_policy_ratio")],
        ),
        (
            {"force_on_policy_ratio": True, "batch_veto": {"max": 0.1}},
            [("batch_veto", "force_on_policy_ratio")],
        ),
    ],
)
def test_each_contradiction_is_one(settings, expected):
    assert keys(**settings) == expected


@pytest.mark.parametrize(
    ("cause", "consequence"),
    [
        # The weights' level is derived from a ratio that has no place in this loss.
        ({**TRUNCATED, BY_SEQUENCE: True}, {**TRUNCATED, BY_SEQUENCE: True, "token_level_loss": False}),
        # Whether the loss is by token follows from the normalization, which is another one or none.
        (
            {BY_SEQUENCE: True, "loss_normalization_constant": 8.0},
            {BY_SEQUENCE: True},
        ),
    ],
)
def test_what_only_follows_waits_for_its_cause(cause, consequence):
    (alone,) = keys(**consequence)
    found = keys(**cause)
    assert found
    assert alone not in found


def test_the_value_that_is_written_is_quoted_not_what_is_derived_from_it():
    found = lines({"use_cispo": True, "loss_normalization": "documents"})
    assert "loss_normalization is documents" in found["use_cispo", "loss_normalization"]
    assert "token_level_loss" not in found["use_cispo", "loss_normalization"]


def test_the_schema_raises_every_contradiction_with_its_keys():
    with pytest.raises(ConfigError) as error:
        parse(LossConfig, {LEVEL: "token", "loss_normalization": "constant"}, prefix="loss_fn")
    assert [line.partition(": ")[0] for line in str(error.value).splitlines()] == [
        "loss_fn.loss_normalization, loss_fn.loss_normalization_constant",
        f"loss_fn.{LEVEL}, loss_fn.{SWITCH}",
    ]


class TestOfAVariant:
    def test_what_it_implies_is_put_down_to_its_name(self):
        ((key, message),) = lines({"name": "gspo", "token_level_loss": True, BY_SEQUENCE: False}).items()
        assert key == ("token_level_loss", "name")
        assert message.endswith(f"(name: gspo implies {BY_SEQUENCE}: true)")
        ((key, message),) = lines({"name": "gspo", **TRUNCATED}).items()
        assert key == (TYPE, "name")

    def test_what_agrees_with_it_is_the_recipes_own(self):
        ((key, message),) = lines({"name": "gspo", "token_level_loss": True, BY_SEQUENCE: True}).items()
        assert key == ("token_level_loss", BY_SEQUENCE)
        assert "implies" not in message

    def test_what_it_refuses_is_not_held_against_the_rest(self):
        found = lines({"name": "gspo", "use_cispo": True, "disable_ppo_ratio": True, LEVEL: "token"})
        assert set(found) == {("use_cispo", "name"), ("disable_ppo_ratio", "name"), (LEVEL, SWITCH)}


class TestAllAtOnce:
    def test_unknown_keys_bad_values_contradictions_and_options(self):
        found = lines(
            {
                "name": "sapo",
                "options": {"tau_poss": 1.0},
                "zzz": 1,
                "ratio_clip_min": -1,
                "ratio_clip_max": math.nan,
                "nonfinite": "ignore",
                "batch_veto": {"mx": 0.1},
                "masks": [{"preset": "geometrc"}, {"preset": "icepop", "max": -1}, 3, {"preset": ["icepop"]}],
                LEVEL: "sequence",
            }
        )
        assert set(found) == {
            ("zzz",),
            ("ratio_clip_min",),
            ("ratio_clip_max",),
            ("nonfinite",),
            ("batch_veto.mx",),
            ("masks[0].preset",),
            ("masks[1].max",),
            ("masks[2]",),
            ("masks[3].preset",),
            (LEVEL, SWITCH),
            ("options.tau_poss",),
        }

    @pytest.mark.parametrize(
        "wrong", [{SWITCH: "perhaps"}, {"use_importance_sampling_corection": True}, {"use_importance_sampling": True}]
    )
    def test_no_contradiction_with_what_is_not_known(self, wrong):
        assert set(lines({LEVEL: "sequence", **wrong})) == {tuple(wrong)}

    def test_the_name_too(self):
        assert set(lines({"name": "gsppo", "ratio_clip_min": -1})) == {("name",), ("ratio_clip_min",)}
        # Which settings go together depends on it.
        assert set(lines({"name": 3, "ratio_clip_min": -1, LEVEL: "token"})) == {("name",), ("ratio_clip_min",)}

    def test_a_wrong_name_alone_stays_a_plugin_error(self):
        with pytest.raises(PluginError, match="did you mean 'gspo'"):
            build_loss({"name": "gsppo", LEVEL: "token"})


class TestNull:
    @pytest.mark.parametrize("word", ["None", "none", "null"])
    def test_a_word_for_it_is_told_to_be_null(self, word):
        ((key, message),) = lines({LEVEL: word}).items()
        assert key == (LEVEL,)
        assert message == (
            "Input should be 'token', 'turn', 'turn_mean', 'sequence', 'sequence_mean' or 'masks_only', or null; in "
            f"YAML '{word}' is a word, write null (found '{word}')"
        )

    def test_is_among_what_is_allowed_only_where_it_is(self):
        found = lines(
            {LEVEL: "seq", "nonfinite": "None", "ratio_clip_c": "None", "masks": [{"preset": "veto", "max": 0}]}
        )
        assert "'masks_only', or null (found 'seq')" in found[LEVEL,]
        assert "null" not in found["nonfinite",]
        assert "write null" in found["ratio_clip_c",]
        assert "or null (found 0)" in found["masks[0].max",]
