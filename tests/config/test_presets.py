"""The presets' bounds in use are valid settings of the presets."""

import pytest

from nemo_geomask import LossConfig
from nemo_geomask.config.presets import PRESETS, PUBLISHED_SETTINGS


def test_every_preset_has_defaults():
    assert PUBLISHED_SETTINGS.keys() == PRESETS.keys()


@pytest.mark.parametrize("preset", PUBLISHED_SETTINGS)
def test_defaults_are_valid_and_have_a_source(preset):
    (rule,) = LossConfig(masks=[PUBLISHED_SETTINGS[preset].mask(preset)]).mask_rules
    assert rule.label == preset
    assert PUBLISHED_SETTINGS[preset].source


@pytest.mark.parametrize("preset", PUBLISHED_SETTINGS)
def test_defaults_agree_with_those_of_the_settings_themselves(preset):
    fields = PRESETS[preset].model_fields
    for key, value in PUBLISHED_SETTINGS[preset].settings.items():
        assert fields[key].default in (value, None) or fields[key].is_required()
