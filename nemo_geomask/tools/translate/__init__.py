"""Translation of other RL systems' settings into a ``loss_fn:`` block, and of such a block into verl's settings."""

from nemo_geomask.tools.translate.peers import PEERS
from nemo_geomask.tools.translate.to_verl import BackTranslation, to_verl
from nemo_geomask.tools.translate.translation import Translation, translate, translate_files

__all__ = ["PEERS", "BackTranslation", "Translation", "to_verl", "translate", "translate_files"]
