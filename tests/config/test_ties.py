"""Settings exactly at the edge of a contradiction, and the one exemption from it."""

import warnings

import pytest

from nemo_geomask import build_loss
from nemo_geomask.errors import ConfigError

TRUNCATED = {
    "use_importance_sampling_correction": True,
    "truncated_importance_sampling_type": "icepop",
    "truncated_importance_sampling_ratio": 1.5,
}


@pytest.mark.parametrize("kind", ["tis", "icepop"])
def test_equal_truncation_bounds_are_allowed(kind):
    equal = {**TRUNCATED, "truncated_importance_sampling_type": kind, "truncated_importance_sampling_ratio_min": 1.5}
    assert build_loss(equal).config.truncated_importance_sampling_ratio_min == 1.5
    with pytest.raises(ConfigError, match="exceeds truncated_importance_sampling_ratio: 1.5; swap them"):
        build_loss({**equal, "truncated_importance_sampling_ratio_min": 1.5001})


def test_a_dual_clip_without_a_ratio_warns_unless_the_ratio_is_forced_to_1():
    # force_on_policy_ratio comes first in NeMo-RL's loss: the ratio is there, and the dual clip applies to it.
    settings = {"disable_ppo_ratio": True, "ratio_clip_c": 3.0}
    with pytest.warns(UserWarning, match="ratio_clip_c: 3 has no effect, since it bounds the ratio"):
        build_loss(settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert build_loss({**settings, "force_on_policy_ratio": True}).config.ratio_clip_c == 3.0
