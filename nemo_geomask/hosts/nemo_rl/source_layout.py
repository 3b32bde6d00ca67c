"""Comparison of NeMo-RL's worker classes and batch keys with the installed source, for ``nemo-geomask doctor``.

Neither is checked when a run starts. A worker class that was moved may no longer be recognised as one that receives the
loss, and a key that was renamed is missing in the first batch, after the models were loaded.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from nemo_geomask.config.strict import nearest
from nemo_geomask.hosts.nemo_rl.accepted_apis import APIDifference
from nemo_geomask.hosts.nemo_rl.facts import POLICY
from nemo_geomask.hosts.nemo_rl.host_api import DATA_KEYS, POLICY_WORKERS, WORKER_REGISTRIES, DataKeys, receives_loss
from nemo_geomask.hosts.nemo_rl.source_signature import APIState, parse_module
from nemo_geomask.recipe.input_limits import read_source

_CLASS_NAME = re.compile(r"nemo_rl(\.\w+)*\.[A-Z]\w*")


def compare_layout(package: Path) -> list[APIState]:
    """Compare NeMo-RL's worker classes and the keys of a batch with the source in the package folder ``package``."""
    return [*_compare_workers(package), *(_compare_data_keys(keys, package) for keys in DATA_KEYS)]


def _compare_data_keys(keys: DataKeys, package: Path) -> APIState:
    name = f"{keys.module}.{keys.owner}".rstrip(".")
    api = f"keys of a batch in {name}"
    tree = parse_module(keys.module, package)
    if tree is None:
        return APIState(api, is_absent=True) if keys.optional else _missing(api, name, "there is no such module")
    owners = [node for node in tree.body if getattr(node, "name", None) == keys.owner] if keys.owner else [tree]
    literals = {literal for owner in owners for literal in _literals(owner)}
    differences = []
    for key in keys.keys:
        if key not in literals:
            similar = nearest(key, literals)
            message = f"'{key}' is not mentioned" + (f"; the most similar key is '{similar}'" if similar else "")
            differences.append(APIDifference(f"{name}[{key!r}]", message, is_missing=True))
    return APIState(api, tuple(differences))


def _compare_workers(package: Path) -> Iterator[APIState]:
    """Yield the states of the policy workers that are known, and of others that NeMo-RL starts or registers."""
    started = _class_names(POLICY[0], package)
    registered = {name for module in WORKER_REGISTRIES for name in _class_names(module, package) if receives_loss(name)}
    named = started | registered
    for name in [*POLICY_WORKERS, *sorted(named - POLICY_WORKERS.keys())]:
        api, is_optional = f"worker {name}", POLICY_WORKERS.get(name, True)
        if not _defines(name, package):
            if is_optional and name not in named:
                yield APIState(api, is_absent=True)
            else:
                places = _modules_with_class(name.rpartition(".")[2], package)
                place = f"; a class of that name is in {', '.join(places)}" if places else ""
                yield _missing(api, name, f"is not defined there{place}")
        elif not receives_loss(name):
            message = "names it, but nemo_geomask takes it for a worker that gets no loss, and leaves it as it is"
            yield _missing(api, name, f"{POLICY[0]} {message}")
        elif name in started or is_optional:
            yield APIState(api, is_new=name not in POLICY_WORKERS)
        else:
            yield _missing(api, name, f"{POLICY[0]} does not name it")


def _missing(api: str, name: str, message: str) -> APIState:
    return APIState(api, (APIDifference(name, message, is_missing=True),))


def _literals(node: ast.AST) -> Iterator[str]:
    for child in ast.walk(node):
        if isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield child.value


def _class_names(module: str, package: Path) -> set[str]:
    """Return the dotted class names that a module contains as string literals."""
    tree = parse_module(module, package)
    return set() if tree is None else {literal for literal in _literals(tree) if _CLASS_NAME.fullmatch(literal)}


def _defines(name: str, package: Path) -> bool:
    module, _, class_name = name.rpartition(".")
    tree = parse_module(module, package)
    return tree is not None and any(isinstance(node, ast.ClassDef) and node.name == class_name for node in tree.body)


def _modules_with_class(class_name: str, package: Path) -> list[str]:
    """Return the dotted names of the modules that define a class of this name."""
    pattern = re.compile(rf"^class {class_name}\b", re.MULTILINE)
    paths = [path for path in sorted(package.rglob("*.py")) if pattern.search(read_source(path))]
    return [".".join(("nemo_rl", *path.relative_to(package).with_suffix("").parts)) for path in paths]
