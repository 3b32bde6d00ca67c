from __future__ import annotations

from typing import Any

import pytest
import torch

from nemo_geomask.tools.lab.lab_recipe import LabRecipe
from tests.tools.lab.tiny_recipe import TINY, merged


@pytest.fixture
def tiny():
    """A recipe that takes a fraction of a second a step; changes come as nested mappings."""

    def build(**change: Any) -> LabRecipe:
        return LabRecipe.read(merged(TINY, change), source="tiny")

    threads = torch.get_num_threads()
    yield build
    torch.set_num_threads(threads)
