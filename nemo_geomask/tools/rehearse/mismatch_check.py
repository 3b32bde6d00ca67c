"""Diagnosis of a rehearsal's records by limits that were measured on healthy tiny models.

:mod:`nemo_geomask.tools.diagnose` judges runs of real models over many steps: its limits on the size of a mismatch are
theirs, and most of its detectors need hundreds of tokens in several ranges of probability. A rehearsal has a few
hundred tokens of a random model. Here the size of the mismatch is judged by limits that were measured on rehearsals
(:mod:`~nemo_geomask.tools.rehearse.healthy_limits`). Faults that show in single log-probs (missing, NaN, above 0,
shifted) are those of ``diagnose``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from nemo_geomask.errors import GeomaskError
from nemo_geomask.tools.diagnose import (
    UNSURE_LOGPROB,
    LogprobGap,
    LogprobPairs,
    RunFiles,
    diagnose,
    find_run,
    logit_noise,
    measure_gap,
    read_step,
    select_pairs,
    survey_run,
    trainer_column,
)
from nemo_geomask.tools.rehearse.healthy_limits import HealthyLimits

MIN_TOKENS = 24
"""Trained tokens below which the size of the mismatch is not judged."""
_MIN_TOKENS_OF_SEQUENCE = 8  # below which a sequence has no typical token
NONFINITE = "log-probs that are NaN or infinite"
_FAULTS: Mapping[str, tuple[str, str, str]] = {
    # By the id of a cause of `diagnose` that needs neither many tokens nor a real model: fault, setting and way out.
    "nonfinite": (
        NONFINITE,
        "policy.precision",
        "find the overflow; loss_fn.nonfinite decides what the loss does with such sequences",
    ),
    "positive_logprobs": (
        "log-probs above 0, which no distribution has",
        "policy.generation.vllm_cfg.logprobs_mode",
        "set processed_logprobs; the sampler returns logits",
    ),
    "shifted": (
        "log-probs shifted by one token against the other engine's",
        "policy.generation",
        "column t of prev_logprobs and generation_logprobs must hold token t: look at padding, BOS and packing",
    ),
    "zero_logprobs": (
        "log-probs of exactly 0 from one engine where the other one is unsure",
        "policy.generation",
        "have the sampler return a log-prob for each token that it samples",
    ),
}
MIN_TILT = 0.4
"""Correlation of Δ with the log-prob that another temperature in one of two engines makes."""
# A filter such as top-p in the sampler alone: at most this share of tokens is likelier to the trainer, and at least
# that share less likely.
_MAX_ABOVE, _MIN_BELOW = 0.03, 0.25
# Share of tokens that one engine's top-p or top-k may leave out and the other's not: ten times the 0.4 % that were
# measured at top-p 0.95 on a random Nemotron-H, whose distributions are flat.
_MAX_OUTSIDE = 0.04


@dataclass(frozen=True)
class Mismatch:
    """Verdict on the gap between two log-probs of the same tokens: trainer and sampler, or before and at an update."""

    limits: HealthyLimits  # what is healthy
    gap: LogprobGap | None = None  # None if nothing was measured
    # by step, the noise of a typical token of the tenth of the sequences where it is largest
    noise_by_step: Mapping[int, float] = field(default_factory=dict)
    # share of tokens with a log-prob of exactly 0 from one engine where the other is unsure, if both filter by top-p
    # or top-k. The gap is without them.
    outside: float = 0.0
    cause: str = ""  # fault in a phrase; empty if there is none
    details: str = ""  # what the fault shows in
    setting: str = ""  # the setting that is likely behind it
    fix: str = ""  # the way out
    since: int | None = None  # first step that shows the fault; None if it is that of all steps
    unjudged: str = ""  # why there is no verdict; empty if there is one

    @property
    def sentence(self) -> str:
        """The verdict in one line."""
        if self.unjudged:
            return f"not judged: {self.unjudged}"
        if self.cause:
            return f"{self.cause}: {self.details}"
        outside = (
            f"; the top-p or top-k of one engine alone leaves out {self.outside:.2%} of the sampled tokens. NeMo-RL "
            "sets their log-prob to 0; loss_fn.drop_filtered_tokens: true leaves them out of weights and masks (GM104)"
        )
        return f"healthy: {self.size}{outside if self.outside else ''}"

    @property
    def size(self) -> str:
        """The gap beside what is healthy."""
        if self.gap is None:
            return "no token has both log-probs"
        usual = f" (up to {self.limits.k3:.2g}, give or take two standard errors of {self.gap.k3_error:.1g})"
        of_k3 = usual if math.isfinite(self.limits.k3) else ""
        return (
            f"noise of a typical token {self.gap.noise:.2g} ({self.limits.of}: up to {self.limits.noise:g}), "
            f"{self.gap.far:.1%} of {self.gap.tokens} tokens far apart (up to {self.limits.far:.0%}), "
            f"k3 {self.gap.k3:.2g} nats a token{of_k3}"
        )

    @property
    def is_beyond(self) -> bool:
        """True if the gap is larger than a healthy one."""
        if self.gap is None:
            return False
        # A few tokens make most of k3: it counts if it is beyond by more than luck.
        sizes = {"noise": self.gap.noise, "far": self.gap.far, "k3": self.gap.k3 - 2 * self.gap.k3_error}
        return any(size > getattr(self.limits, name) for name, size in sizes.items())

    def with_fault(self, cause: str, setting: str, fix: str, details: str = "") -> Mismatch:
        """Return the verdict with a fault; the size of the gap follows its details."""
        details = f"{details}; {self.size}" if details else self.size
        return replace(self, cause=cause, setting=setting, fix=fix, details=details)


def check_mismatch(folder: Path, limits: HealthyLimits, *, is_filtered: bool = False) -> Mismatch:
    """Diagnose the records in a folder.

    Args:
        folder: ``loss_fn.record.dir`` of the rehearsal, or its ``logger.log_dir``, where NeMo-RL logs the same
            log-probs.
        is_filtered: True if the recipe samples with top-p or top-k. NeMo-RL's trainer then filters as well, and sets
            the log-prob of a token outside its own filter to 0 (``mask_out_neg_inf_logprobs``).
    """
    try:
        run = find_run(folder)
        detections = diagnose(survey_run(run)).detections
        measured = _measure(run, limits, is_filtered=is_filtered)
    except GeomaskError as error:
        return Mismatch(limits, unjudged=str(error))
    explains_zeros = is_filtered or _looks_filtered(measured)
    for name, (cause, setting, fix) in _FAULTS.items():
        if detections[name].is_shown and not (name == "zero_logprobs" and explains_zeros):
            fault = measured.with_fault(cause, setting, fix, detections[name].description)
            return replace(fault, since=min(detections[name].steps, default=None))
    tokens = 0 if measured.gap is None else measured.gap.tokens
    if tokens < MIN_TOKENS:
        unjudged = f"only {tokens} trained tokens have log-probs of both engines; {MIN_TOKENS} are needed"
        return replace(measured, unjudged=unjudged)
    if measured.outside > _MAX_OUTSIDE:
        return measured.with_fault(
            "top-p or top-k leaves out other tokens in the trainer than in the sampler",
            "policy.generation.top_p, policy.generation.top_k",
            "set 1.0 and null, or look for why the engines' distributions differ (temperature, precision, weights)",
            f"{measured.outside:.1%} of the sampled tokens have a log-prob of exactly 0 from one engine only",
        )
    return _explain(measured) if measured.is_beyond else measured


def _looks_filtered(measured: Mismatch) -> bool:
    """Return True if many tokens are less likely to the trainer and hardly any is likelier, as after top-p or top-k.

    Where such a filter of the sampler alone leaves a single token, the sampler's log-prob of it is 0.
    """
    return measured.gap is not None and measured.gap.above <= _MAX_ABOVE and measured.gap.below >= _MIN_BELOW


def _measure(run: RunFiles, limits: HealthyLimits, *, is_filtered: bool) -> Mismatch:
    """Measure the mismatch over all trained tokens of a run."""
    # NeMo-RL leaves π_old at 0 if the loss does not need it. Before the first update, π_θ has the same values.
    parts = {
        step: [select_pairs(block, "gen", trainer_column(block)) for block in read_step(run, step)]
        for step in run.steps
    }
    pairs = {step: [np.concatenate([part[index] for part in of]) for index in range(2)] for step, of in parts.items()}
    gen, trainer = (np.concatenate([pair[index] for pair in pairs.values()]) for index in range(2))
    # A filter that leaves a single token gives it a log-prob of 0. NeMo-RL's trainer gives 0 to a token outside, too.
    has_one_zero = ((trainer == 0) & (gen < UNSURE_LOGPROB)) | ((gen == 0) & (trainer < UNSURE_LOGPROB))
    is_outside = has_one_zero & is_filtered
    outside = float(is_outside.mean()) if len(gen) else 0.0
    measure = functools.partial(measure_gap, noise=limits.noise, far_noise=limits.far_noise)
    noise = {step: value for step, of in parts.items() if (value := _noise_of_worst_tenth(of)) is not None}
    return Mismatch(limits, measure(gen[~is_outside], trainer[~is_outside]), noise, outside)


def _noise_of_worst_tenth(parts: Sequence[LogprobPairs]) -> float | None:
    """Return a typical token's noise in the tenth of the sequences where it is largest; None if all are short.

    What a few sequences have, such as those whose prompt was cached before a refit, hardly moves the median of all.
    """
    typical: list[float] = []
    for pairs in parts:
        sizes = logit_noise(pairs.second - pairs.first, pairs.first)
        sequences = np.split(sizes, np.flatnonzero(np.diff(pairs.sequence)) + 1)
        typical += [np.median(each) for each in sequences if len(each) >= _MIN_TOKENS_OF_SEQUENCE]
    return float(np.quantile(typical, 0.9)) if typical else None


def _explain(measured: Mismatch) -> Mismatch:
    """Return the measurement with the likely cause of a mismatch that is larger than a healthy one."""
    assert measured.gap is not None
    gap = measured.gap
    sides = f"{gap.below:.0%} of the tokens are less likely to the trainer and {gap.above:.0%} likelier"
    if _looks_filtered(measured):
        return measured.with_fault(
            "log-probs renormalised by top-p or top-k in the sampler only",
            "policy.generation.top_p, policy.generation.top_k",
            "set 1.0 and null, or have the trainer filter its logits as the sampler does",
            sides,
        )
    if abs(gap.tilt) >= MIN_TILT:
        shape = "sharper" if gap.tilt < 0 else "flatter"
        return measured.with_fault(
            "another temperature in the sampler than in the trainer",
            "policy.generation.temperature",
            "it must reach both engines, and vllm_cfg.logprobs_mode must be processed_logprobs",
            f"the sampler's distribution is {shape}: Δ and the log-prob correlate by {gap.tilt:.2f}",
        )
    return measured.with_fault(
        f"a larger mismatch between sampler and trainer than in {measured.limits.of}",
        "policy.precision, policy.generation",
        "run nemo-geomask diagnose on the records; compare precision, weights and positions of both engines",
        sides,
    )
