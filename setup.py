"""What pyproject.toml can't say: files beside the package that the wheel holds, and README's links on an index page."""

from __future__ import annotations

import re
import runpy
import shutil
import sys
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


class BuildWithShippedFiles(build_py):
    """Builds the package with the files that come with it, unless it is installed in place."""

    def run(self) -> None:
        """Copy the modules, and then the files."""
        super().run()
        for source, target in self._shipped_files().items():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Return all files that are written."""
        return [*super().get_outputs(include_bytecode), *map(str, self._shipped_files().values())]

    def _shipped_files(self) -> dict[Path, Path]:
        if self.editable_mode:
            return {}
        # The module alone: its package needs what the environment of a build lacks.
        sys.path.insert(0, str(ROOT))
        shipped_files = runpy.run_path(str(ROOT / "nemo_geomask" / "recipe" / "shipped_files.py"))
        return {
            ROOT / name: Path(self.build_lib, "nemo_geomask", "shipped", name) for name in shipped_files["list_files"]()
        }


def readme() -> str:
    """Return README.md with links to the files of this version's tag, since an index page has no such files."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (version,) = re.findall(r'^__version__ = "(.*)"$', (ROOT / "nemo_geomask/__init__.py").read_text("utf-8"), re.M)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for syntax, view in ((r"!\[[^\]]*\]", "raw"), (r"(?<!!)\[[^\]]*\]", "blob")):
        address = f"{project['urls']['Repository']}/{view}/v{version}/"
        text = re.sub(rf"({syntax}\()(?!\w+:|#)", lambda match, address=address: match[1] + address, text)
    return text


setup(
    cmdclass={"build_py": BuildWithShippedFiles},
    long_description=readme(),
    long_description_content_type="text/markdown",
)
