"""Conversion of verl's bypass mode: the rollout's log-probs are the old ones.

verl then rejects within the loss, which divides by the original number of tokens.
"""

from __future__ import annotations

from nemo_geomask.tools.translate.peer_table import Assign, Conversion, PeerSettings, Remark, without_counterpart
from nemo_geomask.tools.translate.peers.verl.loss_modes import LOSS_MODES, convert_vanilla
from nemo_geomask.tools.translate.peers.verl.rollout_correction import convert_rejection, convert_weight
from nemo_geomask.tools.translate.peers.verl.setting_names import RC

__all__ = ["convert_bypass_before_v1", "convert_bypass_in_v1", "is_plain_bypass"]


def is_plain_bypass(settings: PeerSettings, mode: str) -> bool:
    """Return True if PPO's clip on the rollout's log-probs results, whichever settings the trainer uses."""
    is_default = settings[RC + "rollout_rs"] is None and settings[RC + "loss_type"] == "ppo_clip"
    return mode == "vanilla" and is_default and settings[RC + "rollout_is"] is None


def convert_bypass_in_v1(settings: PeerSettings, mode: str) -> Conversion:
    """Convert ``bypass_mode`` of verl's v1 trainer: ``loss_mode``, with the rollout's log-probs as the old ones."""
    for line in LOSS_MODES[mode](settings):
        if isinstance(line, Assign) and line.key == "masks":
            yield line._replace(value={**line.value, "log_ratio": "total"})
        else:
            yield line
    yield Assign("ratio_anchor", "gen", "bypass_mode: old_log_prob is the rollout's")
    yield Remark(
        "Under bypass_mode, verl's v1 trainer uses loss_mode, but neither rollout_is nor rollout_rs nor loss_type; "
        "with trainer.use_v1: false, verl uses loss_type in place of loss_mode."
    )


def convert_bypass_before_v1(settings: PeerSettings) -> Conversion:
    """Convert ``bypass_mode`` of verl's older trainer, in which ``loss_type`` takes the place of ``loss_mode``."""
    loss_type, level = settings[RC + "loss_type"], settings[RC + "rollout_is"]
    if loss_type == "ppo_clip":
        yield from convert_vanilla(settings)
        yield Assign("ratio_anchor", "gen", "bypass_mode: the ratio is against the rollout's log-probs")
        if level is not None:
            yield Remark(
                "With these settings verl uses rollout_is for metrics only, so the block has no counterpart of it."
            )
    elif loss_type == "reinforce":
        normalize = settings[RC + "rollout_is_batch_normalize"]
        is_truncated = level == "token" and not normalize and "_" not in str(settings[RC + "rollout_is_threshold"])
        yield Assign("name", "cispo" if is_truncated else "reinforce")
        if is_truncated:
            bound = settings.number(RC + "rollout_is_threshold")
            yield Assign("ratio_anchor", "gen", "-sg(min(w, c))·A·curr with w = e^(curr - gen) is CISPO on gen")
            yield Assign("ratio_clip_min", 1.0)
            yield Assign("ratio_clip_max", bound - 1, "rollout_is_threshold bounds the weight itself")
        elif level is not None:
            normalized = "this package can't divide weights that depend on the current policy by their mean"
            yield from without_counterpart(settings, {RC + "rollout_is_batch_normalize": ((False, None), normalized)})
            yield Assign("force_on_policy_ratio", True, "the weight is then sg(e^(curr - gen))")
            yield from convert_weight(settings)
            yield Remark("NeMo-RL allows force_on_policy_ratio only with one optimiser step for each rollout batch.")
    else:
        yield Remark(
            f"rollout_correction.loss_type: {loss_type} is unknown; verl has ppo_clip and reinforce", ("loss_type",)
        )
    yield from convert_rejection(settings, "total")
