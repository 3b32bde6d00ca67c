"""verl: settings under ``algorithm.rollout_correction``, and those of the actor's loss."""

from nemo_geomask.tools.translate.peers.verl.peer import PEER

__all__ = ["PEER"]
