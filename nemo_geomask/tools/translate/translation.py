"""Translation of another system's settings into a ``loss_fn:`` block."""

from __future__ import annotations

import contextlib
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nemo_geomask.config import LossConfig, nearest
from nemo_geomask.errors import ConfigError
from nemo_geomask.hosts.nemo_rl.facts import LOSS_FIELDS
from nemo_geomask.objectives.resolved_loss import resolve_loss
from nemo_geomask.recipe import read_recipe
from nemo_geomask.tools.translate.peer_table import Assign, Peer, PeerSettings, Remark
from nemo_geomask.tools.translate.peers import PEERS
from nemo_geomask.tools.translate.recognition import SettingsFile, peer_by_name, recognise, select_runs
from nemo_geomask.tools.translate.references import resolve_references
from nemo_geomask.tools.translate.setting_values import flat, is_one_of, shortened
from nemo_geomask.tools.translate.settings_reader import read_runs
from nemo_geomask.tools.translate.unread_places import unread_places
from nemo_geomask.yaml_text import inline_yaml

_WIDTH = 120
_LARGE_SECTION = 8
_PENALTY = "reference_policy_kl_penalty"
_MAX_GUESSES = 100
"""Number of unknown settings for which a similar name is looked for, which takes time."""


@dataclass(frozen=True)
class Translation:
    """A peer's settings as a ``loss_fn`` block, and the differences that remain.

    Attributes:
        outside_loss_fn: place in NeMo-RL of each of the peer's settings that NeMo-RL has outside ``loss_fn``.
    """

    peer: Peer  # the other system
    loss_fn: Mapping[str, Any]  # the valid block
    notes: Mapping[str, str]  # comments on converted values, by key (``masks[0]`` for a mask)
    not_expressed: tuple[str, ...]  # one sentence for each setting without a counterpart; it begins with the setting
    differences: tuple[str, ...]  # one sentence for each difference in detail
    outside_loss_fn: Mapping[str, str]
    without_effect: tuple[str, ...]  # settings that have no effect in the peer, because of the values of others
    not_read: tuple[str, ...]  # settings that do not concern the loss
    from_defaults: Mapping[str, Any]  # settings of the loss that the files do not contain, with the system's defaults
    loss_settings: Mapping[str, Any]  # settings of the loss that the files contain, by full name

    @property
    def switched_off(self) -> dict[str, Any]:
        """NeMo-RL's own settings that the block needs off; a recipe that the user's inherits could set them."""
        defaults = {key: field.default for key, field in LossConfig.model_fields.items() if key in LOSS_FIELDS}
        off = {key: value for key, value in defaults.items() if value is False or value is None}
        if not self.loss_fn.get("use_importance_sampling_correction"):
            off = {key: value for key, value in off.items() if not key.startswith("truncated_")}
        if self.loss_fn.get("loss_normalization") not in (None, "tokens"):
            off["token_level_loss"] = False
        return {key: value for key, value in off.items() if key not in self.loss_fn}

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
        if off := self.switched_off:
            lines += _comment(
                f"Off in {self.peer.name}, but perhaps not in the recipe from which yours inherits:", "  "
            )
            lines += [f"  {key}: {inline_yaml(value)}" for key, value in off.items()]
        comments = [f"NOT EXPRESSED: {text}" for text in self.not_expressed]
        comments += [f"Remains different: {text}" for text in self.differences]
        comments += [f"{key}: in NeMo-RL {place}." for key, place in self.outside_loss_fn.items()]
        if self.without_effect:
            comments.append(
                f"Without effect in {self.peer.name} with these settings: {', '.join(self.without_effect)}."
            )
        if self.from_defaults:
            shown = ", ".join(f"{key}: {inline_yaml(value)}" for key, value in self.from_defaults.items())
            comments.append(f"Not in the files, so {self.peer.name}'s default: {shown}.")
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
    system = None if peer is None else peer_by_name(peer)
    candidates = PEERS.values() if system is None else [system]
    constructors = tuple(name for candidate in PEERS.values() for name in candidate.constructors)
    files = [select_runs(path, read_runs(path, constructors), candidates) for path in paths]
    if len(files) > 1:
        files = [replace(file, settings={}) if file.is_from_docstring else file for file in files]
    settings: dict[str, Any] = {}
    for file in files:
        if "defaults" in file.settings and any(key.startswith("loss_fn.") for key in file.settings):
            # A NeMo-RL recipe inherits the settings that it does not contain.
            recipe = read_recipe(file.path, leave=("data", "env", "logger")).data
            settings |= flat({"loss_fn": recipe.get("loss_fn", {})})
        else:
            # A later file wins, also where it writes the name of a setting in another form; the order matters.
            settings = {key: value for key, value in settings.items() if key not in file.settings} | file.settings
    with _errors_name(paths):
        return _translate_merged(paths, files, settings, system)


