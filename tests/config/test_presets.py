"""The presets' bounds in use are valid settings of the presets."""

import pytest

from nemo_geomask import LossConfig
from nemo_geomask.config.presets import PRESETS, PUBLISHED_SETTINGS
from tests.helpers.batches import BUDGETS, MASKS


@pytest.mark.parametrize("preset", PUBLISHED_SETTINGS)
def test_published_settings_are_valid_and_have_a_source(preset):
    (rule,) = LossConfig(masks=[PUBLISHED_SETTINGS[preset].mask(preset)]).mask_rules
    assert rule.label == preset
    assert PUBLISHED_SETTINGS[preset].source


@pytest.mark.parametrize("preset", PUBLISHED_SETTINGS)
def test_published_settings_agree_with_the_defaults_of_the_preset(preset):
    fields = PRESETS[preset].model_fields
    for key, value in PUBLISHED_SETTINGS[preset].settings.items():
        assert fields[key].default in (value, None) or fields[key].is_required()


def test_every_preset_is_compared_with_the_oracle():
    cases = {mask.get("preset") for mask in (*MASKS.values(), *BUDGETS.values())}
    missing = sorted(PRESETS.keys() - cases)
    assert missing == [], "add a case to MASKS in tests/helpers/batches.py, and the rule to tests/helpers/oracle.py"
