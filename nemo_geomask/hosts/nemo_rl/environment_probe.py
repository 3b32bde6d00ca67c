"""Probe of a Python environment: versions, locations and import errors of the packages that matter.

It also runs in environments where nemo_geomask is missing, so it uses only the standard library.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import pickle
import platform
import re
import sys
from pathlib import Path

MARK = "nemo-geomask-probe:"


def probe(payload: bytes | None = None) -> dict[str, object]:
    """Report on this interpreter.

    Args:
        payload: a pickled loss to load.

    Returns:
        ``python``, ``executable``, ``host``; ``packages``: version and location by name, None if missing;
        ``requires_python``: as nemo_rl declares it here, None if unknown; ``has_nemo_rl``: whether it is installed,
        and not only on the path; ``version`` of nemo_geomask and ``source``, a hash of its code; ``losses``: name,
        value and distribution of each entry point; ``errors`` of imports and of loading the loss.
    """
    errors: dict[str, str] = {}
    geomask_version: str | None = None
    geomask_source: str | None = None
    try:
        geomask = importlib.import_module("nemo_geomask")
        geomask_version, geomask_source = geomask.__version__, source_hash(Path(str(geomask.__file__)).parent)
        importlib.import_module("nemo_geomask.losses")  # brings torch and pydantic
    except Exception as error:
        errors["nemo_geomask"] = f"{type(error).__name__}: {error}"
    try:
        # The imported module tells the version: a checkout on the path has no metadata, or that of another one.
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
        "requires_python": _required_python("nemo_rl"),
        "has_nemo_rl": any(True for _ in importlib.metadata.distributions(name="nemo-rl")),
        "version": geomask_version,
        "source": geomask_source,
        "packages": {name: _package(name) for name in names},
        "losses": sorted(
            (point.name, point.value, point.dist.name if point.dist is not None else "unknown distribution")
            for point in importlib.metadata.entry_points(group="nemo_geomask.losses")
        ),
        "errors": errors,
    }


def source_hash(folder: Path) -> str:
    """Return a hash of the Python files in a package's folder, which tells builds of one version apart."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def probe_actor(actor: object, payload: bytes) -> dict[str, object]:
    """Report on the process of a Ray actor, as :func:`probe` does.

    Args:
        actor: the actor in whose process this runs; not used.
        payload: a pickled loss to load.
    """
    return probe(payload)


def _package(name: str) -> tuple[str, str] | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:  # a folder of that name is importable as a namespace
        return None
    module = sys.modules.get(name)
    version = getattr(module, "__version__", None)
    if version is None:
        try:
            version = importlib.metadata.version(name.replace(".", "-").replace("_", "-"))
        except importlib.metadata.PackageNotFoundError:
            version = "unknown"
    return str(version), spec.origin


def _required_python(name: str) -> str | None:
    """Return ``requires-python`` of a package's checkout, or else of its distribution."""
    package = _package(name)
    if package is None:
        return None
    origin = Path(package[1])
    project = origin.parent.parent / "pyproject.toml"
    if project.is_file():
        # Pythons before 3.11 have no tomllib, and they are the ones that must be reported.
        text = project.read_text(encoding="utf-8")
        match = re.search(r"""^requires-python\s*=\s*["']([^"']+)""", text, re.MULTILINE)
        return match[1] if match else None
    try:
        distribution = importlib.metadata.distribution(name.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return None
    if Path(str(distribution.locate_file(name))) != origin.parent:  # metadata of another installation
        return None
    declared: list[str] = distribution.metadata.get_all("Requires-Python") or []
    return declared[0] if declared else None


if __name__ == "__main__":
    print(MARK + json.dumps(probe()))
