"""What other systems, and NeMo-RL's open pull requests, call settings of ``loss_fn``: for the error that meets them.

``nemo-geomask translate`` converts whole files; here is one name's answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["foreign"]

_LEVELS = {"token": "is_correction_level: token", "sequence": "is_correction_level: sequence"}
_MODES = {
    "dppo_binary_tv": "masks: [{{preset: dppo_tv, delta: …}}]",
    "vanilla": "name: clipped_pg",
    "gspo": "name: gspo_token",
    "geo_mean": "name: gmpo",
    **{name: f"name: {name}" for name in ("sapo", "cispo")},
}
# By system and name: what to write instead, or that by the value; {value} stands for what was given.
_NAMES: Mapping[str, Mapping[str, str | Mapping[Any, str]]] = {
    "NeMo-RL PR 4069 or verl": {"loss_mode": _MODES},
    "NeMo-RL PR 2464": {"sapo_enabled": {True: "name: sapo", False: "name: clipped_pg"}},
    "NeMo-RL PR 2455": {"actor_loss_type": {"sapo": "name: sapo", "ppo_clip": "name: clipped_pg"}},
    "NeMo-RL PRs 2464 and 2455": {f"sapo_tau_{s}": f"options: {{{{tau_{s}: {{value}}}}}}" for s in ("pos", "neg")},
    "NeMo-RL PR 3751": {
        "metrics_level": {"minimal": "metrics: nemo_rl", "full": "metrics: full"},
        "enable_torch_compile": "compile: {value}",
    },
    "verl": {
        "clip_ratio_low": "ratio_clip_min: {value}",
        "clip_ratio_high": "ratio_clip_max: {value}",
        "clip_ratio_c": "ratio_clip_c: {value}",
        "rollout_is": _LEVELS,
        "bypass_mode": {True: "ratio_anchor: gen", False: "ratio_anchor: prev"},
        **dict.fromkeys(("rollout_is_threshold", "rollout_rs", "rollout_rs_threshold", "loss_agg_mode"), ""),
    },
    "TRL": {
        "epsilon": "ratio_clip_min: {value}",
        "epsilon_high": "ratio_clip_max: {value}",
        "beta": "reference_policy_kl_penalty: {value}",
        "off_policy_mask_threshold": "masks: [{{preset: opsm, delta: {value}}}]",
        "importance_sampling_level": {"sequence": "name: gspo", "token": "name: clipped_pg"},
        **dict.fromkeys((f"vllm_importance_sampling_{end}" for end in ("mode", "clip_max", "clip_min", "cap")), ""),
    },
    "slime or AReaL": {
        "eps_clip": "ratio_clip_min: {value}",
        "eps_clip_high": "ratio_clip_max: {value}",
        "eps_clip_higher": "ratio_clip_max: {value}",
        "eps_clip_c": "ratio_clip_c: {value}",
        "c_clip": "ratio_clip_c: {value}",
        "use_tis": {True: "use_importance_sampling_correction: true"},
        "tis_clip": "truncated_importance_sampling_ratio: {value}",
        "tis_clip_low": "truncated_importance_sampling_ratio_min: {value}",
        "use_rollout_logprobs": {True: "ratio_anchor: gen", False: "ratio_anchor: prev"},
        "rejection_sampling": "",
    },
    "SkyRL": {"eps_clip_low": "ratio_clip_min: {value}", "off_policy_correction": "", "tis_ratio_type": _LEVELS},
    "open-instruct": {
        "rho_clamp_upper": "truncated_importance_sampling_ratio: {value}",
        "rho_clamp_lower": "truncated_importance_sampling_ratio_min: {value}",
        "use_vllm_logprobs": {True: "ratio_anchor: gen", False: "ratio_anchor: prev"},
    },
}


def foreign(key: str, value: str) -> str:
    """Whose setting an unknown one is and what it is here; empty for one that nobody is known to have.

    Args:
        key: as it was written.
        value: likewise, in YAML.
    """
    for system, names in _NAMES.items():
        if key not in names:
            continue
        known = names[key]
        text = known if isinstance(known, str) else {str(v).lower(): t for v, t in known.items()}.get(value.lower(), "")
        if text:
            return f"it is a setting of {system}, here {text.format(value=value)}"
        return f"it is a setting of {system}, which nemo-geomask translate converts"
    return ""
