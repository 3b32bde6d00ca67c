"""verl's settings by full name, with their defaults, and its presets of rollout correction."""

from __future__ import annotations

from typing import Any

RC = "algorithm.rollout_correction."
ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."
TRANSFORMER = ACTOR + "megatron.override_transformer_config."
"""Section of Megatron's own settings."""
PROGRAM = "program"
"""Which of verl's programs runs; set by ``Peer.programs``."""

DEFAULTS: dict[str, Any] = {
    RC + "rollout_is": None,
    RC + "rollout_is_threshold": 2.0,
    RC + "rollout_is_batch_normalize": False,
    RC + "rollout_rs": None,
    RC + "rollout_rs_threshold": None,
    RC + "bypass_mode": False,
    "trainer.use_v1": True,
    PROGRAM: None,
    "async_training.use_rollout_log_probs": False,
    ACTOR + "use_rollout_log_probs": False,
    RC + "loss_type": "ppo_clip",
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.type": "fixed",
    "data.max_response_length": None,
    ROLLOUT + "logprobs_mode": "processed_logprobs",
    TRANSFORMER + "moe_aux_loss_coeff": 0.0,
    TRANSFORMER + "moe_z_loss_coeff": None,
    TRANSFORMER + "dsa_indexer_loss_coeff": 0.0,
    ACTOR + "policy_loss.loss_mode": "vanilla",
    ACTOR + "policy_loss.dro_beta": None,
    # Settings of modes that have no counterpart.
    ACTOR + "policy_loss.clip_cov_ratio": 0.0002,
    ACTOR + "policy_loss.clip_cov_lb": 1.0,
    ACTOR + "policy_loss.clip_cov_ub": 5.0,
    ACTOR + "policy_loss.kl_cov_ratio": 0.0002,
    ACTOR + "policy_loss.ppo_kl_coef": 0.1,
    ACTOR + "clip_ratio": 0.2,
    ACTOR + "clip_ratio_low": 0.2,
    ACTOR + "clip_ratio_high": 0.2,
    ACTOR + "clip_ratio_c": 3.0,
    ACTOR + "tau_pos": 1.0,
    ACTOR + "tau_neg": 1.05,
    ACTOR + "loss_agg_mode": "token-mean",
    ACTOR + "loss_scale_factor": None,
    ACTOR + "entropy_coeff": 0,
    ACTOR + "use_kl_loss": False,
    ACTOR + "kl_loss_coef": 0.001,
    ACTOR + "kl_loss_type": "low_var_kl",
}
_MTP = "policy.megatron_cfg.mtp_num_layers"
OUTSIDE_LOSS_FN = {
    ACTOR + "ppo_epochs": "there is always one pass over a batch, with several steps if "
    "policy.train_global_batch_size is smaller than the rollout batch",
    ACTOR + "ppo_mini_batch_size": "policy.train_global_batch_size, in responses",
    ACTOR + "use_torch_compile": "loss_fn.compile, whose default is auto",
    TRANSFORMER + "moe_router_load_balancing_type": "policy.megatron_cfg.moe_router_load_balancing_type",
    "actor_rollout_ref.model.mtp.enable": _MTP,
    "actor_rollout_ref.model.mtp.enable_train": _MTP,
    "actor_rollout_ref.model.mtp.mtp_loss_scaling_factor": "policy.megatron_cfg.mtp_loss_scaling_factor",
    "actor_rollout_ref.rollout.top_k": "policy.generation.top_k",
    "rollout.n": "grpo.num_generations_per_prompt",
    **dict.fromkeys(
        (
            "async_training.staleness_threshold",
            "trainer.v1.sampler.max_off_policy_strategy",
            "trainer.v1.sampler.max_off_policy_threshold",
        ),
        "grpo.async_grpo.max_trajectory_age_steps",
    ),
    "actor_rollout_ref.rollout.calculate_log_probs": "generation log-probs always come with the samples",
    "actor_rollout_ref.rollout.n": "grpo.num_generations_per_prompt",
    "actor_rollout_ref.rollout.temperature": "policy.generation.temperature",
    "actor_rollout_ref.rollout.top_p": "policy.generation.top_p",
    "algorithm.adv_estimator": "grpo.adv_estimator",
    "algorithm.norm_adv_by_std_in_grpo": "grpo.normalize_rewards",
    **dict.fromkeys(
        [f"algorithm.filter_groups.{name}" for name in ("enable", "metric", "max_num_gen_batches")],
        "grpo.use_dynamic_sampling",
    ),
}


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
