"""TRL: arguments of ``GRPOConfig``."""

from __future__ import annotations

from nemo_geomask.tools.translate.peer_table import (
    NO_BOUND,
    Assign,
    Conversion,
    Peer,
    PeerSettings,
    Remark,
    settings_of,
    weight_settings,
    without_counterpart,
)

_MICROBATCH_MEAN = "TRL averages within each microbatch, then over microbatches; this package averages over the step."
_SEQUENCES, _TOKENS, _DOCUMENTS = (
    (Assign("token_level_loss", False),),
    (Assign("token_level_loss", True),),
    (Assign("loss_normalization", "documents"),),
)
# By loss_type: the function that converts the surrogate, and the normalisation.
_LOSSES: dict[str, tuple[str, tuple[Assign | Remark, ...]]] = {
    "grpo": ("clipped", (*_SEQUENCES, Remark(_MICROBATCH_MEAN))),
    "bnpo": (
        "clipped",
        (*_TOKENS, Remark("TRL's bnpo divides by the tokens of each microbatch, this package by those of the step.")),
    ),
    "dapo": ("clipped", _TOKENS),
    "dr_grpo": ("clipped", (Assign("loss_normalization", "constant"), Remark(_MICROBATCH_MEAN))),
    "luspo": ("clipped", (*_DOCUMENTS, Remark(_MICROBATCH_MEAN))),
    "cispo": ("cispo", _TOKENS),
    "sapo": ("sapo", (*_SEQUENCES, Remark(_MICROBATCH_MEAN))),
    "vespo": ("vespo", _TOKENS),
}
# By vllm_importance_sampling_mode: level and truncation of the weight.
_MODES = {
    "token_truncate": ("token", "tis"),
    "token_mask": ("token", "icepop"),
    "sequence_truncate": ("sequence", "tis"),
    "sequence_mask": ("sequence", "icepop"),
}


def _convert(settings: PeerSettings) -> Conversion:
    if settings["config_class"] == "AsyncGRPOConfig":
        yield from _async_grpo(settings)
        return
    loss_type, level = str(settings["loss_type"]), str(settings["importance_sampling_level"])
    if loss_type not in _LOSSES:
        yield Assign("name", "clipped_pg")
        yield Remark(f"loss_type: {loss_type} is unknown; TRL has {', '.join(_LOSSES)}", ("loss_type",))
        return
    surrogate, normalization = _LOSSES[loss_type]
    is_sequence_ratio = level == "sequence"
    if is_sequence_ratio and surrogate != "clipped":
        text = f"importance_sampling_level: sequence with loss_type: {loss_type} has no counterpart; token is used"
        yield Remark(text, ("importance_sampling_level",))
    yield from _SURROGATES[surrogate](settings, is_sequence_ratio)
    if loss_type == "luspo" and not is_sequence_ratio:
        text = "loss_type: luspo with importance_sampling_level: token has no counterpart; set sequence in TRL"
        yield Remark(text, ("importance_sampling_level",))
    if is_sequence_ratio and normalization[0] == _TOKENS[0]:
        yield Assign("loss_normalization", "tokens")
        yield from normalization[1:]
    else:
        yield from normalization
    if loss_type == "dr_grpo":
        yield Assign("loss_normalization_constant", settings.number("max_completion_length"), "max_completion_length")
    yield from _correction(settings, loss_type)
    yield from _kl(settings)
    threshold = settings["off_policy_mask_threshold"]
    if threshold is not None:
        mask = {"preset": "opsm", "delta": float(threshold)}
        yield Assign("masks", mask if settings["use_vllm"] else {**mask, "log_ratio": "policy"})
    yield from without_counterpart(
        settings,
        {
            "top_entropy_quantile": ((1, 1.0), "a mask on the entropy has no counterpart"),
            "entropy_coef": ((0, 0.0), "NeMo-RL's losses have no entropy bonus"),
            "use_liger_kernel": (
                (False,),
                "Liger's kernel computes the loss; it averages over each microbatch, and was not compared",
            ),
            "use_adaptive_entropy": ((False,), "NeMo-RL's losses have no entropy bonus"),
        },
    )


def _async_grpo(settings: PeerSettings) -> Conversion:
    """Convert ``AsyncGRPOConfig``: a clip on the sampler's log-probs, without KL or weight."""
    low = settings.number("epsilon")
    yield Assign("name", "clipped_pg")
    yield Assign("ratio_clip_min", low)
    yield Assign("ratio_clip_max", low if settings["epsilon_high"] is None else settings.number("epsilon_high"))
    yield Assign("ratio_anchor", "gen", "AsyncGRPOTrainer's old log-probs are the sampler's")
    yield Assign("token_level_loss", True)
    yield Assign("reference_policy_kl_penalty", 0.0)
    yield Remark(_MICROBATCH_MEAN)
    async_keys = ("epsilon", "epsilon_high", "max_completion_length", "router_aux_loss_coef", "config_class")
    for key in settings:
        if key not in async_keys:
            yield Remark(f"{key}: AsyncGRPOConfig has no such setting at this commit", (key,))


