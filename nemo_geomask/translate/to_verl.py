"""Back: a ``loss_fn:`` block as verl's settings, as far as verl has them.

What is written is read again by the forward table; whatever then differs from the block is said not to be expressed. So
this table may be wrong in what it offers, and not in what it claims.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_geomask.config import LossConfig, MaskRule
from nemo_geomask.config.strict import as_yaml
from nemo_geomask.losses import PolicyLoss
from nemo_geomask.losses.build import examined
from nemo_geomask.optional import require
from nemo_geomask.translate.read import nested
from nemo_geomask.translate.translation import translate
from nemo_geomask.translate.verl import PEER

__all__ = ["BackTranslation", "to_verl"]

_RC, _ACTOR = "algorithm.rollout_correction.", "actor_rollout_ref.actor."
_MODES = {"gspo_token": "gspo", "gmpo": "geo_mean", "sapo": "sapo", "cispo": "cispo", "dro": "dro"}
_LEVELS = {"token": "token", "sequence": "seq_sum", "sequence_mean": "seq_mean", "sequence_max": "seq_max"}
_AGGREGATIONS = {"tokens": "token-mean", "sequences": "seq-mean-token-mean", "documents": "seq-mean-token-sum"}
_KL = {("k1", "k1"): "kl", ("k1", "k2"): "kl+", ("k2", "k2"): "mse", ("k3", "k3"): "low_var_kl", ("k3", "k2"): "k3+"}
# What only says how a loss runs or what it reports, and what is compared as it is in force.
_APART = {"name", "compile", "metrics", "logprob_backend", "masks", "record", "audit_fraction", "nonfinite"}
_APART |= {"token_level_loss", "loss_normalization", "is_correction_level", "use_importance_sampling_correction"}
_UNBOUNDED = 1e9
"""Where verl always has a bound: beyond e^20, by which it bounds ratios before."""
_CLIP = {"ratio_clip_min", "ratio_clip_max", "ratio_clip_c"}


@dataclass(frozen=True)
class BackTranslation:
    """A block in verl's settings.

    Attributes:
        settings: by dotted name; those that are not at verl's default.
        lost: what is not expressed, a sentence each that begins with our setting.
        remains: what will be different, as forward.
    """

    settings: Mapping[str, Any]
    lost: tuple[str, ...]
    remains: tuple[str, ...]

    def yaml(self) -> str:
        """The settings with comments."""
        yaml = require("yaml", "writing YAML needs", "recipes")
        settings = yaml.safe_dump(nested(self.settings), sort_keys=False).rstrip()
        lines = [f"# For {PEER.title} ({PEER.source}).", settings]
        lines += [f"# NOT EXPRESSED: {text}" for text in self.lost]
        return "\n".join([*lines, *(f"# Remains different: {text}" for text in self.remains)]) + "\n"


def to_verl(loss_fn: Mapping[str, Any]) -> BackTranslation:
    """verl's settings that do what a ``loss_fn:`` block does.

    Args:
        loss_fn: as :func:`nemo_geomask.build_loss` takes it.

    Raises: ConfigError: the block is invalid.
    """
    loss, remarks = _in_verls_terms(examined(dict(loss_fn))[0])
    settings = {key: value for key, value in _settings(loss) if value != PEER.defaults[key]}
    back = translate(settings, PEER.name) if settings else translate({_ACTOR + "clip_ratio": 0.2}, PEER.name)
    lost = (*_differences(loss, examined(dict(back.loss_fn))[0]), *back.lost)
    return BackTranslation(settings, lost, (*remarks, *back.remains))


def _in_verls_terms(loss: PolicyLoss) -> tuple[PolicyLoss, tuple[str, ...]]:
    """The same loss under the name of an objective that verl has, and what differs."""
    given, name = loss.config.given, loss.config.name
    if name == "gspo":
        text = "verl's gspo takes each token's own advantage, here the sequence's mean; the same where it has one."
        return examined({**given, "name": "gspo_token"})[0], (text,)
    if name == "clipped_pg" and (loss.config.force_on_policy_ratio or loss.config.disable_ppo_ratio):
        flags = {"name": "reinforce", "disable_ppo_ratio": False, "ratio_clip_c": None}
        if loss.config.force_on_policy_ratio:
            return examined({**given, **flags})[0], ("verl's value is -w·A·log π where here it is -w·A.",)
        if any(rule.log_ratio == "total" for rule in loss.config.mask_rules):
            return examined({**given, **flags})[0], ()
    if name == "dppo":
        clip = {"ratio_clip_min": 1.0, "ratio_clip_max": dict(loss.options)["cap"] - 1, "options": {}}
        own = {"ratio_anchor": loss.config.ratio_anchor, "masks": loss.config.masks}
        return examined({**given, "name": "cispo", **clip, **own})[0], ()
    return loss, ()


def _settings(loss: PolicyLoss) -> Iterator[tuple[str, Any]]:
    config = loss.config
    rules = list(config.mask_rules)
    anchored, forced = config.ratio_anchor == "gen", config.force_on_policy_ratio
    mode = _MODES.get(config.name, "vanilla")
    dual: float | None = config.ratio_clip_c
    low, high = config.ratio_clip_min, config.ratio_clip_max
    if mode == "cispo" and low == 1 and (dppo := [rule for rule in rules if rule.label in ("dppo_tv", "dppo_kl")]):
        mode, low, high, dual = dppo[0].label, -dppo[0].low, dppo[0].high, high + 1
        rules.remove(dppo[0])
    if mode == "geo_mean":
        low, high = -math.log(1 - low) if low < 1 else math.inf, math.log(1 + high)
    if config.disable_ppo_ratio:
        mode = "gpg"
    reinforce = forced or config.name == "reinforce" or (anchored and mode == "cispo" and low == 1)
    if reinforce:
        mode = "vanilla"
        yield _RC + "loss_type", "reinforce"
    else:
        if math.isfinite(low):
            yield _ACTOR + "clip_ratio_low", low
        yield _ACTOR + "clip_ratio_high", high
    if not reinforce and mode in ("vanilla", "dppo_tv", "dppo_kl"):
        yield _ACTOR + "clip_ratio_c", _UNBOUNDED if dual is None else dual
    yield _RC + "bypass_mode", anchored or reinforce
    yield _ACTOR + "policy_loss.loss_mode", mode
    if mode == "sapo":
        yield from ((_ACTOR + key, getattr(loss.options, key)) for key in ("tau_pos", "tau_neg"))
    if mode == "dro":
        yield _ACTOR + "policy_loss.dro_beta", loss.options.beta  # type: ignore[attr-defined]
    if reinforce and anchored:
        yield _RC + "rollout_is", "token"
        yield _RC + "rollout_is_threshold", _text(high + 1)
    elif config.applies_weight and config.correction_level in ("token", "sequence"):
        yield _RC + "rollout_is", config.correction_level
        least = config.truncated_importance_sampling_ratio_min or 0.0
        most = config.truncated_importance_sampling_ratio or _UNBOUNDED
        inside = f"{_text(least)}_{_text(most)}"
        yield _RC + "rollout_is_threshold", inside if config.truncation == "icepop" else most
        yield _RC + "rollout_is_batch_normalize", config.is_correction_batch_normalize
    found = [(option, bound) for rule in rules for option, bound in _rejection(rule)]
    if found:
        yield _RC + "rollout_rs", ",".join(option for option, _ in found)
        yield _RC + "rollout_rs_threshold", ",".join(bound for _, bound in found)
    if config.normalization == "constant":
        yield _ACTOR + "loss_agg_mode", "seq-mean-token-sum-norm"
        yield _ACTOR + "loss_scale_factor", config.loss_normalization_constant
    else:
        yield _ACTOR + "loss_agg_mode", _AGGREGATIONS[config.normalization]
    kind = config.reference_policy_kl_type
    if config.reference_policy_kl_penalty and config.use_kl_in_reward:
        yield "algorithm.use_kl_in_reward", True
        yield "algorithm.kl_penalty", "low_var_kl" if kind == "k3" else kind
        yield "algorithm.kl_ctrl.kl_coef", config.reference_policy_kl_penalty
    elif config.reference_policy_kl_penalty:
        yield _ACTOR + "use_kl_loss", True
        yield _ACTOR + "kl_loss_coef", config.reference_policy_kl_penalty
        yield _ACTOR + "kl_loss_type", _KL.get((kind, config.reference_policy_kl_gradient or kind), "low_var_kl")


def _rejection(rule: MaskRule) -> Iterator[tuple[str, str]]:
    """verl's option and its bounds, for k1 on 1/ρ."""
    if rule.level not in _LEVELS or rule.statistic not in ("ratio", "k2", "k3") or rule.budgeted:
        return
    if rule.statistic != "ratio" and math.isfinite(rule.high):
        yield f"{_LEVELS[rule.level]}_{rule.statistic}", _text(rule.high)
    elif (
        rule.statistic == "ratio"
        and math.isfinite(rule.low)
        and math.isfinite(rule.high)
        and rule.level != "sequence_max"
    ):
        yield f"{_LEVELS[rule.level]}_k1", f"{_text(math.exp(-rule.high))}_{_text(math.exp(-rule.low))}"


