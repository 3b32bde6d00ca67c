"""An objective in plain words and as a formula, from the settings in force."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from nemo_geomask.config import LossConfig, MaskRule
from nemo_geomask.losses import PolicyLoss

__all__ = ["SURROGATES", "Part", "describe"]


@dataclass(frozen=True)
class Part:
    """One part of the objective.

    Attributes:
        formula: a line of the formula.
        words: the same as a sentence.
    """

    formula: str
    words: str


def describe(loss: PolicyLoss) -> tuple[Part, ...]:
    """The objective of a loss, part by part, the whole first."""
    config = loss.config
    known = SURROGATES.get(config.name)
    surrogate = known(config, loss.options) if known else _foreign(config, loss.variant.source)
    return tuple(
        part
        for parts in (
            _whole(config),
            surrogate,
            _weight(config),
            _masks(config),
            _normaliser(config),
            _kl(config),
            _veto(config),
        )
        for part in parts
    )


def _number(value: float) -> str:
    return f"{value:.6g}"


def _interval(low: float | None, high: float | None) -> str:
    ends = [_number(low) if low else "0", _number(high) if high is not None else "∞"]
    return f"[{', '.join(ends)}]"


def _whole(config: LossConfig) -> Iterator[Part]:
    weighted, masked = config.use_importance_sampling_correction, bool(config.mask_rules)
    term = " · ".join([*(["w_t"] if weighted else []), *(["k_t"] if masked else []), "ℓ_t"])
    formula = f"L = Σ_t c_t · {term}"
    words = f"`{config.name}`, {'weighted' if weighted else 'not weighted'}, {'masked' if masked else 'not masked'}"
    if config.kl_coefficient:
        formula = f"L = Σ_t c_t · ({term} + {_number(config.kl_coefficient)} · KL_t)"
        words += ", with a KL term to the reference"
    if config.positive_example_nll_weight:
        formula += f" + {_number(config.positive_example_nll_weight)} · NLL⁺"
        words += (
            f", with the NLL of successful samples (divided by the {config.positive_example_nll_normalization}'s count)"
        )
    yield Part(formula, f"{words}.")


# --- the surrogate


def _clip(config: LossConfig, ratio: str) -> str:
    return f"clip({ratio}, {_number(1 - config.ratio_clip_min)}, {_number(1 + config.ratio_clip_max)})"


def _bounds(config: LossConfig) -> str:
    high, low = 1 + config.ratio_clip_max, 1 - config.ratio_clip_min
    return f"above {_number(high)} where A > 0" + (f", or below {_number(low)} where A < 0" if low > 0 else "")


def _clipped(config: LossConfig, ratio: str, advantage: str) -> str:
    loss = f"max(−{ratio}·{advantage}, −{_clip(config, ratio)}·{advantage})"
    if config.ratio_clip_c is not None:
        loss += f", at most {_number(config.ratio_clip_c)}·|{advantage}| where {advantage} < 0"
    return loss


_SEQUENCE_RATIO = Part(
    "s = exp(mean_t(curr − prev))", "The policy ratio is one a sequence: the geometric mean of its tokens'."
)
_TOKEN_RATIO = Part("r_t = exp(curr − prev)", "The policy ratio is each token's own.")


def _clipped_pg(config: LossConfig, options: Any) -> Iterator[Part]:
    if config.force_on_policy_ratio:
        yield Part("ℓ_t = −r_t·A_t, r_t = 1", "The policy ratio is taken to be 1: plain policy gradient, on-policy.")
    elif config.disable_ppo_ratio:
        yield Part("ℓ_t = −A_t·curr", "REINFORCE: the advantage times the log-prob, no ratio and no clip.")
    elif config.use_cispo:
        yield from _cispo(config, options)
    else:
        ratio = "s" if config.sequence_level_importance_ratios else "r_t"
        yield Part(
            f"ℓ_t = {_clipped(config, ratio, 'A_t')}", f"PPO's clip: no gradient from a ratio {_bounds(config)}."
        )
        yield _SEQUENCE_RATIO if ratio == "s" else _TOKEN_RATIO


def _gspo(config: LossConfig, options: Any) -> Iterator[Part]:
    yield Part(f"ℓ = {_clipped(config, 's', 'Ā')}", f"GSPO's clip: no gradient from a ratio {_bounds(config)}.")
    yield _SEQUENCE_RATIO


def _gspo_token(config: LossConfig, options: Any) -> Iterator[Part]:
    yield Part(
        f"ℓ_t = {_clipped(config, 's_t', 'A_t')}", f"GSPO-token's clip: no gradient from a ratio {_bounds(config)}."
    )
    yield Part(
        "s_t = sg[exp(mean_t(curr − prev))]·π/sg[π]",
        "The policy ratio has the sequence's value and each token's own gradient.",
    )


def _gmpo(config: LossConfig, options: Any) -> Iterator[Part]:
    low = math.log1p(-config.ratio_clip_min) if config.ratio_clip_min < 1 else -math.inf
    high = math.log1p(config.ratio_clip_max)
    yield Part(
        "ℓ = −Ā·exp(mean_t x_t)",
        f"GMPO: the geometric mean of token ratios, each clipped {_bounds(config)}.",
    )
    yield Part(
        f"x_t = min(curr − prev, {_number(high)}) where Ā > 0, max(curr − prev, {_number(low)}) where Ā < 0",
        "The clip acts where it would make the update larger.",
    )


def _cispo(config: LossConfig, options: Any) -> Iterator[Part]:
    yield Part(
        f"ℓ_t = −sg({_clip(config, 'r_t')})·A_t·curr",
        "CISPO: every token keeps its gradient; the clipped ratio is a weight only.",
    )
    yield _TOKEN_RATIO


def _sapo(config: LossConfig, options: Any) -> Iterator[Part]:
    yield Part(
        "ℓ_t = −(4/τ)·σ(τ·(r_t − 1))·A_t",
        f"SAPO: a soft gate in place of the clip, τ = {_number(options.tau_pos)} where A > 0, "
        f"{_number(options.tau_neg)} elsewhere.",
    )
    yield _TOKEN_RATIO


def _foreign(config: LossConfig, source: str) -> Iterator[Part]:
    yield Part("ℓ_t = the surrogate of " + config.name, source or "This objective gives no source.")


SURROGATES: dict[str, Callable[[LossConfig, Any], Iterator[Part]]] = {
    "clipped_pg": _clipped_pg,
    "gspo": _gspo,
    "gspo_token": _gspo_token,
    "gmpo": _gmpo,
    "cispo": _cispo,
    "sapo": _sapo,
}


# --- around it

_POOLED = {"token": "{}", "sequence": "Σ_t {}", "sequence_mean": "mean_t {}", "sequence_max": "{}"}
_STATISTIC = {"ratio": "x_t", "k2": "x_t²/2", "k3": "(exp(x_t) − 1 − x_t)"}
_LOG_RATIO = {"mismatch": "prev − gen", "policy": "curr − prev", "total": "curr − gen"}
_WHOSE = {
    "token": "token's own ratio",
    "sequence": "product of the sequence's token ratios",
    "sequence_mean": "geometric mean of the sequence's token ratios",
}


def _weight(config: LossConfig) -> Iterator[Part]:
    if not config.use_importance_sampling_correction:
        yield Part("w_t = 1", "Nothing corrects for the mismatch between training and generation engine.")
        return
    level = config.correction_level
    formula = f"w_t = exp({_POOLED[level].format('x_t')}), x = prev − gen"
    words = f"The weight against the mismatch is the {_WHOSE[level]}"
    bounds = _interval(config.truncated_importance_sampling_ratio_min, config.truncated_importance_sampling_ratio)
    if config.truncation == "tis":
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
    low, high = (_number(as_written(bound)) if math.isfinite(bound) else None for bound in (rule.low, rule.high))
    return low, high


def _kept(rule: MaskRule) -> str:
    low, high = _limits(rule)
    value = _POOLED[rule.level].format(_STATISTIC[rule.statistic])
    value = f"exp({value})" if rule.statistic == "ratio" else value
    text = " ≤ ".join(part for part in (low, value, high) if part)
    text += " at every t" if rule.level == "sequence_max" else ""
    text += f", x = {_LOG_RATIO[rule.log_ratio]}"
    return text + {"always": "", "negative_advantage": ", or A ≥ 0", "positive_advantage": ", or A ≤ 0"}[rule.when]


def _dropped(rule: MaskRule) -> str:
    low, high = _limits(rule)
    ratio = rule.statistic == "ratio"
    kind = "ratio" if ratio else f"{rule.statistic} divergence"
    whose = rule.log_ratio
    what = {
        "token": f"tokens whose {whose} {kind}",
        "sequence": f"sequences whose tokens' {whose} {kind} has a {'product' if ratio else 'sum'} that",
        "sequence_mean": f"sequences whose tokens' {whose} {kind} has {'a geometric' if ratio else 'a'} mean that",
        "sequence_max": f"sequences any of whose tokens has a {whose} {kind} that",
    }[rule.level]
    bounds = f"is outside [{low}, {high}]" if low and high else f"is {f'below {low}' if low else f'above {high}'}"
    when = {
        "always": "",
        "negative_advantage": ", if the advantage is negative",
        "positive_advantage": ", if the advantage is positive",
    }
    return f"{what} {bounds}{when[rule.when]}"


def _normaliser(config: LossConfig) -> Iterator[Part]:
    constant = _number(config.loss_normalization_constant or 0)
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
        estimator = {"k1": "x", "k2": "x²/2", "k3": "e^(−x) − 1 + x", "k4": "(π/π_old)·x"}[kind]
        weight = "exp(curr − gen)·(" if config.use_on_policy_kl_approximation else ""
        yield Part(
            f"KL_t = {weight}{estimator}{')' if weight else ''}, x = curr − ref",
            f"KL to the reference by {kind}" + (f", trained by the gradient of {gradient}." if gradient else "."),
        )


def _veto(config: LossConfig) -> Iterator[Part]:
    if config.batch_veto is not None:
        value = {"k1": "−x_t", "k3": "(exp(x_t) − 1 − x_t)"}[config.batch_veto.estimator]
        limit = _number(config.batch_veto.max)
        yield Part(
            f"no update where mean_t {value} > {limit}, x = prev − gen, t over the batch",
            f"A batch whose mismatch KL exceeds {limit} nats per token is not trained on.",
        )
