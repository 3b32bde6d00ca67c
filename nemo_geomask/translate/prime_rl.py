"""prime-rl: ``trainer.loss``; its ratio is always against the sampler."""

from __future__ import annotations

from nemo_geomask.translate.peer import Given, Line, Lines, Peer, Remark, inert

__all__ = ["PEER"]

_LOSS = "trainer.loss."


def _convert(given: Given) -> Lines:
    kind = str(given[_LOSS + "type"])
    yield Line("token_level_loss", True)
    yield Line("reference_policy_kl_penalty", 0.0)
    if kind == "custom":
        path = given[_LOSS + "import_path"]
        yield Line("name", "clipped_pg")
        yield Remark(
            f"import_path: {path} is a function of your own; docs/plugins.md says how to bring it", ("import_path",)
        )
        return
    yield Line("name", "ipo")
    if kind == "ipo":
        options = {"eps": given.number(_LOSS + "ipo_threshold")}
    else:
        options = {"eps": 0.999999}
        mask = {"preset": "dppo_tv", "delta": given.number(_LOSS + "dppo_mask_high")}
        yield Line("masks", {**mask, "delta_low": given.number(_LOSS + "dppo_mask_low")}, "prime-rl's default, DPPO-TV")
    note = "" if kind == "ipo" else "prime-rl's surrogate, -r·A + kl_tau·(log r)², without IPO's own bound"
    yield Line("options", {**options, "kl_tau": given.number(_LOSS + "kl_tau")}, note)
    yield Line("ratio_anchor", "gen")
    yield from inert(given, {_LOSS + "adv_tau": ((1, 1.0), "scale the advantages, or the learning rate, by it")})
    if kind not in ("default", "ipo"):
        yield Remark(f"type: {kind} is unknown; prime-rl has default, ipo and custom", ("type",))


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
