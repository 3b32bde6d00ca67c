"""Translation of other RL systems' settings into a ``loss_fn:`` block."""

from nemo_geomask.tools.translate.peer_names import nemo_rl_keys
from nemo_geomask.tools.translate.peers import PEERS
from nemo_geomask.tools.translate.translation import Translation, translate, translate_files

__all__ = ["PEERS", "Translation", "nemo_rl_keys", "translate", "translate_files"]
