"""verl: settings under ``algorithm.rollout_correction``, and those of the actor's loss."""

from __future__ import annotations

from nemo_geomask.tools.translate.peer_table import (
    Assign,
    Conversion,
    Peer,
    PeerSettings,
    Remark,
    settings_of,
    without_counterpart,
)
from nemo_geomask.tools.translate.peers.verl.correction import (
    convert_bypass_before_v1,
    convert_bypass_in_v1,
    convert_decoupled,
    is_plain_bypass,
)
from nemo_geomask.tools.translate.peers.verl.loss_settings import LOSS_MODES, convert_kl, convert_normalization
from nemo_geomask.tools.translate.peers.verl.settings import (
    ACTOR,
    PRESETS,
    PROGRAM,
    RC,
    ROLLOUT,
    TRANSFORMER,
    runs_v1,
)


def _convert(settings: PeerSettings) -> Conversion:
    mode, bypass = str(settings[ACTOR + "policy_loss.loss_mode"]), bool(settings[RC + "bypass_mode"])
    if settings["async_training.use_rollout_log_probs"] and not bypass:
        bypass = True
        yield Remark(
            "Under async_training.use_rollout_log_probs, verl's fully asynchronous trainer takes the rollout's "
            "log-probs as old ones, as with bypass_mode."
        )
    elif settings[ACTOR + "use_rollout_log_probs"] and not bypass:
        text = "without effect at this commit; others of verl take the rollout's log-probs as old ones: remove it"
        yield Remark(f"use_rollout_log_probs: {text}", (ACTOR + "use_rollout_log_probs",))
    program, sync_steps = settings[PROGRAM], settings.number("async_training.trigger_parameter_sync_step")
    if sync_steps > 1 and not bypass:
        yield Remark(
            "verl computes the old log-probs of trigger_parameter_sync_step training steps with the weights before the "
            "first, NeMo-RL those of a batch: for the same ratio, a batch of NeMo-RL holds the prompts of "
            f"{sync_steps:g} such steps."
        )
    is_run = runs_v1(settings) and program is not None
    follows_v1 = mode in LOSS_MODES and settings["trainer.use_v1"] and (mode != "vanilla" or is_run)
    if bypass and program is not None and not follows_v1 and not is_plain_bypass(settings, mode):
        text = (
            "bypass_mode: verl's documentation and its programs differ in the effect of rollout_is, rollout_rs, "
            f"loss_type and loss_mode: {mode}; the block follows the documentation"
        )
        yield Remark(text, (RC + "bypass_mode",))
    if bypass and follows_v1:
        yield from convert_bypass_in_v1(settings, mode)
    elif bypass or mode == "bypass_mode":
        mode = "bypass_mode"
        yield from convert_bypass_before_v1(settings)
    elif mode in LOSS_MODES:
        yield from LOSS_MODES[mode](settings)
        yield from convert_decoupled(settings, mode)
    else:
        modes = ", ".join(LOSS_MODES)
        yield Assign("name", "clipped_pg")
        yield Remark(
            f"policy_loss.loss_mode: {mode} has no counterpart; values with a counterpart: {modes}", ("loss_mode",)
        )
        yield from convert_decoupled(settings, mode)
    yield from convert_normalization(settings, mode)
    yield from convert_kl(settings)
    yield from without_counterpart(
        settings,
        {
            "algorithm.use_pf_ppo": ((False, None), "NeMo-RL draws no samples by their scores"),
            ACTOR + "entropy_coeff": ((0, 0.0, None), "NeMo-RL's losses have no entropy bonus"),
            ROLLOUT + "logprobs_mode": (
                ("processed_logprobs", None),
                "NeMo-RL's log-probs of the sampler are those after temperature, top-p and top-k",
            ),
            **{
                TRANSFORMER + name: ((0, 0.0, None), "NeMo-RL has no setting for this loss of Megatron's")
                for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff", "dsa_indexer_loss_coeff")
            },
        },
    )
    yield Remark(
        "verl clamps log-ratios to ±20 before exp (gspo: to at most 10), this package to at most 40; larger ratios "
        "differ."
    )


_OWN_FILES = ("*_actor", "*_ref", "rollout", "hf_model", "legacy_data", "rollout_correction", "distillation")
"""Files of verl's configuration, besides its trainers', that Hydra's ``defaults`` name; they hold verl's defaults."""
_FULLY_ASYNC = {RC + "bypass_mode": True, "async_training.trigger_parameter_sync_step": 4}
"""Settings of the fully asynchronous trainers that differ from the main program's."""

PEER = Peer(
    name="verl",
    title="verl's rollout correction and actor",
    source="verl-project/verl at 1dda039b9",
    convert=_convert,
    **settings_of("verl"),
    sections=("rollout_correction", "policy_loss"),
    constructors=("RolloutCorrectionConfig",),
    presets=PRESETS,
    marks=(
        "*actor_rollout_ref.*",
        "*rollout_correction.*",
        "rollout_is*",
        "rollout_rs*",
        "async_training.*",
        "policy_loss.*",
        "loss_agg_mode",
        "algorithm.norm_adv_by_std_in_grpo",
    ),
    programs={
        "verl.trainer.main_ppo": {PROGRAM: "main_ppo"},
        "verl.experimental.one_step_off_policy.main_ppo": {PROGRAM: "one_step_off"},
        "verl.experimental.fully_async_policy.fully_async_main": {
            PROGRAM: "fully_async",
            **_FULLY_ASYNC,
        },
    },
    other_programs=("verl.trainer.sft_trainer*", "verl.trainer.main_generation*", "verl.trainer.main_eval"),
    config_options=("config_name", "defaults"),
    base_configs={
        "ppo_*trainer": {},
        "legacy_reward_impl": {},
        **{name: {} for name in _OWN_FILES},
        "one_step_off_ppo_*trainer": {},
        "fully_async_ppo_*trainer": _FULLY_ASYNC,
    },
)
