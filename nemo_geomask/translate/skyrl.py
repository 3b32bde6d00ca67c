"""SkyRL: ``trainer.algorithm``."""

from __future__ import annotations

from typing import Any

from nemo_geomask.translate.peer import NO_BOUND, Given, Line, Lines, Peer, Remark, chosen, corrected, inert

__all__ = ["PEER"]

_A = "trainer.algorithm."
_O = _A + "off_policy_correction."
_DEFAULTS: dict[str, Any] = {
    _A + "policy_loss_type": "regular",
    _A + "loss_reduction": "token_mean",
    _A + "max_seq_len": None,
    _A + "eps_clip_low": 0.2,
    _A + "eps_clip_high": 0.2,
    _A + "clip_ratio_c": 3.0,
    _A + "use_kl_loss": True,
    _A + "kl_loss_coef": 0.001,
    _A + "kl_estimator_type": "k3",
    _A + "use_kl_in_reward": False,
    _A + "use_entropy_loss": False,
    _A + "sapo.tau_pos": 1.0,
    _A + "sapo.tau_neg": 1.05,
    _A + "cispo.cispo_eps_clip_low": 1.0,
    _A + "cispo.cispo_eps_clip_high": 4.0,
    _A + "cispo.cispo_anchor": "old",
    _A + "dppo.dppo_type": "binary_tv",
    _A + "dppo.delta_low": 0.2,
    _A + "dppo.delta_high": 0.2,
    _O + "tis_ratio_type": None,
    _O + "token_tis_ratio_clip_high": 2.0,
    _O + "sequence_tis_ratio_clip_high": 5.0,
    _O + "sequence_mask_metric": None,
    _O + "geo_mask_low": 0.99,
    _O + "geo_mask_high": 1.01,
    _O + "product_mask_low": 0.5,
    _O + "product_mask_high": 2.0,
    _O + "outlier_token_is_threshold_low": None,
    _O + "outlier_token_is_threshold_high": None,
    _O + "token_mask_is_threshold_low": None,
    _O + "token_mask_is_threshold_high": None,
}


def _convert(given: Given) -> Lines:
    kind = str(given[_A + "policy_loss_type"])
    if kind in _LOSSES:
        yield from _LOSSES[kind](given)
    else:
        yield Line("name", "clipped_pg")
        yield Remark(f"policy_loss_type: {kind} has no counterpart; those that have: {', '.join(_LOSSES)}", (kind,))
    constant: list[Line | Remark] = [
        Remark("loss_reduction: seq_mean_token_sum_norm needs max_seq_len", ("max_seq_len",))
    ]
    if given[_A + "max_seq_len"] is not None:
        constant = [
            Line("loss_normalization", "constant"),
            Line("loss_normalization_constant", given.number(_A + "max_seq_len")),
        ]
    by_token = Line("loss_normalization", "tokens") if kind == "gspo" else Line("token_level_loss", True)
    yield from chosen(
        given,
        _A + "loss_reduction",
        {
            "token_mean": [by_token],
            "sequence_mean": [Line("token_level_loss", False)],
            "seq_mean_token_sum_norm": constant,
        },
    )
    rollout = kind in ("rollout_is", "dppo") or (kind == "cispo" and given[_A + "cispo.cispo_anchor"] == "rollout")
    yield from _correction(given, anchored=rollout)
    yield from _kl(given)
    yield from inert(given, {_A + "use_entropy_loss": ((False,), "NeMo-RL's losses have no entropy bonus")})


def _clip(given: Given, name: str) -> Lines:
    yield Line("name", name)
    yield Line("ratio_clip_min", given.number(_A + "eps_clip_low"))
    yield Line("ratio_clip_max", given.number(_A + "eps_clip_high"))


def _dual(given: Given) -> Lines:
    yield from _clip(given, "clipped_pg")
    yield Line("ratio_clip_c", given.number(_A + "clip_ratio_c"))


def _sapo(given: Given) -> Lines:
    yield Line("name", "sapo")
    yield Line("options", {f"tau_{sign}": given.number(f"{_A}sapo.tau_{sign}") for sign in ("pos", "neg")})


def _cispo(given: Given) -> Lines:
    yield Line("name", "cispo")
    yield Line("ratio_clip_min", given.number(_A + "cispo.cispo_eps_clip_low"))
    yield Line("ratio_clip_max", given.number(_A + "cispo.cispo_eps_clip_high"))
    if given[_A + "cispo.cispo_anchor"] == "rollout":
        yield Line("ratio_anchor", "gen")


