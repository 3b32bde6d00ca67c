"""What the report plots, as plain numbers that are binned beforehand: a long run makes no larger file.

:mod:`nemo_geomask.diagnosis.draw` draws them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from nemo_geomask.diagnosis.levels import LEVELS
from nemo_geomask.diagnosis.quantities import MEASURES, NUMBERS, REMOVED_SHARES, measured
from nemo_geomask.diagnosis.statistics import BY_NAME, DIMENSIONS, Statistics, StepSums, Window
from nemo_geomask.diagnosis.verdict import RunDiagnosis

__all__ = ["POINTS", "Curve", "Figure", "figures_of", "group_lifts", "logged_figures"]

POINTS = 240
"""Of a curve; a longer run's steps are taken together."""
GROUP_BINS = np.arange(-4.0, 4.5, 0.5)


@dataclass(frozen=True)
class Curve:
    """One line, or rows of bars.

    Attributes:
        run: number of the run, which has a colour.
        name: what it is within the run; "" where it is all that there is of the run.
        x: step numbers, or places among the figure's ``parts``.
        y: NaN where there is nothing.
        low, high: of the 95 % interval; empty where there is none.
        style: number of the dash.
        labels: of points that have a name.
    """

    run: int
    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    style: int = 0
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Figure:
    """One plot.

    Attributes:
        key: for programs, and the PNG's name.
        title, definition: what it shows.
        section: where it stands in the page.
        across, along: titles of the axes, y and x.
        curves: by the name of what is measured, of which one is shown at a time.
        parts: names of the places on the x axis, where it has no numbers.
        limits: of the values, drifting and broken.
        since: by run, the first changed step.
        points: whether the points are apart.
    """

    key: str
    title: str
    definition: str
    section: str
    across: str
    along: str
    curves: Mapping[str, Sequence[Curve]]
    parts: tuple[str, ...] = ()
    limits: tuple[float, ...] = ()
    since: Mapping[int, int] = field(default_factory=dict)
    points: bool = False

    @property
    def shown(self) -> Sequence[Curve]:
        """What is seen first."""
        return next(iter(self.curves.values()))


def figures_of(runs: Sequence[RunDiagnosis]) -> list[Figure]:
    """All that there is to plot of runs, side by side; without those for which no record has what they need."""
    binned = [_bins(run.evidence.statistics) for run in runs]
    since = {place: run.since for place, run in enumerate(runs) if run.since is not None}

    def by_step(
        key: str,
        title: str,
        definition: str,
        section: str,
        values: Mapping[str, Callable[[StepSums], tuple[float, float, float]]],
        limits: tuple[float, ...] = (),
    ) -> Figure | None:
        curves = [
            _along_steps(place, name, steps, value, style)
            for place, steps in enumerate(binned)
            for style, (name, value) in enumerate(values.items())
        ]
        curves = [curve for curve in curves if not all(math.isnan(y) for y in curve.y)]
        if not any(y for curve in curves for y in curve.y if math.isfinite(y)):
            return None  # nothing but zeros
        return Figure(key, title, definition, section, "", "step", {"": curves}, limits=limits, since=since)

    found: list[Figure | None] = []
    for level in LEVELS:
        value = {"": lambda sums, level=level: level.of(sums)[:3]}
        limits = (level.drifting, level.broken)
        said = f"{level.definition}. Drifting {'<' if level.below else '>'} {limits[0]:g}, broken {limits[1]:g}"
        found.append(by_step(f"step {level.name}", level.name, f"{said}: {level.source}", "steps", value, limits))
    for number in NUMBERS:
        section = "steps" if number.name in _FIRST else "more"
        value = {"": lambda sums, number=number: (float(number.value(sums)), *number.interval(sums))}
        found.append(by_step(f"step {number.name}", number.name, number.definition, section, value))
    labels = sorted({label for steps in binned for _, sums in steps for label in sums.removed if label})
    for of, what in enumerate(REMOVED_SHARES):
        values = {
            label: lambda sums, label=label, of=of: (sums.removed_share(label, of), math.nan, math.nan)
            for label in labels
        }
        title = "removed, of |Δ|" if of else "removed, of the tokens"
        found.append(by_step(f"masks {title}", title, f"by each mask, the {what}", "masks", values))
    found += [_by_part(runs, one.name) for one in DIMENSIONS]
    found.append(_by_group(runs))
    return [figure for figure in found if figure is not None]


_FIRST = ("noise", "reward", "response length", "masked out", "staleness")


