"""Objective of a loss as formulas and sentences, from its settings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nemo_geomask.config import LossConfig, MaskRule
from nemo_geomask.config.corrections import SIGNED
from nemo_geomask.errors import PluginError, Problem
from nemo_geomask.objectives.resolved_loss import ResolvedLoss
from nemo_geomask.objectives.variant import Part, Parts
from nemo_geomask.yaml_text import as_yaml


def _format_number(value: float) -> str:
    """Format a number with at most six significant digits."""
    return f"{value:.6g}"


def describe(loss: ResolvedLoss) -> tuple[Part, ...]:
    """Return the parts of a loss's objective: the total loss, then each of its terms."""
    config = loss.config
    return (
        _total_loss(config),
        *surrogate_parts(loss),
        *_proximal(config),
        _weight(config),
        *(_mask(rule) for rule in config.mask_rules),
        _normaliser(config),
        *_kl(config),
        *_veto(config),
    )


def _attribute(plugin: str) -> str:
    """Return the attribute of ``module:attribute``, or a registered name as it is."""
    return plugin.rpartition(":")[2]


def _interval(low: float | None, high: float | None) -> str:
    ends = [_format_number(low) if low else "0", _format_number(high) if high is not None else "∞"]
    return f"[{', '.join(ends)}]"


def _total_loss(config: LossConfig) -> Part:
    is_weighted, is_masked = config.applies_weight, bool(config.mask_rules)
    term = " · ".join([*(["w_t"] if is_weighted else []), *(["k_t"] if is_masked else []), "ℓ_t"])
    formula = f"L = Σ_t c_t · {term}"
    explanation = (
        f"`{config.name}`, {'weighted' if is_weighted else 'not weighted'}, {'masked' if is_masked else 'not masked'}"
    )
    if config.kl_coefficient:
        formula = f"L = Σ_t c_t · ({term} + {_format_number(config.kl_coefficient)} · KL_t)"
        explanation += ", with a KL term to the reference"
    if config.positive_example_nll_weight:
        formula += f" + {_format_number(config.positive_example_nll_weight)} · NLL⁺"
        explanation += (
            f", with the NLL of successful samples (divided by the {config.positive_example_nll_normalization}'s count)"
        )
    return Part(formula, f"{explanation}.")


def surrogate_parts(loss: ResolvedLoss) -> Parts:
    """Return the variant's :attr:`~nemo_geomask.losses.Variant.parts` with the loss's settings filled in.

    Text in braces is replaced: ``{name}`` by the setting or option of that name; ``{low}`` and ``{high}`` by the clip's
    bounds on the ratio; ``{log_low}`` and ``{log_high}`` by their logarithms; ``{outside}`` by a description of where
    the clip removes the gradient; ``{dual_clip:A}`` by the dual clip's bound on the loss, with A for the advantage, or
    by nothing without a dual clip.

    Raises:
        PluginError: a part contains another name in braces.
    """
    config, variant = loss.config, loss.variant
    low, high = 1 - config.ratio_clip_min, 1 + config.ratio_clip_max
    outside = f"above {_format_number(high)} where A > 0"
    if low > 0:
        outside += f", or below {_format_number(low)} where A < 0"
    derived = {
        "low": low,
        "high": high,
        "log_low": math.log(low) if low > 0 else -math.inf,
        "log_high": math.log(high),
        "outside": outside,
        "dual_clip": _DualClip(config.ratio_clip_c),
    }
    values = {key: _format_value(value) for key, value in {**dict(config), **derived, **dict(loss.options)}.items()}
    try:
        parts = variant.parts(config) if callable(variant.parts) else variant.parts
        filled = tuple(Part(*(text.format_map(values) for text in part)) for part in parts)
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        problem = f"the parts of the variant '{config.name}' can't be filled in: {type(error).__name__}: {error}"
        raise PluginError(Problem(("loss_fn.name",), problem)) from error
    if filled:
        return filled
    return (Part(f"ℓ_t = the surrogate of {config.name}", variant.source or "This objective names no source."),)


