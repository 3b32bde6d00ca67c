"""Reading of a run's records on a Ray cluster: Ray Data maps a function over the files and keeps their order."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import nemo_geomask
from nemo_geomask.errors import ConfigError, DataError, GeomaskError, MissingDependencyError
from nemo_geomask.tools.diagnose.measure.run_survey import RecordMapper
from nemo_geomask.tools.diagnose.read.record_sources import apply_to_record

LOCAL = "local"
"""Address that starts a cluster on this machine."""
CONNECT_SECONDS = 10
"""Seconds in which a cluster must accept a connection."""


def connect_ray(address: str) -> RecordMapper:
    """Connect to a Ray cluster and return a replacement for ``record_sources.map_records`` that runs on it.

    Every node must have the files under the same paths, NumPy and pyarrow. Ray copies this package to the nodes.

    The address is one for ``ray.init``: ``auto``, ``host:port`` or ``ray://…``; ``local`` starts a cluster on this
    machine. It is ignored if Ray is initialised already.

    Raises: MissingDependencyError: Ray Data is missing. ConfigError: no cluster answers at the address.
    """
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise MissingDependencyError(f"--ray needs Ray Data ({error}): pip install 'nemo-geomask[ray]'") from None
    if not ray.is_initialized():
        _initialize_ray(ray, address)
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True  # so that the sums are added in a fixed order and are reproducible
    context.enable_progress_bars = False

    def map_on_ray(work: Callable[[Path], Any], paths: Sequence[Path], cache: Path | None) -> Iterator[Any]:
        if not paths:
            return
        rows = [{"path": str(path.absolute())} for path in paths]
        task = _RecordTask(work, None if cache is None else cache.absolute())
        for row in ray.data.from_items(rows, override_num_blocks=len(rows)).map(task).iter_rows():
            result = pickle.loads(row["result"])
            if isinstance(result, GeomaskError):
                raise result
            yield result

    return map_on_ray


def _initialize_ray(ray: Any, address: str) -> None:
    host, _, port = address.rpartition(":")
    settings: dict[str, Any] = {"runtime_env": {"py_modules": [str(Path(nemo_geomask.__file__).parent)]}}
    if address == LOCAL:
        settings["include_dashboard"] = False
    try:
        if port.isdecimal() and "://" not in address:
            # Fail fast: Ray itself keeps trying for many minutes.
            socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
        ray.init(address, log_to_driver=False, logging_level="ERROR", **settings)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"--ray {address}: no cluster answers there ({error})") from None


class _RecordTask:
    """Task that applies a function to one file on a node, and pickles the result or the package's error.

    The error is returned and not raised, because Ray would wrap a raised error in one of its own types.
    """

    def __init__(self, work: Callable[[Path], Any], cache: Path | None) -> None:
        self._work, self._cache = work, cache

    def __call__(self, row: Mapping[str, Any]) -> dict[str, bytes]:
        path = Path(row["path"])
        result: Any
        try:
            if not path.exists():
                raise DataError(
                    f"{path}: a node of the cluster can't see this file; put the records where all nodes can read them"
                )
            result = apply_to_record(self._work, path, self._cache)
        except GeomaskError as error:
            result = error
        return {"result": pickle.dumps(result)}
