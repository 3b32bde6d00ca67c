"""Sphinx's settings for the documentation site; ``make site`` builds it."""

import re
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REPOSITORY = PROJECT["urls"]["Repository"]
PARTS = Path(__file__).parent / "_parts"
"""Parts that ``python -m tests.pages`` has made from the code."""

project = "nemo_geomask"
author = "The nemo_geomask maintainers"
copyright = "2026, The nemo_geomask maintainers"
extensions = ["myst_parser", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "_parts", "upstream"]
html_theme = "pydata_sphinx_theme"
html_title = "nemo_geomask"
html_theme_options = {
    "show_toc_level": 1,
    "navigation_with_keys": False,
    "footer_start": ["copyright"],
    "footer_end": [],
}
html_show_sourcelink = False
html_sidebars = {"index": []}
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline"]


def _adapt(app, docname, source):
    """Put the parts that are made from the code into a page, and write it as MyST has it.

    The anchors of generated tables, ``<a id="x"></a>``, become targets that links are checked against. A link to a page
    outside of this folder leads to the repository.
    """
    marker = r"\*.*`make site`.*\n<!-- site: (\w+) -->"
    text = re.sub(marker, lambda match: (PARTS / f"{match[1]}.md").read_text("utf-8"), source[0])
    text = re.sub(r'^<a id="([\w-]+)"></a>\n', r"(\1)=\n", text, flags=re.MULTILINE)
    source[0] = re.sub(r"\]\(\.\./\.\./(\w+\.md)", rf"]({REPOSITORY}/blob/main/\1", text)


def setup(app):
    """Register the hook above."""
    app.connect("source-read", _adapt)