def _format_value(value: Any) -> Any:
    if isinstance(value, str | _DualClip):
        return value
    return _format_number(value) if isinstance(value, float) else as_yaml(value)


@dataclass(frozen=True)
class _DualClip:
    """Upper bound on the loss at a negative advantage, which ``{dual_clip:A}`` formats with A as the advantage."""

    bound: float | None

    def __format__(self, advantage: str) -> str:
        return (
            "" if self.bound is None else f", at most {_format_number(self.bound)}·|{advantage}| where {advantage} < 0"
        )


_POOLING_FORMULA = {
    "token": "{}",
    "turn": "Σ_turn {}",
    "turn_mean": "mean_turn {}",
    "sequence": "Σ_t {}",
    "sequence_mean": "mean_t {}",
    "sequence_max": "{}",
    "prefix_sum": "Σ_{{s≤t}} {}",
    "prefix_mean": "mean_{{s≤t}} {}",
    "prefix_min": "min_{{s≤t}} {}",
    "prefix_max": "max_{{s≤t}} {}",
    "prefix_excess": "max(w_t·|{0}|, Σ_{{s≤t}} w_s·|{0}| − b·Σ_{{s<t}} w_s)",
}
_STATISTICS = {
    "ratio": ("ratio", "x_t"),
    "k2": ("k2 divergence", "x_t²/2"),
    "k3": ("k3 divergence", "(exp(x_t) − 1 − x_t)"),
    "ratio_diff": ("ratio minus 1", ""),
    "ratio_abs": ("ratio, the larger of both directions,", "exp(|x_t|)"),
    "prob_diff": ("difference of probabilities", "(p_t − q_t)"),
    "binary_kl": ("binary KL", "±KL_b(q_t ‖ p_t)"),
    "binary_kl_reverse": ("reverse binary KL", "±KL_b(p_t ‖ q_t)"),
    "binary_kl_max": ("binary KL, the larger of both directions,", "±max(KL_b(q_t ‖ p_t), KL_b(p_t ‖ q_t))"),
}
"""Name and formula of each statistic."""
_SIZE_FORMULA = {"prob_diff": "|p_s − q_s|", "binary_kl": "KL_b(q_s ‖ p_s)", "ratio_diff": "|exp(x_s) − 1|"}
_PROBABILITIES = {
    "mismatch": "p = exp(prev), q = exp(gen)",
    "policy": "p = exp(curr), q = exp(prev)",
    "total": "p = exp(curr), q = exp(gen)",
}
_EXCEPTION = {
    "always": "",
    "negative_advantage": ", or A ≥ 0",
    "positive_advantage": ", or A ≤ 0",
    "pushing": ", or A does not push it further out",
}
_LOG_RATIO = {"mismatch": "prev − gen", "policy": "curr − prev", "total": "curr − gen"}
_WEIGHT_NAME = {
    "token": "token's ratio",
    "turn": "product of the token ratios of the token's turn",
    "turn_mean": "geometric mean of the token ratios of the token's turn",
    "sequence": "product of the sequence's token ratios",
    "sequence_mean": "geometric mean of the sequence's token ratios",
}


def _proximal(config: LossConfig) -> Iterator[Part]:
    if config.proximal_policy == "interpolated":
        formula = "prev = gen + α·(curr − gen), α = max(0, (v − 1 − v_t) / (v − v_t))"
        yield Part(formula, "π_old is interpolated by the token's lag v − v_t; no forward pass computes it.")


