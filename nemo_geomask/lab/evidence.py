"""What many runs of the lab showed, as small data beside ``docs/evidence.md``: tables and plots are made from it.

``python -m nemo_geomask.lab.evidence`` rewrites them; with ``--collect NAME DIR…`` the runs in some folders become
``docs/evidence/NAME.parquet`` first. What is shown of each is in ``nemo_geomask/lab/evidence.toml``.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any

from nemo_geomask.checks.pages import between_marks, markdown
from nemo_geomask.errors import ConfigError
from nemo_geomask.lab.optional import require
from nemo_geomask.lab.outcome import by_variant, collapsed, final, paired_interval
from nemo_geomask.lab.plot import write_plot
from nemo_geomask.lab.runs import Course, read_curves

__all__ = ["CLAIMS", "Claim", "SeedMean", "collect", "draw", "load", "rewrite", "searched", "split"]

_KEY = b"nemo_geomask.evidence"
_FACTS = ("corrected", "chance", "sampler", "precision", "finished", "versions", "settings")
_COLOURS = ("#CC79A7", "#009E73", "#0072B2", "#D55E00", "#E69F00", "#56B4E9")
_FEW = 20
Runs = Sequence[Course]


@dataclass(frozen=True)
class SeedMean:
    """A metric's mean over a run's steps, then over seeds, with its 95 % interval by Student's t.

    Attributes:
        title: above it.
        metric: its name.
        style: of a number, as :func:`format` has it.
        last: over so many last steps alone; 0: all.
        paired: less the first variant's on the same seeds.
        interval: show it.
    """

    title: str
    metric: str
    style: str = ".3f"
    last: int = 0
    paired: bool = False
    interval: bool = True

    def by_seed(self, runs: Runs) -> dict[int, float]:
        """The mean of each run; without the seeds on which the metric was never finite."""
        found = {run.seed: run.series(self.metric)[-self.last :] for run in runs}
        finite = {seed: [value for value in series if math.isfinite(value)] for seed, series in found.items()}
        return {seed: fmean(series) for seed, series in sorted(finite.items()) if series}

    def estimate(self, runs: Runs, base: Runs) -> tuple[float, tuple[float, float] | None] | None:
        """Mean over seeds and its interval; None where there is nothing to say."""
        values = self.by_seed(runs)
        if self.paired:
            others = self.by_seed(base) if runs[0].label != base[0].label else {}
            values = {seed: value - others[seed] for seed, value in values.items() if seed in others}
        return (fmean(values.values()), paired_interval(list(values.values()))) if values else None

    def cell(self, runs: Runs, base: Runs) -> str:
        """Of the table."""
        found = self.estimate(runs, base)
        if found is None:
            return "–"
        mean, interval = found
        # z: a zero has no sign.
        style = f"{'+' * self.paired}z{self.style}"
        shown = (
            "" if interval is None or not self.interval else " ({} to {})".format(*(format(x, style) for x in interval))
        )
        return f"{mean:{style}}{shown}"


def _better(runs: Runs, base: Runs) -> str:
    mine, others = ({run.seed: final(run.series("reward")) for run in some} for some in (runs, base))
    shared = mine.keys() & others.keys()
    return (
        "–"
        if runs[0].label == base[0].label
        else f"{sum(mine[seed] > others[seed] for seed in shared)} of {len(shared)}"
    )


def _range(runs: Runs, base: Runs) -> str:
    rewards = [final(run.series("reward")) for run in runs]
    return f"{min(rewards):.3f}, {max(rewards):.3f}"


_COUNTS: dict[str, Callable[[Runs, Runs], str]] = {
    "seeds": lambda runs, base: str(len(runs)),
    "lowest, highest": _range,
    "better on": _better,
    "collapsed": lambda runs, base: str(sum(collapsed(run.series("reward")) for run in runs)),
}


@dataclass(frozen=True)
class Claim:
    """What is shown of one file of data.

    Attributes:
        columns: of the table, after the variant: measures, and names of counts.
        rows: by label what the table calls it, in this order; empty: all by their labels, the best reward first. The
            first row, or else the first variant of the data, is the one that others are compared with.
        curves: metric of the picture's left half; empty: no picture.
        shown: labels of the rows in it; empty: the two best, the first and the worst.
        dots: title of the measure in its right half.
        axis: what ``curves`` is, in words.
        panels: name of a picture beside the pages, with what ``nemo-geomask lab report`` draws; empty: none.
    """

    columns: Sequence[SeedMean | str]
    rows: Mapping[str, str] = field(default_factory=dict)
    curves: str = ""
    shown: Sequence[str] = ()
    dots: str = ""
    axis: str = "mean reward"
    panels: str = ""

    @property
    def metrics(self) -> list[str]:
        """All that its data have."""
        measured = (column.metric for column in self.columns if isinstance(column, SeedMean))
        return list(dict.fromkeys(("reward", *filter(None, (self.curves, *measured)))))

    def base(self, curves: Runs) -> Runs:
        """Runs of the variant that others are compared with."""
        found = by_variant(curves)
        return found[next(iter(self.rows or found))]

    def variants(self, curves: Runs) -> dict[str, Runs]:
        """Runs by what the table calls them, in its order."""
        found = by_variant(curves)
        if self.rows:
            return {name: found[label] for label, name in self.rows.items() if label in found}
        ranked = sorted(found, key=lambda label: -fmean(final(run.series("reward")) for run in found[label]))
        return {f"`{label}`": found[label] for label in ranked}


def _claims() -> dict[str, Claim]:
    data = tomllib.loads(files("nemo_geomask.lab").joinpath("evidence.toml").read_text(encoding="utf-8"))
    measured = {name: SeedMean(**told) for name, told in data.pop("column").items()}
    return {
        name: Claim(**{**told, "columns": tuple(measured.get(column, column) for column in told["columns"])})
        for name, told in data.items()
    }


CLAIMS = _claims()


def collect(curves: Iterable[Course], path: Path, claim: Claim) -> None:
    """Keep a claim's metrics of every step of some runs, in float32; variants without a correction come first.

    Raises: ConfigError: a run is not finished.
    """
    arrow, parquet = require("pyarrow"), require("pyarrow.parquet")
    curves = sorted(curves, key=lambda curve: not curve.label.split(" ")[0].endswith(":none"))
    facts: dict[str, dict[str, Any]] = {}
    metrics = ["geomask/kept_tokens" if metric == "removed" else metric for metric in claim.metrics]
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
    small = {"seed": arrow.int32(), "step": arrow.int32(), **dict.fromkeys(metrics, arrow.float32())}
    table = arrow.table({name: arrow.array(values, small.get(name)) for name, values in rows.items()})
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table.replace_schema_metadata({_KEY: json.dumps(facts)}), path, compression="zstd")


def split(places: Iterable[Path], dimension: str, edges: Sequence[float]) -> list[Course]:
    """Recorded runs, each as one for every part of its tokens; a step is a recorded one.

    Args:
        places: folders of runs that were recorded in ``records``.
        dimension: by what, as ``nemo-geomask diagnose --by`` has it.
        edges: between the parts.

    Returns:
        With ``tokens`` and ``mismatch``, the part's shares of the step's trained tokens and of their |Δ|, and
        ``geomask/mismatch_abs``, its mean |Δ| where it has 20 tokens. |Δ| counts up to 1 nat, as in the diagnosis.
    """
    from nemo_geomask.diagnosis.run import survey_run
    from nemo_geomask.diagnosis.sources import find_runs
    from nemo_geomask.diagnosis.statistics import BY_NAME, CELLS

    found = []
    kind = BY_NAME[dimension]
    bounds = [0, *(list(kind.edges).index(edge) + 1 for edge in edges), kind.bins]
    of = [CELLS.index(name) for name in ("tokens", "size")]
    for file in (path for place in places for path in sorted(place.rglob("steps/*.parquet"))):
        run = Course.read(file)
        (recorded,) = find_runs([file.parent.parent / file.stem / "records"])
        steps = [window.cells[dimension][:, of] for _, window in sorted(survey_run(recorded).windows.items())]
        for first, last in itertools.pairwise(bounds):
            parts = [(cells[first:last].sum(axis=0), cells.sum(axis=0)) for cells in steps]
            columns: dict[str, list[float]] = {
                "reward": [math.nan] * len(steps),
                "step": list(range(1, len(steps) + 1)),
                "tokens": [part[0] / whole[0] for part, whole in parts],
                "mismatch": [part[1] / whole[1] for part, whole in parts],
                "geomask/mismatch_abs": [part[1] / part[0] if part[0] >= _FEW else math.nan for part, _ in parts],
            }
            label = f"{run.label} {dimension}={kind.label(first, last - 1)}"
            found.append(Course({**run.facts, "label": label, "variant": label}, columns))
    return found


def load(path: Path) -> list[Course]:
    """The runs of one file, variants in the order in which they were collected."""
    table = require("pyarrow.parquet").read_table(path)
    facts = json.loads(table.schema.metadata[_KEY])
    columns: dict[str, list[Any]] = {
        name: [math.nan if value is None else value for value in table[name].to_pylist()] for name in table.column_names
    }
    runs: dict[tuple[str, int], dict[str, list[float]]] = {}
    for place, key in enumerate(zip(columns.pop("variant"), columns.pop("seed"), strict=True)):
        run = runs.setdefault(key, {name: [] for name in columns})
        for name, values in run.items():
            values.append(columns[name][place])
    return [
        Course({**facts[label], "label": label, "variant": label, "seed": seed}, run)
        for (label, seed), run in runs.items()
    ]


def _table(curves: Runs, claim: Claim) -> str:
    base = claim.base(curves)
    titles = [column.title if isinstance(column, SeedMean) else column for column in claim.columns]
    rows = []
    for name, runs in claim.variants(curves).items():
        cells = (
            column.cell(runs, base) if isinstance(column, SeedMean) else _COUNTS[column](runs, base)
            for column in claim.columns
        )
        rows.append((name, *cells))
    return markdown(("variant", *titles), rows)


def draw(curves: Runs, path: Path, claim: Claim) -> None:
    """A metric over the steps, of some variants, and one measure of all of them."""
    require("matplotlib").use("Agg")
    pyplot = require("matplotlib.pyplot")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.6), gridspec_kw={"width_ratios": [1, 1.1]})
    variants = claim.variants(curves)
    base = claim.base(curves)
    names = list(variants)
    first = next(name for name in names if variants[name][0].label == base[0].label)
    shown = claim.shown or dict.fromkeys([*names[:2], first, names[-1]])
    for name, colour in zip(shown, _COLOURS, strict=False):
        series = [run.series(claim.curves) for run in variants[name]]
        for one in series:
            left.plot(range(1, len(one) + 1), one, color=colour, linewidth=0.4, alpha=0.4)
        means = [fmean(step) for step in zip(*series, strict=True)]
        left.plot(range(1, len(means) + 1), means, color=colour, linewidth=2.2, label=name.replace("`", ""))
    if claim.curves == "reward":
        left.axhline(curves[0].facts["chance"], color="0.35", linewidth=1, linestyle=":", label="chance")
    left.set(xlabel="step (rollout batch)", ylabel=claim.axis, title=f"{len(base)} seeds, thin; their mean, thick")
    left.set_ylim(min(0, left.get_ylim()[0]), 1.35 * left.get_ylim()[1])
    left.legend(fontsize="small", loc="upper left")
    measure = next(column for column in claim.columns if isinstance(column, SeedMean) and column.title == claim.dots)
    found = {name: measure.estimate(runs, base) for name, runs in variants.items()}
    dots = [(name, *estimate) for name, estimate in reversed(found.items()) if estimate is not None]
    for place, (_, mean, interval) in enumerate(dots):
        low, high = interval or (mean, mean)
        sure = "#009E73" if low > 0 else "#D55E00" if high < 0 else "0.45"
        colour = sure if measure.paired else "#0072B2"
        right.plot([low, high], [place, place], color=colour, linewidth=2)
        right.plot(mean, place, "o", color=colour)
    labels = [name.strip("`").split(" ", 1)[-1].replace(" ", "\n") if name[0] == "`" else name for name, *_ in dots]
    right.set_yticks(range(len(dots)), labels, fontsize="small")
    right.axvline(0, color="0.35", linewidth=1)
    right.set(xlabel=f"{claim.axis}: {claim.dots}" if measure.paired else claim.dots, title="mean over seeds, 95 %")
    figure.tight_layout()
    figure.savefig(path, dpi=100, metadata={"Software": None})
    pyplot.close(figure)


def searched(rows: Iterable[Mapping[str, str]]) -> str:
    """Table of rewards of ``search.csv``: a variant's mean, and the interval of what it is less the first variant's."""
    found: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for row in rows:
        cells = found.setdefault((row["setting"], row["lr"]), {})
        cells.setdefault(row["variant"], {})[row["seed"]] = float(row["reward"])
    variants = list(dict.fromkeys(variant for cells in found.values() for variant in cells))

    def cell(cells: Mapping[str, Mapping[str, float]], variant: str) -> str:
        mine, base = cells.get(variant), cells.get(variants[0], {})
        if mine is None:
            return "–"
        differences = [value - base[seed] for seed, value in mine.items() if seed in base]
        interval = paired_interval(differences) if variant != variants[0] else None
        return f"{fmean(mine.values()):.3f}" + ("" if interval is None else " ({:+.3f} to {:+.3f})".format(*interval))

    head = ["", "lr", *(variant if " " in variant or variant == "none" else f"`{variant}`" for variant in variants)]
    return markdown(head, ((*key, *(cell(cells, variant) for variant in variants)) for key, cells in found.items()))


def rewrite(page: Path) -> str:
    """The page with its tables as the data beside it have them."""
    text = page.read_text(encoding="utf-8")
    with (page.parent / "evidence" / "search.csv").open(encoding="utf-8", newline="") as file:
        for name, rows in itertools.groupby(csv.DictReader(file), key=lambda row: row["table"]):
            if f"<!-- {name}: begin -->" in text:
                text = between_marks(text, name, searched(rows), page=page.name)
    for path in sorted((page.parent / "evidence").glob("*.parquet")):
        if f"<!-- {path.stem}: begin -->" in text:
            text = between_marks(text, path.stem, _table(load(path), CLAIMS[path.stem]), page=page.name)
    return text


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m nemo_geomask.lab.evidence", description=__doc__)
    parser.add_argument("docs", nargs="?", type=Path, default=Path("docs"), help="folder of the pages")
    parser.add_argument("--collect", nargs="+", metavar=("NAME", "DIR"), help="of the data, and folders of runs")
    parser.add_argument(
        "--split", nargs="+", metavar=("DIMENSION", "EDGE"), help="of recorded runs: parts of their tokens"
    )
    given = parser.parse_args()
    folder = given.docs / "evidence"
    if given.collect:
        name, *places = given.collect[0], *map(Path, given.collect[1:])
        of_tokens = given.split and (given.split[0], [float(edge) for edge in given.split[1:]])
        collect(
            split(places, *of_tokens) if of_tokens else read_curves(places), folder / f"{name}.parquet", CLAIMS[name]
        )
    for path in sorted(folder.glob("*.parquet")):
        curves, claim = load(path), CLAIMS[path.stem]
        if claim.curves:
            draw(curves, path.with_suffix(".png"), claim)
        if claim.panels:
            write_plot(curves, given.docs / claim.panels)
    for page in (given.docs / "evidence.md", given.docs / "lab.md"):
        page.write_text(rewrite(page), encoding="utf-8")


if __name__ == "__main__":
    _main()