def _rollout_is(given: Given) -> Lines:
    low, high = given.number(_A + "eps_clip_low"), given.number(_A + "eps_clip_high")
    yield Line("name", "cispo", "rollout_is is -sg(r)·A·curr where r is within the clip, and 0 outside")
    yield Line("ratio_anchor", "gen")
    yield Line("ratio_clip_min", 1.0)
    yield Line("ratio_clip_max", NO_BOUND)
    yield Line("masks", {"log_ratio": "total", "level": "token", "min": max(1 - low, 0.0), "max": 1 + high})
    yield Remark("SkyRL drops a ratio that is just at the bound, here it stays.")


def _dppo(given: Given) -> Lines:
    kinds = {"binary_tv": "dppo_tv", "binary_kl": "dppo_kl"}
    kind = str(given[_A + "dppo.dppo_type"])
    yield Line("name", "ipo", "SkyRL differentiates the ratio, as IPO does, where the DPPO of its authors detaches it")
    yield Line("options", {"eps": 0.999999, "kl_tau": 0.0}, "without IPO's own bound")
    yield Line("ratio_anchor", "gen")
    low, high = given.number(_A + "dppo.delta_low"), given.number(_A + "dppo.delta_high")
    yield Line("masks", {"preset": kinds.get(kind, "dppo_tv"), "delta": high, "delta_low": low})


_LOSSES = {
    "regular": lambda given: _clip(given, "clipped_pg"),
    "dual_clip": _dual,
    "gspo": lambda given: _clip(given, "gspo_token"),
    "sapo": _sapo,
    "cispo": _cispo,
    "rollout_is": _rollout_is,
    "dppo": _dppo,
}


def _correction(given: Given, *, anchored: bool) -> Lines:
    level = given[_O + "tis_ratio_type"]
    if level in ("token", "sequence") and anchored:
        text = f"tis_ratio_type: {level} multiplies a ratio to the rollout by the mismatch's weight once more"
        yield Remark(text, ("tis_ratio_type",))
    elif level in ("token", "sequence"):
        yield from corrected(str(level), "tis", 0.0, given.number(f"{_O}{level}_tis_ratio_clip_high"))
    rules = (
        ("veto", "outlier_token_is_threshold_low", "outlier_token_is_threshold_high", True),
        ("geometric", "geo_mask_low", "geo_mask_high", given[_O + "sequence_mask_metric"] == "geometric"),
        ("product", "product_mask_low", "product_mask_high", given[_O + "sequence_mask_metric"] == "product"),
        ("icepop", "token_mask_is_threshold_low", "token_mask_is_threshold_high", True),
    )
    masks = []
    for preset, low, high, on in rules:
        if on and not given[_O + low] is given[_O + high] is None:
            bounds = {
                name: given[_O + key] for name, key in (("min", low), ("max", high)) if given[_O + key] is not None
            }
            masks.append({"preset": preset, **{name: float(bound) for name, bound in bounds.items()}})
            yield Line("masks", masks[-1])
    if len(masks) > 1:
        yield Remark("SkyRL applies its masks one after another, each to what the last one left; here each judges all.")


def _kl(given: Given) -> Lines:
    kind = str(given[_A + "kl_estimator_type"])
    if given[_A + "use_kl_in_reward"]:
        yield Line("use_kl_in_reward", True)
        yield Line("reference_policy_kl_type", kind)
        yield Remark("kl_ctrl: its coefficient is reference_policy_kl_penalty here", ("kl_ctrl",))
    elif not given[_A + "use_kl_loss"]:
        yield Line("reference_policy_kl_penalty", 0.0)
    elif kind not in ("k1", "k2", "k3"):
        yield Remark(f"kl_estimator_type: {kind} has no counterpart; k1, k2 and k3 have", ("kl_estimator_type",))
    else:
        yield Line("reference_policy_kl_penalty", given.number(_A + "kl_loss_coef"))
        yield Line("reference_policy_kl_type", kind)
        yield Line("reference_policy_kl_gradient", kind, "SkyRL differentiates the estimate itself")
        yield Remark("SkyRL's KL is a mean over sequences of their tokens' means; here it has the loss's denominator.")


PEER = Peer(
    name="skyrl",
    title="SkyRL's trainer.algorithm",
    source="NovaSky-AI/SkyRL at a9564572e",
    defaults=_DEFAULTS,
    convert=_convert,
    elsewhere={
        _A + "advantage_estimator": "grpo.adv_estimator",
        _A + "grpo_norm_by_std": "grpo.normalize_rewards",
        "generator.n_samples_per_prompt": "grpo.num_generations_per_prompt",
    },
    sections=("algorithm.off_policy_correction", "algorithm.dppo", "algorithm.cispo", "algorithm.sapo"),
)