def _weight(config: LossConfig) -> Part:
    if config.ratio_anchor == "gen":
        return Part("w_t = 1", "The ratio is taken against the generation engine, so it contains the mismatch.")
    if config.use_importance_sampling_correction and config.correction_level == "masks_only":
        return Part("w_t = 1", "By is_correction_level: masks_only, the masks alone act on the mismatch.")
    if not config.applies_weight:
        return Part("w_t = 1", "Nothing corrects for the mismatch between training and generation engine.")
    level, plugin_level = config.correction_level, config.plugin_level
    if plugin_level is None:
        formula = f"w_t = exp({_POOLING_FORMULA[level].format('x_t')}), x = prev − gen"
        explanation = f"The weight against the mismatch is the {_WEIGHT_NAME[level]}"
    else:
        name = _attribute(level)
        formula = f"w_t = exp({name}(x_t, Σ_t x_t, n)), x = prev − gen"
        explanation = f"The weight against the mismatch is {plugin_level.description or f'that of {name}'}"
    if config.truncation is None:
        return Part(formula, f"{explanation}.")
    bounds = _interval(config.truncated_importance_sampling_ratio_min, config.truncated_importance_sampling_ratio)
    if config.plugin_truncation is not None:
        name = _attribute(config.truncation)
        description = config.plugin_truncation.description or f"truncated by {name}"
        return Part(f"{formula}, through {name} with the bounds {bounds}", f"{explanation}, {description}, {bounds}.")
    if config.truncation == "tis":
        return Part(f"{formula}, clamped to {bounds}", f"{explanation}, clamped to {bounds}.")
    if config.truncation == "icepop":
        return Part(f"{formula}, 0 outside {bounds}", f"{explanation}, and 0 outside {bounds}.")
    return Part(
        f"{formula}, 0 where exp(mean_t x_t) is outside {bounds}",
        f"{explanation}, and 0 in sequences whose geometric mean is outside {bounds}.",
    )


def _mask(rule: MaskRule) -> Part:
    return Part(
        f"k_{rule.label} = 1 where {_keep_condition(rule)}", f"Mask `{rule.label}` drops {_describe_dropped(rule)}."
    )


def _format_bounds(rule: MaskRule) -> tuple[str | None, str | None]:
    """Format the bounds of a mask as the recipe writes them; None where there is none."""
    from_log = math.exp if rule.statistic == "ratio" else float
    low, high = (_format_number(from_log(bound)) if math.isfinite(bound) else None for bound in (rule.low, rule.high))
    return (None if rule.level == "sequence_mean_size" else low), high  # a mean size has an upper bound alone


def _keep_condition(rule: MaskRule) -> str:
    low, high = _format_bounds(rule)
    _, statistic = _STATISTICS.get(rule.statistic, ("", f"{_attribute(rule.statistic)}(p_t, q_t)"))
    if rule.level == "sequence_mean_size":
        value = f"mean_s {_SIZE_FORMULA[rule.statistic]}"
    else:
        value = _POOLING_FORMULA[rule.level].format(statistic.replace("_t", "_s") if rule.is_prefix else statistic)
    if rule.has_budget:
        value, high = f"|{value}|", "b"
    elif rule.statistic == "ratio":
        value = f"exp({value})"
    condition = " ≤ ".join(part for part in (low, value, high) if part)
    condition += " at every t" if rule.level == "sequence_max" else ""
    is_signed = rule.statistic in SIGNED or rule.plugin_statistic is not None
    condition += f", {_PROBABILITIES[rule.log_ratio]}" if is_signed else f", x = {_LOG_RATIO[rule.log_ratio]}"
    return condition + _EXCEPTION[rule.when]


