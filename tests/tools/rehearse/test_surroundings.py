"""What the driver finds around it."""

from __future__ import annotations

import importlib.util

import pytest

from nemo_geomask.tools.rehearse.launch_environment import has_automodel


@pytest.fixture
def _not_importable(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


@pytest.mark.usefixtures("_not_importable")
def test_automodel_of_a_checkout_is_there_once_it_is_fetched(tmp_path):
    assert not has_automodel(tmp_path)
    place = tmp_path / "3rdparty" / "Automodel-workspace" / "Automodel"
    place.mkdir(parents=True)
    assert not has_automodel(tmp_path)
    (place / "nemo_automodel").mkdir()
    assert has_automodel(tmp_path)


def test_automodel_that_is_installed_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "nemo_automodel" else None)
    assert has_automodel(tmp_path)
