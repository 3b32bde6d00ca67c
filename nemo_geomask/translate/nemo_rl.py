"""NeMo-RL's own ``loss_fn:`` with the settings of its open pull requests."""

from __future__ import annotations

from nemo_geomask.config import LossConfig, parse
from nemo_geomask.config.loss import LossSettings
from nemo_geomask.translate.peer import Given, Line, Lines, Peer, Remark, chosen

__all__ = ["PEER"]

_OWN = {name: f"loss_fn.{name}" for name in LossConfig.model_fields}
_MODE = "loss_fn.loss_mode"
_TYPE = "loss_fn.actor_loss_type"
_LEVEL = "loss_fn.metrics_level"
_COMPILE = "loss_fn.enable_torch_compile"
_TAUS = {f"tau_{sign}": f"loss_fn.sapo_tau_{sign}" for sign in ("pos", "neg")}
_CLAMP = "loss_fn.sapo_log_ratio_clamp_value"
_DPPO = (
    "loss_mode: dppo_binary_tv (NeMo-RL PR 4069): its thresholds and its anchor aren't known here; DPPO is masks: "
    "[{preset: dppo_tv, delta: 0.2}]"
)


def _convert(given: Given) -> Lines:
    own = {name: given[key] for name, key in _OWN.items() if key in given}
    own.setdefault("name", "clipped_pg")
    if given["loss_fn.sapo_enabled"] or given[_TYPE] == "sapo":
        own["name"] = "sapo"
        yield Line("options", {name: given.number(key) for name, key in _TAUS.items()})
        own.pop("options", None)
        if given[_CLAMP] is not None:
            yield Remark(f"sapo_log_ratio_clamp_value: {given[_CLAMP]}: exp saturates at 40 here", (_CLAMP,))
    elif given[_TYPE] != "ppo_clip":
        yield Remark(f"actor_loss_type: {given[_TYPE]} is unknown", (_TYPE,))
    for name, value in own.items():
        if name == "masks":
            parse(LossSettings, {name: value}, prefix="loss_fn")  # a list of masks, or an error that says so
            for mask in value:
                yield Line(name, mask)
        else:
            yield Line(name, value)
    if given[_MODE] is not None:
        yield from chosen(given, _MODE, {"ppo_clip": (), "dppo_binary_tv": [Remark(_DPPO, (_MODE,))]})
    if given[_LEVEL] is not None:
        levels = {"minimal": [Line("metrics", "nemo_rl", "NeMo-RL's own metrics are the fewest here")]}
        yield from chosen(given, _LEVEL, {**levels, "full": [Line("metrics", "full")]})
    if given[_COMPILE] is not None:
        yield Line("compile", bool(given[_COMPILE]))


PEER = Peer(
    name="nemo_rl",
    title="NeMo-RL's loss_fn, open pull requests included",
    source="NVIDIA-NeMo/RL at 7ea279abf; PRs 2455, 2464, 3751, 4069 by their texts",
    defaults={
        **dict.fromkeys(_OWN.values()),
        _MODE: None,
        _TYPE: "ppo_clip",
        "loss_fn.sapo_enabled": False,
        _TAUS["tau_pos"]: 1.0,
        _TAUS["tau_neg"]: 1.05,
        _CLAMP: None,
        _LEVEL: None,
        _COMPILE: None,
    },
    convert=_convert,
    sections=("loss_fn",),
    mappings=("loss_fn.options", "loss_fn.batch_veto", "loss_fn.record", "loss_fn.masks"),
)