def _bins(statistics: Statistics) -> list[tuple[float, StepSums]]:
    """Steps, so many together that there are at most ``POINTS``, by the mean of their numbers."""
    steps = sorted(statistics.steps)
    size = -(-len(steps) // POINTS)
    return [
        (float(np.mean(steps[first : first + size])), statistics.total(steps[first : first + size]))
        for first in range(0, len(steps), size)
    ]


def _along_steps(
    run: int,
    name: str,
    steps: Sequence[tuple[float, StepSums]],
    value: Callable[[StepSums], tuple[float, float, float]],
    style: int,
) -> Curve:
    y, low, high = zip(*(value(sums) if sums["tokens"] else (math.nan,) * 3 for _, sums in steps), strict=True)
    if all(math.isnan(end) for end in low):
        low = high = ()
    return Curve(run, name, tuple(x for x, _ in steps), y, low, high, style)


def _windows(run: RunDiagnosis) -> Iterator[tuple[str, Window]]:
    """Of the run before and after it changed, or of all of it."""
    evidence = run.evidence
    if evidence.before is None:
        yield "", evidence.after
        return
    yield evidence.names[0], evidence.before
    yield evidence.names[1], evidence.after


def _by_part(runs: Sequence[RunDiagnosis], name: str) -> Figure | None:
    one = BY_NAME[name]
    found = [
        (place, part, len(parts) - 1 - style, measured(window.cells[name]))
        for place, run in enumerate(runs)
        for parts in [list(_windows(run))]
        for style, (part, window) in enumerate(parts)
    ]
    there = sorted({bin_ for *_, cells in found for bin_ in cells})
    if len(there) < 2:
        return None
    order = [measure.name for measure in MEASURES]
    order = [*order[1:], order[0]]
    curves = {
        measure: [
            Curve(
                place,
                part,
                tuple(map(float, range(len(there)))),
                tuple(cells.get(bin_, {}).get(measure, math.nan) for bin_ in there),
                style=style,
            )
            for place, part, style, cells in found
            if cells
        ]
        for measure in order
    }
    return Figure(
        f"by {name}",
        f"By {name}",
        "",
        "parts",
        "",
        one.unit,
        curves,
        parts=tuple(one.label(bin_, bin_) for bin_ in there),
    )


def logged_figures(runs: Sequence[Mapping[str, Mapping[int, float]]]) -> Iterator[Figure]:
    """Of the runs' own metrics, one of which is seen at a time: by name, then step."""
    curves: dict[str, list[Curve]] = {}
    names = {name for run in runs for name in run}
    for name in [*filter(names.__contains__, _LOGGED_FIRST), *sorted(names.difference(_LOGGED_FIRST))]:
        for place, run in enumerate(runs):
            steps = sorted(run.get(name, ()))
            size = max(1, -(-len(steps) // POINTS))
            some = [steps[first : first + size] for first in range(0, len(steps), size)]
            y = tuple(float(np.mean([run[name][step] for step in part])) for part in some)
            if any(map(math.isfinite, y)):
                curves.setdefault(name, []).append(Curve(place, "", tuple(float(np.mean(part)) for part in some), y))
    if curves:
        yield Figure("logged", "Metrics", "", "logged", "", "step", curves)


_LOGGED_FIRST = ("reward", "token_mult_prob_error", "gen_kl_error", "loss", "grad_norm")


def _by_group(runs: Sequence[RunDiagnosis]) -> Figure | None:
    """How many prompt groups of a step have how many times the mismatch of the others."""
    curves = []
    for place, run in enumerate(runs):
        lifts = [lift for step in run.evidence.steps_after for *_, lift in group_lifts(run, step) if lift > 0]
        if lifts:
            inside = np.clip(np.log2(lifts), GROUP_BINS[0], GROUP_BINS[-1] - 1e-9)
            count = np.histogram(inside, GROUP_BINS)[0] / len(lifts)
            curves.append(Curve(place, "", tuple(map(float, range(len(count)))), tuple(count.tolist())))
    if not curves:
        return None
    ends = [f"{2.0**end:.2g}" for end in GROUP_BINS]
    between = [f"{low} to {high}" for low, high in itertools.pairwise(ends)]
    parts = (f"below {ends[1]}", *between[1:-1], f"{ends[-2]} and more")
    definition = "share of the prompt groups, of all steps that count, by their mismatch (mean |Δ| over mean 1 − p) in "
    definition += "units of that of their step's other groups"
    return Figure("by group", "By prompt group", definition, "parts", "share", "times the others", {"": curves}, parts)


def group_lifts(run: RunDiagnosis, step: int) -> Iterator[tuple[int, float, float]]:
    """Of each prompt group of a step its number, share of the mismatch, and mismatch in units of the others'."""
    groups = run.evidence.statistics.steps[step].groups
    size, model = (sum(found[place] for found in groups.values()) for place in (0, 1))
    for group, (own, expected, _) in groups.items():
        others = size - own
        if expected > 0 and others > 0 and model > expected:
            yield group, own / size, own / expected * (model - expected) / others
