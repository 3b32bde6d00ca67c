"""The presets' bounds in use are valid settings of the presets."""

import pytest

from nemo_geomask import LossConfig
from nemo_geomask.config.presets import DEFAULTS, PRESETS


def test_every_preset_has_defaults():
    assert DEFAULTS.keys() == PRESETS.keys()


@pytest.mark.parametrize("preset", DEFAULTS)
def test_defaults_are_valid_and_have_a_source(preset):
    (rule,) = LossConfig(masks=[DEFAULTS[preset].mask(preset)]).mask_rules
    assert rule.label == preset
    assert DEFAULTS[preset].source


@pytest.mark.parametrize("preset", DEFAULTS)
def test_defaults_agree_with_those_of_the_settings_themselves(preset):
    fields = PRESETS[preset].model_fields
    for key, value in DEFAULTS[preset].settings.items():
        assert fields[key].default in (value, None) or fields[key].is_required()
