"""slime and miles: command-line arguments, and the settings of ``mis.yaml``."""

from __future__ import annotations

from nemo_geomask.tools.translate.peer_table import (
    Assign,
    Conversion,
    Peer,
    PeerSettings,
    Remark,
    convert_value,
    settings_of,
    weight_settings,
    without_counterpart,
)
from nemo_geomask.yaml_text import as_yaml

_ESTIMATORS = {
    **dict.fromkeys(("grpo", "ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"), "clipped_pg"),
    "gspo": "gspo",
    "cispo": "cispo",
}
_LEVELS = {"token": "token", "sequence": "sequence", "geometric": "sequence_mean"}
_PRESETS = {"token": "icepop", "sequence": "product", "geometric": "geometric"}
_KL = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "k3"}


def _convert(settings: PeerSettings) -> Conversion:
    estimator = str(settings["advantage_estimator"])
    if estimator not in _ESTIMATORS:
        text = (
            f"advantage_estimator: {estimator} has no counterpart; values with a counterpart: {', '.join(_ESTIMATORS)}"
        )
        yield Remark(text, ("advantage_estimator",))
    name = _ESTIMATORS.get(estimator, "clipped_pg")
    yield Assign("name", name)
    low = settings.number("eps_clip")
    yield Assign("ratio_clip_min", low)
    yield Assign("ratio_clip_max", low if settings["eps_clip_high"] is None else settings.number("eps_clip_high"))
    if name != "cispo" and settings["eps_clip_c"] is not None:
        yield Assign("ratio_clip_c", settings.number("eps_clip_c"))
    is_token_mean = bool(settings["calculate_per_token_loss"])
    yield (
        Assign("loss_normalization", "tokens")
        if is_token_mean and name == "gspo"
        else Assign("token_level_loss", is_token_mean)
    )
    is_on_rollout = bool(settings["use_rollout_logprobs"])
    if is_on_rollout:
        yield Assign("ratio_anchor", "gen")
    elif settings["use_tis"]:
        yield from _correction(settings)
    if settings["use_opsm"]:
        note = "" if is_on_rollout else "slime compares with the training engine's log-probs"
        mask = {"preset": "opsm", "delta": settings.number("opsm_delta")}
        yield Assign("masks", mask if is_on_rollout else {**mask, "log_ratio": "policy"}, note)
        yield Remark("slime's OPSM tests each token's advantage, this package the sequence's mean.")
    yield from _kl(settings)
    yield from without_counterpart(
        settings,
        {
            "loss_type": (("policy_loss",), "only policy_loss is translated"),
            "entropy_coef": ((0, 0.0), "NeMo-RL's losses have no entropy bonus"),
            "moe_aux_loss_coeff": ((0, 0.0), "NeMo-RL has no setting for this loss of Megatron's"),
            "custom_pg_loss_reducer_function_path": (
                (None,),
                "your own code; docs/how_to/plugins.md shows how to write it as a plugin",
            ),
        },
    )


def _correction(settings: PeerSettings) -> Conversion:
    path = settings["custom_tis_function_path"]
    function = "" if path is None else str(path).rpartition(".")[2]
    if function in ("", "vanilla_tis_function"):
        yield from weight_settings("token", "tis", settings.number("tis_clip_low"), settings.number("tis_clip"))
    elif function == "icepop_function":
        yield from weight_settings("token", "icepop", settings.number("tis_clip_low"), settings.number("tis_clip"))
    elif function.startswith("compute_mis_weights"):
        yield from _mis(settings)
    else:
        yield Remark(
            f"custom_tis_function_path: {path} is your own code; docs/how_to/plugins.md shows how to write it as a "
            "plugin",
            (str(path),),
        )


def _mis(settings: PeerSettings) -> Conversion:
    high = settings.number("tis_upper_bound")
    low = 1 / high if settings["tis_lower_bound"] is None else settings.number("tis_lower_bound")
    kinds = {"truncate": ("tis", 0.0), "clip": ("tis", low), "mask": ("icepop", low)}
    level, mode = str(settings["tis_level"]), str(settings["tis_mode"])
    if level not in _LEVELS or mode not in kinds:
        yield Remark(f"tis_level: {level} with tis_mode: {mode} is unknown", ("tis_level", "tis_mode"))
        return
    yield from weight_settings(_LEVELS[level], *kinds[mode], high)
    if settings["use_rs"]:
        rs_low = low if settings["rs_lower_bound"] is None else settings.number("rs_lower_bound")
        rs_high = high if settings["rs_upper_bound"] is None else settings.number("rs_upper_bound")
        bounds = {
            level: [Assign("masks", {"preset": name, "min": rs_low, "max": rs_high})]
            for level, name in _PRESETS.items()
        }
        yield from convert_value(settings, "rs_level", bounds)
        if settings["rs_veto_threshold"] is not None:
            yield Assign("masks", {"preset": "veto", "min": settings.number("rs_veto_threshold")})
        if settings["use_kl_loss"]:
            yield Remark(
                "use_kl_loss: slime removes rejected tokens from the KL term, too; this package does not",
                ("use_kl_loss",),
            )
    if settings["tis_batch_normalize"]:
        yield Assign("is_correction_batch_normalize", True)
        yield Remark("slime takes the mean of the weights over each microbatch and rank, this package over the batch.")
    yield Remark("slime clamps log-ratios to ±20 before exp, this package to at most 40.")


def _kl(settings: PeerSettings) -> Conversion:
    if settings.number("kl_coef"):
        yield Assign("use_kl_in_reward", True)
        yield Assign("reference_policy_kl_penalty", settings.number("kl_coef"))
        yield Assign("reference_policy_kl_type", _KL.get(str(settings["kl_loss_type"]), "k1"))
        if settings["use_kl_loss"]:
            yield Remark(
                "use_kl_loss: this package can't combine a KL in the reward with a KL in the loss", ("use_kl_loss",)
            )
        return
    if not settings["use_kl_loss"] or not settings.number("kl_loss_coef"):
        yield Assign("reference_policy_kl_penalty", 0.0)
        return
    estimator = str(settings["kl_loss_type"])
    if estimator not in _KL:
        yield Remark(f"kl_loss_type: {as_yaml(estimator)} is unknown; slime has {', '.join(_KL)}", ("kl_loss_type",))
        return
    yield Assign("reference_policy_kl_penalty", settings.number("kl_loss_coef"))
    yield Assign("reference_policy_kl_type", _KL[estimator])
    if settings["use_unbiased_kl"]:
        yield Assign("use_on_policy_kl_approximation", True, "slime multiplies by the ratio and differentiates both")
        yield Assign("kl_ratio_anchor", "gen" if settings["use_rollout_logprobs"] else "prev")
    else:
        yield Assign("reference_policy_kl_gradient", _KL[estimator], "slime differentiates the estimate itself")
    yield Assign("kl_input_clamp_value", None)
    yield Assign("kl_output_clamp_value", 10.0 if estimator == "low_var_kl" else None)


PEER = Peer(
    name="slime",
    title="slime's arguments",
    source="THUDM/slime at 624b824a8",
    convert=_convert,
    **settings_of("slime"),
    marks=(
        "use_tis",
        "tis_clip*",
        "use_opsm",
        "opsm_delta",
        "use_rollout_logprobs",
        "custom_tis_function_path",
        "tis_level",
        "rs_level",
        "num_rollout",
        "rollout_batch_size",
        "calculate_per_token_loss",
    ),
    programs={"*train.py": {}, "*train_async.py": {}},
    config_options=("custom_config_path",),
)
