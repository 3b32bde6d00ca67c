"""An objective in plain words and as a formula, from the settings in force."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nemo_geomask.config import LossConfig, MaskRule
from nemo_geomask.config.corrections import SIGNED
from nemo_geomask.config.strict import as_yaml
from nemo_geomask.errors import PluginError, Problem
from nemo_geomask.losses import Part, PolicyLoss
from nemo_geomask.losses.variant import Parts

__all__ = ["describe", "surrogate_parts"]


def number(value: float) -> str:
    """Short, as one would write it."""
    return f"{value:.6g}"


def describe(loss: PolicyLoss) -> tuple[Part, ...]:
    """The objective of a loss, part by part, the whole first."""
    config = loss.config
    return tuple(
        part
        for parts in (
            _whole(config),
            surrogate_parts(loss),
            _weight(config),
            _masks(config),
            _normaliser(config),
            _kl(config),
            _veto(config),
        )
        for part in parts
    )


def _name(plugin: str) -> str:
    """What follows the module."""
    return plugin.rpartition(":")[2]


def _interval(low: float | None, high: float | None) -> str:
    ends = [number(low) if low else "0", number(high) if high is not None else "∞"]
    return f"[{', '.join(ends)}]"


def _whole(config: LossConfig) -> Iterator[Part]:
    weighted, masked = config.applies_weight, bool(config.mask_rules)
    term = " · ".join([*(["w_t"] if weighted else []), *(["k_t"] if masked else []), "ℓ_t"])
    formula = f"L = Σ_t c_t · {term}"
    words = f"`{config.name}`, {'weighted' if weighted else 'not weighted'}, {'masked' if masked else 'not masked'}"
    if config.kl_coefficient:
        formula = f"L = Σ_t c_t · ({term} + {number(config.kl_coefficient)} · KL_t)"
        words += ", with a KL term to the reference"
    if config.positive_example_nll_weight:
        formula += f" + {number(config.positive_example_nll_weight)} · NLL⁺"
        words += (
            f", with the NLL of successful samples (divided by the {config.positive_example_nll_normalization}'s count)"
        )
    yield Part(formula, f"{words}.")


def surrogate_parts(loss: PolicyLoss) -> Parts:
    """The variant's :attr:`~nemo_geomask.losses.Variant.parts` under the settings in force.

    ``{name}`` in them is a setting or an option of that name; ``{low}`` and ``{high}``, the clip's bounds on the ratio;
    ``{log_low}`` and ``{log_high}``, on its logarithm; ``{outside}``, where the clip takes the gradient, in words;
    ``{dual_clip:A}``, the dual clip's bound on the loss where the advantage is called A, nothing without a dual clip.

    Raises: PluginError: a part has another name in braces.
    """
    config, variant = loss.config, loss.variant
    low, high = 1 - config.ratio_clip_min, 1 + config.ratio_clip_max
    bounds = {"low": low, "high": high, "log_low": math.log(low) if low > 0 else -math.inf, "log_high": math.log(high)}
    words = f"above {number(high)} where A > 0" + (f", or below {number(low)} where A < 0" if low > 0 else "")
    derived = {**bounds, "outside": words, "dual_clip": _DualClip(config.ratio_clip_c)}
    names = {key: _written(value) for key, value in {**dict(config), **derived, **dict(loss.options)}.items()}
    try:
        parts = variant.parts(config) if callable(variant.parts) else variant.parts
        filled = tuple(Part(*(text.format_map(names) for text in part)) for part in parts)
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        problem = f"the parts of the variant '{config.name}' can't be filled in: {type(error).__name__}: {error}"
        raise PluginError(Problem(("loss_fn.name",), problem)) from error
    named = Part(f"ℓ_t = the surrogate of {config.name}", variant.source or "This objective gives no source.")
    return filled or (named,)


def _written(value: Any) -> Any:
    if isinstance(value, str | _DualClip):
        return value
    return number(value) if isinstance(value, float) else as_yaml(value)


@dataclass(frozen=True)
class _DualClip:
    bound: float | None

    def __format__(self, advantage: str) -> str:
        return "" if self.bound is None else f", at most {number(self.bound)}·|{advantage}| where {advantage} < 0"


_POOLED = {
    "token": "{}",
    "sequence": "Σ_t {}",
    "sequence_mean": "mean_t {}",
    "sequence_max": "{}",
    "prefix_sum": "Σ_{{s≤t}} {}",
    "prefix_mean": "mean_{{s≤t}} {}",
    "prefix_min": "min_{{s≤t}} {}",
    "prefix_max": "max_{{s≤t}} {}",
    "prefix_excess": "max(w_t·|{0}|, Σ_{{s≤t}} w_s·|{0}| − b·Σ_{{s<t}} w_s)",
}
_STATISTIC = {
    "ratio": "x_t",
    "k2": "x_t²/2",
    "k3": "(exp(x_t) − 1 − x_t)",
    "prob_diff": "(p_t − q_t)",
    "binary_kl": "±KL_b(q_t ‖ p_t)",
    "binary_kl_reverse": "±KL_b(p_t ‖ q_t)",
    "binary_kl_max": "±max(KL_b(q_t ‖ p_t), KL_b(p_t ‖ q_t))",
}
_PROBABILITIES = {
    "mismatch": "p = exp(prev), q = exp(gen)",
    "policy": "p = exp(curr), q = exp(prev)",
    "total": "p = exp(curr), q = exp(gen)",
}
_KIND = {
    "ratio": "ratio",
    "k2": "k2 divergence",
    "k3": "k3 divergence",
    "prob_diff": "difference of probabilities",
    "binary_kl": "binary KL",
    "binary_kl_reverse": "reverse binary KL",
    "binary_kl_max": "binary KL, the larger of both ways,",
}
_OR = {
    "always": "",
    "negative_advantage": ", or A ≥ 0",
    "positive_advantage": ", or A ≤ 0",
    "pushing": ", or A does not push it further",
}
_LOG_RATIO = {"mismatch": "prev − gen", "policy": "curr − prev", "total": "curr − gen"}
_WHOSE = {
    "token": "token's own ratio",
    "sequence": "product of the sequence's token ratios",
    "sequence_mean": "geometric mean of the sequence's token ratios",
}


def _weight(config: LossConfig) -> Iterator[Part]:
    if config.ratio_anchor == "gen":
        yield Part("w_t = 1", "The ratio, taken against the generation engine itself, holds the mismatch.")
        return
    if not config.applies_weight:
        yield Part("w_t = 1", "Nothing corrects for the mismatch between training and generation engine.")
        return
    level = config.correction_level
    own = config.own_level
    if own is None:
        formula = f"w_t = exp({_POOLED[level].format('x_t')}), x = prev − gen"
        words = f"The weight against the mismatch is the {_WHOSE[level]}"
    else:
        formula = f"w_t = exp({_name(level)}(x_t, Σ_t x_t, n)), x = prev − gen"
        words = f"The weight against the mismatch is {own.words or f'that of {_name(level)}'}"
    bounds = _interval(config.truncated_importance_sampling_ratio_min, config.truncated_importance_sampling_ratio)
    if config.truncation is not None and config.own_truncation is not None:
        formula = f"{formula}, then {_name(config.truncation)} by {bounds}"
        words = f"{words}, {config.own_truncation.words or f'truncated by {_name(config.truncation)}'}, {bounds}"
    elif config.truncation == "tis":
        formula, words = f"{formula}, clamped to {bounds}", f"{words}, clamped to {bounds}"
    elif config.truncation == "icepop":
        formula, words = f"{formula}, 0 outside {bounds}", f"{words}, and 0 outside {bounds}"
    elif config.truncation is not None:
        formula = f"{formula}, 0 where exp(mean_t x_t) is outside {bounds}"
        words = f"{words}, and 0 in sequences whose geometric mean is outside {bounds}"
    yield Part(formula, f"{words}.")


def _masks(config: LossConfig) -> Iterator[Part]:
    for rule in config.mask_rules:
        yield Part(f"k_{rule.label} = 1 where {_kept(rule)}", f"Mask `{rule.label}` drops {_dropped(rule)}.")


def _limits(rule: MaskRule) -> tuple[str | None, str | None]:
    as_written = math.exp if rule.statistic == "ratio" else float
    low, high = (number(as_written(bound)) if math.isfinite(bound) else None for bound in (rule.low, rule.high))
    return low, high


def _kept(rule: MaskRule) -> str:
    low, high = _limits(rule)
    statistic = _STATISTIC.get(rule.statistic, f"{_name(rule.statistic)}(p_t, q_t)")
    value = _POOLED[rule.level].format(statistic.replace("_t", "_s") if rule.prefix else statistic)
    if rule.budgeted:
        value, high = f"|{value}|", "b"
    elif rule.statistic == "ratio":
        value = f"exp({value})"
    text = " ≤ ".join(part for part in (low, value, high) if part)
    text += " at every t" if rule.level == "sequence_max" else ""
    signed = rule.statistic in SIGNED or rule.measure is not None
    text += f", {_PROBABILITIES[rule.log_ratio]}" if signed else f", x = {_LOG_RATIO[rule.log_ratio]}"
    return text + _OR[rule.when]


def _dropped(rule: MaskRule) -> str:
    low, high = _limits(rule)
    ratio = rule.statistic == "ratio"
    kind = _KIND.get(rule.statistic) or (rule.measure and rule.measure.words) or _name(rule.statistic)
    whose = rule.log_ratio
    what = {
        "token": f"tokens whose {whose} {kind}",
        "sequence": f"sequences whose tokens' {whose} {kind} has a {'product' if ratio else 'sum'} that",
        "sequence_mean": f"sequences whose tokens' {whose} {kind} has {'a geometric' if ratio else 'a'} mean that",
        "sequence_max": f"sequences any of whose tokens has a {whose} {kind} that",
        "prefix_sum": f"tokens up to which the {whose} {kind} has a {'product' if ratio else 'sum'} that",
        "prefix_mean": f"tokens up to which the {whose} {kind} has {'a geometric' if ratio else 'a'} mean that",
        "prefix_min": f"tokens up to which the smallest {whose} {kind}",
        "prefix_max": f"tokens up to which the largest {whose} {kind}",
        "prefix_excess": f"tokens whose weighted {whose} {kind}, or their prefix's beyond its budget,",
    }[rule.level]
    if rule.budgeted:
        until = f"until the mean size of the batch's rest is at most {number(rule.until_mean or 0)}"
        share = f"at most {number(rule.drop_at_most or 0)} of the batch"
        return f"{what} is largest in size, {share if rule.until_mean is None else until}"
    bounds = f"is outside [{low}, {high}]" if low and high else f"is {f'below {low}' if low else f'above {high}'}"
    when = {
        "always": "",
        "negative_advantage": ", if the advantage is negative",
        "positive_advantage": ", if the advantage is positive",
        "pushing": ", if the advantage pushes it further",
    }
    return f"{what} {bounds}{when[rule.when]}"


def _normaliser(config: LossConfig) -> Iterator[Part]:
    constant = number(config.loss_normalization_constant or 0)
    formula, words = {
        "tokens": ("1 / N_tok", "Every trained token of the step counts the same."),
        "sequences": ("1 / (n_i · N_seq)", "Every sequence of the step counts the same, whatever its length."),
        "documents": ("1 / N_seq", "Tokens add up; the sum is divided by the sequences of the step."),
        "constant": (
            f"1 / ({constant} · N_seq)",
            f"Tokens add up; the sum is divided by {constant} times the sequences of the step.",
        ),
    }[config.normalization]
    if config.rules_before_step:
        names = ", ".join(f"`{rule.label}`" for rule in config.rules_before_step)
        words += f" What {names} drops leaves the counts, and all else, before the step."
    if config.rules_in_loss:
        names = ", ".join(f"`{rule.label}`" for rule in config.rules_in_loss)
        words += f" What {names} drops stays in the counts."
    yield Part(f"c_t = {formula}", words)


def _kl(config: LossConfig) -> Iterator[Part]:
    if config.kl_coefficient:
        kind, gradient = config.reference_policy_kl_type, config.reference_policy_kl_gradient
        estimator = {"k1": "x", "k2": "x²/2", "k3": "e^(−x) − 1 + x", "k4": f"exp(curr − {config.ratio_anchor})·x"}[
            kind
        ]
        weight = "exp(curr − gen)·(" if config.use_on_policy_kl_approximation else ""
        yield Part(
            f"KL_t = {weight}{estimator}{')' if weight else ''}, x = curr − ref",
            f"KL to the reference by {kind}" + (f", trained by the gradient of {gradient}." if gradient else "."),
        )


def _veto(config: LossConfig) -> Iterator[Part]:
    if config.batch_veto is not None:
        # k3 is never negative.
        mean = {"k1": "|mean_t x_t|", "k3": "mean_t (exp(x_t) − 1 − x_t)"}[config.batch_veto.estimator]
        limit = number(config.batch_veto.max)
        yield Part(
            f"no update where {mean} > {limit}, x = prev − gen, t over the batch",
            f"A batch whose mismatch KL exceeds {limit} nats per token is not trained on.",
        )
