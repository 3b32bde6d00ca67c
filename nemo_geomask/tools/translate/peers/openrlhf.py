"""OpenRLHF: command-line arguments of ``train_ppo_ray``."""

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

_IS, _KL = "algo.advantage.is_correction_", "algo.kl."


def _convert(settings: PeerSettings) -> Conversion:
    is_gspo = settings["actor.policy_loss_type"] == "gspo"
    yield from convert_value(
        settings,
        "actor.policy_loss_type",
        {"ppo": [Assign("name", "clipped_pg")], "gspo": [Assign("name", "gspo"), Assign("token_level_loss", False)]},
    )
    if not is_gspo:
        yield Assign("token_level_loss", bool(settings["actor.token_level_loss"]))
    low_high = settings["actor.eps_clip_low_high"]
    low, high = (
        (settings.number("actor.eps_clip"),) * 2 if low_high is None else settings.numbers("actor.eps_clip_low_high")
    )
    yield Assign("ratio_clip_min", low)
    yield Assign("ratio_clip_max", high)
    if settings["actor.dual_clip"] is not None:
        yield Assign("ratio_clip_c", settings.number("actor.dual_clip"))
    if settings[_IS + "enable"] and is_gspo:
        yield Assign("ratio_anchor", "gen", "under gspo, OpenRLHF corrects by taking the ratio against the sampler")
    elif settings[_IS + "enable"]:
        low, high = settings.numbers(_IS + "threshold")
        truncation = str(settings[_IS + "type"])
        yield from weight_settings("token", truncation, low, high)
        if truncation == "seq-mask-tis" and not low:
            yield Assign("truncated_importance_sampling_ratio_min", 0.0)
    yield from without_counterpart(
        settings, {"actor.entropy_coef": ((None, 0, 0.0), "NeMo-RL's losses have no entropy bonus")}
    )
    estimator = str(settings[_KL + "estimator"])
    yield Assign("reference_policy_kl_penalty", settings.number(_KL + "init_coef"))
    if not settings.number(_KL + "init_coef"):
        return
    if estimator not in ("k1", "k2", "k3"):
        yield Remark(f"algo.kl.estimator: {estimator} has no counterpart", (_KL + "estimator",))
        return
    yield Assign("reference_policy_kl_type", estimator)
    if settings[_KL + "use_loss"]:
        yield Assign("reference_policy_kl_gradient", estimator, "OpenRLHF differentiates the estimate itself")
        yield Assign("kl_input_clamp_value", None)
    else:
        yield Assign("use_kl_in_reward", True)
        yield Remark("NeMo-RL adds the KL to the reward under Reinforce++ and GAE, but not under its GRPO estimator.")


PEER = Peer(
    name="openrlhf",
    title="OpenRLHF's arguments",
    source="OpenRLHF/OpenRLHF at 3c3be6234",
    convert=_convert,
    **settings_of("openrlhf"),
    marks=("algo.advantage.*", "algo.kl.*", "actor.policy_loss_type", "actor.eps_clip_low_high", "vllm.num_engines"),
    programs={"openrlhf.cli.train_ppo_ray": {}},
    other_programs=("openrlhf.cli.train_*", "openrlhf.cli.serve_rm"),
)
