"""Translation of other RL systems' settings into a ``loss_fn:`` block."""

from nemo_geomask.tools.translate.peers import PEERS
from nemo_geomask.tools.translate.translation import Translation, translate, translate_files

__all__ = ["PEERS", "Translation", "translate", "translate_files"]
