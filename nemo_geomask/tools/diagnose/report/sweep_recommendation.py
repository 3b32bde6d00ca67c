"""Choice of a candidate from the outcomes of a sweep, and the ``loss_fn`` block that sets it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_geomask.config.strict import inline_yaml
from nemo_geomask.errors import ConfigError, DataError
from nemo_geomask.losses import build_loss
from nemo_geomask.tools.diagnose.measure.thresholds import MIN_SEQUENCES
from nemo_geomask.tools.diagnose.report.candidate_outcome import CandidateOutcome

MAX_VARIANCE = 1.1
"""Largest variance that a recommended candidate may have, as a multiple of the variance without correction."""


def pareto_front(outcomes: Sequence[CandidateOutcome]) -> list[CandidateOutcome]:
    """Return the outcomes that no other outcome beats: in bias or in variance, without being worse in either."""
    compared = [outcome for outcome in outcomes if not math.isnan(outcome.value("bias"))]
    points = [(outcome.value("bias"), outcome.value("variance")) for outcome in compared]
    return [
        outcome
        for outcome, (bias, variance) in zip(compared, points, strict=True)
        if not any(b <= bias and v <= variance and (b, v) != (bias, variance) for b, v in points)
    ]


def explain_no_recommendation(outcomes: Sequence[CandidateOutcome]) -> str:
    """Return why the replayed steps do not tell which candidate is best; empty if they do.

    Args:
        outcomes: from :func:`replay`; the first is that of ``NO_CORRECTION``.

    Raises:
        DataError: no token has a gradient, so there is nothing to compare.
    """
    uncorrected = outcomes[0]
    if not uncorrected.tokens[0]:
        if uncorrected.silent_tokens:
            raise DataError(
                f"all {uncorrected.silent_tokens:,} trained tokens of the replayed steps have an advantage of 0, so no "
                "loss has a gradient; replay other steps (--steps N, or the last ones with --last)"
            )
        raise DataError(
            "no token of the replayed steps is trained with finite log-probs of both engines: the masks leave out all "
            "of them, or prev or gen is missing; replay other steps (--steps N), or see `nemo-geomask diagnose`"
        )
    if uncorrected.sequences < MIN_SEQUENCES:
        return (
            f"only {uncorrected.sequences} sequences have a token with a gradient, and the intervals need at least "
            f"{MIN_SEQUENCES}; replay more steps (--steps N), or record more"
        )
    return ""


def recommend(
    outcomes: Sequence[CandidateOutcome], base: Mapping[str, Any] | None = None
) -> tuple[CandidateOutcome, str]:
    """Return the best outcome and the ``loss_fn`` block that sets its candidate.

    The best candidate has the least bias of those that skip no step and whose variance is at most
    :data:`MAX_VARIANCE`, judged by the upper end of its interval. If its bias is within the interval of the bias
    without correction, the outcome without correction is returned.

    Args:
        outcomes: from :func:`replay`; the first is that of ``NO_CORRECTION``.
        base: settings that all candidates share.
    """
    uncorrected = outcomes[0]
    allowed = [
        outcome
        for outcome in outcomes
        if outcome.interval("variance")[1] <= MAX_VARIANCE and not outcome.skipped and outcome.candidate.settings
    ]
    best = min(allowed, key=lambda outcome: (outcome.value("bias"), outcome.value("variance")), default=uncorrected)
    if best.value("bias") >= uncorrected.interval("bias")[0]:
        best = uncorrected
    return best, format_loss_block(best, outcomes, base or {})


def format_loss_block(best: CandidateOutcome, outcomes: Sequence[CandidateOutcome], base: Mapping[str, Any]) -> str:
    """Return the YAML of a ``loss_fn`` with the base's and a candidate's settings, and its measures as comments.

    Args:
        best: the candidate's outcome.
        outcomes: outcomes of all candidates; the first is that of ``NO_CORRECTION``.
        base: settings that all candidates share; the candidate's settings override them.
    """
    uncorrected = outcomes[0]

    def percent(outcome: CandidateOutcome, measure: str) -> str:
        low, high = (100 * end for end in outcome.interval(measure))
        return f"{100 * outcome.value(measure):.3g} % ({low:.3g} to {high:.3g})"

    low, high = best.interval("variance")
    lines = [
        f"# {best.candidate.name} ({best.candidate.source}), of {len(outcomes)} candidates:",
        f"# bias of the gradient {percent(best, 'bias')}; without correction {percent(uncorrected, 'bias')}",
        f"# variance {best.value('variance'):.3g} ({low:.3g} to {high:.3g}) times that without correction; "
        f"{MAX_VARIANCE:g} times is allowed",
        f"# removes {percent(best, 'removed')} of the tokens; shifts the mean advantage by "
        f"{best.value('advantage'):.2g}",
        "loss_fn:",
    ]
    settings = {**base, **best.candidate.settings}
    if not settings:
        return "\n".join([*lines[:-1], "loss_fn: {}"])
    settings = {"name": "clipped_pg", **settings}
    try:
        build_loss(settings)
    except ConfigError:
        # audit_fraction computes π_old for some sequences only, and the candidate needs it for all of them.
        settings.pop("audit_fraction", None)
    return "\n".join([*lines, *(f"  {key}: {inline_yaml(value)}" for key, value in settings.items())])
