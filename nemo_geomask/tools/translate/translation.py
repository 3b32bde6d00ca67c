"""Translation of another system's settings into a ``loss_fn:`` block."""

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
from nemo_geomask.losses.build import build_with_warnings
from nemo_geomask.recipe import read_recipe
from nemo_geomask.tools.translate.peer_table import Peer, PeerSettings, Remark
from nemo_geomask.tools.translate.peers import PEERS
from nemo_geomask.tools.translate.settings_reader import flat, read_settings

__all__ = ["PEERS", "Translation", "translate", "translate_files"]

_WIDTH = 120
_LARGE_SECTION = 8


@dataclass(frozen=True)
class Translation:
    """A peer's settings as a ``loss_fn`` block, and the differences that remain.

    Attributes:
        peer: the other system.
        loss_fn: the valid block.
        notes: comments on converted values, by key (``masks[0]`` for a mask).
        not_expressed: one sentence for each setting without a counterpart; it begins with the setting.
        differences: one sentence for each difference in detail.
        outside_loss_fn: place in NeMo-RL of each of the peer's settings that NeMo-RL has outside ``loss_fn``.
        without_effect: settings that have no effect in the peer, because of the values of others.
        not_read: settings that do not concern the loss.
    """

    peer: Peer
    loss_fn: Mapping[str, Any]
    notes: Mapping[str, str]
    not_expressed: tuple[str, ...]
    differences: tuple[str, ...]
    outside_loss_fn: Mapping[str, str]
    without_effect: tuple[str, ...]
    not_read: tuple[str, ...]

    def yaml(self) -> str:
        """Return the block with its comments."""
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
        comments = [f"NOT EXPRESSED: {text}" for text in self.not_expressed]
        comments += [f"Remains different: {text}" for text in self.differences]
        comments += [f"{key}: in NeMo-RL {place}." for key, place in self.outside_loss_fn.items()]
        if self.without_effect:
            comments.append(
                f"Without effect in {self.peer.name} with these settings: {', '.join(self.without_effect)}."
            )
        if self.not_read:
            comments.append(
                f"Not read, because they don't concern the loss: {', '.join(_shorten_sections(self.not_read))}."
            )
        return "\n".join([*lines, *(line for text in comments for line in _comment(text))]) + "\n"


def translate_files(paths: Sequence[Path], peer: str | None = None) -> Translation:
    """Translate the settings in files; if several files have the same setting, the last one wins.

    Args:
        paths: files as :func:`~nemo_geomask.tools.translate.settings_reader.read_settings` takes them.
        peer: name of the other system, one of :data:`PEERS`; None: recognised by the settings' names.

    Raises:
        ConfigError: a file can't be read; or an error of :func:`translate`.
    """
    candidates = [PEERS[peer]] if peer in PEERS else PEERS.values()
    constructors = tuple(name for candidate in candidates for name in candidate.constructors)
    settings: dict[str, Any] = {}
    for path in paths:
        in_file = read_settings(path, constructors)
        if "defaults" in in_file and any(key.startswith("loss_fn.") for key in in_file):
            # A NeMo-RL recipe inherits the settings that it does not contain.
            in_file = flat({"loss_fn": read_recipe(path, leave=("data", "env", "logger")).data["loss_fn"]})
        settings |= in_file
    return translate(settings, peer)


