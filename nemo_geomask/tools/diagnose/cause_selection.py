"""Selection of the likely cause from the causes that the records show."""

from __future__ import annotations

from collections.abc import Mapping

from nemo_geomask.tools.diagnose.causes import CAUSES, LOCATION_CAUSES, WITHIN_SEQUENCE_CAUSES, Cause
from nemo_geomask.tools.diagnose.run_evidence import Detection, Evidence

__all__ = ["select_cause"]

WITHIN_SEQUENCE_PREFERENCE = 1.25
"""Factor by which the excess share of a cause within a sequence counts more than that of other location causes.

Late tokens are mostly in long responses, so a mismatch at late positions also makes long responses stand out. The
difference within one sequence is the more specific observation.
"""


def select_cause(detections: Mapping[str, Detection], evidence: Evidence) -> Cause | None:
    """Return the likely cause, or None if the records show no cause.

    Bugs that are judged step by step come first, then the other causes in the order of :data:`CAUSES`. Of the causes
    that locate the mismatch, the one with the largest excess share is chosen.

    Args:
        detections: outcome of each cause that may be chosen, by the id of the cause.
        evidence: the evidence that the detectors read.
    """
    judged_steps = {step for step in evidence.statistics.steps if step >= evidence.first_step}
    steps_by_cause = {id_: judged_steps.intersection(detection.steps) for id_, detection in detections.items()}
    # A bug that shows only in steps before the change cannot have caused the change.
    shown = [
        cause
        for cause in CAUSES
        if cause.id in detections
        and detections[cause.id].is_shown
        and (steps_by_cause[cause.id] or not detections[cause.id].steps)
    ]
    if not shown:
        return None
    bugs_in_steps = [cause for cause in shown if cause.is_bug and steps_by_cause[cause.id]]
    if bugs_in_steps:
        # A bug in a single step may be a side effect of a bug in all steps: a shift leaves zeros, for example. So the
        # bug that most steps show is chosen, and the first in the table among bugs with as many steps.
        most_frequent = max(bugs_in_steps, key=lambda cause: len(steps_by_cause[cause.id]))
        steps = steps_by_cause[most_frequent.id]
        if 2 * len(steps) < len(judged_steps):
            # A few bad steps can look like a bug of the whole run. Such a bug must also show without those steps.
            remaining_evidence = evidence.without(steps)
            for cause in shown:
                is_bug_of_whole_run = cause.is_bug and not detections[cause.id].steps
                if is_bug_of_whole_run and cause.detect(remaining_evidence, cause.threshold).is_shown:
                    return cause
        return most_frequent
    if shown[0].id in LOCATION_CAUSES:
        return max(
            (cause for cause in shown if cause.id in LOCATION_CAUSES),
            key=lambda cause: (
                detections[cause.id].value * (WITHIN_SEQUENCE_PREFERENCE if cause.id in WITHIN_SEQUENCE_CAUSES else 1.0)
            ),
        )
    return shown[0]
