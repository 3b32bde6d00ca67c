"""The pages say what the code does."""

import re
from pathlib import Path

import pytest
import torch

from nemo_geomask import build_loss
from nemo_geomask.config import reference
from nemo_geomask.config.masks import _PRESETS
from nemo_geomask.errors import ConfigError
from nemo_geomask.losses import available

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted([*DOCS.glob("*.md"), DOCS.parent / "README.md"])
LOSSES = (DOCS / "loss_reference.md").read_text(encoding="utf-8")


def test_field_table_is_current():
    assert reference.rewrite(LOSSES) == LOSSES, "run: make docs"


def test_page_without_markers_is_an_error():
    with pytest.raises(ConfigError, match="fields: begin"):
        reference.rewrite("nothing here")


@pytest.mark.parametrize(
    "name", [name for name, entries in available().items() if entries[0].distribution == "nemo-geomask"]
)
def test_every_objective_has_a_row(name):
    assert f"| `{name}` |" in LOSSES


@pytest.mark.parametrize("preset", _PRESETS)
def test_every_preset_has_a_row(preset):
    assert f"| `{preset} {{" in (DOCS / "masks.md").read_text(encoding="utf-8")


def test_every_new_metric_is_described():
    loss = build_loss({"ratio_clip_c": 3.0, "masks": [{"preset": "veto", "max": 9.0}]})
    described = set(re.findall(r"`(?:geomask/|…/)?([\w/<>]+)`", LOSSES)) | {
        f"nonfinite{suffix}" for suffix in re.findall(r"`(_\w+)`", LOSSES)
    }
    for name in loss.metric_normalizations:
        if name.startswith("geomask/"):
            short = name.removeprefix("geomask/").replace("mask/veto/", "mask/<label>/")
            assert short in described or short.removeprefix("mask/<label>/") in described, name


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
