"""Origin of NaN in a loss or its gradient: the operation that returns the first NaN, with its file and line."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import nemo_geomask
from nemo_geomask.losses import PolicyLoss
from nemo_geomask.losses.evaluate import evaluate
from nemo_geomask.losses.raw_batch import requested_tensors, take_padded
from nemo_geomask.segments import PaddedSegments

_PACKAGE, _TORCH = (str(Path(module.__file__ or "").parent) for module in (nemo_geomask, torch))
_FRAME = re.compile(r'File "(.+)", line (\d+), in (.+)\n *(.*)')


class _FirstNan(TorchFunctionMode):
    """Record where an operation returns NaN although none of its arguments is NaN.

    Attributes:
        origin: description of the first such operation in another package, such as a plugin's, or else of the first
            one in this package; empty if there is none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.origin = ""
        self._is_final = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._is_final and _has_nan([result]) and not _has_nan([*args, *(kwargs or {}).values()]):
            frame = _innermost(traceback.extract_stack())
            # A NaN that this package makes may come from an infinite value that a plugin returned earlier or later.
            if frame is not None and (not self.origin or not frame.filename.startswith(_PACKAGE)):
                self.origin = _at(frame)
                self._is_final = not frame.filename.startswith(_PACKAGE)
        return result


def describe_origin(loss: PolicyLoss, batch: Mapping[str, Tensor], counts: tuple[Tensor, Tensor]) -> str:
    """Return where the first NaN of a loss or of its gradient comes from, as a clause; "" if that is not known.

    Args:
        loss: the loss; it runs eagerly, whatever its ``compile`` setting.
        batch: rows [B, T] with the current policy's log-probs under ``curr``.
        counts: numbers of valid sequences and tokens.
    """
    curr = batch["curr"][:, 1:].clone().requires_grad_()
    raw = take_padded(curr, batch, requested_tensors(loss.config))
    raw = raw._replace(batch_scalars=loss.for_prepared_batches().batch_scalars(batch, curr.device))
    with _FirstNan() as first_nan:
        _run(loss, raw, counts)
    if first_nan.origin:
        return f"; the first NaN comes from {first_nan.origin}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with torch.autograd.detect_anomaly():
                torch.autograd.grad(_run(loss, raw, counts), curr, allow_unused=True)
        except RuntimeError:
            # Autograd names the operation's forward call in the last warning before the error.
            text = str(caught[-1].message) if caught else ""
            frames = [traceback.FrameSummary(f, int(n), name, line=line) for f, n, name, line in _FRAME.findall(text)]
            frame = _innermost(frames)
            return "" if frame is None else f"; the first NaN is the gradient of {_at(frame)}"
    return ""


def _run(loss: PolicyLoss, raw: Any, counts: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss; frames above this function belong to it."""
    float_counts = [count.float() for count in counts]
    return evaluate(loss.config, loss.variant, loss.options, raw, PaddedSegments(), (), *float_counts)[0]


def _has_nan(values: Iterable[Any]) -> bool:
    """Return True if a tensor among the values, or in lists or tuples of them, has a NaN."""
    return any(
        _has_nan(value)
        if isinstance(value, (list, tuple))
        else isinstance(value, Tensor) and value.is_floating_point() and bool(value.isnan().any())
        for value in values
    )


def _innermost(frames: Iterable[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """Return the innermost frame of a plugin that :func:`_run` called, or else of this package."""
    package_frame = plugin_frame = None
    for frame in frames:
        if frame.filename == __file__:
            if frame.name == "_run":
                package_frame = plugin_frame = None
        elif frame.filename.startswith(_PACKAGE):
            package_frame = frame
        elif not frame.filename.startswith(_TORCH):
            plugin_frame = frame
    return plugin_frame or package_frame


def _at(frame: traceback.FrameSummary) -> str:
    return f"`{frame.line}` ({Path(frame.filename).name}, line {frame.lineno}, in {frame.name})"
