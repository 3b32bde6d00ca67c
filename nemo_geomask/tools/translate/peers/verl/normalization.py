"""Conversion of verl's ``loss_agg_mode``: the mean or sum over tokens and sequences."""

from __future__ import annotations

from nemo_geomask.tools.translate.peer_table import Assign, Conversion, PeerSettings, Remark, convert_value
from nemo_geomask.tools.translate.peers.verl.setting_names import ACTOR

__all__ = ["convert_normalization", "effective_aggregation"]


def effective_aggregation(settings: PeerSettings, mode: str) -> str:
    """Return ``loss_agg_mode``, or the one that a ``loss_mode`` always uses."""
    always = {"gspo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean", "geo_mean": "seq-mean-token-mean"}
    return always.get(mode) or str(settings[ACTOR + "loss_agg_mode"])


def convert_normalization(settings: PeerSettings, mode: str) -> Conversion:
    """Convert ``loss_agg_mode``, with ``loss_scale_factor`` where it divides by a constant."""
    loss_agg_mode = effective_aggregation(settings, mode)
    if loss_agg_mode != "seq-mean-token-sum-norm":
        if mode in ("gspo", "sapo", "geo_mean"):
            yield Assign(
                "token_level_loss", False, f"in verl, {mode} is a mean over sequences, whatever loss_agg_mode is"
            )
            return
        yield from convert_value(
            settings,
            ACTOR + "loss_agg_mode",
            {
                "token-mean": [Assign("token_level_loss", True)],
                "seq-mean-token-mean": [Assign("token_level_loss", False)],
                "seq-mean-token-sum": [Assign("loss_normalization", "documents")],
            },
        )
        return
    keys = (ACTOR + "loss_scale_factor", "data.max_response_length")
    key = next((key for key in keys if settings[key] is not None), None)
    if key is None:
        text = "loss_agg_mode: seq-mean-token-sum-norm divides by the padded width; set loss_scale_factor to it"
        yield Remark(text, ("loss_agg_mode",))
        return
    note = "" if key == keys[0] else "verl divides by the padded width, which is data.max_response_length"
    yield Assign("loss_normalization", "constant")
    yield Assign("loss_normalization_constant", settings.number(key), note)
