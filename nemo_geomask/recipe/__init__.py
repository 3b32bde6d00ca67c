"""Recipe files, read as NeMo-RL reads them; where each setting was written; their JSON Schema. No loss needs them."""

from __future__ import annotations

from nemo_geomask.recipe.origins import Origin, Origins
from nemo_geomask.recipe.read import ROOT_VARIABLE, Recipe, load_recipe, nemo_rl_root, read_recipe

__all__ = ["ROOT_VARIABLE", "Origin", "Origins", "Recipe", "load_recipe", "nemo_rl_root", "read_recipe"]
