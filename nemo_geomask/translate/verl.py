"""verl: ``algorithm.rollout_correction`` and the actor's loss.

Its rejection bounds on k1 are on 1/ρ. In decoupled mode the rejection rewrites the response mask before the step, so a
token mean divides by what is kept; in bypass mode it happens within the loss, which divides by the original count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from nemo_geomask.errors import ConfigError
from nemo_geomask.translate.peer import Given, Line, Lines, Peer, Remark, chosen, corrected, inert

__all__ = ["PEER"]

_RC = "algorithm.rollout_correction."
_ACTOR = "actor_rollout_ref.actor."
_LEVELS = {"token": "token", "seq_sum": "sequence", "seq_mean": "sequence_mean", "seq_max": "sequence_max"}
_PRESETS_OF_K1 = {"token": "icepop", "sequence": "product", "sequence_mean": "geometric"}
_GEO, _K3 = ("seq_mean_k1", "0.999_1.001"), ("seq_mean_k3", 0.01)


def _preset(level: str | None = None, rs: tuple[str, Any] | None = None, loss_type: str | None = None) -> Any:
    """Parameters and settings of one of ``RolloutCorrectionConfig``'s factory methods."""
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
    _RC + "loss_type": "ppo_clip",
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.type": "fixed",
    "data.max_response_length": None,
    _ACTOR + "policy_loss.loss_mode": "vanilla",
    _ACTOR + "policy_loss.dro_beta": None,
    # Of modes that have no counterpart.
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
_ELSEWHERE = {
    _ACTOR + "ppo_epochs": "has one pass over a batch; several steps by grpo.num_prompts_per_step over "
    "policy.train_global_batch_size",
    _ACTOR + "ppo_mini_batch_size": "policy.train_global_batch_size, in responses",
    _ACTOR + "use_torch_compile": "loss_fn.compile, which decides by itself",
    "actor_rollout_ref.rollout.calculate_log_probs": "generation log-probs always come with the samples",
    "actor_rollout_ref.rollout.n": "grpo.num_generations_per_prompt",
    "actor_rollout_ref.rollout.temperature": "policy.generation.temperature",
    "actor_rollout_ref.rollout.top_p": "policy.generation.top_p",
    "algorithm.adv_estimator": "grpo.adv_estimator",
    "algorithm.norm_adv_by_std_in_grpo": "grpo.normalize_rewards",
}
_KL = {
    **dict.fromkeys(("kl", "k1"), ("k1", "k1")),
    **dict.fromkeys(("kl+", "k1+"), ("k1", "k2")),
    **dict.fromkeys(("mse", "k2", "mse+", "k2+"), ("k2", "k2")),
    **dict.fromkeys(("low_var_kl", "k3"), ("k3", "k3")),
    **dict.fromkeys(("low_var_kl+", "k3+"), ("k3", "k2")),
}


def _convert(given: Given) -> Lines:
    mode, bypass = str(given[_ACTOR + "policy_loss.loss_mode"]), bool(given[_RC + "bypass_mode"])
    if bypass and mode in _MODES and mode != "vanilla" and given["trainer.use_v1"]:
        yield from _on_rollout(given, mode)
    elif bypass or mode == "bypass_mode":
        mode = "bypass_mode"
        yield from _bypass(given)
    elif mode in _MODES:
        yield from _MODES[mode](given)
        yield from _decoupled(given, mode)
    else:
        known = ", ".join(_MODES)
        yield Line("name", "clipped_pg")
        yield Remark(f"policy_loss.loss_mode: {mode} has no counterpart; those that have: {known}", ("loss_mode",))
        yield from _decoupled(given, mode)
    yield from _normalization(given, mode)
    yield from _kl(given)
    yield from inert(given, {_ACTOR + "entropy_coeff": ((0, 0.0, None), "NeMo-RL's losses have no entropy bonus")})
    yield Remark(
        "verl bounds log-ratios by ±20 before exp (gspo: at most 10), where exp here saturates at 40; ratios beyond "
        "e^20 differ."
    )


# --- objectives


_ENDS = ("low", "high")


def _bounds(given: Given) -> tuple[float, float]:
    keys = [
        _ACTOR + (f"clip_ratio_{end}" if given[_ACTOR + f"clip_ratio_{end}"] is not None else "clip_ratio")
        for end in _ENDS
    ]
    return given.number(keys[0]), given.number(keys[1])


