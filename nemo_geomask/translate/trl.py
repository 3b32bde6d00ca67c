"""TRL: ``GRPOConfig``."""

from __future__ import annotations

from typing import Any

from nemo_geomask.translate.peer import NO_BOUND, Given, Line, Lines, Peer, Remark, corrected, inert

__all__ = ["PEER"]

_DEFAULTS: dict[str, Any] = {
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "epsilon": 0.2,
    "epsilon_high": None,
    "delta": None,
    "beta": 0.0,
    "use_bias_correction_kl": False,
    "use_vllm": False,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None,
    "vllm_importance_sampling_cap": None,
    "off_policy_mask_threshold": None,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
    "max_completion_length": 512,
    "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "router_aux_loss_coef": 0.001,
}
_ELSEWHERE = {
    "num_generations": "grpo.num_generations_per_prompt",
    "max_prompt_length": "data.max_input_seq_length",
    "temperature": "policy.generation.temperature",
    "top_p": "policy.generation.top_p",
    "top_k": "policy.generation.top_k",
    "learning_rate": "policy.optimizer.kwargs.lr",
    "scale_rewards": "grpo.normalize_rewards",
    "mask_truncated_completions": "grpo.overlong_filtering",
    "num_iterations": "has one pass over a batch",
    "steps_per_generation": "grpo.num_prompts_per_step over policy.train_global_batch_size",
    "generation_batch_size": "grpo.num_prompts_per_step",
    "gradient_accumulation_steps": "policy.train_global_batch_size over policy.train_micro_batch_size",
    "per_device_train_batch_size": "policy.train_micro_batch_size",
    "max_grad_norm": "policy.max_grad_norm",
}
_LOCAL = "TRL averages each microbatch by itself, then over microbatches; here the mean is over the step."
_SEQUENCES, _TOKENS, _DOCUMENTS = (
    (Line("token_level_loss", False),),
    (Line("token_level_loss", True),),
    (Line("loss_normalization", "documents"),),
)
# Surrogate and normalisation.
_LOSSES: dict[str, tuple[str, tuple[Line | Remark, ...]]] = {
    "grpo": ("clipped", (*_SEQUENCES, Remark(_LOCAL))),
    "bnpo": ("clipped", (*_TOKENS, Remark("TRL's bnpo divides by each microbatch's own tokens; here by the step's."))),
    "dapo": ("clipped", _TOKENS),
    "dr_grpo": ("clipped", (Line("loss_normalization", "constant"), Remark(_LOCAL))),
    "luspo": ("clipped", (*_DOCUMENTS, Remark(_LOCAL))),
    "cispo": ("cispo", _TOKENS),
    "sapo": ("sapo", (*_SEQUENCES, Remark(_LOCAL))),
    "vespo": ("vespo", _TOKENS),
}
# Level, kind.
_MODES = {
    "token_truncate": ("token", "tis"),
    "token_mask": ("token", "icepop"),
    "sequence_truncate": ("sequence", "tis"),
    "sequence_mask": ("sequence", "icepop"),
}


def _convert(given: Given) -> Lines:
    loss_type, level = str(given["loss_type"]), str(given["importance_sampling_level"])
    if loss_type not in _LOSSES:
        yield Line("name", "clipped_pg")
        yield Remark(f"loss_type: {loss_type} is unknown; TRL has {', '.join(_LOSSES)}", ("loss_type",))
        return
    surrogate, normalization = _LOSSES[loss_type]
    by_sequence = level == "sequence"
    if by_sequence and surrogate != "clipped":
        text = f"importance_sampling_level: sequence with loss_type: {loss_type} has no counterpart; token is written"
        yield Remark(text, ("importance_sampling_level",))
    yield from _SURROGATES[surrogate](given, by_sequence)
    if loss_type == "luspo" and not by_sequence:
        text = "loss_type: luspo with importance_sampling_level: token is no mean of TRL's own; set sequence"
        yield Remark(text, ("importance_sampling_level",))
    if by_sequence and normalization[0] == _TOKENS[0]:
        yield Line("loss_normalization", "tokens")
        yield from normalization[1:]
    else:
        yield from normalization
    if loss_type == "dr_grpo":
        yield Line("loss_normalization_constant", given.number("max_completion_length"), "max_completion_length")
    yield from _correction(given, loss_type)
    yield from _kl(given)
    off_policy = given["off_policy_mask_threshold"]
    if off_policy is not None:
        mask = {"preset": "opsm", "delta": float(off_policy)}
        yield Line("masks", mask if given["use_vllm"] else {**mask, "log_ratio": "policy"})
    yield from inert(
        given,
        {
            "top_entropy_quantile": ((1, 1.0), "a mask on the entropy, which the loss isn't given, has no counterpart"),
            "entropy_coef": ((0, 0.0), "NeMo-RL's losses have no entropy bonus"),
            "use_adaptive_entropy": ((False,), "NeMo-RL's losses have no entropy bonus"),
        },
    )


