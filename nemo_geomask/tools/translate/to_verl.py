"""Translation of a ``loss_fn:`` block into verl's settings, as far as verl has counterparts.

The result is translated back, and every difference from the original block is reported as not expressed. If a setting
is lost, even by a mistake in this module, the output therefore says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_geomask.config import LossConfig, MaskRule
from nemo_geomask.config.strict import as_yaml
from nemo_geomask.objectives.resolved_loss import ResolvedLoss, resolve_loss
from nemo_geomask.optional import require
from nemo_geomask.tools.translate.peers.verl import PEER
from nemo_geomask.tools.translate.setting_values import nested
from nemo_geomask.tools.translate.translation import translate

_RC, _ACTOR = "algorithm.rollout_correction.", "actor_rollout_ref.actor."
_MODES = {"gspo_token": "gspo", "gmpo": "geo_mean", "sapo": "sapo", "cispo": "cispo", "dro": "dro"}
_LEVELS = {"token": "token", "sequence": "seq_sum", "sequence_mean": "seq_mean", "sequence_max": "seq_max"}
_AGGREGATIONS = {"tokens": "token-mean", "sequences": "seq-mean-token-mean", "documents": "seq-mean-token-sum"}
_KL = {("k1", "k1"): "kl", ("k1", "k2"): "kl+", ("k2", "k2"): "mse", ("k3", "k3"): "low_var_kl", ("k3", "k2"): "k3+"}
# Fields that only determine how a loss runs or what it reports, and fields that are compared by their effective value.
_NOT_COMPARED = {"name", "compile", "metrics", "logprob_backend", "masks", "record", "audit_fraction", "nonfinite"}
_NOT_COMPARED |= {
    "compare_ranks",
    "token_level_loss",
    "loss_normalization",
    "is_correction_level",
    "use_importance_sampling_correction",
}
_UNBOUNDED = 1e9
"""Value that means no bound where verl requires one; verl clamps ratios to e^20 before it applies the bound."""
_CLIP = {"ratio_clip_min", "ratio_clip_max", "ratio_clip_c"}

Described = ResolvedLoss


@dataclass(frozen=True)
class BackTranslation:
    """A ``loss_fn`` block as verl's settings.

    Attributes:
        not_expressed: one sentence for each setting of the block without a counterpart; it begins with the setting.
    """

    settings: Mapping[str, Any]  # settings that differ from verl's defaults, by dotted name
    not_expressed: tuple[str, ...]
    differences: tuple[str, ...]  # one sentence for each difference in detail

    def yaml(self) -> str:
        """Return the settings as YAML, with comments."""
        yaml = require("yaml", "writing YAML needs", "recipes")
        settings = yaml.safe_dump(nested(self.settings), sort_keys=False).rstrip()
        lines = [f"# For {PEER.title} ({PEER.source}).", settings]
        lines += [f"# NOT EXPRESSED: {text}" for text in self.not_expressed]
        return "\n".join([*lines, *(f"# Remains different: {text}" for text in self.differences)]) + "\n"


def to_verl(loss_fn: Mapping[str, Any]) -> BackTranslation:
    """Return verl's settings with the same effect as a ``loss_fn:`` block.

    Args:
        loss_fn: as :func:`nemo_geomask.build_loss` takes it.

    Raises:
        ConfigError: the block is invalid.
    """
    loss, remarks = _as_verl_objective(resolve_loss(dict(loss_fn))[0])
    settings = {key: value for key, value in _settings(loss) if value != PEER.defaults[key]}
    back = translate(settings, PEER.name) if settings else translate({_ACTOR + "clip_ratio": 0.2}, PEER.name)
    not_expressed = (*_differences(loss, resolve_loss(dict(back.loss_fn))[0]), *back.not_expressed)
    return BackTranslation(settings, not_expressed, (*remarks, *back.differences))


def _as_verl_objective(loss: Described) -> tuple[Described, tuple[str, ...]]:
    """Return the same loss as an objective that verl has, and the differences that remain."""
    block, name = loss.config.explicit_settings, loss.config.name
    if name == "gspo":
        text = (
            "verl's gspo uses each token's advantage, this package the sequence's mean; they agree if all tokens of a "
            "sequence have the same advantage."
        )
        return resolve_loss({**block, "name": "gspo_token"})[0], (text,)
    if name == "clipped_pg" and (loss.config.force_on_policy_ratio or loss.config.disable_ppo_ratio):
        flags = {"name": "reinforce", "disable_ppo_ratio": False, "ratio_clip_c": None}
        if loss.config.force_on_policy_ratio:
            return resolve_loss({**block, **flags})[0], (
                "verl reports -w·A·log π as the loss, this package -w·A; the gradients are the same.",
            )
        if any(rule.log_ratio == "total" for rule in loss.config.mask_rules):
            return resolve_loss({**block, **flags})[0], ()
    if name == "dppo":
        clip = {"ratio_clip_min": 1.0, "ratio_clip_max": dict(loss.options)["cap"] - 1, "options": {}}
        anchor = {"ratio_anchor": loss.config.ratio_anchor, "masks": loss.config.masks}
        return resolve_loss({**block, "name": "cispo", **clip, **anchor})[0], ()
    return loss, ()


def _settings(loss: Described) -> Iterator[tuple[str, Any]]:
    config = loss.config
    rules = list(config.mask_rules)
    is_on_gen, is_forced = config.ratio_anchor == "gen", config.force_on_policy_ratio
    mode = _MODES.get(config.name, "vanilla")
    clip_c: float | None = config.ratio_clip_c
    low, high = config.ratio_clip_min, config.ratio_clip_max
    if mode == "cispo" and low == 1 and (dppo := [rule for rule in rules if rule.label in ("dppo_tv", "dppo_kl")]):
        mode, low, high, clip_c = dppo[0].label, -dppo[0].low, dppo[0].high, high + 1
        rules.remove(dppo[0])
    if mode == "geo_mean":
        low, high = -math.log(1 - low) if low < 1 else math.inf, math.log(1 + high)
    if config.disable_ppo_ratio:
        mode = "gpg"
    is_reinforce = is_forced or config.name == "reinforce" or (is_on_gen and mode == "cispo" and low == 1)
    if is_reinforce:
        mode = "vanilla"
        yield _RC + "loss_type", "reinforce"
    else:
        if math.isfinite(low):
            yield _ACTOR + "clip_ratio_low", low
        yield _ACTOR + "clip_ratio_high", high
    if not is_reinforce and mode in ("vanilla", "dppo_tv", "dppo_kl"):
        yield _ACTOR + "clip_ratio_c", _UNBOUNDED if clip_c is None else clip_c
    yield _RC + "bypass_mode", is_on_gen or is_reinforce
    yield _ACTOR + "policy_loss.loss_mode", mode
    if mode == "sapo":
        yield from ((_ACTOR + key, getattr(loss.options, key)) for key in ("tau_pos", "tau_neg"))
    if mode == "dro":
        yield _ACTOR + "policy_loss.dro_beta", loss.options.beta  # type: ignore[attr-defined]
    if is_reinforce and is_on_gen:
        yield _RC + "rollout_is", "token"
        yield _RC + "rollout_is_threshold", _format(high + 1)
    elif config.applies_weight and config.correction_level in ("token", "sequence"):
        yield _RC + "rollout_is", config.correction_level
        lowest = config.truncated_importance_sampling_ratio_min or 0.0
        highest = config.truncated_importance_sampling_ratio or _UNBOUNDED
        interval = f"{_format(lowest)}_{_format(highest)}"
        yield _RC + "rollout_is_threshold", interval if config.truncation == "icepop" else highest
        yield _RC + "rollout_is_batch_normalize", config.is_correction_batch_normalize
    rejections = [(option, bound) for rule in rules for option, bound in _rejection_bounds(rule)]
    if rejections:
        yield _RC + "rollout_rs", ",".join(option for option, _ in rejections)
        yield _RC + "rollout_rs_threshold", ",".join(bound for _, bound in rejections)
        if config.normalization == "tokens":
            yield "trainer.use_v1", config.denominator != "kept"
    if config.normalization == "constant":
        yield _ACTOR + "loss_agg_mode", "seq-mean-token-sum-norm"
        yield _ACTOR + "loss_scale_factor", config.loss_normalization_constant
    else:
        yield _ACTOR + "loss_agg_mode", _AGGREGATIONS[config.normalization]
    estimator = config.reference_policy_kl_type
    if config.reference_policy_kl_penalty and config.use_kl_in_reward:
        yield "algorithm.use_kl_in_reward", True
        yield "algorithm.kl_penalty", "low_var_kl" if estimator == "k3" else estimator
        yield "algorithm.kl_ctrl.kl_coef", config.reference_policy_kl_penalty
    elif config.reference_policy_kl_penalty:
        yield _ACTOR + "use_kl_loss", True
        yield _ACTOR + "kl_loss_coef", config.reference_policy_kl_penalty
        yield (
            _ACTOR + "kl_loss_type",
            _KL.get((estimator, config.reference_policy_kl_gradient or estimator), "low_var_kl"),
        )


def _rejection_bounds(rule: MaskRule) -> Iterator[tuple[str, str]]:
    """Yield verl's option for a mask, with its bounds as text; verl's k1 bounds are on 1/ρ."""
    if rule.level not in _LEVELS or rule.statistic not in ("ratio", "k2", "k3") or rule.has_budget:
        return
    if rule.statistic != "ratio" and math.isfinite(rule.high):
        yield f"{_LEVELS[rule.level]}_{rule.statistic}", _format(rule.high)
    elif (
        rule.statistic == "ratio"
        and math.isfinite(rule.low)
        and math.isfinite(rule.high)
        and rule.level != "sequence_max"
    ):
        yield f"{_LEVELS[rule.level]}_k1", f"{_format(math.exp(-rule.high))}_{_format(math.exp(-rule.low))}"


def _format(value: float) -> str:
    return f"{value:.12g}"


def _differences(original: Described, restored: Described) -> Iterator[str]:
    """Yield one sentence for each difference between a block and the translation of verl's settings."""
    if original.variant != restored.variant:
        yield f"name: {original.config.name}: verl's settings mean {restored.config.name}"
        return
    config = original.config
    keys = [key for key in LossConfig.model_fields if key not in _NOT_COMPARED]
    keys += ["normalization", "applies_weight", *(["correction_level"] if config.applies_weight else [])]
    if not config.reference_policy_kl_penalty:
        keys = [key for key in keys if "kl_" not in key or key == "reference_policy_kl_penalty"]
    if config.disable_ppo_ratio or config.force_on_policy_ratio:
        keys = [key for key in keys if key not in _CLIP]
    for key in keys:
        before, after = _effective_value(config, key), _effective_value(restored.config, key)
        if not _same(before, after):
            yield f"{key}: {as_yaml(before)}: verl's settings mean {as_yaml(after)}"
    if not _same(tuple(dict(original.options).items()), tuple(dict(restored.options).items())):
        yield f"options: {as_yaml(dict(original.options))}: verl's settings mean {as_yaml(dict(restored.options))}"
    written = [_comparable(rule) for rule in restored.config.mask_rules]
    for rule in original.config.mask_rules:
        if not any(_same(_comparable(rule), other) for other in written):
            yield f"{rule.key}: verl has no mask {rule.label} on {rule.log_ratio} at level {rule.level}"


def _effective_value(config: LossConfig, key: str) -> Any:
    """Return a field's value, with a bound that never acts as None."""
    if key == "truncated_importance_sampling_type" and config.truncated_importance_sampling_ratio in (None, _UNBOUNDED):
        return None
    value = getattr(config, key)
    if value == _UNBOUNDED or (key == "truncated_importance_sampling_ratio_min" and not value):
        return None
    return value


def _comparable(rule: MaskRule) -> tuple[Any, ...]:
    budget = (rule.drop_at_most, rule.until_mean, rule.allowance)
    return rule.log_ratio, rule.level, rule.statistic, rule.when, *budget, rule.low, rule.high


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)
    return bool(a == b)
