"""verl: settings under ``algorithm.rollout_correction``, and those of the actor's loss.

verl's rejection bounds on k1 are on 1/ρ. In decoupled mode verl rejects before the step, by changing the response mask,
so a token mean divides by the number of kept tokens. In bypass mode it rejects within the loss, which divides by the
original number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.translate.peer_table import (
    Assign,
    Conversion,
    Peer,
    PeerSettings,
    Remark,
    convert_value,
    weight_settings,
    without_counterpart,
)

__all__ = ["PEER"]

_RC = "algorithm.rollout_correction."
_ACTOR = "actor_rollout_ref.actor."
_PROGRAM = "program"
"""Which of verl's programs runs; set by ``Peer.programs``."""
_LEVELS = {"token": "token", "seq_sum": "sequence", "seq_mean": "sequence_mean", "seq_max": "sequence_max"}
_PRESETS_OF_K1 = {"token": "icepop", "sequence": "product", "sequence_mean": "geometric"}
_GEO, _K3 = ("seq_mean_k1", "0.999_1.001"), ("seq_mean_k3", 0.01)


def _preset(level: str | None = None, rs: tuple[str, Any] | None = None, loss_type: str | None = None) -> Any:
    """Return a factory method of ``RolloutCorrectionConfig``: its arguments with defaults, and its settings."""
    parameters: dict[str, Any] = {"threshold" if rs is None else "is_threshold": 2.0} if level else {}
    parameters |= {"rs_threshold": rs[1]} if rs else {}
    settings: dict[str, Any] = {"rollout_is": level, "rollout_rs": rs and rs[0]}
    settings |= {"rollout_is_threshold": f"{{{next(iter(parameters))}}}"} if level else {}
    settings |= {"rollout_rs_threshold": "{rs_threshold}"} if rs else {}
    settings |= {"bypass_mode": True, "loss_type": loss_type} if loss_type else {}
    return parameters, {_RC + key: value for key, value in settings.items()}


_ICEPOP = {"threshold": 5.0, "threshold_lower": 0.5}
_ICEPOP_IS = {_RC + "rollout_is": "token", _RC + "rollout_is_threshold": "{threshold_lower}_{threshold}"}
_PRESETS = {
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
    "bypass_pg_token_icepop": (
        _ICEPOP,
        {**_ICEPOP_IS, _RC + "bypass_mode": True, _RC + "loss_type": "reinforce"},
    ),
    "bypass_pg_geo_rs": _preset(None, _GEO, "reinforce"),
    "bypass_pg_geo_rs_seq_tis": _preset("sequence", _GEO, "reinforce"),
    "bypass_pg_geo_rs_token_tis": _preset("token", _GEO, "reinforce"),
    "disabled": _preset(),
}