def _describe_dropped(rule: MaskRule) -> str:
    low, high = _format_bounds(rule)
    is_ratio = rule.statistic == "ratio"
    plugin_name = (rule.plugin_statistic and rule.plugin_statistic.description) or _attribute(rule.statistic)
    name, _ = _STATISTICS.get(rule.statistic, (plugin_name, ""))
    quantity = f"{rule.log_ratio} {name}"
    total, mean = ("a product", "a geometric mean") if is_ratio else ("a sum", "a mean")
    subject = {
        "token": f"tokens whose {quantity}",
        "turn": f"turns whose tokens' {quantity} has {total} that",
        "turn_mean": f"turns whose tokens' {quantity} has {mean} that",
        "sequence": f"sequences whose tokens' {quantity} has {total} that",
        "sequence_mean": f"sequences whose tokens' {quantity} has {mean} that",
        "sequence_max": f"sequences any of whose tokens has a {quantity} that",
        "prefix_sum": f"tokens up to which the {quantity} has {total} that",
        "prefix_mean": f"tokens up to which the {quantity} has {mean} that",
        "prefix_min": f"tokens up to which the smallest {quantity}",
        "prefix_max": f"tokens up to which the largest {quantity}",
        "sequence_mean_size": f"tokens of sequences whose tokens' {quantity} has a mean size that",
        "prefix_excess": f"tokens whose weighted {quantity}, or its sum over the prefix minus the prefix's budget,",
    }[rule.level]
    if rule.has_budget:
        budget = (
            f"at most {_format_number(rule.drop_at_most or 0)} of the batch"
            if rule.until_mean is None
            else f"until the mean size over the rest of the batch is at most {_format_number(rule.until_mean)}"
        )
        return f"{subject} is largest in size, {budget}"
    one_sided = f"is below {low}" if low else f"is above {high}"
    violation = f"is outside [{low}, {high}]" if low and high else one_sided
    condition = {
        "always": "",
        "negative_advantage": ", if the advantage is negative",
        "positive_advantage": ", if the advantage is positive",
        "pushing": ", if the advantage pushes it further out",
    }[rule.when]
    return f"{subject} {violation}{condition}"


def _normaliser(config: LossConfig) -> Part:
    constant = _format_number(config.loss_normalization_constant or 0)
    formula, explanation = {
        "tokens": ("1 / N_tok", "Every trained token of the step has the same weight."),
        "sequences": ("1 / (n_i · N_seq)", "Every sequence of the step has the same weight, whatever its length."),
        "documents": ("1 / N_seq", "The sum over tokens is divided by the number of sequences in the step."),
        "constant": (
            f"1 / ({constant} · N_seq)",
            f"The sum over tokens is divided by {constant} times the number of sequences in the step.",
        ),
    }[config.normalization]
    if config.rules_before_step:
        names = ", ".join(f"`{rule.label}`" for rule in config.rules_before_step)
        explanation += f" Tokens and sequences that {names} drops are removed before the step and not counted."
    if config.rules_in_loss:
        names = ", ".join(f"`{rule.label}`" for rule in config.rules_in_loss)
        scale = "left out by a factor G/K on the gradient" if config.denominator == "kept_in_loss" else "still counted"
        explanation += f" Tokens and sequences that {names} drops are {scale}."
    return Part(f"c_t = {formula}", explanation)


def _kl(config: LossConfig) -> Iterator[Part]:
    if not config.kl_coefficient:
        return
    estimator, gradient = config.reference_policy_kl_type, config.reference_policy_kl_gradient
    formula = {"k1": "x", "k2": "x²/2", "k3": "e^(−x) − 1 + x", "k4": f"exp(curr − {config.ratio_anchor})·x"}[estimator]
    if config.use_on_policy_kl_approximation:
        formula = f"exp(curr − gen)·({formula})"
    trained_by = f", trained with the gradient of {gradient}" if gradient else ""
    yield Part(f"KL_t = {formula}, x = curr − ref", f"KL to the reference, estimated by {estimator}{trained_by}.")


def _veto(config: LossConfig) -> Iterator[Part]:
    if config.batch_veto is not None:
        # k3 is never negative, so only k1 needs absolute values.
        mean = {"k1": "|mean_t x_t|", "k3": "mean_t (exp(x_t) − 1 − x_t)"}[config.batch_veto.estimator]
        limit = _format_number(config.batch_veto.max)
        yield Part(
            f"no update where {mean} > {limit}, x = prev − gen, t over the batch",
            f"A batch whose mismatch KL exceeds {limit} nats per token is not trained on.",
        )