def _clipped(given: Given, by_sequence: bool) -> Lines:
    low = given.number("epsilon")
    high = low if given["epsilon_high"] is None else given.number("epsilon_high")
    yield Line("name", "gspo" if by_sequence else "clipped_pg")
    yield Line("ratio_clip_min", low)
    yield Line("ratio_clip_max", high)
    delta = given["delta"]
    if delta is not None and float(delta) > 1 + high:
        yield Line("ratio_clip_c", float(delta))
    elif delta is not None:
        text = f"delta: {delta} bounds the ratio below the clip's own bound {1 + high:g}, also where A > 0"
        yield Remark(text, ("delta",))


def _cispo(given: Given, by_sequence: bool) -> Lines:
    key = "epsilon" if given["epsilon_high"] is None else "epsilon_high"
    bound = given.number(key)
    yield Line("name", "cispo")
    yield Line("ratio_clip_min", 1.0, "TRL has no lower bound")
    if bound >= 1:
        yield Line(
            "ratio_clip_max", bound - 1, f"TRL's {key} is the bound on the ratio itself; here the distance from 1"
        )
    else:
        text = f"{key}: {bound:g} is a bound on the ratio below 1, which shrinks every weight; TRL advises 5.0"
        yield Remark(text, (key,))


def _sapo(given: Given, by_sequence: bool) -> Lines:
    taus = {f"tau_{sign}": given.number(f"sapo_temperature_{sign}") for sign in ("pos", "neg")}
    yield Line("name", "sapo")
    yield Line("options", taus)


def _vespo(given: Given, by_sequence: bool) -> Lines:
    anchored = given["use_vllm"] and given["vllm_importance_sampling_correction"]
    yield Line("ratio_anchor", "gen" if anchored else "prev")
    if anchored:
        text = "TRL truncates each token's ratio before VESPO's product, which here is of the ratios as they are"
        yield Remark(f"vllm_importance_sampling_mode: {given['vllm_importance_sampling_mode']}: {text}", ("mode",))
    names = ("k_pos", "lambda_pos", "k_neg", "lambda_neg")
    yield Line("name", "vespo")
    yield Line("options", {name: given.number(f"vespo_{name}") for name in names})


_SURROGATES = {"clipped": _clipped, "cispo": _cispo, "sapo": _sapo, "vespo": _vespo}


def _correction(given: Given, loss_type: str) -> Lines:
    if not given["use_vllm"]:
        yield Remark("use_vllm is false, so TRL corrects no mismatch, and nothing is written for it.")
        return
    if not given["vllm_importance_sampling_correction"] or loss_type == "vespo":
        return
    mode = str(given["vllm_importance_sampling_mode"])
    high, low = given["vllm_importance_sampling_clip_max"], given["vllm_importance_sampling_clip_min"]
    if given["vllm_importance_sampling_cap"] is not None:
        high = given["vllm_importance_sampling_cap"]
    if mode not in _MODES:
        known = ", ".join(_MODES)
        text = f"vllm_importance_sampling_mode: {mode} is unknown; TRL has {known}"
        yield Remark(text, ("vllm_importance_sampling_mode",))
        return
    level, kind = _MODES[mode]
    if high is None and low is not None:
        high = NO_BOUND
    yield from corrected(level, kind, float(low or 0.0), None if high is None else float(high))


def _kl(given: Given) -> Lines:
    beta = given.number("beta")
    yield Line("reference_policy_kl_penalty", beta)
    if not beta:
        return
    yield Line("reference_policy_kl_type", "k3")
    yield Line("reference_policy_kl_gradient", "k3", "TRL differentiates the estimate itself")
    yield Line("kl_input_clamp_value", None)
    yield Line("kl_output_clamp_value", None)
    weighted = "the KL times the policy's ratio, with its gradient, has no counterpart"
    yield from inert(given, {"use_bias_correction_kl": ((False,), weighted)})


PEER = Peer(
    name="trl",
    title="TRL's GRPOConfig",
    source="huggingface/trl at f2cd57710",
    defaults=_DEFAULTS,
    convert=_convert,
    elsewhere=_ELSEWHERE,
    constructors=("GRPOConfig",),
)