def translate(settings: Mapping[str, Any], peer: str | None = None) -> Translation:
    """Return the ``loss_fn`` block with the same effect as another system's settings.

    Args:
        settings: settings of the system, nested or by dotted name; a missing one has the system's default. ``preset``
            names one of the system's presets.
        peer: name of the system, one of :data:`PEERS`; None: recognised by the settings' names.

    Raises:
        ConfigError: no system, or more than one, has such settings; or a value has the wrong type.
    """
    by_name = flat(settings)
    system = _recognise(by_name, peer)
    by_name = system.regroup_mappings(_fill_preset(system, by_name))
    full_names = {key: system.full_name(key) for key in by_name}
    loss_settings = {
        full: by_name[key] for key, full in full_names.items() if full is not None and full in system.defaults
    }
    peer_settings = PeerSettings(system.defaults, loss_settings)
    fields: dict[str, Any] = {}
    notes: dict[str, str] = {}
    masks: list[Any] = []
    not_expressed: list[str] = []
    differences: list[str] = []
    for item in system.convert(peer_settings):
        if isinstance(item, Remark):
            (not_expressed if item.lost_keys else differences).append(item.text)
            continue
        key = item.key
        if key == "masks":
            key = f"masks[{len(masks)}]"
            masks.append(item.value)
        else:
            fields[key] = item.value
        if item.note:
            notes[key] = item.note
    not_read: list[str] = []
    for key in (key for key, full in full_names.items() if full is None):
        section, _, name = key.rpartition(".")
        is_loss_section = bool(system.sections) and section.endswith(system.sections)
        if name == "_target_" or not is_loss_section:  # Hydra writes _target_ into every section
            not_read.append(key)
            continue
        guess = nearest(name, [full.rpartition(".")[2] for full in system.defaults])
        not_expressed.append(f"{key}: unknown" + (f"; did you mean '{guess}'?" if guess else f" at {system.source}"))
    fields.setdefault("name", "clipped_pg")  # where the peer's objective has no counterpart, which not_expressed says
    order = list(LossConfig.model_fields)
    block = {key: fields[key] for key in sorted(fields, key=order.index)} | ({"masks": masks} if masks else {})
    build_with_warnings(block)  # raises if a value is out of range here
    return Translation(
        peer=system,
        loss_fn=block,
        notes=notes,
        not_expressed=tuple(not_expressed),
        differences=tuple(dict.fromkeys(differences)),
        outside_loss_fn={
            key: system.outside_loss_fn[str(full)] for key, full in full_names.items() if full in system.outside_loss_fn
        },
        without_effect=tuple(
            key for key, full in full_names.items() if full in loss_settings and full not in peer_settings.read_keys
        ),
        not_read=tuple(not_read),
    )


def _recognise(settings: Mapping[str, Any], name: str | None) -> Peer:
    """Return the system called ``name``, or the one that most of the settings' names belong to."""
    if name is not None:
        if name not in PEERS:
            guess = nearest(name, PEERS)
            raise ConfigError(
                f"--from: system '{name}' is not known; "
                + (f"did you mean '{guess}'?" if guess else f"choose from {', '.join(PEERS)}")
            )
        return PEERS[name]
    preset = settings.get("preset")
    scores = {name: _name_overlap(peer, settings) + (preset in peer.presets) for name, peer in PEERS.items()}
    best = max(scores.values())
    if not best:
        raise ConfigError(f"these settings belong to none of the known systems: {', '.join(PEERS)}")
    tied = [name for name, score in scores.items() if score == best]
    if len(tied) > 1:
        raise ConfigError(f"these settings may belong to {' or '.join(tied)}; name the system with --from")
    return PEERS[tied[0]]


def _name_overlap(peer: Peer, settings: Mapping[str, Any]) -> int:
    """Return a score: the number of parts of dotted names that the settings share with the system's settings."""
    pairs = ((key, peer.full_name(key)) for key in settings)
    return sum(1 + min(key.count("."), full.count(".")) for key, full in pairs if full is not None)


def _fill_preset(peer: Peer, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings together with those of the preset that they name; the explicit ones win."""
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
    return {**filled, **{key: value for key, value in settings.items() if key not in parameters and key != "preset"}}


def _comment(text: str, indent: str = "") -> list[str]:
    lines = textwrap.wrap(text, _WIDTH - len(indent) - 2, break_long_words=False, break_on_hyphens=False)
    return [f"{indent}# {line}" for line in lines]


def _shorten_sections(keys: Sequence[str]) -> list[str]:
    """Return the keys, but replace those of a large section by one entry with their number."""
    sizes = Counter(key.partition(".")[0] for key in keys)
    entries = dict.fromkeys(
        f"{top}.* ({sizes[top]})" if sizes[top] > _LARGE_SECTION and rest else key
        for key in keys
        for top, _, rest in [key.partition(".")]
    )
    return list(entries)
