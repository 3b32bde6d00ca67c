"""From other systems' settings to a ``loss_fn:`` block, with what had to be converted and what remains different."""

from nemo_geomask.translate.translation import PEERS, Translation, translate, translate_files

__all__ = ["PEERS", "Translation", "translate", "translate_files"]
