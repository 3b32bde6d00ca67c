"""AReaL: ``actor``. Its KL metrics are of +(prev - gen); its k3 is that of the inverse ratio."""

from __future__ import annotations

import math
from typing import Any

from nemo_geomask.translate.peer import Given, Line, Lines, Peer, Remark, corrected

__all__ = ["PEER"]

_R = "actor.rejection_sampling."
_DEFAULTS: dict[str, Any] = {
    "actor.eps_clip": 0.2,
    "actor.eps_clip_higher": None,
    "actor.c_clip": None,
    "actor.importance_sampling_level": "token",
    "actor.use_sapo_loss": False,
    "actor.sapo_tau_pos": 1.0,
    "actor.sapo_tau_neg": 1.05,
    "actor.use_cispo_loss": False,
    "actor.use_decoupled_loss": False,
    "actor.recompute_logprob": False,
    "actor.prox_logp_method": "recompute",
    "actor.m2_threshold": None,
    "actor.kl_ctl": 0.1,
    "actor.kl_estimator": "k1",
    _R + "level": "token",
    _R + "action": "mask",
    _R + "metric": "ratio",
    _R + "agg": "mean",
    _R + "upper": 5.0,
    _R + "lower": None,
}
_KEYS = ("level", "action", "metric", "agg", "upper", "lower")
_POOLED = {"mean": "sequence_mean", "sum": "sequence", "max": "sequence_max"}


def _convert(given: Given) -> Lines:
    by_sequence = given["actor.importance_sampling_level"] == "sequence"
    if given["actor.use_sapo_loss"]:
        yield Line("name", "sapo")
        yield Line("options", {f"tau_{sign}": given.number(f"actor.sapo_tau_{sign}") for sign in ("pos", "neg")})
    else:
        name = "cispo" if given["actor.use_cispo_loss"] else "gspo" if by_sequence else "clipped_pg"
        low = given.number("actor.eps_clip")
        yield Line("name", name)
        yield Line("ratio_clip_min", low)
        high = low if given["actor.eps_clip_higher"] is None else given.number("actor.eps_clip_higher")
        yield Line("ratio_clip_max", high)
        if given["actor.c_clip"] is not None and name != "cispo":
            yield Line("ratio_clip_c", given.number("actor.c_clip"))
    yield Line("loss_normalization", "tokens")
    yield Line("reference_policy_kl_penalty", given.number("actor.kl_ctl"))
    if given.number("actor.kl_ctl"):
        yield Line("use_kl_in_reward", True, "AReaL takes its KL from the reward")
        yield Line("reference_policy_kl_type", str(given["actor.kl_estimator"]))
        yield Remark("NeMo-RL's GRPO estimator reads no KL in the reward; Reinforce++ and GAE do.")
    if not given["actor.use_decoupled_loss"] and not given["actor.recompute_logprob"]:
        yield Line("ratio_anchor", "gen", "neither use_decoupled_loss nor recompute_logprob: the sampler's log-probs")
    elif given["actor.use_decoupled_loss"] and any(_R + key in given for key in _KEYS):
        yield from _rejection(given)
    if given["actor.prox_logp_method"] != "recompute":
        text = (
            f"prox_logp_method: {given['actor.prox_logp_method']}: log-probs between two versions aren't estimated here"
        )
        yield Remark(text, ("prox_logp_method",))
    if given["actor.m2_threshold"] is not None:
        mask = {"preset": "m2po", "tau": given.number("actor.m2_threshold")}
        yield Line("masks", mask, "AReaL's budget is each microbatch's and rank's own, here the step's")
        yield Line("denominator", "kept", "AReaL counts tokens after M2PO")


def _rejection(given: Given) -> Lines:
    values = {key: given[_R + key] for key in _KEYS}
    metric, upper = str(values["metric"]), float(values["upper"])
    lower = None if values["lower"] is None else float(values["lower"])
    by_token = values["level"] == "token"
    level = "token" if by_token else _POOLED[str(values["agg"])]
    plain = level == ("token" if by_token else "sequence_mean")
    if metric == "ratio":
        weight = "token" if by_token else "sequence_mean"
        if plain:
            kind = "icepop" if values["action"] == "mask" else "tis"
            yield from corrected(weight, kind, lower or 0.0, upper)
        elif values["action"] == "mask":
            yield from corrected(weight)
            raw = {"log_ratio": "mismatch", "level": level, "max": upper}
            yield Line("masks", raw if lower is None else {**raw, "min": lower}, "AReaL's weight is the geometric mean")
        else:
            yield Remark("rejection_sampling: clamp decided by sum or max has no counterpart", ("rejection_sampling",))
        if level == "sequence_max" and lower is not None:
            yield Remark("AReaL's max compares the largest token with both bounds; here every token is inside them.")
        return
    yield from corrected("token")
    raw = {"log_ratio": "mismatch", "level": level}
    if values["action"] == "clamp":
        yield Remark(f"rejection_sampling: clamp decided by {metric} has no counterpart", ("rejection_sampling",))
    elif metric == "kl_k1":
        low = {} if lower is None else {"min": math.exp(lower)}
        yield Line("masks", {**raw, **low, "max": math.exp(upper)}, "AReaL's kl_k1 is prev - gen; here bounds are on ρ")
    elif metric == "kl_k2":
        yield Line("masks", {**raw, "statistic": "k2", "max": upper})
    elif metric == "binary_kl" and by_token:
        yield Line("masks", {"preset": "kpop", "max": upper})
    else:
        text = f"rejection_sampling.metric: {metric} at level {level}: AReaL's k3 is e^(gen - prev) - 1 + prev - gen"
        yield Remark(text, ("rejection_sampling",))


PEER = Peer(
    name="areal",
    title="AReaL's actor",
    source="areal-project/AReaL at cbff54d64",
    defaults=_DEFAULTS,
    convert=_convert,
    elsewhere={
        "gconfig.n_samples": "grpo.num_generations_per_prompt",
        "gconfig.temperature": "policy.generation.temperature",
    },
    sections=("actor.rejection_sampling",),
)
