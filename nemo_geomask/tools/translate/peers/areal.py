"""AReaL: settings under ``actor``. Its KL metrics use prev - gen; its k3 is that of the inverse ratio."""

from __future__ import annotations

import math

from nemo_geomask.tools.translate.peer_table import (
    Assign,
    Conversion,
    Peer,
    PeerSettings,
    Remark,
    settings_of,
    weight_settings,
    without_counterpart,
)

_R = "actor.rejection_sampling."
_KEYS = ("level", "action", "metric", "agg", "upper", "lower")
_POOLED = {"mean": "sequence_mean", "sum": "sequence", "max": "sequence_max"}


def _convert(settings: PeerSettings) -> Conversion:
    is_sequence_ratio = settings["actor.importance_sampling_level"] == "sequence"
    if settings["actor.use_sapo_loss"]:
        yield Assign("name", "sapo")
        if is_sequence_ratio:
            text = "importance_sampling_level: sequence with use_sapo_loss has no counterpart; token is used"
            yield Remark(text, ("actor.importance_sampling_level",))
        yield Assign("options", {f"tau_{sign}": settings.number(f"actor.sapo_tau_{sign}") for sign in ("pos", "neg")})
    else:
        name = "cispo" if settings["actor.use_cispo_loss"] else "gspo" if is_sequence_ratio else "clipped_pg"
        low = settings.number("actor.eps_clip")
        yield Assign("name", name)
        yield Assign("ratio_clip_min", low)
        high = low if settings["actor.eps_clip_higher"] is None else settings.number("actor.eps_clip_higher")
        yield Assign("ratio_clip_max", high)
        if settings["actor.c_clip"] is not None and name != "cispo":
            yield Assign("ratio_clip_c", settings.number("actor.c_clip"))
    yield Assign("loss_normalization", "tokens")
    yield Assign("reference_policy_kl_penalty", settings.number("actor.kl_ctl"))
    if settings.number("actor.kl_ctl"):
        yield Assign("use_kl_in_reward", True, "AReaL subtracts the KL from the reward")
        yield Assign("reference_policy_kl_type", str(settings["actor.kl_estimator"]))
        yield Remark("NeMo-RL adds the KL to the reward under Reinforce++ and GAE, but not under its GRPO estimator.")
    if not settings["actor.use_decoupled_loss"] and not settings["actor.recompute_logprob"]:
        yield Assign("ratio_anchor", "gen", "without use_decoupled_loss and recompute_logprob")
    elif settings["actor.use_decoupled_loss"] and any(_R + key in settings for key in _KEYS):
        yield from _rejection(settings)
    method, reads_prev = settings["actor.prox_logp_method"], settings["actor.m2_threshold"] is not None
    if method == "loglinear" and not (reads_prev or settings.number("actor.kl_ctl")):
        yield Assign("proximal_policy", "interpolated", "the batch must have the tokens' versions")
    elif method != "recompute":
        reason = " beside a KL in the reward or M2PO" if method == "loglinear" else ""
        text = f"prox_logp_method: {method} has no counterpart{reason}; π_old is recomputed"
        yield Remark(text, ("prox_logp_method",))
    yield from without_counterpart(
        settings,
        {"actor.megatron.moe_z_loss_coeff": ((0, 0.0, None), "NeMo-RL has no setting for this loss of Megatron's")},
    )
    if settings["actor.m2_threshold"] is not None:
        mask = {"preset": "m2po", "tau": settings.number("actor.m2_threshold")}
        yield Assign("masks", mask, "AReaL has a budget for each microbatch and rank, this package one for the batch")
        yield Assign("denominator", "kept", "AReaL counts tokens after M2PO")


def _rejection(settings: PeerSettings) -> Conversion:
    values = {key: settings[_R + key] for key in _KEYS}
    metric, upper = str(values["metric"]), float(values["upper"])
    lower = None if values["lower"] is None else float(values["lower"])
    is_token_level = values["level"] == "token"
    level = "token" if is_token_level else _POOLED[str(values["agg"])]
    is_on_weight = level == ("token" if is_token_level else "sequence_mean")
    if metric == "ratio":
        weight = "token" if is_token_level else "sequence_mean"
        if is_on_weight:
            truncation = "icepop" if values["action"] == "mask" else "tis"
            yield from weight_settings(weight, truncation, lower or 0.0, upper)
        elif values["action"] == "mask":
            yield from weight_settings(weight)
            mask = {"log_ratio": "mismatch", "level": level, "max": upper}
            yield Assign(
                "masks",
                mask if lower is None else {**mask, "min": lower},
                "the weight stays the geometric mean, as in AReaL",
            )
        else:
            yield Remark(
                "rejection_sampling: a clamp that depends on sum or max has no counterpart", ("rejection_sampling",)
            )
        if level == "sequence_max" and lower is not None:
            yield Remark(
                "rejection_sampling: AReaL compares the largest token with both bounds, this package every token",
                ("rejection_sampling",),
            )
        return
    yield from weight_settings("token")
    mask = {"log_ratio": "mismatch", "level": level}
    if values["action"] == "clamp":
        yield Remark(
            f"rejection_sampling: a clamp that depends on {metric} has no counterpart", ("rejection_sampling",)
        )
    elif metric == "kl_k1":
        low = {} if lower is None else {"min": math.exp(lower)}
        yield Assign(
            "masks",
            {**mask, **low, "max": math.exp(upper)},
            "AReaL's kl_k1 is prev - gen; the bounds of this package are on ρ",
        )
    elif metric == "kl_k2":
        yield Assign("masks", {**mask, "statistic": "k2", "max": upper})
    elif metric == "binary_kl" and is_token_level:
        yield Assign("masks", {"preset": "kpop", "max": upper})
    else:
        text = f"rejection_sampling.metric: {metric} at level {level}: AReaL's k3 is e^(gen - prev) - 1 + prev - gen"
        yield Remark(text, ("rejection_sampling",))


PEER = Peer(
    name="areal",
    title="AReaL's actor",
    source="areal-project/AReaL at cbff54d64",
    convert=_convert,
    **settings_of("areal"),
    sections=("actor.rejection_sampling",),
    marks=(
        "actor.use_decoupled_loss",
        "actor.recompute_logprob",
        "actor.prox_logp_method",
        "actor.eps_clip_higher",
        "actor.kl_ctl",
        "actor.m2_threshold",
        "actor.rejection_sampling.*",
        "actor.use_sapo_loss",
        "rollout.max_head_offpolicyness",
        "gconfig.n_samples",
    ),
    config_options=("config",),
)
