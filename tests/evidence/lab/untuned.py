"""Data files and tables of runs whose learning rate was not tuned for each variant."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.lab.run_store import RunCurves, read_columns, write_columns
from nemo_geomask.tools.shared.intervals import mean_interval
from tests.evidence.lab.columns import COMPUTED_COLUMNS, EVIDENCE_SPECS, EvidenceSpec, Runs, SeedMean
from tests.helpers.interval_text import format_interval
from tests.helpers.markdown import markdown_table, replace_marked_text

PAGES = ("untuned_runs.md", "claims.md")
"""Pages of ``docs/evidence`` with tables of this data."""

_METADATA_KEY = b"nemo_geomask.evidence"
_FACTS = ("corrected", "chance", "sampler", "precision", "finished", "versions", "settings")
_MIN_TOKENS = 20  # a part's mean in a step is not shown if it has fewer tokens


def collect_runs(curves: Iterable[RunCurves], path: Path, spec: EvidenceSpec) -> None:
    """Write the metrics of ``spec`` for every step of the runs, in float32; variants without correction come first.

    Raises: ConfigError: a run is not finished.
    """
    curves = sorted(curves, key=lambda curve: not curve.label.split(" ")[0].endswith(":none"))
    facts: dict[str, dict[str, Any]] = {}
    metrics = ["geomask/kept_tokens" if metric == "removed" else metric for metric in spec.metrics]
    rows: dict[str, list[Any]] = {name: [] for name in ("variant", "seed", "step", *metrics)}
    for curve in curves:
        if not curve.finished:
            raise ConfigError(
                f"the run of '{curve.label}' on seed {curve.seed} has {curve.steps} steps and is not finished"
            )
        facts.setdefault(curve.label, {key: curve.facts[key] for key in _FACTS})
        rows["variant"] += [curve.label] * curve.steps
        rows["seed"] += [curve.seed] * curve.steps
        rows["step"] += range(1, curve.steps + 1)
        for metric in metrics:
            rows[metric] += curve.series(metric)
    types = {"variant": "string", "seed": "int32", "step": "int32", **dict.fromkeys(metrics, "float32")}
    write_columns(path, rows, types, _METADATA_KEY, facts)


def split_runs(
    folders: Iterable[Path],
    dimension: str,
    edges: Sequence[float],
    *,
    matched_by: str = "",
    without_token: int | None = None,
) -> list[RunCurves]:
    """Split the tokens of runs with ``loss_fn.record.dir: records`` by a dimension, each part as if it were a run.

    ``edges`` separate the parts; each is an edge of the dimension's bins in ``nemo-geomask diagnose --by``. With
    ``matched_by``, another dimension, a part's means are over its bins, weighted by the tokens of the first part in
    them; bins in which a part has fewer than 20 tokens in a step are left out of all parts. ``without_token`` is an id
    to leave out.

    Returns:
        One entry for each run and part, with a value for each recorded step. ``count`` is the part's
        number of tokens, ``tokens`` and ``mismatch`` are its shares of the step's trained tokens and of their sum of
        |Δ|. ``geomask/mismatch_abs`` is the part's mean |Δ|, ``delta`` its mean Δ, ``delta_plus_k3`` that of Δ + k3.
        ``against_expected`` is its sum of |Δ| over that of 1 − p, divided by the same of all tokens. Means are NaN if
        the part has fewer than 20 tokens. As in the diagnosis, |Δ| is capped at 1 nat, and 1 − p is larger by 0.001.
    """
    from nemo_geomask.tools.diagnose import BIN_SUMS, DIMENSIONS_BY_NAME

    parts_as_runs = []
    bins = DIMENSIONS_BY_NAME[dimension]
    bounds = [0, *(list(bins.edges).index(edge) + 1 for edge in edges), bins.bin_count]
    for file in (path for folder in folders for path in sorted(folder.rglob("steps/*.parquet"))):
        run = RunCurves.read(file)
        # For each step [bins of the dimension, bins of the other one, sums].
        steps = [
            sums.reshape(bins.bin_count, -1, len(BIN_SUMS))
            for sums in _bin_sums(file.parent.parent / file.stem / "records", dimension, matched_by, without_token)
        ]
        described = [_describe_parts(cells, bounds, is_matched=bool(matched_by)) for cells in steps]
        for index, (first, last) in enumerate(itertools.pairwise(bounds)):
            columns: dict[str, list[float]] = {
                name: [parts[index][name] for parts in described] for name in described[0][index]
            }
            columns |= {"reward": [math.nan] * len(steps), "step": list(range(1, len(steps) + 1))}
            label = f"{run.label} {dimension}={bins.label(first, last - 1)}"
            parts_as_runs.append(RunCurves({**run.facts, "label": label, "variant": label}, columns))
    return parts_as_runs


def _bin_sums(records: Path, dimension: str, matched_by: str, without_token: int | None) -> list[Any]:
    """Return for each step the sums over each bin of a dimension, or of a pair of dimensions: [bins, sums]."""
    from nemo_geomask.tools.diagnose import RunStatistics, find_run, read_step, sum_parts, survey_block

    run = find_run(records)
    names = [dimension, matched_by] if matched_by else [dimension]
    sums = []
    for step in run.steps:
        statistics = RunStatistics()
        for block in read_step(run, step):
            if without_token is not None:
                # Tokens without a log-prob are not compared. Turns are counted from the mask, which stays as it is.
                gen = np.where(block.tokens["tokens"] == without_token, np.nan, block.tokens["gen"])
                block = replace(block, tokens={**block.tokens, "gen": gen})
            statistics.add(survey_block(block))
        sums.append(sum_parts(statistics.tokens, names))
    return sums


def _describe_parts(cells: Any, bounds: Sequence[int], *, is_matched: bool) -> list[dict[str, float]]:
    """Return the columns of :func:`split_runs` for each part, in one step.

    Args:
        cells: [bins, bins of the other dimension, sums]; one bin of the other dimension if parts are not matched.
        bounds: first bin of each part, and the number of bins.
        is_matched: weight the bins of the other dimension as in the first part.
    """
    from nemo_geomask.tools.diagnose import BIN_SUMS

    parts = np.stack([cells[first:last].sum(axis=0) for first, last in itertools.pairwise(bounds)])
    tokens = parts[..., BIN_SUMS.index("tokens")]  # [parts, bins of the other dimension]
    is_measured = tokens >= _MIN_TOKENS
    weights = np.ones_like(tokens)
    if is_matched:
        is_measured = np.broadcast_to(is_measured.all(axis=0), tokens.shape)
        weights = tokens[:1] / np.maximum(tokens, 1.0)
    matched = np.einsum("pb,pbs->ps", np.where(is_measured, weights, 0.0), parts)
    matched[~is_measured.any(axis=1)] = np.nan
    unweighted, all_tokens = (
        dict(zip(BIN_SUMS, sums.T, strict=True)) for sums in (parts.sum(axis=1), cells.sum(axis=(0, 1)))
    )
    weighted = dict(zip(BIN_SUMS, matched.T, strict=True))
    columns = {
        "count": unweighted["tokens"],
        "tokens": unweighted["tokens"] / all_tokens["tokens"],
        "mismatch": unweighted["capped_abs"] / all_tokens["capped_abs"],
        "geomask/mismatch_abs": weighted["capped_abs"] / weighted["tokens"],
        "delta": weighted["delta"] / weighted["tokens"],
        "delta_plus_k3": (weighted["delta"] + weighted["k3"]) / weighted["tokens"],
        "against_expected": weighted["capped_abs"]
        / weighted["one_minus_p"]
        * all_tokens["one_minus_p"]
        / all_tokens["capped_abs"],
    }
    return [{name: float(values[part]) for name, values in columns.items()} for part in range(len(parts))]


def load_runs(path: Path) -> list[RunCurves]:
    """Read the runs of a data file; variants keep the order in which they were collected."""
    facts, columns = read_columns(path, _METADATA_KEY, texts=("variant",))
    runs: dict[tuple[str, int], dict[str, list[float]]] = {}
    for row, key in enumerate(zip(columns.pop("variant"), columns.pop("seed"), strict=True)):
        run = runs.setdefault(key, {name: [] for name in columns})
        for name, values in run.items():
            values.append(columns[name][row])
    return [
        RunCurves({**facts[label], "label": label, "variant": label, "seed": seed}, run)
        for (label, seed), run in runs.items()
    ]


def _evidence_table(curves: Runs, spec: EvidenceSpec) -> str:
    baseline = spec.baseline_runs(curves)
    titles = [column.title if isinstance(column, SeedMean) else column for column in spec.columns]
    rows = []
    for name, runs in spec.variants(curves).items():
        cells = (
            column.cell(runs, baseline) if isinstance(column, SeedMean) else COMPUTED_COLUMNS[column](runs, baseline)
            for column in spec.columns
        )
        rows.append((name, *cells))
    return markdown_table(("variant", *titles), rows)


def search_table(rows: Iterable[Mapping[str, str]]) -> str:
    """Return the table of ``search.csv``: mean rewards, and intervals of the difference from the first variant."""
    by_setting: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for row in rows:
        cells = by_setting.setdefault((row["setting"], row["lr"]), {})
        cells.setdefault(row["variant"], {})[row["seed"]] = float(row["reward"])
    variants = list(dict.fromkeys(variant for cells in by_setting.values() for variant in cells))

    def cell(cells: Mapping[str, Mapping[str, float]], variant: str) -> str:
        rewards, baseline = cells.get(variant), cells.get(variants[0], {})
        if rewards is None:
            return "–"
        differences = [value - baseline[seed] for seed, value in rewards.items() if seed in baseline]
        interval = mean_interval(differences) if variant != variants[0] else None
        return f"{fmean(rewards.values()):.3f}{format_interval(interval)}"

    head = ["", "lr", *(variant if " " in variant or variant == "none" else f"`{variant}`" for variant in variants)]
    return markdown_table(
        head, ((*key, *(cell(cells, variant) for variant in variants)) for key, cells in by_setting.items())
    )


def rewrite_page(page: Path) -> str:
    """Return the page's text with tables generated from the data beside it."""
    text = page.read_text(encoding="utf-8")
    with page.with_name("search.csv").open(encoding="utf-8", newline="") as file:
        for name, rows in itertools.groupby(csv.DictReader(file), key=lambda row: row["table"]):
            if f"<!-- {name}: begin -->" in text:
                text = replace_marked_text(text, name, search_table(rows), page=page.name)
    for path in sorted(page.parent.glob("*.parquet")):
        if f"<!-- {path.stem}: begin -->" in text:
            text = replace_marked_text(
                text, path.stem, _evidence_table(load_runs(path), EVIDENCE_SPECS[path.stem]), page=page.name
            )
    return text
