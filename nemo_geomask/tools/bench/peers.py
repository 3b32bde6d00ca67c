"""Import of peers, why one can't be measured here, and what all measured paths are given."""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from nemo_geomask.errors import ConfigError

CHUNK = 256  # tokens in a chunk of NeMo-RL's paths with logits, ``policy.logprob_chunk_size``

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Path = TypeVar("_Path")


class Absent(Exception):
    """The path is not available on this machine; the message says why."""

    status = "absent"


class NotApplicable(Absent):
    """The path lacks what the case needs; the message says what."""

    status = "not applicable"


class Setting(NamedTuple):
    """Device and process group with which the paths run."""

    device: torch.device  # device of the tensors
    group: dist.ProcessGroup | None = None  # the tensor-parallel group; None for one rank

    @property
    def rank(self) -> int:
        """Rank of this process in the group."""
        return 0 if self.group is None else dist.get_rank(self.group)

    def required_group(self) -> Any:
        """Return the group, or for paths that need one the group of this process alone; :func:`close_group` ends it."""
        if self.group is None and not dist.is_initialized():
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            backend = "nccl" if self.device.type == "cuda" and dist.is_nccl_available() else "gloo"
            folder = tempfile.mkdtemp()
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        return self.group or dist.group.WORLD

    def megatron_group(self) -> Any:
        """Return the group as megatron-core's own tensor-parallel group, which some of its functions look up."""
        group = self.required_group()
        state = import_peer("megatron.core.parallel_state")
        if not state.model_parallel_is_initialized():
            state.initialize_model_parallel(tensor_model_parallel_size=group.size())
        return state.get_tensor_model_parallel_group()


def close_group() -> None:
    """End the default process group and those of megatron-core, if there are any."""
    state = sys.modules.get("megatron.core.parallel_state")
    if state is not None and state.model_parallel_is_initialized():
        state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def import_peer(name: str) -> Any:
    """Import a peer's module.

    Raises:
        Absent: the module, or a module that it imports, can't be imported.
    """
    module = _import_or_reason(name)
    if isinstance(module, str):
        raise Absent(module)
    return module


@functools.cache  # a failed import may take long
def _import_or_reason(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # a peer's import may fail in any way
        text = str(error).strip().splitlines()
        return f"{name} can't be imported: {text[0] if text else type(error).__name__}"


def lazily(prepare: Callable[[], _Function]) -> _Function:
    """Return a function that calls ``prepare()``, whose result it is called through, when it is called first."""
    prepared = functools.cache(prepare)
    return lambda *arguments: prepared()(*arguments)  # type: ignore[return-value]


def select(paths: Mapping[str, _Path], text: str | None) -> dict[str, _Path]:
    """Return the paths that ``--paths`` selects: all for None, otherwise those that are named in full or in part.

    Raises:
        ConfigError: a word of ``--paths`` is not in the name of any path.
    """
    if text is None:
        return dict(paths)
    selected: set[str] = set()
    for word in [text] if text in paths else text.split(","):  # a full name may contain commas
        part = word.strip().lower()
        matches = [name for name in paths if name.lower() == part] or [name for name in paths if part in name.lower()]
        if not part or not matches:
            raise ConfigError(f"--paths {text}: '{part}': no such path; there are: {'; '.join(paths)}")
        selected.update(matches)
    return {name: path for name, path in paths.items() if name in selected}
