"""Runs and their files: a run is one variant on one seed, and its metrics of each step are stored in a Parquet file.

For each run, a folder of runs has a file ``steps/<run>.parquet``, which is rewritten after every step, and a folder
``<run>/`` of rollouts, records and, until the run is finished, the state to resume from. A run's name contains a hash
of its settings, so several invocations can share a folder: finished runs in it are not trained again.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nemo_geomask.errors import ConfigError, InputLimitError
from nemo_geomask.optional import require
from nemo_geomask.recipe.input_limits import InputLimits, check_values, open_regular_file, use_limits
from nemo_geomask.tools.lab.lab_recipe import SEEDS, LabRecipe
from nemo_geomask.tools.shared.atomic_write import write_atomically
from nemo_geomask.tools.shared.flat_settings import differing_keys, flatten_settings

_METADATA_KEY = b"nemo_geomask.tools.lab"
_STEPS = "steps"
_FACT_LIMITS = InputLimits(string_characters=10_000)
# The largest file of the evidence has 434,160 values in 4 MB, 2.5 MB of which is its footer with the facts.
_MAX_FILE_BYTES = 2**27
_MAX_VALUES = 4_000_000
COMPUTE_KEYS = {"tp", "cp", "dp", "num_threads", "device", "rollouts_every", "compare", "presets"}
"""Keys of ``lab:`` that do not define a run: they determine how runs are computed, planned and stored."""


@dataclass(frozen=True)
class Run:
    """One variant, with its label in tables and plots, on one seed; ``out`` is the folder of all runs.

    ``recipe`` has this run's seed and ``loss_fn``. Reports order the variants by their ``position`` in the comparison.
    """

    label: str
    recipe: LabRecipe
    out: Path
    position: int = 0

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Settings that determine the run's numbers, except for the seed."""
        return self.recipe.model_dump(mode="json", exclude={"lab": COMPUTE_KEYS, "grpo": {"seed"}})

    @cached_property
    def variant(self) -> str:
        """Name of the variant in paths: its label and a hash of its settings."""
        digest = hashlib.sha256(json.dumps(self.settings, sort_keys=True, default=str).encode()).hexdigest()[:6]
        return f"{re.sub(r'[^A-Za-z0-9_.+=-]+', '-', self.label)[:80]}-{digest}"

    @property
    def name(self) -> str:
        """Name of the run."""
        return f"{self.variant}-seed{self.recipe.grpo.seed}"

    @property
    def folder(self) -> Path:
        """Folder of the run's rollouts, records and state."""
        return self.out / self.name

    @property
    def steps_file(self) -> Path:
        """Parquet file of the run's steps."""
        return self.out / _STEPS / f"{self.name}.parquet"

    @property
    def state_file(self) -> Path:
        """Checkpoint of an unfinished run; see :mod:`nemo_geomask.tools.lab.checkpoint`."""
        return self.folder / "state.pt"

    @property
    def finished(self) -> bool:
        """True if all steps are stored."""
        return self.steps_file.exists() and RunCurves.read(self.steps_file).finished


class _RunFacts(BaseModel):
    """Types of the facts of :class:`RunCurves` that the lab reads; other facts may be anything."""

    model_config = ConfigDict(strict=True)

    label: str = Field(min_length=1, max_length=1_000)
    variant: str
    position: int = Field(0, ge=0, lt=2**31)
    seed: int = Field(ge=0, lt=SEEDS)
    finished: bool
    settings: dict[str, Any]
    loss_fn: dict[str, Any] = {}
    corrected: bool
    chance: float = Field(ge=0, le=1)
    sampler: str = Field(max_length=1_000)
    precision: str = Field(max_length=1_000)
    ranks: dict[str, Any] = {}
    versions: dict[str, str] = {}
    error: str = ""


