"""What a Python environment holds; runs in others' too, where nemo_geomask may be missing: standard library only."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import pickle
import platform
import sys

__all__ = ["MARK", "probe"]

MARK = "nemo-geomask-probe:"


def probe(payload: bytes | None = None) -> dict[str, object]:
    """Report on this interpreter.

    Args:
        payload: a pickled loss to open.

    Returns:
        ``python``, ``executable``, ``host``; ``packages``: version and location by name, None where there is none;
        ``version`` of nemo_geomask; ``losses``: name, value and distribution of each entry point; ``errors``: what
        failed to import or open.
    """
    errors: dict[str, str] = {}
    own: str | None = None
    try:
        own = importlib.import_module("nemo_geomask").__version__
        importlib.import_module("nemo_geomask.losses")  # brings torch and pydantic
    except Exception as error:
        errors["nemo_geomask"] = f"{type(error).__name__}: {error}"
    try:
        # It is named by what is importable, since a checkout on the path has no metadata, or another's.
        importlib.import_module("nemo_rl")
    except Exception as error:
        errors["nemo_rl"] = f"{type(error).__name__}: {error}"
    if payload is not None and "nemo_geomask" not in errors:
        try:
            pickle.loads(payload)
        except Exception as error:
            errors["loss"] = f"{type(error).__name__}: {error}"
    names = ("nemo_geomask", "nemo_rl", "torch", "pydantic", "ray", "megatron.core", "vllm")
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "host": platform.node(),
        "version": own,
        "packages": {name: _package(name) for name in names},
        "losses": sorted(
            (point.name, point.value, point.dist.name if point.dist is not None else "unknown distribution")
            for point in importlib.metadata.entry_points(group="nemo_geomask.losses")
        ),
        "errors": errors,
    }


def _package(name: str) -> tuple[str, str] | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:  # any folder of that name is a namespace
        return None
    module = sys.modules.get(name)
    version = getattr(module, "__version__", None)
    if version is None:
        try:
            version = importlib.metadata.version(name.replace(".", "-").replace("_", "-"))
        except importlib.metadata.PackageNotFoundError:
            version = "unknown"
    return str(version), spec.origin


if __name__ == "__main__":
    print(MARK + json.dumps(probe()))