def _clip(given: Given, name: str) -> Lines:
    yield Line("name", name)
    low, high = _bounds(given)
    yield Line("ratio_clip_min", low)
    yield Line("ratio_clip_max", high)


def _vanilla(given: Given) -> Lines:
    yield from _clip(given, "clipped_pg")
    yield Line("ratio_clip_c", given.number(_ACTOR + "clip_ratio_c"))


def _gmpo(given: Given) -> Lines:
    low, high = _bounds(given)
    note = "verl clips the log-ratio to [-low, high]; here bounds are distances of the ratio from 1"
    yield Line("name", "gmpo")
    yield Line("ratio_clip_min", 1 - math.exp(-low), note)
    yield Line("ratio_clip_max", math.exp(high) - 1, note)
    yield Remark("verl's geo_mean averages over the sequences of each microbatch; here over those of the step.")


def _sapo(given: Given) -> Lines:
    yield Line("name", "sapo")
    yield Line("options", {tau: given.number(_ACTOR + tau) for tau in ("tau_pos", "tau_neg")})


def _gpg(given: Given) -> Lines:
    yield Line("name", "clipped_pg")
    yield Line("disable_ppo_ratio", True)


def _dppo(preset: str, given: Given) -> Lines:
    low, high = _bounds(given)
    yield Line("name", "cispo", "DPPO's surrogate, -sg(min(r, c))·A·curr, is CISPO's without a lower bound")
    yield Line("ratio_clip_min", 1.0)
    yield Line("ratio_clip_max", given.number(_ACTOR + "clip_ratio_c") - 1, "clip_ratio_c bounds the ratio itself")
    mask = {"preset": preset, "delta": high, "delta_low": low, "log_ratio": "policy"}
    yield Line("masks", mask, "clip_ratio_high and _low; without bypass_mode verl measures them against old_log_prob")


def _dro(given: Given) -> Lines:
    yield Line("name", "dro")
    yield Line("options", {"beta": given.number(_ACTOR + "policy_loss.dro_beta")})


_MODES: dict[str, Callable[[Given], Lines]] = {
    "vanilla": _vanilla,
    "gspo": lambda given: _clip(given, "gspo_token"),
    "geo_mean": _gmpo,
    "sapo": _sapo,
    "cispo": lambda given: _clip(given, "cispo"),
    "gpg": _gpg,
    "dro": _dro,
    "dppo_tv": lambda given: _dppo("dppo_tv", given),
    "dppo_kl": lambda given: _dppo("dppo_kl", given),
}


# --- rollout correction


def _decoupled(given: Given, mode: str) -> Lines:
    level = given[_RC + "rollout_is"]
    if level is not None and mode == "geo_mean" and level != "sequence":
        text = "rollout_is: under geo_mean verl pools the truncated weights of a sequence by their geometric mean"
        yield Remark(text, ("rollout_is",))
    elif level is not None:
        yield from _weight(given)
        if given[_RC + "rollout_is_batch_normalize"]:
            yield Line("is_correction_batch_normalize", True)
            if given[_RC + "rollout_rs"] is not None:
                yield Remark("verl's mean of the weights is over all tokens, here it is over those kept.")
    masks = list(_rejection(given, "mismatch"))
    yield from masks
    rules = [line for line in masks if isinstance(line, Line)]
    if not rules:
        return
    by_token = any(str(option).strip().startswith("token") for option in str(given[_RC + "rollout_rs"]).split(","))
    if _aggregation(given, mode) == "token-mean" or by_token:
        yield Line("denominator", "kept", "verl takes what is rejected out of the response mask before the step")
        if _aggregation(given, mode) != "token-mean":
            yield Remark("verl counts a sequence without a kept token among the N of a sequence mean; here it isn't.")
        if by_token and level == "sequence":
            yield Remark("verl takes a sequence's weight over all its tokens, here it is over those kept.")
    elif given[_ACTOR + "use_kl_loss"]:
        yield Remark("verl takes rejected sequences out of the KL term too; here masks act on the surrogate.")


