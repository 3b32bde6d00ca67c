"""verl's ``policy_loss.loss_mode`` as an objective of this package."""

from __future__ import annotations

import math
from collections.abc import Callable

from nemo_geomask.tools.translate.peer_table import Assign, Conversion, PeerSettings, Remark
from nemo_geomask.tools.translate.peers.verl.setting_names import ACTOR

__all__ = ["LOSS_MODES", "convert_vanilla"]


def _clip_bounds(settings: PeerSettings) -> tuple[float, float]:
    """Return clip_ratio_low and clip_ratio_high; clip_ratio stands in for one that is null."""
    keys = [
        ACTOR + (f"clip_ratio_{side}" if settings[ACTOR + f"clip_ratio_{side}"] is not None else "clip_ratio")
        for side in ("low", "high")
    ]
    return settings.number(keys[0]), settings.number(keys[1])


def _clip(settings: PeerSettings, name: str) -> Conversion:
    yield Assign("name", name)
    low, high = _clip_bounds(settings)
    yield Assign("ratio_clip_min", low)
    yield Assign("ratio_clip_max", high)


def convert_vanilla(settings: PeerSettings) -> Conversion:
    """Convert PPO's clip with the dual clip."""
    yield from _clip(settings, "clipped_pg")
    yield Assign("ratio_clip_c", settings.number(ACTOR + "clip_ratio_c"))


def _gmpo(settings: PeerSettings) -> Conversion:
    low, high = _clip_bounds(settings)
    note = "verl clips the log-ratio to [-low, high]; this field is the distance of the ratio's bound from 1"
    yield Assign("name", "gmpo")
    yield Assign("ratio_clip_min", 1 - math.exp(-low), note)
    yield Assign("ratio_clip_max", math.exp(high) - 1, note)
    yield Remark("verl's geo_mean averages over the sequences of each microbatch, this package over those of the step.")


def _sapo(settings: PeerSettings) -> Conversion:
    yield Assign("name", "sapo")
    yield Assign("options", {tau: settings.number(ACTOR + tau) for tau in ("tau_pos", "tau_neg")})


def _gpg(settings: PeerSettings) -> Conversion:
    yield Assign("name", "clipped_pg")
    yield Assign("disable_ppo_ratio", True)


def _dppo(preset: str, settings: PeerSettings) -> Conversion:
    low, high = _clip_bounds(settings)
    yield Assign("name", "cispo", "DPPO's surrogate, -sg(min(r, c))·A·curr, is CISPO's without a lower bound")
    yield Assign("ratio_clip_min", 1.0)
    yield Assign("ratio_clip_max", settings.number(ACTOR + "clip_ratio_c") - 1, "clip_ratio_c bounds the ratio itself")
    mask = {"preset": preset, "delta": high, "delta_low": low, "log_ratio": "policy"}
    yield Assign("masks", mask, "from clip_ratio_high and _low; without bypass_mode verl compares with old_log_prob")


def _dro(settings: PeerSettings) -> Conversion:
    yield Assign("name", "dro")
    yield Assign("options", {"beta": settings.number(ACTOR + "policy_loss.dro_beta")})


LOSS_MODES: dict[str, Callable[[PeerSettings], Conversion]] = {
    "vanilla": convert_vanilla,
    "gspo": lambda settings: _clip(settings, "gspo_token"),
    "geo_mean": _gmpo,
    "sapo": _sapo,
    "cispo": lambda settings: _clip(settings, "cispo"),
    "gpg": _gpg,
    "dro": _dro,
    "dppo_tv": lambda settings: _dppo("dppo_tv", settings),
    "dppo_kl": lambda settings: _dppo("dppo_kl", settings),
}
