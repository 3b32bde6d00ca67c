"""The JSON Schema for editors: current, complete, and of one mind with the settings' own validation."""

import json
from pathlib import Path

import pytest
import yaml

from nemo_geomask import LossConfig, build_loss
from nemo_geomask.cli import main
from nemo_geomask.cli.schema import render
from nemo_geomask.config.presets import PRESETS
from nemo_geomask.errors import GeomaskError

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "recipes" / "recipe.schema.json"
SCHEMA = json.loads(render())
BLOCK = SCHEMA["$defs"]["LossConfig"]

VALID = [
    {},
    {"name": "gspo", "token_level_loss": False, "ratio_clip_c": None},
    {"name": "their_loss:THEIRS", "options": {"anything": 1}},
    {"name": "sapo", "options": {"tau_pos": 2.0}},
    {"masks": []},
    {"batch_veto": {"max": 0.1}},
    {"batch_veto": None},
    {"masks": [{"preset": "geometric", "min": 0.99, "max": 1.01}, {"preset": "opsm", "delta": 0.5, "label": "stale"}]},
    {"masks": [{"preset": "trust_region", "statistic": "k3", "level": "sequence_max", "max": 0.1}]},
    {"masks": [{"log_ratio": "policy", "level": "token", "statistic": "k2", "max": 0.02}]},
    {"masks": [{"log_ratio": "total", "level": "token", "statistic": "prob_diff", "min": -0.1, "when": "pushing"}]},
    {"masks": [{"preset": "dppo_kl", "delta": 0.05, "log_ratio": "policy"}, {"preset": "kpop", "max": 0.1}]},
    {"is_correction_level": "sequence_mean", "use_importance_sampling_correction": True},
    {"is_correction_level": "tests.helpers.plugin_corrections:ROOT_LEVEL", "use_importance_sampling_correction": True},
    {"masks": [{"preset": "tests.losses.test_registry:Half", "factor": 1.1}]},
    {
        "masks": [
            {"log_ratio": "total", "level": "token", "statistic": "tests.helpers.plugin_corrections:GAP", "max": 0.2}
        ]
    },
]
# What is wrong, and the key at which an editor should say so.
INVALID = [
    ({"ratio_clip_mim": 0.1}, ""),
    ({"ratio_clip_min": -0.1}, "ratio_clip_min"),
    ({"ratio_clip_min": "small"}, "ratio_clip_min"),
    ({"ratio_clip_c": 1.0}, "ratio_clip_c"),
    ({"token_level_loss": 3}, "token_level_loss"),
    ({"is_correction_level": "seq"}, "is_correction_level"),
    ({"nonfinite": None}, "nonfinite"),
    ({"masks": {"preset": "veto"}}, "masks"),
    ({"masks": [{"preset": "geometrc", "max": 1.01}]}, "masks.0.preset"),
    ({"masks": [{"preset": "geometric", "mx": 1.01}]}, "masks.0"),
    ({"masks": [{"preset": "geometric", "max": 0}]}, "masks.0.max"),
    ({"masks": [{"preset": "opsm"}]}, "masks.0"),
    ({"masks": [{"preset": "opsm", "delta": 0.1, "log_ratio": "mismatch"}]}, "masks.0.log_ratio"),
    ({"masks": [{"level": "token", "max": 2.0}]}, "masks.0"),
    ({"masks": [{"preset": "veto", "max": 2.0, "label": "Not a label"}]}, "masks.0.label"),
    ({"batch_veto": {"mx": 0.1, "max": 0.1}}, "batch_veto"),
    ({"batch_veto": {"max": 0.1, "estimator": "k2"}}, "batch_veto.estimator"),
    ({"name": "sapo", "options": {"tau": 1.0}}, "options"),
    ({"name": "sapo", "options": {"tau_pos": 0}}, "options.tau_pos"),
    ({"name": "gspo", "options": {"tau_pos": 1.0}}, "options"),
]