@dataclass(frozen=True)
class RunCurves:
    """Metrics of a stored run, step by step.

    Attributes:
        facts: ``label``, ``variant``, ``position``, ``seed``, ``finished``, ``settings``, the validated ``loss_fn``,
            ``corrected`` (True if the correction weight was applied; otherwise ``geomask/weight…`` are about the weight
            that would have been applied), ``chance``, ``sampler``, ``precision``, ``ranks`` (those of ``lab.tp``,
            ``cp``, ``dp`` and ``device`` that are not the default), ``machine``, ``versions``, and ``error`` if a step
            raised an error.
        columns: values of each metric by step; NaN where a step has none.
    """

    facts: Mapping[str, Any]
    columns: Mapping[str, Sequence[float]] = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> RunCurves:
        """Read a file of ``steps/``.

        Raises: ConfigError: the file is not the file of a run, or too large for one.
        """
        facts, columns = read_columns(path, _METADATA_KEY, ignored=("seed", "variant"))
        if problem := _describe_problem(facts, columns):
            raise ConfigError(f"{path} is not a run of the lab: {problem}; move it elsewhere to go on without it")
        return cls(facts, columns)

    @property
    def label(self) -> str:
        """Name of the variant in tables and plots."""
        return str(self.facts["label"])

    @property
    def seed(self) -> int:
        """Seed of weights, prompts and sampling."""
        return int(self.facts["seed"])

    @property
    def is_uncorrected(self) -> bool:
        """True if nothing corrects the mismatch: no importance-sampling weight, no mask and no batch veto."""
        loss_fn = self.facts.get("loss_fn", {})
        return not (self.facts["corrected"] or loss_fn.get("masks") or loss_fn.get("batch_veto"))

    @property
    def finished(self) -> bool:
        """True if all steps were taken."""
        return bool(self.facts["finished"])

    @property
    def steps(self) -> int:
        """Number of stored steps."""
        return len(self.columns["step"])

    @property
    def history(self) -> list[dict[str, float]]:
        """Metrics of each step, without missing ones."""
        return [
            {name: values[step] for name, values in self.columns.items() if not math.isnan(values[step])}
            for step in range(self.steps)
        ]

    def series(self, key: str) -> list[float]:
        """Return a metric's values by step, NaN where missing; ``removed`` is 1 minus the share of kept tokens."""
        if key == "removed":
            # Rounded, because the fraction of kept tokens is computed in float32 and may miss 1 by a rounding error.
            return [
                max(0.0, round(1.0 - kept, 6)) if kept == kept else kept for kept in self.series("geomask/kept_tokens")
            ]
        return list(self.columns.get(key, [math.nan] * self.steps))


def _describe_problem(facts: Any, columns: Mapping[str, Sequence[float]]) -> str:
    """Return what keeps the content of a file from being that of a run; empty if nothing does."""
    try:
        with use_limits(_FACT_LIMITS):
            check_values(facts, "")
        _RunFacts.model_validate(facts)
    except InputLimitError:
        return "its facts are nested too deeply, or too long"
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(["facts", *map(str, problem["loc"])])
        return f"its {place[:100]}: {problem['msg'][:100]}"
    steps = columns.get("step")
    if steps is None:
        return "it has no column step"
    if list(steps) != list(range(1, len(steps) + 1)):
        return "its steps are not 1, 2, 3 and so on"
    if facts["finished"] and not steps:
        return "it is finished without a step"
    return ""


def write_steps(run: Run, history: Sequence[Mapping[str, float]], facts: Mapping[str, Any]) -> None:
    """Write the metrics of a run's steps, from the first, and further facts of :class:`RunCurves`, atomically.

    The columns are ``step``, ``seed``, ``variant``, and each metric as float64.
    """
    names = list(dict.fromkeys(name for step in history for name in step if name != "step"))
    columns: dict[str, Sequence[Any]] = {
        "step": range(1, len(history) + 1),
        "seed": [run.recipe.grpo.seed] * len(history),
        "variant": [run.label] * len(history),
        **{name: [step.get(name) for step in history] for name in names},
    }
    types = {"step": "int32", "seed": "int64", "variant": "string", **dict.fromkeys(names, "float64")}
    all_facts = {
        "label": run.label,
        "variant": run.variant,
        "position": run.position,
        "seed": run.recipe.grpo.seed,
        "finished": len(history) >= run.recipe.grpo.max_num_steps,
        "settings": run.settings,
        **facts,
    }
    write_columns(run.steps_file, columns, types, _METADATA_KEY, all_facts)


