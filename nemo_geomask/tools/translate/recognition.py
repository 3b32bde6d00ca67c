"""Choice of the system that settings belong to, and of the settings that its program gets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from nemo_geomask.config import nearest
from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.translate.peer_table import Peer
from nemo_geomask.tools.translate.peers import PEERS
from nemo_geomask.tools.translate.setting_values import UNRESOLVED, is_one_of
from nemo_geomask.tools.translate.shell_reader import ProgramRun

_NOT_TRANSLATED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "ms-swift": (
        ("swift *", "megatron *"),
        ("rlhf_type", "rollout_importance_sampling_*"),
    ),
    "ROLL": (("*start_*_pipeline.py",), ("actor_train*", "actor_infer*", "student_train*", "*.strategy_args.*")),
    "labs-molt": (("molt.cli.*",), ("algo.advantage.is_correction_level", "algo.advantage.is_correction_mode")),
}
"""Systems that share names with others and are not translated: patterns of their programs and of their settings."""


@dataclass(frozen=True)
class SettingsFile:
    """A file's settings for one training.

    Attributes:
        settings: settings by dotted name; one that the file's training programs set differently is unresolved.
    """

    path: Path  # the file
    settings: dict[str, Any]
    programs: tuple[str, ...]  # programs that get the settings
    unread: tuple[str, ...]  # places in the file that may hold more settings
    is_from_docstring: bool  # True if the settings are those of a command in the docstring of a Python file


def peer_by_name(name: str) -> Peer:
    """Return the system that ``--from`` names.

    Raises:
        ConfigError: there is no such system.
    """
    if name not in PEERS:
        guess = nearest(name, PEERS)
        raise ConfigError(
            f"--from: system '{name}' is not known; "
            + (f"did you mean '{guess}'?" if guess else f"choose from {', '.join(PEERS)}")
        )
    return PEERS[name]


def recognise(settings: Mapping[str, Any], programs: Iterable[str] = ()) -> Peer:
    """Return the system that has these settings or programs.

    A program decides; without a known one, the settings' names do.

    Raises:
        ConfigError: no system, or more than one, is identified.
    """
    programs = list(programs)
    for name, (own_programs, own_settings) in _NOT_TRANSLATED.items():
        for word in [*programs, *settings]:
            if any(fnmatchcase(word, pattern) for pattern in (own_programs if word in programs else own_settings)):
                raise ConfigError(
                    f"these are settings of {name} ('{word}'), which is not among the systems that are translated; its "
                    "defaults differ from those of systems with the same names, so write the block by hand "
                    "(docs/reference/loss_reference.md lists its fields)"
                )
    reasons: dict[str, str] = {}
    for name, peer in PEERS.items():
        matching_programs = [program for program in programs if peer.identifies(program)]
        marks = peer.marks_of(settings)
        if matching_programs or marks or is_one_of(settings.get("preset"), peer.presets):
            reasons[name] = (matching_programs or marks or ["preset"])[0]
    known = [name for name, peer in PEERS.items() if any(map(peer.identifies, programs))]
    reasons = {known[0]: ""} if len(known) == 1 else reasons
    if len(reasons) == 1:
        return PEERS[next(iter(reasons))]
    if reasons:
        evidence = ", ".join(f"'{reason}' belongs to {name}" for name, reason in reasons.items())
        raise ConfigError(
            f"these settings may belong to {' or '.join(reasons)}: {evidence}; name the system with --from"
        )
    candidates = [name for name, peer in PEERS.items() if any(peer.full_name(key) in peer.defaults for key in settings)]
    if candidates:
        raise ConfigError(f"these settings may belong to {' or '.join(candidates)}; name the system with --from")
    scripts = [program for program in programs if program.endswith(".sh")]
    hint = f"; translate {', '.join(scripts)}, which is run here, with the variables set in it" if scripts else ""
    raise ConfigError(f"these settings belong to none of the known systems: {', '.join(PEERS)}{hint}")


def select_runs(path: Path, runs: Sequence[ProgramRun], peers: Iterable[Peer]) -> SettingsFile:
    """Return a file's settings: those of the programs that train with a loss of ``peers``, otherwise all.

    Raises:
        ConfigError: the file runs only programs of these systems that have no such loss.
    """
    peers = list(peers)
    trainings = [run for run in runs if any(peer.settings_of_program(run.program) is not None for peer in peers)]
    if not trainings:
        for run in runs:
            if any(fnmatchcase(run.program, pattern) for peer in peers for pattern in peer.other_programs):
                raise ConfigError(f"{path}: {run.program} trains without a policy-gradient loss; nothing to translate")
    selected = trainings or list(runs)
    settings: dict[str, Any] = {}
    for run in selected:
        settings |= run.settings
    if len(trainings) > 1:
        values_by_key: dict[str, list[Any]] = {}
        for run in trainings:
            for key, value in run.settings.items():
                values_by_key.setdefault(key, []).append(value)
        for key, values in values_by_key.items():
            if len(values) < len(trainings) or any(value != values[0] for value in values):
                shown = [*dict.fromkeys(map(str, values)), *(["unset"] if len(values) < len(trainings) else [])]
                settings[key] = f"{UNRESOLVED}(one of {', '.join(shown)}, as runs in the file set different values)"
    return SettingsFile(
        path,
        settings,
        tuple(dict.fromkeys(run.program for run in selected if run.program)),
        tuple(dict.fromkeys(word for run in selected for word in run.unread)),
        any(run.is_from_docstring for run in selected),
    )


def check_programs(peer: Peer, programs: Sequence[str]) -> str | None:
    """Return a sentence if none of the programs is known to train with the system's loss."""
    if programs and all(name.endswith(".sh") for name in programs):
        return f"{programs[0]}: a script, which may set more; translate it with what this file sets written into it"
    known = [name for name in programs if name in peer.constructors or peer.settings_of_program(name) is not None]
    if known or not peer.programs or not programs:
        return None
    return f"{programs[0]}: not one of {peer.name}'s programs that are known; it may change the loss"
