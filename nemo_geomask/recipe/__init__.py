"""Recipe files as NeMo-RL reads them, the origin of each setting, and the JSON Schema of a recipe.

The ``recipes`` extra installs what this package needs. The losses don't import it.
"""

from __future__ import annotations

from nemo_geomask.recipe.origins import Origin, Origins
from nemo_geomask.recipe.recipe_file import ROOT_VARIABLE, Recipe, load_recipe, nemo_rl_root, read_recipe

__all__ = ["ROOT_VARIABLE", "Origin", "Origins", "Recipe", "load_recipe", "nemo_rl_root", "read_recipe"]
