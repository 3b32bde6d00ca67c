"""What a run is and what is left of it: one variant on one seed, its settings, and its steps in a Parquet file.

A folder of runs has ``steps/<run>.parquet``, one file a run, written anew after every step, and a folder ``<run>/`` of
rollouts, records and, until the run is finished, the state from which it goes on. A run's name holds a hash of its
settings, so that invocations into one folder add up: what is finished there is not trained again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from nemo_geomask.errors import ConfigError
from nemo_geomask.lab.optional import require
from nemo_geomask.lab.recipe import LabRecipe

__all__ = ["SHARED", "Course", "Run", "flat", "read_curves", "write_steps"]

_KEY = b"nemo_geomask.lab"
_STEPS = "steps"
#: Keys of ``lab:`` that say how runs are computed and shown, not what is trained.
SHARED = {"tp", "cp", "dp", "num_threads", "rollouts_every", "compare", "presets"}


@dataclass(frozen=True)
class Run:
    """One variant on one seed.

    Attributes:
        label: what tells the variant from the others.
        recipe: the settings, with its seed and its ``loss_fn``.
        out: folder of all runs.
    """

    label: str
    recipe: LabRecipe
    out: Path

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What the course follows from, the seed apart."""
        return self.recipe.model_dump(mode="json", exclude={"lab": SHARED, "grpo": {"seed"}})

    @cached_property
    def variant(self) -> str:
        """Name of the settings among others, as a path has it."""
        told = hashlib.sha256(json.dumps(self.settings, sort_keys=True, default=str).encode()).hexdigest()[:6]
        return f"{re.sub(r'[^A-Za-z0-9_.+=-]+', '-', self.label)[:80]}-{told}"

    @property
    def name(self) -> str:
        """Name of the run."""
        return f"{self.variant}-seed{self.recipe.grpo.seed}"

    @property
    def folder(self) -> Path:
        """Of its rollouts and state."""
        return self.out / self.name

    @property
    def file(self) -> Path:
        """Its steps."""
        return self.out / _STEPS / f"{self.name}.parquet"

    @property
    def state(self) -> Path:
        """From which it goes on."""
        return self.folder / "state.pt"

    @property
    def finished(self) -> bool:
        """Whether all its steps are there."""
        return self.file.exists() and Course.read(self.file).finished


@dataclass(frozen=True)
class Course:
    """A run as it was written.

    Attributes:
        facts: ``label``, ``variant``, ``seed``, ``finished``, ``settings``, ``loss_fn`` in force, ``corrected`` (the
            weight was applied; if not, ``geomask/weight…`` is what it would have been), ``chance``, ``sampler``,
            ``precision``, ``ranks`` (``lab.tp``, ``cp`` and ``dp`` where there are several), ``versions``, ``error`` (a
            step's that raised).
        columns: by metric, a value a step; NaN where it is missing.
    """

    facts: Mapping[str, Any]
    columns: Mapping[str, Sequence[float]] = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> Course:
        """One file of ``steps/``.

        Raises:
            ConfigError: it is none.
        """
        arrow, parquet = require("pyarrow"), require("pyarrow.parquet")
        try:
            table = parquet.read_table(path, partitioning=None)
            facts = json.loads(table.schema.metadata[_KEY])
        except (arrow.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path} holds no run of the lab: {' '.join(str(error).split())[:200]}") from None
        numbers = [name for name in table.column_names if name not in ("seed", "variant")]
        columns = {
            name: [math.nan if value is None else value for value in table[name].to_pylist()] for name in numbers
        }
        return cls(facts, columns)

    @property
    def label(self) -> str:
        """What tells the variant from the others."""
        return str(self.facts["label"])

    @property
    def seed(self) -> int:
        """Of weights, prompts and sampling."""
        return int(self.facts["seed"])

    @property
    def finished(self) -> bool:
        """Whether all steps were taken."""
        return bool(self.facts["finished"])

    @property
    def steps(self) -> int:
        """How many there are."""
        return len(self.columns["step"])

    @property
    def history(self) -> list[dict[str, float]]:
        """The metrics of each step, without what is missing there."""
        return [
            {name: values[step] for name, values in self.columns.items() if not math.isnan(values[step])}
            for step in range(self.steps)
        ]

    def series(self, key: str) -> list[float]:
        """One metric over the steps, NaN where it is missing; ``removed`` is derived."""
        if key == "removed":
            # Rounded, since a sum of counts over a global count is 1 up to float32.
            return [
                max(0.0, round(1.0 - kept, 6)) if kept == kept else kept for kept in self.series("geomask/kept_tokens")
            ]
        return list(self.columns.get(key, [math.nan] * self.steps))


