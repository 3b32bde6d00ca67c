"""The layers of the NeMo-RL adapter, as the package's docstring lists them."""

import ast
import re
from pathlib import Path

from nemo_geomask.hosts import nemo_rl

FOLDER = Path(nemo_rl.__file__).parent


def listed_layers():
    """Modules of each row of the table, in order."""
    table = nemo_rl.__doc__[nemo_rl.__doc__.index("====") :]
    rows: list[list[str]] = []
    for line in table.splitlines():
        if line and not line.startswith((" ", "=")):
            rows.append([])
        if rows:
            rows[-1] += re.findall(r"``(\w+)``", line)
    return rows


def imported(name):
    for node in ast.walk(ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(nemo_rl.__name__):
            module = node.module.removeprefix(nemo_rl.__name__).lstrip(".")
            yield from [module] if module else [alias.name for alias in node.names]


def test_a_module_imports_only_from_its_own_layer_and_those_before():
    layers = listed_layers()
    assert sorted(name for layer in layers for name in layer) == sorted(
        path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__"
    )
    for number, layer in enumerate(layers):
        allowed = {name for lower in layers[: number + 1] for name in lower}
        for name in layer:
            assert set(imported(name)) <= allowed, name