def _on_rollout(given: Given, mode: str) -> Lines:
    """verl's v1 trainer copies the rollout's log-probs, on which then any loss_mode runs, and nothing else."""
    for line in _MODES[mode](given):
        if isinstance(line, Line) and line.key == "masks":
            yield line._replace(value={**line.value, "log_ratio": "total"})
        else:
            yield line
    yield Line("ratio_anchor", "gen", "bypass_mode: old_log_prob is the rollout's")
    yield Remark(
        "verl's v1 trainer runs loss_mode here and uses neither rollout_is nor rollout_rs nor loss_type; with "
        "trainer.use_v1: false it trains loss_type in place of loss_mode."
    )


def _bypass(given: Given) -> Lines:
    kind, level = given[_RC + "loss_type"], given[_RC + "rollout_is"]
    if kind == "ppo_clip":
        yield from _vanilla(given)
        yield Line("ratio_anchor", "gen", "bypass_mode: the ratio is against the rollout's log-probs")
        if level is not None:
            yield Remark("verl computes rollout_is for its metrics alone here, and so nothing is written for it.")
    elif kind == "reinforce":
        normalize = given[_RC + "rollout_is_batch_normalize"]
        truncated = level == "token" and not normalize and "_" not in str(given[_RC + "rollout_is_threshold"])
        yield Line("name", "cispo" if truncated else "reinforce")
        if truncated:
            bound = given.number(_RC + "rollout_is_threshold")
            yield Line("ratio_anchor", "gen", "-sg(min(w, c))·A·curr with w = e^(curr - gen) is CISPO on gen")
            yield Line("ratio_clip_min", 1.0)
            yield Line("ratio_clip_max", bound - 1, "rollout_is_threshold bounds the weight itself")
        elif level is not None:
            normalized = "weights that move with the policy aren't divided by their mean here"
            yield from inert(given, {_RC + "rollout_is_batch_normalize": ((False, None), normalized)})
            yield Line("force_on_policy_ratio", True, "the weight is then against curr: sg(e^(curr - gen))")
            yield from _weight(given)
            yield Remark("NeMo-RL allows force_on_policy_ratio with one optimiser step a batch only.")
    else:
        yield Remark(
            f"rollout_correction.loss_type: {kind} is unknown; verl has ppo_clip and reinforce", ("loss_type",)
        )
    yield from _rejection(given, "total")


def _weight(given: Given) -> Lines:
    level, spec = str(given[_RC + "rollout_is"]), str(given[_RC + "rollout_is_threshold"])
    low, separator, high = spec.rpartition("_")
    if level not in ("token", "sequence"):
        yield Remark(f"rollout_is: {level} is unknown; verl has token and sequence", ("rollout_is",))
    elif separator:
        yield from corrected(level, "icepop", _number("rollout_is_threshold", low), _number("", high))
    else:
        yield from corrected(level, "tis", 0.0, _number("rollout_is_threshold", high))


def _rejection(given: Given, log_ratio: str) -> Lines:
    if given[_RC + "rollout_rs"] is None:
        return
    options = list(dict.fromkeys(_words(given[_RC + "rollout_rs"])))
    bounds = list(_words(given[_RC + "rollout_rs_threshold"]))
    if len(bounds) not in (1, len(options)):
        raise ConfigError(
            f"rollout_rs_threshold must have one bound or one for each of {', '.join(options)}, but has {len(bounds)}"
        )
    for option, spec in zip(options, bounds * (len(options) if len(bounds) == 1 else 1), strict=True):
        place, _, statistic = option.rpartition("_")
        if place not in _LEVELS or statistic not in ("k1", "k2", "k3") or option == "seq_max_k1":
            yield Remark(f"rollout_rs: {option} is unknown", ("rollout_rs",))
            continue
        level = _LEVELS[place]
        raw: dict[str, Any] = {"log_ratio": log_ratio, "level": level}
        if statistic != "k1":
            yield Line("masks", {**raw, "statistic": statistic, "max": _number("rollout_rs_threshold", spec)})
            continue
        low, separator, high = spec.rpartition("_")
        upper = _number("rollout_rs_threshold", high)
        given_lower = _number("rollout_rs_threshold", low) if separator else upper
        if min(given_lower, upper) <= 0:
            raise ConfigError(f"rollout_rs_threshold: {option} bounds a ratio, which must be above 0, by '{spec}'")
        lower = given_lower if separator else 1 / upper
        note = (
            f"verl's {option} keeps {lower:g} to {upper:g} of 1/ρ; here bounds are on ρ itself"
            if separator
            else (f"verl's {option} keeps 1/{upper:g} to {upper:g}")
        )
        named = {"preset": _PRESETS_OF_K1[level]} if log_ratio == "mismatch" else raw
        yield Line("masks", {**named, "min": 1 / upper, "max": 1 / lower}, note)


