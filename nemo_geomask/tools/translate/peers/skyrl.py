"""SkyRL: settings under ``trainer.algorithm``."""

from __future__ import annotations

from nemo_geomask.tools.translate.peer_table import (
    NO_BOUND,
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

_A = "trainer.algorithm."
_O = _A + "off_policy_correction."
_M = "trainer.policy.megatron_config."


def _convert(settings: PeerSettings) -> Conversion:
    loss_type = str(settings[_A + "policy_loss_type"])
    if loss_type in _LOSSES:
        yield from _LOSSES[loss_type](settings)
    else:
        yield Assign("name", "clipped_pg")
        yield Remark(
            f"policy_loss_type: {loss_type} has no counterpart; values with a counterpart: {', '.join(_LOSSES)}",
            (loss_type,),
        )
    constant: list[Assign | Remark] = [
        Remark("loss_reduction: seq_mean_token_sum_norm needs max_seq_len", ("max_seq_len",))
    ]
    if settings[_A + "max_seq_len"] is not None:
        constant = [
            Assign("loss_normalization", "constant"),
            Assign("loss_normalization_constant", settings.number(_A + "max_seq_len")),
        ]
    by_token = Assign("loss_normalization", "tokens") if loss_type == "gspo" else Assign("token_level_loss", True)
    yield from convert_value(
        settings,
        _A + "loss_reduction",
        {
            "token_mean": [by_token],
            "sequence_mean": [Assign("token_level_loss", False)],
            "seq_mean_token_sum_norm": constant,
        },
    )
    is_on_rollout = loss_type in ("rollout_is", "dppo") or (
        loss_type == "cispo" and settings[_A + "cispo.cispo_anchor"] == "rollout"
    )
    yield from _correction(settings, ratio_contains_weight=is_on_rollout)
    yield from _kl(settings)
    yield from without_counterpart(
        settings,
        {
            _A + "use_entropy_loss": ((False,), "NeMo-RL's losses have no entropy bonus"),
            "trainer.override_entrypoint": ((None,), "another trainer runs, whose loss may differ"),
            "trainer.update_ref_every_epoch": ((False,), "NeMo-RL's reference policy stays the same"),
            _M + "moe_aux_loss_coeff": ((0, 0.0), "NeMo-RL has no setting for this loss of Megatron's"),
        },
    )


def _clip(settings: PeerSettings, name: str) -> Conversion:
    yield Assign("name", name)
    yield Assign("ratio_clip_min", settings.number(_A + "eps_clip_low"))
    yield Assign("ratio_clip_max", settings.number(_A + "eps_clip_high"))


def _dual(settings: PeerSettings) -> Conversion:
    yield from _clip(settings, "clipped_pg")
    yield Assign("ratio_clip_c", settings.number(_A + "clip_ratio_c"))


def _sapo(settings: PeerSettings) -> Conversion:
    yield Assign("name", "sapo")
    yield Assign("options", {f"tau_{sign}": settings.number(f"{_A}sapo.tau_{sign}") for sign in ("pos", "neg")})


def _cispo(settings: PeerSettings) -> Conversion:
    yield Assign("name", "cispo")
    yield Assign("ratio_clip_min", settings.number(_A + "cispo.cispo_eps_clip_low"))
    yield Assign("ratio_clip_max", settings.number(_A + "cispo.cispo_eps_clip_high"))
    if settings[_A + "cispo.cispo_anchor"] == "rollout":
        yield Assign("ratio_anchor", "gen")


def _rollout_is(settings: PeerSettings) -> Conversion:
    low, high = settings.number(_A + "eps_clip_low"), settings.number(_A + "eps_clip_high")
    yield Assign("name", "cispo", "rollout_is is -sg(r)·A·curr where r is within the clip bounds, else 0")
    yield Assign("ratio_anchor", "gen")
    yield Assign("ratio_clip_min", 1.0)
    yield Assign("ratio_clip_max", NO_BOUND)
    yield Assign("masks", {"log_ratio": "total", "level": "token", "min": max(1 - low, 0.0), "max": 1 + high})
    yield Remark("SkyRL drops a ratio that equals a bound, this package keeps it.")


def _dppo(settings: PeerSettings) -> Conversion:
    presets = {"binary_tv": "dppo_tv", "binary_kl": "dppo_kl"}
    divergence = str(settings[_A + "dppo.dppo_type"])
    yield Assign("name", "ipo", "SkyRL differentiates the ratio as IPO does; DPPO's authors detach it")
    yield Assign("options", {"eps": 0.999999, "kl_tau": 0.0}, "eps close to 1 disables the mask of IPO")
    yield Assign("ratio_anchor", "gen")
    low, high = settings.number(_A + "dppo.delta_low"), settings.number(_A + "dppo.delta_high")
    yield Assign("masks", {"preset": presets.get(divergence, "dppo_tv"), "delta": high, "delta_low": low})


_LOSSES = {
    "regular": lambda settings: _clip(settings, "clipped_pg"),
    "dual_clip": _dual,
    "gspo": lambda settings: _clip(settings, "gspo_token"),
    "sapo": _sapo,
    "cispo": _cispo,
    "rollout_is": _rollout_is,
    "dppo": _dppo,
}


def _correction(settings: PeerSettings, *, ratio_contains_weight: bool) -> Conversion:
    level = settings[_O + "tis_ratio_type"]
    if level in ("token", "sequence") and ratio_contains_weight:
        text = f"tis_ratio_type: {level} applies the weight although the ratio, taken against the rollout, contains it"
        yield Remark(text, ("tis_ratio_type",))
    elif level in ("token", "sequence"):
        yield from weight_settings(str(level), "tis", 0.0, settings.number(f"{_O}{level}_tis_ratio_clip_high"))
    rules = (
        ("veto", "outlier_token_is_threshold_low", "outlier_token_is_threshold_high", True),
        ("geometric", "geo_mask_low", "geo_mask_high", settings[_O + "sequence_mask_metric"] == "geometric"),
        ("product", "product_mask_low", "product_mask_high", settings[_O + "sequence_mask_metric"] == "product"),
        ("icepop", "token_mask_is_threshold_low", "token_mask_is_threshold_high", True),
    )
    masks = []
    for preset, low, high, is_enabled in rules:
        if is_enabled and not settings[_O + low] is settings[_O + high] is None:
            bounds = {
                name: settings[_O + key]
                for name, key in (("min", low), ("max", high))
                if settings[_O + key] is not None
            }
            masks.append({"preset": preset, **{name: float(bound) for name, bound in bounds.items()}})
            yield Assign("masks", masks[-1])
    if len(masks) > 1:
        text = "off_policy_correction: SkyRL applies each mask to what the one before kept; here each judges all tokens"
        yield Remark(text, ("off_policy_correction",))
    elif masks and ratio_contains_weight:
        text = "off_policy_correction: a mask beside a ratio against the rollout differs from SkyRL's"
        yield Remark(text, ("off_policy_correction",))


def _kl(settings: PeerSettings) -> Conversion:
    estimator = str(settings[_A + "kl_estimator_type"])
    if settings[_A + "use_kl_in_reward"]:
        yield Assign("use_kl_in_reward", True)
        yield Assign("reference_policy_kl_type", estimator)
        yield Remark("kl_ctrl: write its coefficient as reference_policy_kl_penalty", ("kl_ctrl",))
    elif not settings[_A + "use_kl_loss"]:
        yield Assign("reference_policy_kl_penalty", 0.0)
    elif estimator not in ("k1", "k2", "k3"):
        yield Remark(
            f"kl_estimator_type: {estimator} has no counterpart; values with a counterpart: k1, k2, k3",
            ("kl_estimator_type",),
        )
    else:
        yield Assign("reference_policy_kl_penalty", settings.number(_A + "kl_loss_coef"))
        yield Assign("reference_policy_kl_type", estimator)
        yield Assign("reference_policy_kl_gradient", estimator, "SkyRL differentiates the estimate itself")
        if settings[_A + "loss_reduction"] != "sequence_mean":
            text = "use_kl_loss: SkyRL averages the KL over each sequence, then over sequences; this package does not"
            yield Remark(text, ("use_kl_loss",))


PEER = Peer(
    name="skyrl",
    title="SkyRL's trainer.algorithm",
    source="NovaSky-AI/SkyRL at a9564572e",
    convert=_convert,
    **settings_of("skyrl"),
    sections=(
        "trainer.algorithm",
        "generator.step_wise_trajectories",
        "algorithm.off_policy_correction",
        "algorithm.dppo",
        "algorithm.cispo",
        "algorithm.sapo",
    ),
    marks=("trainer.algorithm.*", "trainer.placement.*", "generator.inference_engine.*"),
    programs={
        "skyrl.train.entrypoints.main_base": {},
        "examples.train.*.main_dapo": {},
        "examples.train.*.main_dapo_fully_async": {},
        "examples.train.*.main_tis_dapo": {},
        "examples.train.*.main_fully_async": {},
    },
    other_programs=("skyrl.train.main_sft", "skyrl.tinker.api", "skyrl.train.entrypoints.serve"),
)