def test_committed_schema_is_current():
    assert COMMITTED.read_text(encoding="utf-8") == render(), "run: make docs"


def test_command_writes_it(tmp_path, capsys):
    assert main(["schema"]) == 0
    assert capsys.readouterr().out == render()
    assert main(["schema", "--out", str(tmp_path / "s.json")]) == 0
    assert (tmp_path / "s.json").read_text(encoding="utf-8") == render()
    assert main(["schema", "--out", str(tmp_path / "nowhere" / "s.json")]) == 2


def test_every_setting_is_there_with_its_default_and_words():
    assert set(BLOCK["properties"]) == {*LossConfig.model_fields, "_override_"}
    assert BLOCK["additionalProperties"] is False
    for name, field in LossConfig.model_fields.items():
        entry = BLOCK["properties"][name]
        assert str(field.description).split("\n")[0] in entry["description"]
        assert entry["default"] == (list(field.default) if isinstance(field.default, tuple) else field.default)


def test_every_preset_has_a_branch_of_its_own():
    items = BLOCK["properties"]["masks"]["else"]["items"]
    assert set(items["properties"]["preset"]["else"]["enum"]) == set(PRESETS)
    branches = {
        branch["if"]["properties"]["preset"]["const"]: branch["then"]["$ref"].rpartition("/")[2]
        for branch in items["allOf"]
        if "properties" in branch["if"]
    }
    assert branches == {preset: model.__name__ for preset, model in PRESETS.items()}
    for name in branches.values():
        assert SCHEMA["$defs"][name]["additionalProperties"] is False


def test_no_titles_and_no_words_for_programmers():
    for definition in SCHEMA["$defs"].values():
        assert "title" not in definition
        assert "Raises" not in definition["description"]
        for entry in definition["properties"].values():
            assert not {"title", "formula", "source"} & set(entry)


@pytest.mark.parametrize("settings", VALID, ids=str)
def test_what_the_schema_is_to_accept_is_valid(settings):
    if ":" not in settings.get("name", ""):
        build_loss(settings)


@pytest.mark.parametrize(("settings", "key"), INVALID, ids=str)
def test_what_the_schema_is_to_refuse_is_invalid(settings, key):
    with pytest.raises(GeomaskError, match="loss_fn"):
        build_loss(settings)


@pytest.fixture(scope="module")
def validator():
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    return jsonschema.Draft7Validator(SCHEMA)


class TestWithAValidator:
    @pytest.mark.parametrize("settings", VALID, ids=str)
    def test_accepts(self, settings, validator):
        validator.validate({"defaults": "x.yaml", "policy": {"anything": 1}, "loss_fn": settings})

    @pytest.mark.parametrize(("settings", "key"), INVALID, ids=str)
    def test_refuses_once_and_at_the_key(self, settings, key, validator):
        (error,) = validator.iter_errors({"loss_fn": settings})
        assert ".".join(map(str, error.absolute_path)) == ".".join(filter(None, ["loss_fn", key]))

    @pytest.mark.parametrize("value", ["${policy.max_total_sequence_length}", "${mul:2, ${a.b}}", "???"])
    def test_references_go_anywhere(self, value, validator):
        mask = {"preset": "geometric", "max": value}
        for settings in ({"ratio_clip_min": value}, {"masks": value}, {"masks": [mask]}, {"name": value}):
            validator.validate({"loss_fn": settings})

    @pytest.mark.parametrize("path", sorted(ROOT.glob("recipes/*/*.yaml")), ids=lambda path: path.stem)
    def test_the_recipes_here_are_valid(self, path, validator):
        validator.validate(yaml.safe_load(path.read_text(encoding="utf-8")))

    @pytest.mark.parametrize("wrong", [3, "gspo", ["gspo"]])
    def test_the_block_is_a_mapping(self, wrong, validator):
        assert list(validator.iter_errors({"loss_fn": wrong}))
