"""prime-rl: settings under ``trainer.loss``. Its ratio is always taken against the sampler."""

from __future__ import annotations

from nemo_geomask.tools.translate.peer_table import (
    Assign,
    Conversion,
    Peer,
    PeerSettings,
    Remark,
    without_counterpart,
)

__all__ = ["PEER"]

_LOSS = "trainer.loss."


def _convert(settings: PeerSettings) -> Conversion:
    loss_type = str(settings[_LOSS + "type"])
    yield Assign("token_level_loss", True)
    yield Assign("reference_policy_kl_penalty", 0.0)
    if loss_type == "custom":
        path = settings[_LOSS + "import_path"]
        yield Assign("name", "clipped_pg")
        yield Remark(
            f"import_path: {path} is a function of your own; docs/plugins.md shows how to write it as a plugin",
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


PEER = Peer(
    name="prime_rl",
    title="prime-rl's trainer.loss",
    source="PrimeIntellect-ai/prime-rl at 559b44772",
    defaults={
        _LOSS + "type": "default",
        _LOSS + "import_path": None,
        _LOSS + "ipo_threshold": 0.1,
        _LOSS + "dppo_mask_low": 0.2,
        _LOSS + "dppo_mask_high": 0.2,
        _LOSS + "adv_tau": 1.0,
        _LOSS + "kl_tau": 1e-3,
    },
    convert=_convert,
    sections=("trainer.loss", "loss"),
)
