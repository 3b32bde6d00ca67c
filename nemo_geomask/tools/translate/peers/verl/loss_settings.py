"""Conversion of verl's ``loss_mode``, of its ``loss_agg_mode``, and of its KL to the reference policy."""

from __future__ import annotations

import math
from collections.abc import Callable

from nemo_geomask.tools.translate.peer_table import (
    Assign,
    Conversion,
    PeerSettings,
    Remark,
    convert_value,
    without_counterpart,
)
from nemo_geomask.tools.translate.peers.verl.settings import ACTOR, runs_v1


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
    yield Remark(
        "verl's geo_mean adds up means over the sequences of each microbatch, this package takes one over those of a "
        "step; so its policy loss is as many times larger, beside the KL, as a step has microbatches on a rank."
    )


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
            if settings[ACTOR + "use_kl_loss"] and settings[ACTOR + "loss_agg_mode"] != "seq-mean-token-mean":
                text = f"use_kl_loss: under {mode} verl averages the KL by loss_agg_mode, this package over sequences"
                yield Remark(text, ("use_kl_loss",))
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
    if key != keys[0] and runs_v1(settings):
        text = "loss_agg_mode: verl's v1 trainer divides by the longest response of each microbatch"
        yield Remark(f"{text}, this block by the longest allowed; set loss_scale_factor in verl", ("loss_agg_mode",))
        note = "the longest response that data.max_response_length allows"
    yield Assign("loss_normalization", "constant")
    yield Assign("loss_normalization_constant", settings.number(key), note)


_KL = {
    **dict.fromkeys(("kl", "k1"), ("k1", "k1")),
    **dict.fromkeys(("kl+", "k1+"), ("k1", "k2")),
    **dict.fromkeys(("mse", "k2", "mse+", "k2+"), ("k2", "k2")),
    **dict.fromkeys(("low_var_kl", "k3"), ("k3", "k3")),
    **dict.fromkeys(("low_var_kl+", "k3+"), ("k3", "k2")),
}


def convert_kl(settings: PeerSettings) -> Conversion:
    """Convert the KL in the reward (``algorithm.use_kl_in_reward``) or in the loss (``use_kl_loss``)."""
    if settings["algorithm.use_kl_in_reward"]:
        estimator = str(settings["algorithm.kl_penalty"])
        yield Assign("use_kl_in_reward", True)
        yield Assign("reference_policy_kl_penalty", settings.number("algorithm.kl_ctrl.kl_coef"))
        if estimator in _KL:
            yield Assign("reference_policy_kl_type", _KL[estimator][0])
        else:
            yield Remark(f"algorithm.kl_penalty: {estimator} has no counterpart", ("kl_penalty",))
        adaptive = "the coefficient of the KL is constant in this package"
        yield from without_counterpart(settings, {"algorithm.kl_ctrl.type": (("fixed",), adaptive)})
        if settings[ACTOR + "use_kl_loss"]:
            yield Remark(
                "use_kl_loss: this package can't combine a KL in the reward with a KL in the loss", ("use_kl_loss",)
            )
    elif settings[ACTOR + "use_kl_loss"]:
        estimator = str(settings[ACTOR + "kl_loss_type"])
        yield Assign("reference_policy_kl_penalty", settings.number(ACTOR + "kl_loss_coef"))
        if estimator not in _KL:
            yield Remark(
                f"kl_loss_type: {estimator} has no counterpart; values with a counterpart: {', '.join(_KL)}",
                ("kl_loss_type",),
            )
            return
        value, gradient = _KL[estimator]
        yield Assign("reference_policy_kl_type", value)
        yield Assign("reference_policy_kl_gradient", gradient, "verl differentiates the estimate itself")
        if value != "k3":
            yield Assign("kl_input_clamp_value", None)
            yield Assign("kl_output_clamp_value", None)
    else:
        yield Assign("reference_policy_kl_penalty", 0.0)
