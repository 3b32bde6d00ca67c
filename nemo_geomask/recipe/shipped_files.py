"""Files that come with the package: recipes, their JSON Schema and the pages that can be read in a terminal.

A file's name is its path in the repository, such as ``recipes/lab/demo.yaml``. In a wheel the files lie in
``nemo_geomask/shipped``, with the same names below it; ``setup.py`` packs what :func:`list_files` returns.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

import nemo_geomask
from nemo_geomask.errors import ConfigError

_RECIPES = ("recipes/llm/*.yaml", "recipes/lab/*.yaml", "recipes/*.json")
_PAGES = tuple(f"docs/{folder}/*.md" for folder in ("tutorials", "how_to", "reference", "background"))


def list_files() -> list[str]:
    """Return the names of all recipes, schemas and pages; not of pages that only the site has complete."""
    folder = _folder()
    recipes, pages = (
        [path for pattern in patterns for path in sorted(folder.glob(pattern))] for patterns in (_RECIPES, _PAGES)
    )
    complete = [path for path in pages if path.stem != "index" and "<!-- site: " not in path.read_text("utf-8")]
    return [path.relative_to(folder).as_posix() for path in (*recipes, *complete)]


def select_files(words: Iterable[str]) -> list[str]:
    """Return the names of the files that some names and folders stand for; of all files without any.

    Raises:
        ConfigError: there is no file or folder of a name.
    """
    names = list_files()
    selected: list[str] = []
    for word in words:
        inside = [name for name in names if name == word or name.startswith(f"{word.rstrip('/')}/")]
        if not inside:
            shipped_file(word)  # raises the error of an unknown name
        selected += inside
    return selected or names


def shipped_file(name: str) -> Path:
    """Return the path of a file that comes with the package.

    Raises:
        ConfigError: there is no file of this name.
    """
    if name not in list_files():
        raise ConfigError(f"{name}: no file of this name comes with nemo-geomask; `nemo-geomask recipes` lists them")
    return _folder() / name


def find_recipe(path: str | Path) -> Path:
    """Return the path, or that of the package's own recipe of this name if no file has it.

    The recipes that pages and help texts name, such as ``recipes/lab/demo.yaml``, can thus be used in any folder.
    """
    path = Path(path)
    is_shipped = path.suffix == ".yaml" and not os.path.exists(path) and path.as_posix() in list_files()
    return _folder() / path if is_shipped else path


def describe_file(name: str) -> str:
    """Return the first sentence of a recipe's comment, or the title of a page."""
    text = (_folder() / name).read_text(encoding="utf-8")
    if name.endswith(".md"):
        return next((line.removeprefix("# ") for line in text.splitlines() if line.startswith("# ")), "")
    if name.endswith(".json"):
        return "JSON Schema of a recipe, for editors"
    comment = re.match(r"(?:# yaml-language-server.*\n)?((?:#.*\n)*)", text)
    words = " ".join(line.removeprefix("#").strip() for line in comment[1].splitlines()) if comment else ""
    return re.split(r"(?<=[.:]) ", words, maxsplit=1)[0].rstrip(".:")


def inherited_files(names: Iterable[str]) -> list[str]:
    """Return the names with those of the shipped recipes that they inherit from, in the order of :func:`list_files`."""
    chosen = list(names)
    for name in chosen:
        parent = re.search(r"^defaults: (\S+)$", shipped_file(name).read_text(encoding="utf-8"), re.MULTILINE)
        sibling = (Path(name).parent / parent[1]).as_posix() if parent else ""
        if (_folder() / sibling).is_file() and sibling not in chosen:
            chosen.append(sibling)
    return [name for name in list_files() if name in chosen]


def copy_files(names: Collection[str], target: Path) -> list[Path]:
    """Copy files into a folder, below which they keep their names, and return their paths there.

    Raises:
        ConfigError: a name is unknown, or a file exists already and is another one; then nothing is copied.
    """
    sources = {target / name: shipped_file(name) for name in names}
    try:
        differing = [path for path, source in sources.items() if path.exists() and not _is_same(path, source)]
        if differing:
            more = f" and {len(differing) - 1} others" if len(differing) > 1 else ""
            raise ConfigError(
                f"{differing[0]}{more}: exists and differs from the file of nemo-geomask {nemo_geomask.__version__}; "
                "nothing was copied. Choose another folder, or remove the file"
            )
        for path, source in sources.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, path)
    except OSError as error:
        raise ConfigError(f"{error.filename or target}: can't be written: {error.strerror or error}") from None
    return list(sources)


def _is_same(path: Path, source: Path) -> bool:
    return path.is_file() and path.read_bytes() == source.read_bytes()


def _folder() -> Path:
    """Return the folder below which the files have their names: the wheel's, or the root of a checkout."""
    package = Path(nemo_geomask.__file__).resolve().parent
    return package / "shipped" if (package / "shipped").is_dir() else package.parent
