"""The pages say what the code does."""

import re
from pathlib import Path

import pytest
import torch

from nemo_geomask.config.presets import PRESETS
from nemo_geomask.losses import available
from tests import suite

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted([*DOCS.glob("*.md"), DOCS.parent / "README.md"])
LOSSES = (DOCS / "loss_reference.md").read_text(encoding="utf-8")


def test_the_table_of_the_suite_is_current():
    text = (DOCS / "nemo_rl.md").read_text(encoding="utf-8")
    assert suite.rewrite(text) == text, "run: make docs"


@pytest.mark.parametrize(
    "name", [name for name, entries in available().items() if entries[0].distribution == "nemo-geomask"]
)
def test_every_objective_has_a_row(name):
    assert f"| `{name}` |" in LOSSES


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_a_row(preset):
    assert f"| `{preset} {{" in (DOCS / "masks.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_readme_example_runs():
    text = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    scope = {"torch": torch}
    exec(compile(example, "README.md", "exec"), scope)
    assert scope["value"].requires_grad
    assert scope["metrics"]["geomask/mask/geometric/removed"] >= 0
