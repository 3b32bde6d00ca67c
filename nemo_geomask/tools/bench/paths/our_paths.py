"""Our paths: with default options, without validation of the targets, and with the gradient in the logits' memory."""

from __future__ import annotations

from typing import Any

from nemo_geomask.parallel import vocab_parallel_logprobs
from nemo_geomask.tools.bench.logprob_cases import IGNORE, LogprobCase, LogprobSample, PathOutput
from nemo_geomask.tools.bench.paths.path import ForwardPass, LogprobPath, Setting, output_by_autograd

__all__ = ["PATHS"]

_TRAFFIC_SOURCE = "kernels/gpu.py: _statistics reads a trained row, _gradients reads it again and writes every row"


def _prepare(case: LogprobCase, setting: Setting, *, in_place: bool = False, **options: Any) -> ForwardPass:
    def forward(sample: LogprobSample) -> PathOutput:
        # The gradient may overwrite only logits that are the output of an operation. A view is one, at no cost.
        logits = sample.logits.view_as(sample.logits) if in_place else sample.logits
        outputs = vocab_parallel_logprobs(
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
        return output_by_autograd(sample.logits, *(outputs if case.entropy else (outputs,)))

    return forward


def _path(name: str, *, in_place: bool = False, **options: Any) -> LogprobPath:
    return LogprobPath(
        name,
        lambda case, setting: _prepare(case, setting, in_place=in_place, **options),
        lambda fraction: 4 * fraction + 2,
        _TRAFFIC_SOURCE,
        overwrites=in_place,
    )


PATHS = (
    _path("nemo_geomask"),
    _path("nemo_geomask, unchecked targets", validate=False),
    _path("nemo_geomask, gradient in place", in_place=True),
)
