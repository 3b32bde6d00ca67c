"""Places outside of the files that are translated, which may hold more settings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from nemo_geomask.tools.translate.peer_table import Peer
from nemo_geomask.tools.translate.recognition import SettingsFile, check_programs
from nemo_geomask.tools.translate.shell_reader import line_settings


def unread_places(
    system: Peer, files: Sequence[SettingsFile], settings: dict[str, Any], base: dict[str, Any]
) -> Iterator[str]:
    """Yield a sentence for each place that may hold more settings.

    Settings that name another file are removed from ``settings``. If it is one of the system's own files
    (``Peer.base_configs``), its values are added to ``base``. Otherwise, unless that file is among ``files``, the
    setting is such a place.
    """
    if text := check_programs(system, [program for file in files for program in file.programs]):
        yield text
    stems = {file.path.stem for file in files}
    names = {file.path.name for file in files}
    for file in files:
        for script in {Path(program).name for program in file.programs} & (names - {file.path.name}):
            yield f"{file.path.name} runs {script}, and may set its variables; write their values into {script}"
    for file in files:
        for word in file.unread:
            branch = re.search(r"only some branches add '(.*)'", word, re.DOTALL)
            added = line_settings(f"program.py {branch[1]}") if branch else {}
            if added and all(system.is_unrelated(key) or key in system.outside_loss_fn for key in added):
                continue
            yield f"{word}: may set more than the file shows; write its settings out"
    named = {key: settings.pop(key) for key in list(settings) if key.rpartition(".")[2] in system.config_options}
    for key, value in named.items():
        for entry, place, stem in _named_files(value):
            base_settings = next((item for name, item in system.base_configs.items() if fnmatchcase(stem, name)), None)
            if base_settings is not None:
                base |= base_settings
            elif stem not in stems and not any(map(system.is_unrelated, (place, f"{place}.*"))):
                yield f"{key}: {entry} names a file with more settings; pass that file, too"


def _named_files(value: Any) -> Iterator[tuple[str, str, str]]:
    """Yield the entry, the place in the settings and the stem of each file that ``defaults``, or an option, names."""
    for entry in value if isinstance(value, list) else [value]:
        if isinstance(entry, Mapping):  # GROUP@PLACE: NAME
            for group, name in entry.items():
                folder, _, place = str(group).removeprefix("override ").removeprefix("optional ").partition("@")
                if isinstance(name, str):
                    yield f"{group}: {name}", place or folder.replace("/", "."), Path(name).stem
        elif isinstance(entry, str) and entry != "_self_":
            name, _, place = entry.partition("@")
            yield (
                entry,
                place,
                Path(name).stem if name.endswith((".yaml", ".yml", ".toml")) else name.rpartition("/")[2],
            )
