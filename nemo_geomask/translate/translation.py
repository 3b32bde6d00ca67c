"""The translation itself: which system's settings they are, what they are here, and the YAML."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_geomask.config import LossConfig, nearest
from nemo_geomask.config.strict import inline_yaml
from nemo_geomask.errors import ConfigError
from nemo_geomask.losses.build import examined
from nemo_geomask.recipe import read_recipe
from nemo_geomask.translate import (
    areal,
    fast_llm,
    nemo_rl,
    open_instruct,
    openrlhf,
    prime_rl,
    skyrl,
    slime,
    trl,
    verl,
)
from nemo_geomask.translate.peer import Given, Peer, Remark
from nemo_geomask.translate.read import flat, read_settings

__all__ = ["PEERS", "Translation", "translate", "translate_files"]

_MODULES = (verl, trl, slime, areal, skyrl, prime_rl, openrlhf, open_instruct, fast_llm, nemo_rl)
PEERS: dict[str, Peer] = {module.PEER.name: module.PEER for module in _MODULES}
_WIDTH = 120
_FEW = 8


@dataclass(frozen=True)
class Translation:
    """Settings of another system in ours.

    Attributes:
        peer: the other system.
        loss_fn: the block; valid.
        notes: what had to be converted, by key (``masks[0]`` for a mask).
        lost: what can't be expressed, a sentence each that begins with its setting.
        remains: what will be different.
        elsewhere: their settings that NeMo-RL has in another place, and which.
        idle: their settings that did nothing there.
        unread: settings that are none of the loss's.
    """

    peer: Peer
    loss_fn: Mapping[str, Any]
    notes: Mapping[str, str]
    lost: tuple[str, ...]
    remains: tuple[str, ...]
    elsewhere: Mapping[str, str]
    idle: tuple[str, ...]
    unread: tuple[str, ...]

    def yaml(self) -> str:
        """The block with its comments."""
        lines = [*_comment(f"From {self.peer.title} ({self.peer.source})."), "loss_fn:"]
        for key, value in self.loss_fn.items():
            if key == "masks":
                lines.append("  masks:")
                for index, mask in enumerate(value):
                    lines += _comment(self.notes.get(f"masks[{index}]", ""), "    ")
                    lines.append(f"    - {inline_yaml(mask)}")
                continue
            lines += _comment(self.notes.get(key, ""), "  ")
            lines.append(f"  {key}: {inline_yaml(value)}")
        idle = f"Without effect there, with the settings given: {', '.join(self.idle)}." if self.idle else ""
        unread = f"No settings of the loss, not read: {', '.join(_grouped(self.unread))}." if self.unread else ""
        lines += [line for text in self.lost for line in _comment(f"NOT EXPRESSED: {text}")]
        lines += [line for text in self.remains for line in _comment(f"Remains different: {text}")]
        lines += [line for key, where in self.elsewhere.items() for line in _comment(f"{key}: in NeMo-RL {where}.")]
        return "\n".join([*lines, *_comment(idle), *_comment(unread)]) + "\n"


def translate_files(paths: Sequence[Path], peer: str | None = None) -> Translation:
    """:func:`translate` of what stands in files, those of a later one before an earlier one's."""
    known = [PEERS[peer]] if peer in PEERS else PEERS.values()
    constructors = tuple(name for other in known for name in other.constructors)
    settings: dict[str, Any] = {}
    for path in paths:
        found = read_settings(path, constructors)
        if "defaults" in found and any(key.startswith("loss_fn.") for key in found):
            # NeMo-RL's recipes: what is not written is inherited.
            found = flat({"loss_fn": read_recipe(path, leave=("data", "env", "logger")).data["loss_fn"]})
        settings |= found
    return translate(settings, peer)


