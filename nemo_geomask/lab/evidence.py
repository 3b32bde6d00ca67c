"""What many runs of the lab showed, as small data beside ``docs/evidence.md``: its tables and plots are made from it.

``python -m nemo_geomask.lab.evidence`` rewrites them; with ``--collect stale DIR…`` the runs in some folders become
``docs/evidence/stale.parquet`` first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nemo_geomask.checks.pages import between_marks
from nemo_geomask.errors import ConfigError
from nemo_geomask.lab.optional import require
from nemo_geomask.lab.outcome import VariantSummary, by_variant, outcomes
from nemo_geomask.lab.runs import Course, flat

__all__ = ["collect", "draw", "load", "rewrite"]

_KEY = b"nemo_geomask.evidence"
_METRICS = (
    *("reward", "geomask/mismatch_abs", "geomask/mismatch_k3", "geomask/weight_mean", "geomask/weight_ess"),
    *("geomask/kept_tokens", "skipped_update"),
)
_FACTS = ("corrected", "chance", "sampler", "precision", "finished", "versions", "settings")


def collect(places: Iterable[Path], path: Path) -> None:
    """Keep the reward and a few metrics of every step of all runs in some folders, in float32.

    Of variants of one label, those whose settings differ from the first folder's are named after the difference. The
    first folder's variant without a correction (``NAME:none``) comes first: others are compared with it.

    Raises: ConfigError: a run is not finished, or is there twice.
    """
    arrow, parquet = require("pyarrow"), require("pyarrow.parquet")
    curves = [Course.read(file) for place in places for file in sorted(place.rglob("steps/*.parquet"))]
    curves.sort(key=lambda curve: not curve.label.endswith(":none"))
    first: dict[str, dict[str, Any]] = {}
    facts: dict[str, dict[str, Any]] = {}
    rows: dict[str, list[Any]] = {name: [] for name in ("variant", "seed", "step", *_METRICS)}
    seen: set[tuple[str, int]] = set()
    for curve in curves:
        own = flat(curve.facts["settings"])
        usual = first.setdefault(curve.label, own)
        differ = sorted(key for key in own.keys() | usual.keys() if own.get(key) != usual.get(key))
        name = ", ".join([curve.label, *(f"{key}={own.get(key)}" for key in differ)])
        if not curve.finished or (name, curve.seed) in seen:
            what = "is there twice" if curve.finished else f"has {curve.steps} steps and is not finished"
            raise ConfigError(f"the run of '{name}' on seed {curve.seed} {what}; give folders of whole runs, each once")
        seen.add((name, curve.seed))
        facts.setdefault(name, {key: curve.facts[key] for key in _FACTS})
        rows["variant"] += [name] * curve.steps
        rows["seed"] += [curve.seed] * curve.steps
        rows["step"] += range(1, curve.steps + 1)
        for metric in _METRICS:
            rows[metric] += curve.series(metric)
    small = {"seed": arrow.int32(), "step": arrow.int32(), **dict.fromkeys(_METRICS, arrow.float32())}
    table = arrow.table({name: arrow.array(values, small.get(name)) for name, values in rows.items()})
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table.replace_schema_metadata({_KEY: json.dumps(facts)}), path, compression="zstd")


def load(path: Path) -> list[Course]:
    """The runs of one file, variants in the order in which they were collected."""
    table = require("pyarrow.parquet").read_table(path)
    facts = json.loads(table.schema.metadata[_KEY])
    runs: dict[tuple[str, int], dict[str, list[float]]] = {}
    columns = {name: table[name].to_pylist() for name in table.column_names}
    for place, key in enumerate(zip(columns["variant"], columns["seed"], strict=True)):
        run = runs.setdefault(key, {name: [] for name in ("step", *_METRICS)})
        for name, values in run.items():
            values.append(columns[name][place])
    return [
        Course({**facts[label], "label": label, "variant": label, "seed": seed}, run)
        for (label, seed), run in runs.items()
    ]


def _ranked(curves: Sequence[Course]) -> list[VariantSummary]:
    """The best first; differences are to what was collected first."""
    return sorted(outcomes(curves), key=lambda found: -found.row["reward_last"])


def _table(curves: Sequence[Course]) -> str:
    lines = [
        "| variant | seeds | reward, last 10 steps | lowest, highest | less uncorrected, same seeds | better on "
        "| collapsed | removed by masks | steps skipped | k3 |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    base = outcomes(curves)[0].row["reward_last_by_seed"]
    for found in _ranked(curves):
        row, by_seed = found.row, found.row["reward_last_by_seed"]
        less = better = "–"
        if row["interval"] is not None:
            low, high = row["interval"]
            less = f"{row['difference']:+.3f} ({low:+.3f} to {high:+.3f})"
            better = f"{sum(by_seed[seed] > base[seed] for seed in by_seed)} of {len(by_seed)}"
        lines.append(
            f"| `{found.label}` | {len(by_seed)} | {row['reward_last']:.3f} "
            f"| {min(by_seed.values()):.3f}, {max(by_seed.values()):.3f} | {less} | {better} | {row['collapses']} "
            f"| {_cell(row['removed'], '.1%')} | {_cell(row['skipped_updates'], '.0%')} "
            f"| {_cell(row['mismatch_k3'], '.2g')} |"
        )
    return "\n".join(lines)


def _cell(value: float | None, style: str) -> str:
    return "–" if value is None else format(value, style)


def draw(curves: Sequence[Course], path: Path) -> None:
    """Rewards of the two best, the uncorrected and the worst variant, and all differences to the uncorrected."""
    require("matplotlib").use("Agg")
    pyplot = require("matplotlib.pyplot")
    ranked, first = _ranked(curves), outcomes(curves)[0].label
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.6), gridspec_kw={"width_ratios": [1, 1.1]})
    runs = by_variant(curves)
    shown = dict.fromkeys([*(found.label for found in ranked[:2]), first, ranked[-1].label])
    for label, colour in zip(shown, ("#CC79A7", "#009E73", "#0072B2", "#D55E00"), strict=False):
        rewards = [run.series("reward") for run in runs[label]]
        means = [sum(step) / len(step) for step in zip(*rewards, strict=True)]
        for reward in rewards:
            left.plot(range(1, len(reward) + 1), reward, color=colour, linewidth=0.4, alpha=0.4)
        left.plot(range(1, len(means) + 1), means, color=colour, linewidth=2.2, label=label)
    left.axhline(curves[0].facts["chance"], color="0.35", linewidth=1, linestyle=":", label="chance")
    left.set(
        xlabel="step (rollout batch)", ylabel="mean reward", title=f"{len(runs[first])} seeds, thin; their mean, thick"
    )
    left.set_ylim(0, 1.35 * left.get_ylim()[1])
    left.legend(fontsize="small", loc="upper left")
    others = [found for found in reversed(ranked) if found.row["interval"] is not None]
    for place, found in enumerate(others):
        low, high = found.row["interval"]
        colour = "#009E73" if low > 0 else "#D55E00" if high < 0 else "0.45"
        right.plot([low, high], [place, place], color=colour, linewidth=2)
        right.plot(found.row["difference"], place, "o", color=colour)
    right.set_yticks(
        range(len(others)), [found.label.split(", ", 1)[-1].replace(", ", ",\n") for found in others], fontsize="small"
    )
    right.axvline(0, color="0.35", linewidth=1)
    right.set(xlabel="reward of the last 10 steps, less the uncorrected run's", title="mean over paired seeds, 95 %")
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def rewrite(page: Path) -> str:
    """The page with its tables as the data beside it has them."""
    text = page.read_text(encoding="utf-8")
    for path in sorted((page.parent / page.stem).glob("*.parquet")):
        text = between_marks(text, path.stem, _table(load(path)), page=page.name)
    return text


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m nemo_geomask.lab.evidence", description=__doc__)
    parser.add_argument("page", nargs="?", type=Path, default=Path("docs/evidence.md"))
    parser.add_argument("--collect", nargs="+", metavar=("NAME", "DIR"), help="of the data, and folders of runs")
    given = parser.parse_args()
    folder = given.page.parent / given.page.stem
    if given.collect:
        name, *places = given.collect
        collect(map(Path, places), folder / f"{name}.parquet")
    for path in sorted(folder.glob("*.parquet")):
        draw(load(path), path.with_suffix(".png"))
    given.page.write_text(rewrite(given.page), encoding="utf-8")


if __name__ == "__main__":
    _main()
