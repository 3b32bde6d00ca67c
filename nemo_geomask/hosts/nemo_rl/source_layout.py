"""Comparison of NeMo-RL's worker classes and batch keys with the installed source, for ``nemo-geomask doctor``.

Neither is checked when a run starts. A worker class that was moved may no longer be recognised as one that receives the
loss, and a key that was renamed is missing in the first batch, after the models were loaded.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from nemo_geomask.config.strict import nearest
from nemo_geomask.hosts.nemo_rl.accepted_apis import APIDifference
from nemo_geomask.hosts.nemo_rl.source_signature import APIState, parse_module
from nemo_geomask.recipe.input_limits import read_source

__all__ = ["DataKeys", "compare_data_keys", "compare_workers"]

_CLASS_NAME = re.compile(r"nemo_rl(\.\w+)*\.[A-Z]\w*")


@dataclass(frozen=True)
class DataKeys:
    """Keys of a batch that a module of NeMo-RL writes or reads, as string literals.

    Attributes:
        module: dotted name.
        keys: the keys.
        owner: class of the module that has them; empty for the complete module.
        optional: True if some tested versions do not have the module.
    """

    module: str
    keys: tuple[str, ...]
    owner: str = ""
    optional: bool = False

    def __str__(self) -> str:
        return f"keys of a batch in {self.name}"

    @property
    def name(self) -> str:
        """Dotted name of the module or class."""
        return f"{self.module}.{self.owner}".rstrip(".")

    def differences(self, tree: ast.Module) -> list[APIDifference]:
        """Return the keys that the parsed module lacks."""
        owners = [node for node in tree.body if getattr(node, "name", None) == self.owner] if self.owner else [tree]
        literals = {literal for owner in owners for literal in _literals(owner)}
        similar = {key: nearest(key, literals) for key in self.keys if key not in literals}
        return [
            APIDifference(
                f"{self.name}[{key!r}]",
                f"'{key}' is not mentioned" + (f"; the most similar key is '{name}'" if name else ""),
                is_missing=True,
            )
            for key, name in similar.items()
        ]


def compare_data_keys(tables: Iterable[DataKeys], package: Path) -> list[APIState]:
    """Compare keys of a batch with the source in the package folder ``package``."""
    states = []
    for keys in tables:
        tree = parse_module(keys.module, package)
        if tree is not None:
            states.append(APIState(str(keys), tuple(keys.differences(tree))))
        elif keys.optional:
            states.append(APIState(str(keys), is_absent=True))
        else:
            message = APIDifference(keys.name, "there is no such module", is_missing=True)
            states.append(APIState(str(keys), (message,)))
    return states


def compare_workers(
    workers: Mapping[str, bool],
    package: Path,
    *,
    policy: str,
    registries: Iterable[str],
    receives_loss: Callable[[str], bool],
) -> list[APIState]:
    """Compare NeMo-RL's policy workers with the source in the package folder ``package``.

    Args:
        workers: dotted names of the known worker classes; True for those that some tested versions do not have.
        package: the folder.
        policy: dotted name of the module that names the classes of the workers that it starts.
        registries: dotted names of further modules that name worker classes, among others.
        receives_loss: tells whether workers of a class, by its dotted name, are checked and prepared for the loss.
    """
    started = _class_names(policy, package)
    registered = {name for module in registries for name in _class_names(module, package) if receives_loss(name)}
    states = []
    for name, is_optional in workers.items():
        if is_optional and not {name} & (started | registered) and not _defines(name, package):
            states.append(APIState(f"worker {name}", is_absent=True))
        else:
            states.append(_worker_state(name, package, is_started=is_optional or name in started, policy=policy))
    for name in sorted((started | registered) - workers.keys()):
        if not _defines(name, package):
            states.append(_worker_state(name, package))
        elif not receives_loss(name):
            message = (
                f"{policy} names it, but nemo_geomask takes it for a worker that gets no loss, and leaves it as it is"
            )
            states.append(APIState(f"worker {name}", (APIDifference(name, message, is_missing=True),)))
        else:
            states.append(APIState(f"worker {name}", is_new=True))
    return states


def _worker_state(name: str, package: Path, *, is_started: bool = True, policy: str = "") -> APIState:
    if not _defines(name, package):
        places = _modules_with_class(name.rpartition(".")[2], package)
        message = "is not defined there" + (f"; a class of that name is in {', '.join(places)}" if places else "")
    elif not is_started:
        message = f"{policy} does not name it"
    else:
        return APIState(f"worker {name}")
    return APIState(f"worker {name}", (APIDifference(name, message, is_missing=True),))


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
