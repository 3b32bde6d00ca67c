from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.tools.lab.tiny_recipe import TINY, merged

if TYPE_CHECKING:
    from nemo_geomask.tools.lab.lab_recipe import LabRecipe


@pytest.fixture
def tiny():
    """A recipe that takes a fraction of a second a step; changes come as nested mappings."""
    # Imported here, since the tests of a GPU also start where its package pydantic is missing, and skip.
    from nemo_geomask.tools.lab.lab_recipe import LabRecipe

    def build(**change: Any) -> LabRecipe:
        return LabRecipe.read(merged(TINY, change), source="tiny")

    threads = torch.get_num_threads()
    yield build
    torch.set_num_threads(threads)