def _words(text: Any) -> Iterator[str]:
    return (word.strip() for word in str(text).split(",") if word.strip())


def _number(key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{key} must be a number or lower_upper, but a bound is '{text}'") from None


# --- normalisation and KL


def _aggregation(given: Given, mode: str) -> str:
    always = {"gspo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean", "geo_mean": "seq-mean-token-mean"}
    return always.get(mode) or str(given[_ACTOR + "loss_agg_mode"])


def _normalization(given: Given, mode: str) -> Lines:
    aggregation = _aggregation(given, mode)
    if aggregation != "seq-mean-token-sum-norm":
        if mode in ("gspo", "sapo", "geo_mean"):
            yield Line("token_level_loss", False, f"verl's {mode} is a mean over sequences whatever loss_agg_mode says")
            return
        yield from chosen(
            given,
            _ACTOR + "loss_agg_mode",
            {
                "token-mean": [Line("token_level_loss", True)],
                "seq-mean-token-mean": [Line("token_level_loss", False)],
                "seq-mean-token-sum": [Line("loss_normalization", "documents")],
            },
        )
        return
    keys = (_ACTOR + "loss_scale_factor", "data.max_response_length")
    key = next((key for key in keys if given[key] is not None), None)
    if key is None:
        text = "loss_agg_mode: seq-mean-token-sum-norm divides by the padded width; give loss_scale_factor"
        yield Remark(text, ("loss_agg_mode",))
        return
    note = "" if key == keys[0] else "verl divides by the padded width, which is data.max_response_length"
    yield Line("loss_normalization", "constant")
    yield Line("loss_normalization_constant", given.number(key), note)


def _kl(given: Given) -> Lines:
    if given["algorithm.use_kl_in_reward"]:
        kind = str(given["algorithm.kl_penalty"])
        yield Line("use_kl_in_reward", True)
        yield Line("reference_policy_kl_penalty", given.number("algorithm.kl_ctrl.kl_coef"))
        if kind in _KL:
            yield Line("reference_policy_kl_type", _KL[kind][0])
        else:
            yield Remark(f"algorithm.kl_penalty: {kind} has no counterpart", ("kl_penalty",))
        adaptive = "the coefficient of the KL is fixed here"
        yield from inert(given, {"algorithm.kl_ctrl.type": (("fixed",), adaptive)})
        if given[_ACTOR + "use_kl_loss"]:
            yield Remark("use_kl_loss: a KL in the reward and one in the loss don't go together here", ("use_kl_loss",))
    elif given[_ACTOR + "use_kl_loss"]:
        kind = str(given[_ACTOR + "kl_loss_type"])
        yield Line("reference_policy_kl_penalty", given.number(_ACTOR + "kl_loss_coef"))
        if kind not in _KL:
            yield Remark(
                f"kl_loss_type: {kind} has no counterpart; those that have: {', '.join(_KL)}", ("kl_loss_type",)
            )
            return
        value, gradient = _KL[kind]
        yield Line("reference_policy_kl_type", value)
        yield Line("reference_policy_kl_gradient", gradient, "verl differentiates the estimate itself")
        if value != "k3":
            yield Line("kl_input_clamp_value", None)
            yield Line("kl_output_clamp_value", None)
    else:
        yield Line("reference_policy_kl_penalty", 0.0)


PEER = Peer(
    name="verl",
    title="verl's rollout correction and actor",
    source="verl-project/verl at 1dda039b9",
    defaults=_DEFAULTS,
    convert=_convert,
    elsewhere=_ELSEWHERE,
    sections=("rollout_correction", "policy_loss"),
    constructors=("RolloutCorrectionConfig",),
    presets=_PRESETS,
)
