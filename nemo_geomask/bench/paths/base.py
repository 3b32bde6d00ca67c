"""What a path is."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_geomask.bench.inputs import Answer, Case, Sample

__all__ = [
    "Absent",
    "Path",
    "Setting",
    "Start",
    "Unfit",
    "by_autograd",
    "module",
    "on_gpu",
    "scaled",
    "without_entropy",
]

Start = Callable[[Sample], Answer]


class Absent(Exception):
    """The path can't be had here; the message says why."""


class Unfit(Exception):
    """The path does not offer what the case asks for; the message says what."""


@dataclass
class Setting:
    """Where a path runs.

    Attributes:
        device: of the logits.
        kernel: what ours asks :func:`nemo_geomask.kernels.choose` for.
        group: the tensor-parallel group; None where there is one rank.
    """

    device: torch.device
    kernel: str = "auto"
    group: dist.ProcessGroup | None = None
    _folder: Any = field(default=None, repr=False)

    def required_group(self) -> Any:
        """A group for paths that don't work without one: of this process alone, where there is no other."""
        if self.group is not None:
            return self.group
        if not dist.is_initialized():
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
            backend = "nccl" if self.device.type == "cuda" and dist.is_nccl_available() else "gloo"
            dist.init_process_group(backend, init_method=f"file://{self._folder.name}/store", rank=0, world_size=1)
        return dist.group.WORLD

    def close(self) -> None:
        """Leave the group of this process alone, if there was one."""
        if self._folder is not None:
            state = sys.modules.get("megatron.core.parallel_state")
            if state is not None:
                state.destroy_model_parallel()
            dist.destroy_process_group()
            self._folder.cleanup()
            self._folder = None

    @property
    def rank(self) -> int:
        """In the group."""
        return 0 if self.group is None else dist.get_rank(self.group)


@dataclass(frozen=True)
class Path:
    """One implementation.

    Attributes:
        name: as reported.
        open: from a case and a setting to a function that runs the forward pass of a sample; raises :class:`Absent` or
            :class:`Unfit`.
        traffic: from the fraction of trained tokens to bytes moved an element, forward and backward, for logits of two
            bytes; None where no model holds.
        counted: what the model was counted from.
        overwrites: the path destroys the logits.
    """

    name: str
    open: Callable[[Case, Setting], Start]
    traffic: Callable[[float], float] | None
    counted: str
    overwrites: bool = False


def module(name: str) -> Any:
    """Import a peer's module.

    Raises:
        Absent: it, or something that it needs, can't be imported.
    """
    if name not in _failed:
        try:
            return importlib.import_module(name)
        except Exception as error:  # a peer's import may fail in any way
            text = str(error).strip().splitlines()
            _failed[name] = f"{name} can't be imported: {text[0] if text else type(error).__name__}"
    raise Absent(_failed[name])


# An import that fails at its end may take long, and would each time.
_failed: dict[str, str] = {}


def without_entropy(entropy: bool) -> None:
    """Raise Unfit where the entropy is wanted, of a path that has none."""
    if entropy:
        raise Unfit("has no entropy")


def on_gpu(device: torch.device) -> None:
    """Raise Absent off a GPU, of a path that needs one."""
    if device.type != "cuda":
        raise Absent("needs a GPU")


def scaled(sample: Sample, case: Case) -> Tensor:
    """Logits over the temperature, for paths that take none: in the logits' own type, as their callers do it."""
    return sample.logits if case.temperature == 1 else sample.logits / case.temperature


def by_autograd(logits: Tensor, logprobs: Tensor, entropy: Tensor | None = None) -> Answer:
    """An answer whose gradient autograd finds."""

    def gradient(g: Tensor, h: Tensor | None) -> Tensor:
        if entropy is None or h is None:
            return torch.autograd.grad(logprobs, logits, g.to(logprobs.dtype))[0]
        return torch.autograd.grad([logprobs, entropy], logits, [g.to(logprobs.dtype), h.to(entropy.dtype)])[0]

    return Answer(logprobs.detach(), None if entropy is None else entropy.detach(), gradient)