def _text(value: float) -> str:
    return f"{value:.12g}"


def _differences(mine: PolicyLoss, theirs: PolicyLoss) -> Iterator[str]:
    """What of a block the settings do not say, a sentence each."""
    if mine.variant != theirs.variant:
        yield f"name: {mine.config.name}: verl's settings train {theirs.config.name}"
        return
    config = mine.config
    keys = [key for key in LossConfig.model_fields if key not in _APART]
    keys += ["normalization", "applies_weight", *(["correction_level"] if config.applies_weight else [])]
    if not config.reference_policy_kl_penalty:
        keys = [key for key in keys if "kl_" not in key or key == "reference_policy_kl_penalty"]
    if config.disable_ppo_ratio or config.force_on_policy_ratio:
        keys = [key for key in keys if key not in _CLIP]
    for key in keys:
        one, other = _in_force(config, key), _in_force(theirs.config, key)
        if not _same(one, other):
            yield f"{key}: {as_yaml(one)}: verl's settings stand for {as_yaml(other)}"
    if not _same(tuple(dict(mine.options).items()), tuple(dict(theirs.options).items())):
        yield f"options: {as_yaml(dict(mine.options))}: verl's settings stand for {as_yaml(dict(theirs.options))}"
    written = [_bounds(rule) for rule in theirs.config.mask_rules]
    for rule in mine.config.mask_rules:
        if not any(_same(_bounds(rule), other) for other in written):
            yield f"{rule.key}: verl has no mask {rule.label} on {rule.log_ratio} at level {rule.level}"


def _in_force(config: LossConfig, key: str) -> Any:
    if key == "truncated_importance_sampling_type" and config.truncated_importance_sampling_ratio in (None, _UNBOUNDED):
        return None
    value = getattr(config, key)
    if value == _UNBOUNDED or (key == "truncated_importance_sampling_ratio_min" and not value):
        return None
    return value


def _bounds(rule: MaskRule) -> tuple[Any, ...]:
    budget = (rule.drop_at_most, rule.until_mean, rule.allowance)
    return rule.log_ratio, rule.level, rule.statistic, rule.when, *budget, rule.low, rule.high


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9)
    return bool(one == other)