def _clipped(settings: PeerSettings, is_sequence_ratio: bool) -> Conversion:
    low = settings.number("epsilon")
    high = low if settings["epsilon_high"] is None else settings.number("epsilon_high")
    yield Assign("name", "gspo" if is_sequence_ratio else "clipped_pg")
    yield Assign("ratio_clip_min", low)
    yield Assign("ratio_clip_max", high)
    delta = settings["delta"]
    if delta is not None and float(delta) > 1 + high:
        yield Assign("ratio_clip_c", float(delta))
    elif delta is not None:
        text = f"delta: {delta} is below the clip bound {1 + high:g}, so it bounds the ratio where A > 0, too"
        yield Remark(text, ("delta",))


def _cispo(settings: PeerSettings, is_sequence_ratio: bool) -> Conversion:
    key = "epsilon" if settings["epsilon_high"] is None else "epsilon_high"
    bound = settings.number(key)
    yield Assign("name", "cispo")
    yield Assign("ratio_clip_min", 1.0, "TRL has no lower bound")
    if bound >= 1:
        yield Assign(
            "ratio_clip_max", bound - 1, f"TRL's {key} is the bound on the ratio; ratio_clip_max is its distance from 1"
        )
    else:
        text = f"{key}: {bound:g} is a bound on the ratio below 1, which shrinks every weight; TRL advises 5.0"
        yield Remark(text, (key,))


def _sapo(settings: PeerSettings, is_sequence_ratio: bool) -> Conversion:
    taus = {f"tau_{sign}": settings.number(f"sapo_temperature_{sign}") for sign in ("pos", "neg")}
    yield Assign("name", "sapo")
    yield Assign("options", taus)


def _vespo(settings: PeerSettings, is_sequence_ratio: bool) -> Conversion:
    is_corrected = settings["use_vllm"] and settings["vllm_importance_sampling_correction"]
    yield Assign("ratio_anchor", "gen" if is_corrected else "prev")
    if is_corrected:
        text = "TRL truncates each token's ratio before it takes VESPO's product; this package does not truncate them"
        yield Remark(f"vllm_importance_sampling_mode: {settings['vllm_importance_sampling_mode']}: {text}", ("mode",))
    names = ("k_pos", "lambda_pos", "k_neg", "lambda_neg")
    yield Assign("name", "vespo")
    yield Assign("options", {name: settings.number(f"vespo_{name}") for name in names})


_SURROGATES = {"clipped": _clipped, "cispo": _cispo, "sapo": _sapo, "vespo": _vespo}


def _correction(settings: PeerSettings, loss_type: str) -> Conversion:
    if not settings["use_vllm"]:
        yield Remark("use_vllm is false, so TRL corrects no mismatch, and the block has no correction.")
        return
    if not settings["vllm_importance_sampling_correction"] or loss_type == "vespo":
        return
    mode = str(settings["vllm_importance_sampling_mode"])
    high, low = settings["vllm_importance_sampling_clip_max"], settings["vllm_importance_sampling_clip_min"]
    if settings["vllm_importance_sampling_cap"] is not None:
        high = settings["vllm_importance_sampling_cap"]
    if mode not in _MODES:
        modes = ", ".join(_MODES)
        text = f"vllm_importance_sampling_mode: {mode} is unknown; TRL has {modes}"
        yield Remark(text, ("vllm_importance_sampling_mode",))
        return
    level, truncation = _MODES[mode]
    if high is None and low is not None:
        high = NO_BOUND
    yield from weight_settings(level, truncation, float(low or 0.0), None if high is None else float(high))


def _kl(settings: PeerSettings) -> Conversion:
    beta = settings.number("beta")
    yield Assign("reference_policy_kl_penalty", beta)
    if not beta:
        return
    yield Assign("reference_policy_kl_type", "k3")
    if not settings["use_bias_correction_kl"]:
        yield Assign("reference_policy_kl_gradient", "k3", "TRL differentiates the estimate itself")
    elif settings["importance_sampling_level"] == "token":
        yield Assign("use_on_policy_kl_approximation", True, "TRL multiplies by the ratio and differentiates both")
        yield Assign("kl_ratio_anchor", "prev")
    else:
        yield Remark(
            "use_bias_correction_kl: a KL that is multiplied by the sequence's ratio has no counterpart",
            ("use_bias_correction_kl",),
        )
    yield Assign("kl_input_clamp_value", None)
    yield Assign("kl_output_clamp_value", None)


PEER = Peer(
    name="trl",
    title="TRL's GRPOConfig",
    source="huggingface/trl at f2cd57710",
    convert=_convert,
    **settings_of("trl"),
    constructors=("GRPOConfig", "AsyncGRPOConfig"),
    marks=(
        "use_vllm",
        "num_generations",
        "vllm_importance_sampling_*",
        "importance_sampling_level",
        "epsilon",
        "off_policy_mask_threshold",
        "sapo_temperature_*",
        "vespo_*",
        "scale_rewards",
        "steps_per_generation",
        "use_bias_correction_kl",
    ),
    programs={
        "GRPOConfig": {},
        "trl grpo": {},
        "trl/scripts/grpo.py": {},
        "AsyncGRPOConfig": {"config_class": "AsyncGRPOConfig"},
    },
    config_options=("config",),
)
