"""Conversion of verl's rollout correction: weights against the mismatch, rejection, and bypass mode.

verl's rejection bounds on k1 are on 1/ρ. In decoupled mode verl rejects before the step, by changing the response mask,
so a token mean divides by the number of kept tokens. In bypass mode, whose old log-probs are the rollout's, it rejects
within the loss, which divides by the original number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.translate.peer_table import (
    Assign,
    Conversion,
    PeerSettings,
    Remark,
    weight_settings,
    without_counterpart,
)
from nemo_geomask.tools.translate.peers.verl.loss_settings import LOSS_MODES, convert_vanilla, effective_aggregation
from nemo_geomask.tools.translate.peers.verl.settings import ACTOR, RC, runs_v1

_LEVELS = {"token": "token", "seq_sum": "sequence", "seq_mean": "sequence_mean", "seq_max": "sequence_max"}
_PRESETS_OF_K1 = {"token": "icepop", "sequence": "product", "sequence_mean": "geometric"}


def convert_decoupled(settings: PeerSettings, mode: str) -> Conversion:
    """Convert rollout correction of log-probs that the training engine has computed before the step."""
    level = settings[RC + "rollout_is"]
    if level is not None and mode == "geo_mean" and level != "sequence":
        text = "rollout_is: under geo_mean verl pools the truncated weights of a sequence by their geometric mean"
        yield Remark(text, ("rollout_is",))
    elif level is not None:
        yield from convert_weight(settings)
        if settings[RC + "rollout_is_batch_normalize"]:
            yield Assign("is_correction_batch_normalize", True)
    masks = list(convert_rejection(settings, "mismatch"))
    yield from masks
    if not any(isinstance(line, Assign) for line in masks):
        return
    has_token_rule = any(
        str(option).strip().startswith("token") for option in str(settings[RC + "rollout_rs"]).split(",")
    )
    # The v1 trainer divides a token mean by the tokens of loss_mask, from which rejection takes nothing.
    is_token_mean = effective_aggregation(settings, mode) == "token-mean"
    shrinks_denominator = not runs_v1(settings) if is_token_mean else has_token_rule
    if shrinks_denominator:
        yield Assign("denominator", "kept", "verl removes what it rejects from the response mask before the step")
        if not is_token_mean:
            yield Remark(
                "rollout_rs: a sequence mean of verl counts sequences without a kept token; this package does not",
                ("rollout_rs",),
            )
        if has_token_rule and level == "sequence":
            yield Remark(
                "rollout_rs: verl computes a sequence's weight from all its tokens, this package from the kept ones",
                ("rollout_rs",),
            )
        if level is not None and settings[RC + "rollout_is_batch_normalize"]:
            yield Remark(
                "rollout_is_batch_normalize: verl takes the mean over all tokens, this package over the kept ones",
                ("rollout_is_batch_normalize",),
            )
    elif settings[ACTOR + "use_kl_loss"]:
        yield Assign("kl_tokens", "kept", "verl removes what it rejects from the KL term, too")


def convert_weight(settings: PeerSettings) -> Conversion:
    """Convert ``rollout_is`` and its threshold."""
    level, spec = str(settings[RC + "rollout_is"]), str(settings[RC + "rollout_is_threshold"])
    low, separator, high = spec.rpartition("_")
    if level not in ("token", "sequence"):
        yield Remark(f"rollout_is: {level} is unknown; verl has token and sequence", ("rollout_is",))
    elif separator:
        yield from weight_settings(
            level, "icepop", _parse_bound("rollout_is_threshold", low), _parse_bound("rollout_is_threshold", high)
        )
    else:
        yield from weight_settings(level, "tis", 0.0, _parse_bound("rollout_is_threshold", high))


def convert_rejection(settings: PeerSettings, log_ratio: str) -> Conversion:
    """Convert ``rollout_rs`` to masks on a log-ratio: ``mismatch`` or ``total``."""
    if settings[RC + "rollout_rs"] is None:
        return
    options = list(dict.fromkeys(_comma_separated(settings[RC + "rollout_rs"])))
    bounds = list(_comma_separated(settings[RC + "rollout_rs_threshold"]))
    if len(bounds) not in (1, len(options)):
        raise ConfigError(
            f"rollout_rs_threshold must have one bound or one for each of {', '.join(options)}, but has {len(bounds)}"
        )
    for option, spec in zip(options, bounds * (len(options) if len(bounds) == 1 else 1), strict=True):
        level_name, _, statistic = option.rpartition("_")
        if level_name not in _LEVELS or statistic not in ("k1", "k2", "k3") or option == "seq_max_k1":
            yield Remark(f"rollout_rs: {option} is unknown", ("rollout_rs",))
            continue
        level = _LEVELS[level_name]
        rule: dict[str, Any] = {"log_ratio": log_ratio, "level": level}
        if statistic != "k1":
            yield Assign("masks", {**rule, "statistic": statistic, "max": _parse_bound("rollout_rs_threshold", spec)})
            continue
        low, separator, high = spec.rpartition("_")
        upper = _parse_bound("rollout_rs_threshold", high)
        stated_lower = _parse_bound("rollout_rs_threshold", low) if separator else upper
        if min(stated_lower, upper) <= 0:
            raise ConfigError(f"rollout_rs_threshold: {option} bounds a ratio, which must be above 0, by '{spec}'")
        lower = stated_lower if separator else 1 / upper
        note = (
            f"verl's {option} keeps {lower:g} to {upper:g} of 1/ρ; the bounds here are on ρ"
            if separator
            else (f"verl's {option} keeps 1/{upper:g} to {upper:g}")
        )
        form = {"preset": _PRESETS_OF_K1[level]} if log_ratio == "mismatch" else rule
        yield Assign("masks", {**form, "min": 1 / upper, "max": 1 / lower}, note)


def _comma_separated(text: Any) -> Iterator[str]:
    return (word.strip() for word in str(text).split(",") if word.strip())


def _parse_bound(key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{key} must be a number or lower_upper, but a bound is '{text}'") from None


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
