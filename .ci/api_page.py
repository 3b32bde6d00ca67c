"""Write the page of the public Python names: ``python .ci/api_page.py docs/reference/api.md``.

Each name that ``nemo_geomask`` exports has its signature and its docstring, as they are in the code.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
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
HEAD = """\
# Python API

The public names, with the docstrings of the code. This page is generated. [Versions](versions.md#version-numbers) says
which names keep their meaning, and [Write an objective](../how_to/plugins.md) shows most of them in use.
"""


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


def api_page() -> str:
    """Return the page as Markdown."""
    sections = [HEAD]
    shown: set[int] = set()
    for package, title in PACKAGES.items():
        module = importlib.import_module(package)
        values = {name: getattr(module, name) for name in sorted(module.__all__) if not name.startswith("__")}
        entries = [entry(package, name, value) for name, value in values.items() if id(value) not in shown]
        shown |= {id(value) for value in values.values()}
        sections.append(f"## {package}\n\n{title}.\n")
        sections += entries
    return "\n".join(sections)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(api_page(), encoding="utf-8")
