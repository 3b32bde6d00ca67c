"""Selection of the likely cause among those that the records show."""

from __future__ import annotations

from collections.abc import Mapping

from nemo_geomask.tools.diagnose.causes import CAUSES, LOCATION_CAUSES, WITHIN_SEQUENCE_CAUSES, Cause
from nemo_geomask.tools.diagnose.run_evidence import Detection, Evidence

__all__ = ["select_cause"]

WITHIN_SEQUENCE_PREFERENCE = 1.25
"""Factor on the excess share of causes within a sequence.

Late tokens are mostly in long responses, so a mismatch at late positions also shows by length; the difference within a
sequence is more specific.
"""


def select_cause(detections: Mapping[str, Detection], evidence: Evidence) -> Cause | None:
    """Return the likely cause, or None if none is shown.

    Bugs that are judged step by step come first, then the other causes in the order of the table. The causes that
    locate the mismatch compete by their excess share.

    Args:
        detections: outcome for each cause that may be chosen, by its id.
        evidence: the evidence that they were judged by.
    """
    counted = {step for step in evidence.statistics.steps if step >= evidence.first_step}
    counted_steps = {id_: counted.intersection(detection.steps) for id_, detection in detections.items()}
    # A bug that only steps before the change show is not its cause.
    shown = [
        cause
        for cause in CAUSES
        if cause.id in detections
        and detections[cause.id].is_shown
        and (counted_steps[cause.id] or not detections[cause.id].steps)
    ]
    if not shown:
        return None
    bugs_by_step = [cause for cause in shown if cause.is_bug and counted_steps[cause.id]]
    if bugs_by_step:
        # A bug in a single step may be a side effect of one that all steps show: a shift leaves zeros, for example.
        # So the bug with the most steps counts; among equals, the first of the table.
        most_frequent = max(bugs_by_step, key=lambda cause: len(counted_steps[cause.id]))
        steps = counted_steps[most_frequent.id]
        if 2 * len(steps) < len(counted):
            # A few bad steps can look like a bug of the whole run: it must show in the other steps, too.
            other_steps = evidence.without(steps)
            for cause in shown:
                is_of_whole_run = cause.is_bug and not detections[cause.id].steps
                if is_of_whole_run and cause.detect(other_steps, cause.threshold).is_shown:
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