@contextlib.contextmanager
def _errors_name(paths: Sequence[Path]) -> Iterator[None]:
    """Have problems of settings name the files that they come from."""
    names = ", ".join(map(str, paths))
    try:
        yield
    except ConfigError as error:
        problems = [
            problem
            if problem.where or any(str(path) in problem.message for path in paths)
            else replace(problem, where=names)
            for problem in error.problems
        ]
        raise type(error)(*problems) from error


def _translate_merged(
    paths: Sequence[Path], files: Sequence[SettingsFile], settings: dict[str, Any], system: Peer | None
) -> Translation:
    """Return the translation of the settings of several files, merged in order."""
    programs = [program for file in files for program in file.programs]
    system = system or recognise(settings, programs)
    changed = [system.settings_of_program(program) for program in programs]
    has_loss = any(system.full_name(key) in system.defaults for key in settings) or bool(system.marks_of(settings))
    if not has_loss and not is_one_of(settings.get("preset"), system.presets) and all(item is None for item in changed):
        raise ConfigError(f"{', '.join(map(str, paths))}: no setting of {system.name}'s loss; nothing to translate")
    base: dict[str, Any] = {}
    for item in changed:
        base |= item or {}
    unread = list(unread_places(system, files, settings, base))
    translation = translate(settings, system.name, base)
    differences = [
        f"The settings are those of the command in the docstring of {file.path.name}."
        for file in files
        if file.is_from_docstring and len(files) == 1
    ]
    return replace(
        translation,
        not_expressed=(*translation.not_expressed, *unread),
        differences=(*translation.differences, *differences),
    )


