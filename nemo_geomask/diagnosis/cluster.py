"""The same sums over a cluster's cores: files are mapped by Ray Data, and what adds up is added up here."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import nemo_geomask
from nemo_geomask.diagnosis.sources import of_file
from nemo_geomask.errors import ConfigError, DataError, GeomaskError, MissingDependencyError

__all__ = ["over_ray"]

LOCAL = "local"


def over_ray(address: str) -> Callable[[Callable[[Path], Any], Sequence[Path], Path | None], Iterator[Any]]:
    """What stands for :func:`~nemo_geomask.diagnosis.sources.over_files` on a Ray cluster.

    Every node must see the files under the same paths, and have NumPy and pyarrow; this package is sent along.

    Args:
        address: of the cluster, as ``ray.init`` takes it: ``auto``, ``host:port``, ``ray://…``; ``local``: one is
            started on this machine. A Ray that runs already is taken as it is.

    Raises: MissingDependencyError: there is no Ray Data. ConfigError: there is no such cluster.
    """
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise MissingDependencyError(f"--ray needs Ray Data ({error}): pip install 'nemo-geomask[ray]'") from None
    if not ray.is_initialized():
        package = {"py_modules": [str(Path(nemo_geomask.__file__).parent)]}
        try:
            if (port := address.rpartition(":")[2]).isdecimal() and "://" not in address:
                # Ray itself goes on trying for many minutes.
                socket.create_connection((address.removesuffix(f":{port}"), int(port)), timeout=10).close()
            own = {"include_dashboard": False} if address == LOCAL else {}
            ray.init(address, runtime_env=package, log_to_driver=False, logging_level="ERROR", **own)
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(f"--ray {address}: no cluster answers there ({error})") from None
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True  # sums of the same order are the same to the last bit
    context.enable_progress_bars = False

    def over(work: Callable[[Path], Any], paths: Sequence[Path], cache: Path | None) -> Iterator[Any]:
        rows = [{"path": str(path.absolute())} for path in paths]
        if not rows:
            return
        mapped = ray.data.from_items(rows, override_num_blocks=len(rows)).map(
            _OnNode(work, None if cache is None else cache.absolute())
        )
        for row in mapped.iter_rows():
            found = pickle.loads(row["found"])
            if isinstance(found, GeomaskError):
                raise found
            yield found

    return over


class _OnNode:
    """``work`` of a row's file; an error of the package travels as a value, as Ray would wrap it."""

    def __init__(self, work: Callable[[Path], Any], cache: Path | None) -> None:
        self._work, self._cache = work, cache

    def __call__(self, row: Mapping[str, Any]) -> dict[str, bytes]:
        path = Path(row["path"])
        found: Any
        try:
            if not path.exists():
                raise DataError(f"{path}: a node of the cluster can't see it; put the records where all nodes do")
            found = of_file(self._work, path, self._cache)
        except GeomaskError as error:
            found = error
        return {"found": pickle.dumps(found)}
