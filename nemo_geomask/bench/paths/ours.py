"""Our paths: as a caller gets them, without the check of the targets, and with the gradient in place."""

from __future__ import annotations

from typing import Any

from nemo_geomask.bench.inputs import IGNORE, Answer, Case, Sample
from nemo_geomask.bench.paths.base import Path, Setting, Start, by_autograd
from nemo_geomask.parallel import vocab_parallel_logprobs

__all__ = ["PATHS"]

_COUNTED = "kernels/gpu.py: _statistics reads a trained row, _gradients reads it again and writes every row"


def _open(case: Case, setting: Setting, *, in_place: bool = False, **options: Any) -> Start:
    def start(sample: Sample) -> Answer:
        # In place needs logits that an operation produced, as a model's are; a view is one that costs nothing.
        logits = sample.logits.view_as(sample.logits) if in_place else sample.logits
        found = vocab_parallel_logprobs(
            logits,
            sample.targets,
            group=setting.group,
            temperature=case.temperature,
            entropy=case.entropy,  # type: ignore[call-overload]
            ignore_index=IGNORE,
            inplace_gradient=in_place,
            kernel=setting.kernel,
            **options,
        )
        return by_autograd(sample.logits, *(found if case.entropy else (found,)))

    return start


def _path(name: str, *, in_place: bool = False, **options: Any) -> Path:
    return Path(
        name,
        lambda case, setting: _open(case, setting, in_place=in_place, **options),
        lambda fraction: 4 * fraction + 2,
        _COUNTED,
        overwrites=in_place,
    )


PATHS = (
    _path("nemo_geomask"),
    _path("nemo_geomask, unchecked targets", validate=False),
    _path("nemo_geomask, gradient in place", in_place=True),
)
