"""A path from logits to log-probs, the setting in which it runs, and functions that several paths use."""

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

from nemo_geomask.tools.bench.logprob_cases import LogprobCase, LogprobSample, PathOutput

__all__ = [
    "Absent",
    "ForwardPass",
    "LogprobPath",
    "NotApplicable",
    "Setting",
    "divide_by_temperature",
    "import_peer",
    "output_by_autograd",
    "refuse_entropy",
    "require_gpu",
]

ForwardPass = Callable[[LogprobSample], PathOutput]
"""Forward pass of a path."""


class Absent(Exception):
    """The path is not available on this machine; the message says why."""


class NotApplicable(Exception):
    """The path lacks what the case needs; the message says what."""


@dataclass
class Setting:
    """Device, kernel and process group with which the paths run.

    Attributes:
        device: device of the logits.
        kernel: the kernel of our paths, as in :func:`nemo_geomask.kernels.choose`.
        group: the tensor-parallel group; None for one rank.
    """

    device: torch.device
    kernel: str = "auto"
    group: dist.ProcessGroup | None = None
    _folder: Any = field(default=None, repr=False)

    def required_group(self) -> Any:
        """Return the group, or a group of this process alone for paths that do not work without one."""
        if self.group is not None:
            return self.group
        if not dist.is_initialized():
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
            backend = "nccl" if self.device.type == "cuda" and dist.is_nccl_available() else "gloo"
            dist.init_process_group(backend, init_method=f"file://{self._folder.name}/store", rank=0, world_size=1)
        return dist.group.WORLD

    def close(self) -> None:
        """Destroy the group of this process alone, if :meth:`required_group` made one."""
        if self._folder is not None:
            state = sys.modules.get("megatron.core.parallel_state")
            if state is not None:
                state.destroy_model_parallel()
            dist.destroy_process_group()
            self._folder.cleanup()
            self._folder = None

    @property
    def rank(self) -> int:
        """Rank of this process in the group."""
        return 0 if self.group is None else dist.get_rank(self.group)


@dataclass(frozen=True)
class LogprobPath:
    """One implementation of the computation of log-probs, and of their gradient, from logits.

    Attributes:
        name: name in tables and in the JSON.
        prepare: function of a case and a setting that returns the path's forward pass; raises :class:`Absent` or
            :class:`NotApplicable`.
        traffic: model of the path's memory traffic, forward and backward, for logits of two bytes: a function from the
            fraction of trained tokens to bytes for each logit; None if no model is known.
        traffic_source: source of that model.
        overwrites: True if the path overwrites the logits.
    """

    name: str
    prepare: Callable[[LogprobCase, Setting], ForwardPass]
    traffic: Callable[[float], float] | None
    traffic_source: str
    overwrites: bool = False


def import_peer(name: str) -> Any:
    """Import a peer's module.

    Raises:
        Absent: the module, or a module that it imports, can't be imported.
    """
    if name not in _import_errors:
        try:
            return importlib.import_module(name)
        except Exception as error:  # a peer's import may fail in any way
            text = str(error).strip().splitlines()
            _import_errors[name] = f"{name} can't be imported: {text[0] if text else type(error).__name__}"
    raise Absent(_import_errors[name])


# Error messages of failed imports. A failed import may take long and is not repeated.
_import_errors: dict[str, str] = {}


def refuse_entropy(entropy: bool) -> None:
    """Raise NotApplicable if the case has entropies; for paths that do not compute them."""
    if entropy:
        raise NotApplicable("has no entropy")


def require_gpu(device: torch.device) -> None:
    """Raise Absent if the device is not a GPU; for paths that need one."""
    if device.type != "cuda":
        raise Absent("needs a GPU")


def divide_by_temperature(sample: LogprobSample, case: LogprobCase) -> Tensor:
    """Return the logits divided by the temperature, in the logits' type; for paths without a temperature."""
    return sample.logits if case.temperature == 1 else sample.logits / case.temperature


def output_by_autograd(logits: Tensor, logprobs: Tensor, entropy: Tensor | None = None) -> PathOutput:
    """Return a path's output whose gradient is computed by autograd."""

    def gradient(g: Tensor, h: Tensor | None) -> Tensor:
        if entropy is None or h is None:
            return torch.autograd.grad(logprobs, logits, g.to(logprobs.dtype))[0]
        return torch.autograd.grad([logprobs, entropy], logits, [g.to(logprobs.dtype), h.to(entropy.dtype)])[0]

    return PathOutput(logprobs.detach(), None if entropy is None else entropy.detach(), gradient)
