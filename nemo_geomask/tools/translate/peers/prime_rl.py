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
    yield Assign("name", "ipo")
    if loss_type == "ipo":
        options = {"eps": settings.number(_LOSS + "ipo_threshold")}
    else:
        options = {"eps": 0.999999}
        mask = {"preset": "dppo_tv", "delta": settings.number(_LOSS + "dppo_mask_high")}
        yield Assign(
            "masks", {**mask, "delta_low": settings.number(_LOSS + "dppo_mask_low")}, "prime-rl's default, DPPO-TV"
        )
    note = (
        ""
        if loss_type == "ipo"
        else "prime-rl's surrogate, -r·A + kl_tau·(log r)²; eps close to 1 disables the mask of IPO"
    )
    yield Assign("options", {**options, "kl_tau": settings.number(_LOSS + "kl_tau")}, note)
    yield Assign("ratio_anchor", "gen")
    yield from without_counterpart(
        settings, {_LOSS + "adv_tau": ((1, 1.0), "multiply the advantages or the learning rate by it instead")}
    )
    if loss_type not in ("default", "ipo"):
        yield Remark(f"type: {loss_type} is unknown; prime-rl has default, ipo and custom", ("type",))


def _algorithms_of_sources(sources: Any) -> Iterator[str]:
    """Yield the algorithms that single sources of samples set for themselves."""
    for source in sources if isinstance(sources, list) else ():
        algorithm = source.get("algo") if isinstance(source, dict) else None
        if isinstance(algorithm, dict):
            yield str(algorithm.get("type", "grpo"))


PEER = Peer(
    name="prime_rl",
    title="prime-rl's trainer.loss",
    source="PrimeIntellect-ai/prime-rl at 559b44772",
    convert=_convert,
    **settings_of("prime_rl"),
    sections=("trainer.loss", "orchestrator.algo"),
    marks=("orchestrator.*", "trainer.loss.*", "inference.vllm.*", "trainer.model.*", "trainer.optim.*", "loss.dppo_*"),
    programs={"rl": {}},
    config_options=("@",),
)