def read_curves(folders: Iterable[Path | str]) -> list[RunCurves]:
    """Read all runs in and below the folders, sorted by variant (in the order of their comparison) and seed.

    If variants have the same label, the first of them keeps it (in the order of folders, then seeds). The settings in
    which another variant differs from the first are appended to its label.

    Raises: ConfigError: a folder has no runs, or a file is not the file of a run.
    """
    files: dict[Path, int] = {}
    for number, folder in enumerate(map(Path, folders)):
        paths = [*folder.rglob(f"{_STEPS}/*.parquet"), *(folder.glob("*.parquet") if folder.name == _STEPS else ())]
        if not paths:
            raise ConfigError(f"no run of the lab in {folder}; nemo-geomask lab RECIPE.yaml --out DIR trains some")
        files |= {path: number for path in sorted(paths) if path not in files}
    longest: dict[tuple[Any, ...], RunCurves] = {}
    folder_numbers: dict[tuple[Any, ...], int] = {}
    for path, number in files.items():
        curve = RunCurves.read(path)
        key = _identity(curve)
        folder_numbers.setdefault(key, number)
        # If there are several copies of a run, keep the longest.
        if key not in longest or longest[key].steps < curve.steps:
            longest[key] = curve
    return _distinguish_labels(
        sorted(
            longest.values(),
            key=lambda curve: (folder_numbers[_identity(curve)], curve.seed, curve.facts.get("position", 0)),
        )
    )


def _identity(curve: RunCurves) -> tuple[Any, ...]:
    """Return what two copies of a run have in common."""
    return curve.facts["variant"], str(curve.facts.get("ranks", {})), curve.seed


def _distinguish_labels(curves: Sequence[RunCurves]) -> list[RunCurves]:
    settings_by_label: dict[str, dict[str, Any]] = {}
    relabelled = []
    for curve in curves:
        settings = flatten_settings(curve.facts["settings"]) | flatten_settings(curve.facts.get("ranks", {}), "lab.")
        first = settings_by_label.setdefault(curve.label, settings)
        differ = differing_keys(settings, first)
        label = " ".join([curve.label, *(f"{key}={settings.get(key)}" for key in differ)])
        relabelled.append(RunCurves({**curve.facts, "label": label}, curve.columns))
    order = list(dict.fromkeys(curve.label for curve in relabelled))
    return sorted(relabelled, key=lambda curve: (order.index(curve.label), curve.seed))


def write_columns(
    path: Path, columns: Mapping[str, Sequence[Any]], types: Mapping[str, str], key: bytes, facts: Any
) -> None:
    """Write a Parquet file of metrics, atomically; its folder is created if it does not exist.

    None stands where a step has no value. ``types`` has the Arrow type of each column. ``facts`` become JSON under
    ``key``.
    """
    arrow, parquet = require("pyarrow", "the lab needs", "demo"), require("pyarrow.parquet", "the lab needs", "demo")
    table = arrow.table(
        {name: arrow.array(values, arrow.type_for_alias(types[name])) for name, values in columns.items()}
    )
    content = io.BytesIO()
    table = table.replace_schema_metadata({key: json.dumps(facts, default=str)})
    parquet.write_table(table, content, compression="zstd")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content.getvalue())


def read_columns(
    path: Path, key: bytes, *, texts: Collection[str] = (), ignored: Collection[str] = ()
) -> tuple[Any, dict[str, list[Any]]]:
    """Return the facts and the columns of a file, as numbers with NaN where a step has no value.

    The file's size, and what it claims to hold, are checked before it is decoded. ``key`` is that of the facts in the
    metadata, ``texts`` are the columns of texts, and ``ignored`` those that are not read.

    Raises: ConfigError: it is no regular file, too large, damaged, or has columns of other types.
    """
    arrow, parquet = require("pyarrow", "the lab needs", "demo"), require("pyarrow.parquet", "the lab needs", "demo")
    try:
        with open_regular_file(path) as file:
            if (size := os.fstat(file.fileno()).st_size) > _MAX_FILE_BYTES:
                raise ValueError(f"it has {size:,} bytes, and the lab reads {_MAX_FILE_BYTES:,}")
            with parquet.ParquetFile(file) as parquet_file:
                metadata = parquet_file.metadata
                names = [name for name in parquet_file.schema_arrow.names if name not in ignored]
                if metadata.num_rows * len(names) > _MAX_VALUES:
                    raise ValueError(
                        f"it claims {metadata.num_rows:,} rows of {len(names)} columns; the lab reads {_MAX_VALUES:,} "
                        "values"
                    )
                facts = json.loads((metadata.metadata or {})[key])
                # A thread of Arrow's that lets go of the file while Python ends aborts the process.
                table = parquet_file.read(columns=names, use_threads=False)
        columns = {
            name: table[name].to_pylist() if name in texts else table[name].cast("float64").to_numpy().tolist()
            for name in names
        }
        return facts, columns
    except InputLimitError:
        raise
    except (arrow.ArrowException, OSError, KeyError, ValueError, RecursionError, MemoryError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(
            f"{path} is not a run of the lab: {' '.join(reason.split())[:200] or type(error).__name__}; move it "
            "elsewhere to go on without it"
        ) from None