def translate(
    settings: Mapping[str, Any], peer: str | None = None, base: Mapping[str, Any] | None = None
) -> Translation:
    """Return the ``loss_fn`` block with the same effect as another system's settings.

    Args:
        settings: settings of the system, nested or by dotted name; a missing one has the system's default. ``preset``
            names one of the system's presets.
        peer: name of the system, one of :data:`PEERS`; None: recognised by the settings' names.
        base: values in place of the system's defaults, by full name.

    Raises:
        ConfigError: no system, or more than one, has such settings; or a value has the wrong type.
    """
    by_name = flat(settings)
    system = recognise(by_name) if peer is None else peer_by_name(peer)
    by_name, replaced = _current_names(system, by_name)
    defaults = {**system.defaults, **(base or {})}
    by_name, from_references = resolve_references(_fill_preset(system, by_name), defaults, system.full_name)
    by_name = system.regroup_mappings(by_name)
    full_names = {key: system.full_name(key) for key in by_name}
    loss_settings = {
        full: by_name[key] for key, full in full_names.items() if full is not None and full in system.defaults
    }
    peer_settings = PeerSettings(defaults, loss_settings)
    fields: dict[str, Any] = {}
    notes: dict[str, str] = {}
    masks: list[Any] = []
    not_expressed: list[str] = []
    differences: list[str] = []
    items = _convert(system, peer_settings)
    without_kl = any(item.key == _PENALTY and item.value == 0 for item in items if isinstance(item, Assign))
    for item in items:
        if isinstance(item, Remark):
            if item.lost_keys and without_kl and all("kl" in key.split("_") for key in item.lost_keys):
                continue  # settings of a KL whose coefficient is 0
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
    if fields.get(_PENALTY) == 0:
        # Without a KL term, its gradient is an error.
        fields.pop("reference_policy_kl_gradient", None)
        notes.pop("reference_policy_kl_gradient", None)
    not_read: list[str] = []
    for key in (key for key, full in full_names.items() if full is None):
        name = key.rpartition(".")[2]
        # Hydra writes _target_ into every section.
        if name == "_target_" or system.is_unrelated(key) or _is_disabled(key, by_name):
            not_read.append(key)
            continue
        guess = None
        if len(not_expressed) < _MAX_GUESSES:
            guess = nearest(name, [full.rpartition(".")[2] for full in system.defaults])
        hint = f"did you mean '{guess}'?" if guess else "it may concern the loss"
        not_expressed.append(f"{key}: no counterpart known (read at {system.source}); {hint}")
    fields.setdefault("name", "clipped_pg")  # where the peer's objective has no counterpart, which not_expressed says
    order = list(LossConfig.model_fields)
    block = {key: fields[key] for key in sorted(fields, key=order.index)} | ({"masks": masks} if masks else {})
    resolve_loss(block)  # raises if a value is out of range here
    return Translation(
        peer=system,
        loss_fn=block,
        notes=notes,
        not_expressed=(*not_expressed, *replaced),
        differences=tuple(dict.fromkeys(differences)),
        outside_loss_fn={
            key: system.outside_loss_fn[str(full)] for key, full in full_names.items() if full in system.outside_loss_fn
        },
        without_effect=tuple(
            key for key, full in full_names.items() if full in loss_settings and full not in peer_settings.read_keys
        ),
        not_read=tuple(not_read),
        loss_settings={**(base or {}), **loss_settings},
        from_defaults={
            key: value
            for key, value in defaults.items()
            if key in peer_settings.read_keys and key not in loss_settings and value is not None
        }
        | from_references,
    )


def _current_names(system: Peer, settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the settings under the names of the system's present version, and a sentence for each that has no such."""
    current: dict[str, Any] = {}
    replaced = []
    for key, value in settings.items():
        is_known = system.full_name(key) is not None
        unchanged = {key: "{}"}
        names = {} if is_known else system.former_names
        successor = next((new for old, new in names.items() if f".{old}".endswith(f".{key}")), unchanged)
        if isinstance(successor, str):
            replaced.append(f"{key}: a name of older versions of {system.name}; in its place is {successor}")
        elif successor is unchanged or value not in (None, False):
            current |= {new: value if template == "{}" else template for new, template in successor.items()}
    return current, replaced


def _is_disabled(key: str, settings: Mapping[str, Any]) -> bool:
    """Return True if a section that holds the setting is turned off."""
    parts = key.split(".")
    for count in range(1, len(parts)):
        section, own = ".".join(parts[:count]), ".".join([*parts[: count - 1], f"use_{parts[count - 1]}"])
        if any(settings.get(switch) is False for switch in (f"{section}.enable", f"{section}.enabled", own)):
            return True
    return False


def _convert(system: Peer, settings: PeerSettings) -> list[Assign | Remark]:
    """Return what the system's ``convert`` yields; a value of a type or size that it can't take is an error."""
    try:
        return list(system.convert(settings))
    except ConfigError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        key, value = settings.last_read
        raise ConfigError(f"{key}: {shortened(value)} is no value that {system.title} can have; correct it") from None


def _fill_preset(peer: Peer, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings together with those of the preset that they name; the explicit ones win."""
    name = settings.get("preset")
    if name is None or not peer.presets:
        return dict(settings)
    if not is_one_of(name, peer.presets):
        raise ConfigError(f"{peer.title} has no preset {shortened(name)}; it has {', '.join(peer.presets)}")
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
