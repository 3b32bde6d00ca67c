"""What the driver finds around it."""

from __future__ import annotations

import importlib.util

from nemo_geomask.tools.rehearse.launch_environment import has_automodel


def test_automodel_is_there_if_it_is_installed_or_fetched_into_the_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "nemo_automodel" else None)
    assert has_automodel(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not has_automodel(tmp_path)
    place = tmp_path / "3rdparty" / "Automodel-workspace" / "Automodel"
    place.mkdir(parents=True)
    assert not has_automodel(tmp_path)  # a submodule that was not fetched
    (place / "nemo_automodel").mkdir()
    assert has_automodel(tmp_path)
