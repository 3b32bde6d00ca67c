"""NeMo-RL: its own ``loss_fn:`` block, including settings of its open pull requests."""

from __future__ import annotations

from nemo_geomask.config import LossConfig, parse
from nemo_geomask.config.loss_settings import LossSettings
from nemo_geomask.tools.translate.peer_table import Assign, Conversion, Peer, PeerSettings, Remark, convert_value

_FIELDS = {name: f"loss_fn.{name}" for name in LossConfig.model_fields}
_MODE = "loss_fn.loss_mode"
_TYPE = "loss_fn.actor_loss_type"
_LEVEL = "loss_fn.metrics_level"
_COMPILE = "loss_fn.enable_torch_compile"
_TAUS = {f"tau_{sign}": f"loss_fn.sapo_tau_{sign}" for sign in ("pos", "neg")}
_CLAMP = "loss_fn.sapo_log_ratio_clamp_value"
_DPPO = (
    "loss_mode: dppo_binary_tv (NeMo-RL PR 4069): its thresholds and its anchor are not known; DPPO is masks: "
    "[{preset: dppo_tv, delta: 0.2}]"
)


def _convert(settings: PeerSettings) -> Conversion:
    fields = {name: settings[key] for name, key in _FIELDS.items() if key in settings}
    fields.setdefault("name", "clipped_pg")
    if settings["loss_fn.sapo_enabled"] or settings[_TYPE] == "sapo":
        fields["name"] = "sapo"
        yield Assign("options", {name: settings.number(key) for name, key in _TAUS.items()})
        fields.pop("options", None)
        if settings[_CLAMP] is not None:
            yield Remark(
                f"sapo_log_ratio_clamp_value: {settings[_CLAMP]}: this package clamps log-ratios at 40", (_CLAMP,)
            )
    elif settings[_TYPE] != "ppo_clip":
        yield Remark(f"actor_loss_type: {settings[_TYPE]} is unknown", (_TYPE,))
    for name, value in fields.items():
        if name == "masks":
            parse(LossSettings, {name: value}, prefix="loss_fn")  # a list of masks, or an error that says so
            for mask in value:
                yield Assign(name, mask)
        else:
            yield Assign(name, value)
    if settings[_MODE] is not None:
        yield from convert_value(settings, _MODE, {"ppo_clip": (), "dppo_binary_tv": [Remark(_DPPO, (_MODE,))]})
    if settings[_LEVEL] is not None:
        levels = {"minimal": [Assign("metrics", "nemo_rl", "the smallest set of metrics that this package has")]}
        yield from convert_value(settings, _LEVEL, {**levels, "full": [Assign("metrics", "full")]})
    if settings[_COMPILE] is not None:
        yield Assign("compile", bool(settings[_COMPILE]))


PEER = Peer(
    name="nemo_rl",
    title="NeMo-RL's loss_fn, open pull requests included",
    source="NVIDIA-NeMo/RL at 7ea279abf; PRs 2455, 2464, 3751, 4069 by their texts",
    defaults={
        **dict.fromkeys(_FIELDS.values()),
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
    marks=("loss_fn.*",),
)
