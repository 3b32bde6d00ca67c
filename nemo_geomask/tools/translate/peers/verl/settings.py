"""verl's settings by full name, with their defaults, and its presets of rollout correction."""

from __future__ import annotations

from typing import Any

from nemo_geomask.tools.translate.peer_table import PeerSettings

RC = "algorithm.rollout_correction."
ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."
TRANSFORMER = ACTOR + "megatron.override_transformer_config."
"""Section of Megatron's own settings."""
PROGRAM = "program"
"""Which of verl's programs runs; set by ``Peer.programs``."""


def runs_v1(settings: PeerSettings) -> bool:
    """Return True if verl's v1 trainer runs, which is the default of its main program."""
    return bool(settings["trainer.use_v1"]) and settings[PROGRAM] in (None, "main_ppo")


_GEO, _K3 = ("seq_mean_k1", "0.999_1.001"), ("seq_mean_k3", 0.01)


def _preset(level: str | None = None, rs: tuple[str, Any] | None = None, loss_type: str | None = None) -> Any:
    """Return a factory method of ``RolloutCorrectionConfig``: its arguments with defaults, and its settings."""
    parameters: dict[str, Any] = {"threshold" if rs is None else "is_threshold": 2.0} if level else {}
    parameters |= {"rs_threshold": rs[1]} if rs else {}
    settings: dict[str, Any] = {"rollout_is": level, "rollout_rs": rs and rs[0]}
    settings |= {"rollout_is_threshold": f"{{{next(iter(parameters))}}}"} if level else {}
    settings |= {"rollout_rs_threshold": "{rs_threshold}"} if rs else {}
    settings |= {"bypass_mode": True, "loss_type": loss_type} if loss_type else {}
    return parameters, {RC + key: value for key, value in settings.items()}


_ICEPOP = {"threshold": 5.0, "threshold_lower": 0.5}
_ICEPOP_IS = {RC + "rollout_is": "token", RC + "rollout_is_threshold": "{threshold_lower}_{threshold}"}
PRESETS = {
    "decoupled_token_is": _preset("token"),
    "decoupled_seq_is": _preset("sequence"),
    "decoupled_token_icepop": (_ICEPOP, _ICEPOP_IS),
    "decoupled_seq_is_rs": _preset("sequence", ("seq_sum_k1", "0.5_2.0")),
    "decoupled_geo_rs": _preset(None, _GEO),
    "decoupled_geo_rs_seq_tis": _preset("sequence", _GEO),
    "decoupled_geo_rs_token_tis": _preset("token", _GEO),
    "decoupled_k3_rs": _preset(None, _K3),
    "decoupled_k3_rs_seq_tis": _preset("sequence", _K3),
    "decoupled_k3_rs_token_tis": _preset("token", _K3),
    "bypass_ppo_clip": _preset(None, None, "ppo_clip"),
    "bypass_ppo_clip_geo_rs": _preset(None, _GEO, "ppo_clip"),
    "bypass_ppo_clip_k3_rs": _preset(None, _K3, "ppo_clip"),
    "bypass_pg_is": _preset("sequence", None, "reinforce"),
    "bypass_pg_token_icepop": (_ICEPOP, {**_ICEPOP_IS, RC + "bypass_mode": True, RC + "loss_type": "reinforce"}),
    "bypass_pg_geo_rs": _preset(None, _GEO, "reinforce"),
    "bypass_pg_geo_rs_seq_tis": _preset("sequence", _GEO, "reinforce"),
    "bypass_pg_geo_rs_token_tis": _preset("token", _GEO, "reinforce"),
    "disabled": _preset(),
}