_DEFAULTS: dict[str, Any] = {
    _RC + "rollout_is": None,
    _RC + "rollout_is_threshold": 2.0,
    _RC + "rollout_is_batch_normalize": False,
    _RC + "rollout_rs": None,
    _RC + "rollout_rs_threshold": None,
    _RC + "bypass_mode": False,
    "trainer.use_v1": True,
    _PROGRAM: None,
    "async_training.use_rollout_log_probs": False,
    _ACTOR + "use_rollout_log_probs": False,
    _RC + "loss_type": "ppo_clip",
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.type": "fixed",
    "data.max_response_length": None,
    _ACTOR + "policy_loss.loss_mode": "vanilla",
    _ACTOR + "policy_loss.dro_beta": None,
    # Settings of modes that have no counterpart.
    _ACTOR + "policy_loss.clip_cov_ratio": 0.0002,
    _ACTOR + "policy_loss.clip_cov_lb": 1.0,
    _ACTOR + "policy_loss.clip_cov_ub": 5.0,
    _ACTOR + "policy_loss.kl_cov_ratio": 0.0002,
    _ACTOR + "policy_loss.ppo_kl_coef": 0.1,
    _ACTOR + "clip_ratio": 0.2,
    _ACTOR + "clip_ratio_low": 0.2,
    _ACTOR + "clip_ratio_high": 0.2,
    _ACTOR + "clip_ratio_c": 3.0,
    _ACTOR + "tau_pos": 1.0,
    _ACTOR + "tau_neg": 1.05,
    _ACTOR + "loss_agg_mode": "token-mean",
    _ACTOR + "loss_scale_factor": None,
    _ACTOR + "entropy_coeff": 0,
    _ACTOR + "use_kl_loss": False,
    _ACTOR + "kl_loss_coef": 0.001,
    _ACTOR + "kl_loss_type": "low_var_kl",
}
_UNRELATED = (
    "data.*",
    "trainer.*",
    "critic.*",
    "reward.*",
    "reward_model.*",
    "custom_reward_function.*",
    "ray_kwargs.*",
    "ray_init.*",
    "global_profiler.*",
    "transfer_queue.*",
    "hydra.*",
    "skip.*",
    "sandbox_fusion.*",
    "reward_manager.*",
    "algorithm.kl_ctrl.horizon",
    "algorithm.kl_ctrl.target_kl",
    "rollout.*",
    "async_training.*",
    "actor_rollout_ref.rollout.*",
    "actor_rollout_ref.ref.*",
    "actor_rollout_ref.model.*",
    "actor_rollout_ref.hybrid_engine",
    "actor_rollout_ref.nccl_timeout",
    *(
        _ACTOR + name
        for name in (
            "optim.*",
            "fsdp_config.*",
            "megatron.*",
            "veomni.*",
            "torchtitan.*",
            "mindspeed.*",
            "engine.*",
            "checkpoint.*",
            "profiler.*",
            "profile.*",
            "ppo_micro_batch_size*",
            "ppo_max_token_len_per_gpu",
            "ppo_infer_max_token_len_per_gpu",
            "use_dynamic_bsz",
            "use_prefix_grouper",
            "strategy",
            "shuffle",
            "data_loader_seed",
            "grad_clip",
            "ulysses_sequence_parallel_size",
            "entropy_checkpointing",
            "entropy_from_logits_with_chunking",
            "calculate_entropy",
            "calculate_sum_pi_squared",
            "use_fused_kernels",
            "use_remove_padding",
            "load_weight",
            "freeze_vision_tower",
            "rollout_n",
            "sum_pi_squared_checkpointing",
            "router_replay.*",
            "qat.*",
            "entropy_from_logits_chunk_size",
            "model_engine",
            "pad_to_length",
            "nccl_timeout",
            "data_loader_seed",
        )
    ),
    "algorithm.gamma",
    "algorithm.lam",
    "algorithm._target_",
    "config_path",
    "model_engine",
    "gpu_memory_utilization",
)
_OUTSIDE_LOSS_FN = {
    _ACTOR + "ppo_epochs": "there is always one pass over a batch, with several steps if "
    "policy.train_global_batch_size is smaller than the rollout batch",
    _ACTOR + "ppo_mini_batch_size": "policy.train_global_batch_size, in responses",
    _ACTOR + "use_torch_compile": "loss_fn.compile, whose default is auto",
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
_KL = {
    **dict.fromkeys(("kl", "k1"), ("k1", "k1")),
    **dict.fromkeys(("kl+", "k1+"), ("k1", "k2")),
    **dict.fromkeys(("mse", "k2", "mse+", "k2+"), ("k2", "k2")),
    **dict.fromkeys(("low_var_kl", "k3"), ("k3", "k3")),
    **dict.fromkeys(("low_var_kl+", "k3+"), ("k3", "k2")),
}


def _convert(settings: PeerSettings) -> Conversion:
    mode, bypass = str(settings[_ACTOR + "policy_loss.loss_mode"]), bool(settings[_RC + "bypass_mode"])
    if settings["async_training.use_rollout_log_probs"] and not bypass:
        bypass = True
        yield Remark(
            "Under async_training.use_rollout_log_probs, verl's fully asynchronous trainer takes the rollout's "
            "log-probs as old ones, as with bypass_mode."
        )
    elif settings[_ACTOR + "use_rollout_log_probs"] and not bypass:
        text = "use_rollout_log_probs: some versions of verl take the rollout's log-probs as old ones; set bypass_mode"
        yield Remark(text, (_ACTOR + "use_rollout_log_probs",))
    program = settings[_PROGRAM]
    if bypass and program is not None and not _is_plain_bypass(settings, mode):
        text = (
            "bypass_mode: verl's documentation and its programs differ in the effect of rollout_is, rollout_rs, "
            f"loss_type and loss_mode: {mode}; the block follows the documentation"
        )
        yield Remark(text, (_RC + "bypass_mode",))
    if bypass and mode in _MODES and mode != "vanilla" and settings["trainer.use_v1"]:
        yield from _bypass_in_v1(settings, mode)
    elif bypass or mode == "bypass_mode":
        mode = "bypass_mode"
        yield from _bypass_before_v1(settings)
    elif mode in _MODES:
        yield from _MODES[mode](settings)
        yield from _decoupled(settings, mode)
    else:
        modes = ", ".join(_MODES)
        yield Assign("name", "clipped_pg")
        yield Remark(
            f"policy_loss.loss_mode: {mode} has no counterpart; values with a counterpart: {modes}", ("loss_mode",)
        )
        yield from _decoupled(settings, mode)
    yield from _normalization(settings, mode)
    yield from _kl(settings)
    yield from without_counterpart(
        settings, {_ACTOR + "entropy_coeff": ((0, 0.0, None), "NeMo-RL's losses have no entropy bonus")}
    )
    yield Remark(
        "verl clamps log-ratios to ±20 before exp (gspo: to at most 10), this package to at most 40; larger ratios "
        "differ."
    )


# --- objectives


def _is_plain_bypass(settings: PeerSettings, mode: str) -> bool:
    """Return True if PPO's clip on the rollout's log-probs results, whichever settings the trainer uses."""
    is_default = settings[_RC + "rollout_rs"] is None and settings[_RC + "loss_type"] == "ppo_clip"
    return mode == "vanilla" and is_default and settings[_RC + "rollout_is"] is None


def _clip_bounds(settings: PeerSettings) -> tuple[float, float]:
    """Return clip_ratio_low and clip_ratio_high; clip_ratio stands in for one that is null."""
    keys = [
        _ACTOR + (f"clip_ratio_{side}" if settings[_ACTOR + f"clip_ratio_{side}"] is not None else "clip_ratio")
        for side in ("low", "high")
    ]
    return settings.number(keys[0]), settings.number(keys[1])


def _clip(settings: PeerSettings, name: str) -> Conversion:
    yield Assign("name", name)
    low, high = _clip_bounds(settings)
    yield Assign("ratio_clip_min", low)
    yield Assign("ratio_clip_max", high)


def _vanilla(settings: PeerSettings) -> Conversion:
    yield from _clip(settings, "clipped_pg")
    yield Assign("ratio_clip_c", settings.number(_ACTOR + "clip_ratio_c"))


def _gmpo(settings: PeerSettings) -> Conversion:
    low, high = _clip_bounds(settings)
    note = "verl clips the log-ratio to [-low, high]; this field is the distance of the ratio's bound from 1"
    yield Assign("name", "gmpo")
    yield Assign("ratio_clip_min", 1 - math.exp(-low), note)
    yield Assign("ratio_clip_max", math.exp(high) - 1, note)
    yield Remark("verl's geo_mean averages over the sequences of each microbatch, this package over those of the step.")


def _sapo(settings: PeerSettings) -> Conversion:
    yield Assign("name", "sapo")
    yield Assign("options", {tau: settings.number(_ACTOR + tau) for tau in ("tau_pos", "tau_neg")})


def _gpg(settings: PeerSettings) -> Conversion:
    yield Assign("name", "clipped_pg")
    yield Assign("disable_ppo_ratio", True)


def _dppo(preset: str, settings: PeerSettings) -> Conversion:
    low, high = _clip_bounds(settings)
    yield Assign("name", "cispo", "DPPO's surrogate, -sg(min(r, c))·A·curr, is CISPO's without a lower bound")
    yield Assign("ratio_clip_min", 1.0)
    yield Assign("ratio_clip_max", settings.number(_ACTOR + "clip_ratio_c") - 1, "clip_ratio_c bounds the ratio itself")
    mask = {"preset": preset, "delta": high, "delta_low": low, "log_ratio": "policy"}
    yield Assign("masks", mask, "from clip_ratio_high and _low; without bypass_mode verl compares with old_log_prob")


def _dro(settings: PeerSettings) -> Conversion:
    yield Assign("name", "dro")
    yield Assign("options", {"beta": settings.number(_ACTOR + "policy_loss.dro_beta")})


_MODES: dict[str, Callable[[PeerSettings], Conversion]] = {
    "vanilla": _vanilla,
    "gspo": lambda settings: _clip(settings, "gspo_token"),
    "geo_mean": _gmpo,
    "sapo": _sapo,
    "cispo": lambda settings: _clip(settings, "cispo"),
    "gpg": _gpg,
    "dro": _dro,
    "dppo_tv": lambda settings: _dppo("dppo_tv", settings),
    "dppo_kl": lambda settings: _dppo("dppo_kl", settings),
}


# --- rollout correction


def _decoupled(settings: PeerSettings, mode: str) -> Conversion:
    level = settings[_RC + "rollout_is"]
    if level is not None and mode == "geo_mean" and level != "sequence":
        text = "rollout_is: under geo_mean verl pools the truncated weights of a sequence by their geometric mean"
        yield Remark(text, ("rollout_is",))
    elif level is not None:
        yield from _weight(settings)
        if settings[_RC + "rollout_is_batch_normalize"]:
            yield Assign("is_correction_batch_normalize", True)
            if settings[_RC + "rollout_rs"] is not None:
                yield Remark(
                    "rollout_is_batch_normalize: verl takes the mean over all tokens, this package over the kept ones",
                    ("rollout_is_batch_normalize",),
                )
    masks = list(_rejection(settings, "mismatch"))
    yield from masks
    if not any(isinstance(line, Assign) for line in masks):
        return
    has_token_rule = any(
        str(option).strip().startswith("token") for option in str(settings[_RC + "rollout_rs"]).split(",")
    )
    if _aggregation(settings, mode) == "token-mean" or has_token_rule:
        yield Assign("denominator", "kept", "verl removes what it rejects from the response mask before the step")
        if _aggregation(settings, mode) != "token-mean":
            yield Remark(
                "rollout_rs: a sequence mean of verl counts sequences without a kept token; this package does not",
                ("rollout_rs",),
            )
        if has_token_rule and level == "sequence":
            yield Remark(
                "rollout_rs: verl computes a sequence's weight from all its tokens, this package from the kept ones",
                ("rollout_rs",),
            )
    elif settings[_ACTOR + "use_kl_loss"]:
        yield Remark(
            "use_kl_loss: verl removes rejected sequences from the KL term, too; here masks act on the surrogate only",
            ("use_kl_loss",),
        )


def _bypass_in_v1(settings: PeerSettings, mode: str) -> Conversion:
    """Convert ``bypass_mode`` of verl's v1 trainer: ``loss_mode``, with the rollout's log-probs as the old ones."""
    for line in _MODES[mode](settings):
        if isinstance(line, Assign) and line.key == "masks":
            yield line._replace(value={**line.value, "log_ratio": "total"})
        else:
            yield line
    yield Assign("ratio_anchor", "gen", "bypass_mode: old_log_prob is the rollout's")
    yield Remark(
        "Under bypass_mode, verl's v1 trainer uses loss_mode, but neither rollout_is nor rollout_rs nor loss_type; "
        "with trainer.use_v1: false, verl uses loss_type in place of loss_mode."
    )


def _bypass_before_v1(settings: PeerSettings) -> Conversion:
    """Convert ``bypass_mode`` of verl's older trainer, in which ``loss_type`` takes the place of ``loss_mode``."""
    loss_type, level = settings[_RC + "loss_type"], settings[_RC + "rollout_is"]
    if loss_type == "ppo_clip":
        yield from _vanilla(settings)
        yield Assign("ratio_anchor", "gen", "bypass_mode: the ratio is against the rollout's log-probs")
        if level is not None:
            yield Remark(
                "With these settings verl uses rollout_is for metrics only, so the block has no counterpart of it."
            )
    elif loss_type == "reinforce":
        normalize = settings[_RC + "rollout_is_batch_normalize"]
        is_truncated = level == "token" and not normalize and "_" not in str(settings[_RC + "rollout_is_threshold"])
        yield Assign("name", "cispo" if is_truncated else "reinforce")
        if is_truncated:
            bound = settings.number(_RC + "rollout_is_threshold")
            yield Assign("ratio_anchor", "gen", "-sg(min(w, c))·A·curr with w = e^(curr - gen) is CISPO on gen")
            yield Assign("ratio_clip_min", 1.0)
            yield Assign("ratio_clip_max", bound - 1, "rollout_is_threshold bounds the weight itself")
        elif level is not None:
            normalized = "this package can't divide weights that depend on the current policy by their mean"
            yield from without_counterpart(settings, {_RC + "rollout_is_batch_normalize": ((False, None), normalized)})
            yield Assign("force_on_policy_ratio", True, "the weight is then sg(e^(curr - gen))")
            yield from _weight(settings)
            yield Remark("NeMo-RL allows force_on_policy_ratio only with one optimiser step for each rollout batch.")
    else:
        yield Remark(
            f"rollout_correction.loss_type: {loss_type} is unknown; verl has ppo_clip and reinforce", ("loss_type",)
        )
    yield from _rejection(settings, "total")


def _weight(settings: PeerSettings) -> Conversion:
    level, spec = str(settings[_RC + "rollout_is"]), str(settings[_RC + "rollout_is_threshold"])
    low, separator, high = spec.rpartition("_")
    if level not in ("token", "sequence"):
        yield Remark(f"rollout_is: {level} is unknown; verl has token and sequence", ("rollout_is",))
    elif separator:
        yield from weight_settings(
            level, "icepop", _parse_bound("rollout_is_threshold", low), _parse_bound("rollout_is_threshold", high)
        )
    else:
        yield from weight_settings(level, "tis", 0.0, _parse_bound("rollout_is_threshold", high))


def _rejection(settings: PeerSettings, log_ratio: str) -> Conversion:
    if settings[_RC + "rollout_rs"] is None:
        return
    options = list(dict.fromkeys(_comma_separated(settings[_RC + "rollout_rs"])))
    bounds = list(_comma_separated(settings[_RC + "rollout_rs_threshold"]))
    if len(bounds) not in (1, len(options)):
        raise ConfigError(
            f"rollout_rs_threshold must have one bound or one for each of {', '.join(options)}, but has {len(bounds)}"
        )
    for option, spec in zip(options, bounds * (len(options) if len(bounds) == 1 else 1), strict=True):
        level_name, _, statistic = option.rpartition("_")
        if level_name not in _LEVELS or statistic not in ("k1", "k2", "k3") or option == "seq_max_k1":
            yield Remark(f"rollout_rs: {option} is unknown", ("rollout_rs",))
            continue
        level = _LEVELS[level_name]
        rule: dict[str, Any] = {"log_ratio": log_ratio, "level": level}
        if statistic != "k1":
            yield Assign("masks", {**rule, "statistic": statistic, "max": _parse_bound("rollout_rs_threshold", spec)})
            continue
        low, separator, high = spec.rpartition("_")
        upper = _parse_bound("rollout_rs_threshold", high)
        stated_lower = _parse_bound("rollout_rs_threshold", low) if separator else upper
        if min(stated_lower, upper) <= 0:
            raise ConfigError(f"rollout_rs_threshold: {option} bounds a ratio, which must be above 0, by '{spec}'")
        lower = stated_lower if separator else 1 / upper
        note = (
            f"verl's {option} keeps {lower:g} to {upper:g} of 1/ρ; the bounds here are on ρ"
            if separator
            else (f"verl's {option} keeps 1/{upper:g} to {upper:g}")
        )
        form = {"preset": _PRESETS_OF_K1[level]} if log_ratio == "mismatch" else rule
        yield Assign("masks", {**form, "min": 1 / upper, "max": 1 / lower}, note)


def _comma_separated(text: Any) -> Iterator[str]:
    return (word.strip() for word in str(text).split(",") if word.strip())


def _parse_bound(key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{key} must be a number or lower_upper, but a bound is '{text}'") from None


# --- normalisation and KL


def _aggregation(settings: PeerSettings, mode: str) -> str:
    always = {"gspo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean", "geo_mean": "seq-mean-token-mean"}
    return always.get(mode) or str(settings[_ACTOR + "loss_agg_mode"])


def _normalization(settings: PeerSettings, mode: str) -> Conversion:
    aggregation = _aggregation(settings, mode)
    if aggregation != "seq-mean-token-sum-norm":
        if mode in ("gspo", "sapo", "geo_mean"):
            yield Assign(
                "token_level_loss", False, f"in verl, {mode} is a mean over sequences, whatever loss_agg_mode is"
            )
            return
        yield from convert_value(
            settings,
            _ACTOR + "loss_agg_mode",
            {
                "token-mean": [Assign("token_level_loss", True)],
                "seq-mean-token-mean": [Assign("token_level_loss", False)],
                "seq-mean-token-sum": [Assign("loss_normalization", "documents")],
            },
        )
        return
    keys = (_ACTOR + "loss_scale_factor", "data.max_response_length")
    key = next((key for key in keys if settings[key] is not None), None)
    if key is None:
        text = "loss_agg_mode: seq-mean-token-sum-norm divides by the padded width; set loss_scale_factor to it"
        yield Remark(text, ("loss_agg_mode",))
        return
    note = "" if key == keys[0] else "verl divides by the padded width, which is data.max_response_length"
    yield Assign("loss_normalization", "constant")
    yield Assign("loss_normalization_constant", settings.number(key), note)


def _kl(settings: PeerSettings) -> Conversion:
    if settings["algorithm.use_kl_in_reward"]:
        estimator = str(settings["algorithm.kl_penalty"])
        yield Assign("use_kl_in_reward", True)
        yield Assign("reference_policy_kl_penalty", settings.number("algorithm.kl_ctrl.kl_coef"))
        if estimator in _KL:
            yield Assign("reference_policy_kl_type", _KL[estimator][0])
        else:
            yield Remark(f"algorithm.kl_penalty: {estimator} has no counterpart", ("kl_penalty",))
        adaptive = "the coefficient of the KL is constant in this package"
        yield from without_counterpart(settings, {"algorithm.kl_ctrl.type": (("fixed",), adaptive)})
        if settings[_ACTOR + "use_kl_loss"]:
            yield Remark(
                "use_kl_loss: this package can't combine a KL in the reward with a KL in the loss", ("use_kl_loss",)
            )
    elif settings[_ACTOR + "use_kl_loss"]:
        estimator = str(settings[_ACTOR + "kl_loss_type"])
        yield Assign("reference_policy_kl_penalty", settings.number(_ACTOR + "kl_loss_coef"))
        if estimator not in _KL:
            yield Remark(
                f"kl_loss_type: {estimator} has no counterpart; values with a counterpart: {', '.join(_KL)}",
                ("kl_loss_type",),
            )
            return
        value, gradient = _KL[estimator]
        yield Assign("reference_policy_kl_type", value)
        yield Assign("reference_policy_kl_gradient", gradient, "verl differentiates the estimate itself")
        if value != "k3":
            yield Assign("kl_input_clamp_value", None)
            yield Assign("kl_output_clamp_value", None)
    else:
        yield Assign("reference_policy_kl_penalty", 0.0)


PEER = Peer(
    name="verl",
    title="verl's rollout correction and actor",
    source="verl-project/verl at 1dda039b9",
    defaults=_DEFAULTS,
    convert=_convert,
    outside_loss_fn=_OUTSIDE_LOSS_FN,
    sections=("rollout_correction", "policy_loss"),
    constructors=("RolloutCorrectionConfig",),
    presets=_PRESETS,
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
        "verl.trainer.main_ppo": {_PROGRAM: "main_ppo"},
        "verl.experimental.one_step_off_policy.main_ppo": {_PROGRAM: "one_step_off"},
        "verl.experimental.fully_async_policy.fully_async_main": {
            _PROGRAM: "fully_async",
            _RC + "bypass_mode": True,
            _ACTOR + "use_rollout_log_probs": True,
        },
    },
    other_programs=("verl.trainer.sft_trainer*", "verl.trainer.main_generation*", "verl.trainer.main_eval"),
    config_options=("config_name", "defaults"),
    base_configs={
        "ppo_*trainer": {},
        "one_step_off_ppo_*trainer": {},
        "fully_async_ppo_*trainer": {_RC + "bypass_mode": True, _ACTOR + "use_rollout_log_probs": True},
    },
    unrelated=_UNRELATED,
)
