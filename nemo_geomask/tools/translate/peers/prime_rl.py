"""prime-rl: settings under ``trainer.loss``. Its ratio is always taken against the sampler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nemo_geomask.tools.translate.peer_table import (
    Assign,
    Conversion,
    Peer,
    PeerSettings,
    Remark,
    settings_of,
    without_counterpart,
)

_LOSS = "trainer.loss."
_ALGO = "orchestrator.algo.type"
_RL_ALGORITHMS = ("grpo", "max_rl", "rae", "hierarchical_grpo")
"""Algorithms with the same loss; they differ in their advantages only."""


def _convert(settings: PeerSettings) -> Conversion:
    loss_type = str(settings[_LOSS + "type"])
    algorithms = {str(settings[_ALGO]), *_algorithms_of_sources(settings["orchestrator.train.source"])}
    for algorithm in sorted(algorithms - {*_RL_ALGORITHMS}):
        text = f"orchestrator.algo.type: {algorithm}: its cross-entropy or distillation terms have no counterpart"
        yield Remark(text, (_ALGO,))
    yield Assign("token_level_loss", True)
    yield Assign("reference_policy_kl_penalty", 0.0)
    if loss_type == "custom":
        path = settings[_LOSS + "import_path"]
        yield Assign("name", "clipped_pg")
        yield Remark(
            f"import_path: {path} is a function of your own; docs/how_to/plugins.md shows how to write it as a plugin",
            ("import_path",),
        )
        return
    yield Assign("ratio_anchor", "gen")
    yield from _LOSSES.get(loss_type, _ipo)(settings)
    yield from without_counterpart(
        settings,
        {
            _LOSS + "adv_tau": ((1, 1.0), "multiply the advantages or the learning rate by it instead"),
            _LOSS + "score_centering": ((False,), "this package has no such correction"),
        },
    )
    if loss_type not in _LOSSES:
        yield Remark(f"type: {loss_type} is unknown; prime-rl has {', '.join(_LOSSES)} and custom", ("type",))


def _ipo(settings: PeerSettings) -> Conversion:
    yield Assign("name", "ipo")
    yield Assign("options", {name: settings.number(_LOSS + name) for name in ("eps", "kl_tau")})


def _without_mask(settings: PeerSettings, kl_tau: float) -> Conversion:
    """Convert prime-rl's surrogate, -r·A + kl_tau·(log r)², which other types combine with masks of their own."""
    yield Assign("name", "ipo")
    yield Assign("options", {"eps": 0.999999, "kl_tau": kl_tau}, "eps close to 1 disables the mask of IPO")


def _dppo(settings: PeerSettings) -> Conversion:
    yield from _without_mask(settings, settings.number(_LOSS + "kl_tau") if _LOSS + "kl_tau" in settings else 1e-3)
    low, high = (settings.number(f"{_LOSS}dppo_mask_{side}") for side in ("low", "high"))
    mask = {"preset": "dppo_tv", "delta": high, "delta_low": low}
    yield Assign("masks", mask, "DPPO-TV, prime-rl's default before September 2026")


def _icepop(settings: PeerSettings) -> Conversion:
    yield from _without_mask(settings, 0.0)
    low, high = _ratio_bounds(settings, 0.2, 5.0)
    yield Assign("masks", {"log_ratio": "total", "level": "token", "min": low, "max": high})


def _ppo(settings: PeerSettings) -> Conversion:
    low, high = _ratio_bounds(settings, 0.8, 1.2)
    yield Assign("name", "clipped_pg")
    yield Assign("ratio_clip_min", 1 - low, "ratio_low bounds the ratio itself")
    yield Assign("ratio_clip_max", high - 1)


def _cispo(settings: PeerSettings) -> Conversion:
    low, high = _ratio_bounds(settings, 0.0, 5.0)
    yield Assign("name", "cispo")
    yield Assign("ratio_clip_min", 1 - low, "ratio_low bounds the ratio itself")
    yield Assign("ratio_clip_max", high - 1)


def _ratio_bounds(settings: PeerSettings, *defaults: float) -> tuple[float, float]:
    low, high = (
        settings.number(key) if settings[key] is not None else default
        for key, default in zip((_LOSS + "ratio_low", _LOSS + "ratio_high"), defaults, strict=True)
    )
    return low, high


_LOSSES = {"ipo": _ipo, "icepop": _icepop, "ppo": _ppo, "cispo": _cispo, "default": _dppo}


def _algorithms_of_sources(sources: Any) -> Iterator[str]:
    """Yield the algorithms that single sources of samples set for themselves."""
    for source in sources if isinstance(sources, list) else ():
        algorithm = source.get("algo") if isinstance(source, dict) else None
        if isinstance(algorithm, dict):
            yield str(algorithm.get("type", "grpo"))


PEER = Peer(
    name="prime_rl",
    title="prime-rl's trainer.loss",
    source="PrimeIntellect-ai/prime-rl at 559b44772, and its PRs 3418, 3526 and 3586",
    convert=_convert,
    **settings_of("prime_rl"),
    sections=("trainer.loss", "orchestrator.algo"),
    marks=("orchestrator.*", "trainer.loss.*", "inference.vllm.*", "trainer.model.*", "trainer.optim.*", "loss.dppo_*"),
    programs={"rl": {}},
    config_options=("@",),
)