def write_steps(run: Run, history: Sequence[Mapping[str, float]], facts: Mapping[str, Any]) -> None:
    """Write a run's steps: ``step``, ``seed``, ``variant`` and a column of float64 for each metric; all or nothing.

    Args:
        run: what they are of.
        history: metrics of each step, from the first.
        facts: for :class:`Course`.
    """
    arrow, parquet = require("pyarrow"), require("pyarrow.parquet")
    names = list(dict.fromkeys(name for step in history for name in step if name != "step"))
    columns = {
        "step": arrow.array(range(1, len(history) + 1), arrow.int32()),
        "seed": arrow.array([run.recipe.grpo.seed] * len(history), arrow.int64()),
        "variant": arrow.array([run.label] * len(history), arrow.string()),
        **{name: arrow.array([step.get(name) for step in history], arrow.float64()) for name in names},
    }
    told = {
        "label": run.label,
        "variant": run.variant,
        "seed": run.recipe.grpo.seed,
        "finished": len(history) >= run.recipe.grpo.max_num_steps,
        "settings": run.settings,
        **facts,
    }
    table = arrow.table(columns).replace_schema_metadata({_KEY: json.dumps(told, default=str)})
    run.file.parent.mkdir(parents=True, exist_ok=True)
    part = run.file.with_suffix(".part")
    parquet.write_table(table, part, compression="zstd")
    os.replace(part, run.file)


def read_curves(places: Iterable[Path | str]) -> list[Course]:
    """All runs in and below some folders, by label and seed.

    Of variants of one label, the first folder's keeps it, and the others' has the settings too in which they differ;
    in one folder it is the first seed's.

    Raises:
        ConfigError: a folder has none, or a file is none.
    """
    files: dict[Path, int] = {}
    for number, place in enumerate(map(Path, places)):
        own = [*place.rglob(f"{_STEPS}/*.parquet"), *(place.glob("*.parquet") if place.name == _STEPS else ())]
        if not own:
            raise ConfigError(f"no run of the lab in {place}; nemo-geomask lab RECIPE.yaml --out DIR trains some")
        files |= {path: number for path in sorted(own) if path not in files}
    found: dict[tuple[Any, ...], Course] = {}
    places_of: dict[tuple[Any, ...], int] = {}
    for path, number in files.items():
        curve = Course.read(path)
        key = (curve.facts["variant"], str(curve.facts.get("ranks", {})), curve.seed)
        places_of.setdefault(key, number)
        # Of copies of a run, the longest.
        if key not in found or found[key].steps < curve.steps:
            found[key] = curve
    return _told_apart([found[key] for key in sorted(found, key=lambda key: (places_of[key], found[key].seed))])


def _told_apart(curves: Sequence[Course]) -> list[Course]:
    first: dict[str, dict[str, Any]] = {}
    named = []
    for curve in curves:
        own = flat(curve.facts["settings"]) | flat(curve.facts.get("ranks", {}), "lab.")
        usual = first.setdefault(curve.label, own)
        differ = sorted(key for key in own.keys() | usual.keys() if own.get(key) != usual.get(key))
        told = " ".join([curve.label, *(f"{key}={own.get(key)}" for key in differ)])
        named.append(Course({**curve.facts, "label": told}, curve.columns))
    order = list(dict.fromkeys(curve.label for curve in named))
    return sorted(named, key=lambda curve: (order.index(curve.label), curve.seed))


def flat(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested settings by their dotted keys."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{above}{key}.")
        else:
            found[f"{above}{key}"] = value
    return found