def translate(settings: Mapping[str, Any], peer: str | None = None) -> Translation:
    """A ``loss_fn:`` block that does what another system's settings do there.

    Args:
        settings: theirs, nested or by dotted name, whole or a part of the file; ``preset`` names one of their presets.
        peer: whose, one of :data:`PEERS`; found out by the names if None.

    Raises: ConfigError: no system knows the settings or several do; a value is of the wrong kind.
    """
    written = flat(settings)
    system = _system(written, peer)
    written = system.whole(_filled(system, written))
    named = {key: system.named(key) for key in written}
    theirs = {full: written[key] for key, full in named.items() if full is not None and full in system.defaults}
    given = Given(system.defaults, theirs)
    loss_fn: dict[str, Any] = {}
    notes: dict[str, str] = {}
    masks: list[Any] = []
    lost: list[str] = []
    remains: list[str] = []
    for item in system.convert(given):
        if isinstance(item, Remark):
            (lost if item.lost else remains).append(item.text)
            continue
        key = item.key
        if key == "masks":
            key = f"masks[{len(masks)}]"
            masks.append(item.value)
        else:
            loss_fn[key] = item.value
        notes |= {key: item.note} if item.note else {}
    unread = [key for key, full in named.items() if full is None]
    for key in tuple(unread):
        section, _, own = key.rpartition(".")
        if own == "_target_" or not section.endswith(system.sections or ("\n",)):  # the first is Hydra's
            continue
        unread.remove(key)
        guess = nearest(own, [name.rpartition(".")[2] for name in system.defaults])
        lost.append(f"{key}: unknown" + (f"; did you mean '{guess}'?" if guess else f" at {system.source}"))
    loss_fn.setdefault("name", "clipped_pg")  # where theirs is unknown, and said to be lost
    order = list(LossConfig.model_fields)
    block = {key: loss_fn[key] for key in sorted(loss_fn, key=order.index)} | ({"masks": masks} if masks else {})
    examined(block)  # what it raises is a mistake of the table's, or a value that is out of range there and here
    return Translation(
        peer=system,
        loss_fn=block,
        notes=notes,
        lost=tuple(lost),
        remains=tuple(dict.fromkeys(remains)),
        elsewhere={key: system.elsewhere[str(full)] for key, full in named.items() if full in system.elsewhere},
        idle=tuple(key for key, full in named.items() if full in theirs and full not in given.asked),
        unread=tuple(unread),
    )


def _system(settings: Mapping[str, Any], name: str | None) -> Peer:
    if name is not None:
        if name not in PEERS:
            guess = nearest(name, PEERS)
            raise ConfigError(
                f"no settings of '{name}' are known; " + (f"did you mean '{guess}'?" if guess else _all())
            )
        return PEERS[name]
    preset = settings.get("preset")
    counts = Counter({name: _overlap(peer, settings) + (preset in peer.presets) for name, peer in PEERS.items()})
    (best, most), *others = counts.most_common()
    if not most:
        raise ConfigError(f"these settings are of no system that is known; {_all()}")
    tied = [name for name, count in [(best, most), *others] if count == most]
    if len(tied) > 1:
        raise ConfigError(f"these settings may be of {' or '.join(tied)}; say which with --from")
    return PEERS[best]


def _overlap(peer: Peer, settings: Mapping[str, Any]) -> int:
    """Parts of names that are the system's."""
    pairs = ((key, peer.named(key)) for key in settings)
    return sum(1 + min(key.count("."), full.count(".")) for key, full in pairs if full is not None)


def _all() -> str:
    return f"known: {', '.join(PEERS)}"


def _filled(peer: Peer, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with those of a preset."""
    name = settings.get("preset")
    if name is None or not peer.presets:
        return dict(settings)
    if name not in peer.presets:
        raise ConfigError(f"{peer.title} has no preset '{name}'; it has {', '.join(peer.presets)}")
    parameters, template = peer.presets[name]
    values = {**parameters, **{key: value for key, value in settings.items() if key in parameters}}
    filled = {
        key: text.format(**values) if isinstance(text, str) and "{" in text else text for key, text in template.items()
    }
    rest = {key: value for key, value in settings.items() if key not in parameters and key != "preset"}
    return {**filled, **rest}


def _comment(text: str, indent: str = "") -> list[str]:
    lines = textwrap.wrap(text, _WIDTH - len(indent) - 2, break_long_words=False, break_on_hyphens=False)
    return [f"{indent}# {line}" for line in lines]


def _grouped(keys: Sequence[str]) -> list[str]:
    """The names, those of a large section as one."""
    sizes = Counter(key.partition(".")[0] for key in keys)
    groups = dict.fromkeys(
        f"{top}.* ({sizes[top]})" if sizes[top] > _FEW and rest else key
        for key in keys
        for top, _, rest in [key.partition(".")]
    )
    return list(groups)
