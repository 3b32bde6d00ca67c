"""Sections of the public Python names, each with its signature and docstring, for ``docs/reference/api.md``."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

PACKAGES = {
    "nemo_geomask": "Losses, log-probs and errors; imported when used",
    "nemo_geomask.config": "Settings, and what plugins derive from",
    "nemo_geomask.losses": "Objectives, the registry and the pre-step pass",
    "nemo_geomask.functional": "The papers' formulas on plain tensors",
    "nemo_geomask.segments": "Which token belongs to which sequence",
    "nemo_geomask.parallel": "Log-probs of a vocabulary that is sharded over ranks",
    "nemo_geomask.testing": "What the package promises of every loss",
    "nemo_geomask.hosts.nemo_rl": "Entry points for scripts of your own",
}


def entry(package: str, name: str, value: Any) -> str:
    """Return the section of one name."""
    try:
        signature = str(_without_types(inspect.signature(value))) if callable(value) else ""
    except (TypeError, ValueError):
        signature = ""
    text = inspect.getdoc(value) or ""
    is_own = getattr(value, "__module__", "").startswith("nemo_geomask")
    if not callable(value) or not is_own:
        text = ""  # that of the value's type, which says nothing of the value
    call = f"{name}{signature}" if len(signature) <= 90 else f"{name}(…)"
    body = f"\n\n```text\n{text}\n```" if text else ""
    return f"### {package.rpartition('.')[2]}.{name}\n\n`{call}`{body}\n"


def _without_types(signature: inspect.Signature) -> inspect.Signature:
    """Return a signature without annotations, which the docstring gives in words."""
    parameters = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    return signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)


def api_sections() -> str:
    """Return a Markdown section for each public package."""
    sections = []
    shown: set[int] = set()
    for package, title in PACKAGES.items():
        module = importlib.import_module(package)
        values = {name: getattr(module, name) for name in sorted(module.__all__) if not name.startswith("__")}
        entries = [entry(package, name, value) for name, value in values.items() if id(value) not in shown]
        shown |= {id(value) for value in values.values()}
        sections.append(f"## {package}\n\n{title}.\n")
        sections += entries
    return "\n".join(sections)
