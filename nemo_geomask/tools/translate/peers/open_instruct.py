"""open-instruct: arguments of its GRPO trainer."""

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
)


def _convert(settings: PeerSettings) -> Conversion:
    is_cispo = settings["loss_fn"] == "cispo"
    if settings["loss_fn"] not in ("dapo", "cispo"):
        yield Remark(f"loss_fn: {settings['loss_fn']} is unknown; open-instruct has dapo and cispo", ("loss_fn",))
    yield Assign("name", "cispo" if is_cispo else "clipped_pg")
    yield Assign(
        "ratio_clip_min", 1.0 if is_cispo else settings.number("clip_lower"), "no lower bound" if is_cispo else ""
    )
    yield Assign("ratio_clip_max", settings.number("clip_higher"))
    yield Assign("token_level_loss", True)
    if settings["loss_denominator"] != "token":
        text = (
            f"loss_denominator: {settings['loss_denominator']} divides the sum over a step; a constant of this package "
            "divides the sum over a sequence"
        )
        yield Remark(text, ("loss_denominator",))
    if settings["use_vllm_logprobs"]:
        yield Assign("ratio_anchor", "gen")
    elif settings["use_rho_correction"]:
        yield from _rho(settings)
    beta = settings.number("beta") if settings["load_ref_policy"] else 0.0
    yield Assign("reference_policy_kl_penalty", beta)
    if beta:
        estimator = f"k{int(settings.number('kl_estimator')) + 1}"
        yield Assign("reference_policy_kl_type", estimator, "open-instruct counts its estimators from 0")
        yield Assign("reference_policy_kl_gradient", estimator, "open-instruct differentiates the estimate itself")
        yield Assign("kl_input_clamp_value", 40.0)
        yield Assign("kl_output_clamp_value", None)


def _rho(settings: PeerSettings) -> Conversion:
    low, high = settings.number("rho_clamp_lower_bound"), settings.number("rho_clamp_upper_bound")
    level = "sequence_mean" if settings["rho_mask_sequence_level"] else "token"
    yield from weight_settings(level, "tis" if low or high else None, low, high or NO_BOUND)
    mask_low, mask_high = settings.number("rho_mask_lower_bound"), settings.number("rho_mask_upper_bound")
    if settings["rho_mask_tv_divergence"] and (mask_low or mask_high):
        if mask_low:
            text = f"rho_mask_lower_bound: {mask_low:g} drops tokens of sequences that are too close to the sampler"
            yield Remark(f"{text}; the mask vaco has no such bound", ("rho_mask_lower_bound",))
        if mask_high:
            yield Assign("masks", {"preset": "vaco", "statistic": "ratio_diff", "delta": mask_high})
    elif mask_low or mask_high:
        bounds = {name: bound for name, bound in (("min", mask_low), ("max", mask_high)) if bound}
        yield Assign("masks", {"preset": "geometric" if level == "sequence_mean" else "icepop", **bounds})
    yield Remark("open-instruct clamps log-ratios against the sampler to ±10 before exp, this package to at most 40.")


PEER = Peer(
    name="open_instruct",
    title="open-instruct's GRPO arguments",
    source="allenai/open-instruct at e6c3044aa",
    convert=_convert,
    **settings_of("open_instruct"),
    constructors=("GRPOExperimentConfig",),
    marks=("num_samples_per_prompt_rollout", "clip_higher", "clip_lower", "rho_*", "use_vllm_logprobs", "kl_estimator"),
    programs={"open_instruct/grpo_fast.py": {}, "GRPOExperimentConfig": {}},
    other_programs=("*open_instruct/finetune*.py", "*open_instruct/dpo*.py", "*open_instruct/reward_modeling.py"),
)
