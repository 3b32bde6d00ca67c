"""From other systems' settings to a ``loss_fn:`` block, with what had to be converted and what remains different; and
from such a block to verl's."""

from nemo_geomask.translate.to_verl import BackTranslation, to_verl
from nemo_geomask.translate.translation import PEERS, Translation, translate, translate_files

__all__ = ["PEERS", "BackTranslation", "Translation", "to_verl", "translate", "translate_files"]
