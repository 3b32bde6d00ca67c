"""OpenRLHF: the command line of ``train_ppo_ray``."""

from __future__ import annotations

from typing import Any

from nemo_geomask.translate.peer import Given, Line, Lines, Peer, Remark, chosen, corrected, inert

__all__ = ["PEER"]

_IS, _KL = "algo.advantage.is_correction_", "algo.kl."
_DEFAULTS: dict[str, Any] = {
    "actor.policy_loss_type": "ppo",
    "actor.eps_clip": 0.2,
    "actor.eps_clip_low_high": None,
    "actor.dual_clip": None,
    "actor.entropy_coef": None,
    "actor.token_level_loss": True,
    _IS + "enable": False,
    _IS + "threshold": [0.5, 5.0],
    _IS + "type": "tis",
    _KL + "init_coef": 0.01,
    _KL + "use_loss": False,
    _KL + "estimator": "k1",
}


def _convert(given: Given) -> Lines:
    gspo = given["actor.policy_loss_type"] == "gspo"
    yield from chosen(
        given,
        "actor.policy_loss_type",
        {"ppo": [Line("name", "clipped_pg")], "gspo": [Line("name", "gspo"), Line("token_level_loss", False)]},
    )
    if not gspo:
        yield Line("token_level_loss", bool(given["actor.token_level_loss"]))
    both = given["actor.eps_clip_low_high"]
    low, high = (given.number("actor.eps_clip"),) * 2 if both is None else given.numbers("actor.eps_clip_low_high")
    yield Line("ratio_clip_min", low)
    yield Line("ratio_clip_max", high)
    if given["actor.dual_clip"] is not None:
        yield Line("ratio_clip_c", given.number("actor.dual_clip"))
    if given[_IS + "enable"] and gspo:
        yield Line("ratio_anchor", "gen", "under gspo OpenRLHF's correction is the ratio against the sampler")
    elif given[_IS + "enable"]:
        low, high = given.numbers(_IS + "threshold")
        kind = str(given[_IS + "type"])
        yield from corrected("token", kind, low, high)
        if kind == "seq-mask-tis" and not low:
            yield Line("truncated_importance_sampling_ratio_min", 0.0)
    yield from inert(given, {"actor.entropy_coef": ((None, 0, 0.0), "NeMo-RL's losses have no entropy bonus")})
    estimator = str(given[_KL + "estimator"])
    yield Line("reference_policy_kl_penalty", given.number(_KL + "init_coef"))
    if not given.number(_KL + "init_coef"):
        return
    if estimator not in ("k1", "k2", "k3"):
        yield Remark(f"algo.kl.estimator: {estimator} has no counterpart", (_KL + "estimator",))
        return
    yield Line("reference_policy_kl_type", estimator)
    if given[_KL + "use_loss"]:
        yield Line("reference_policy_kl_gradient", estimator, "OpenRLHF differentiates the estimate itself")
        yield Line("kl_input_clamp_value", None)
    else:
        yield Line("use_kl_in_reward", True)
        yield Remark("NeMo-RL's GRPO estimator reads no KL in the reward; Reinforce++ and GAE do.")


PEER = Peer(
    name="openrlhf",
    title="OpenRLHF's arguments",
    source="OpenRLHF/OpenRLHF at 3c3be6234",
    defaults=_DEFAULTS,
    convert=_convert,
    elsewhere={
        "rollout.n_samples_per_prompt": "grpo.num_generations_per_prompt",
        "algo.advantage.estimator": "grpo.adv_estimator",
    },
)
