"""``python -m nemo_geomask.tools.bench.performance_page docs/background/performance.md``: rewrite its tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from nemo_geomask.tools.bench.paths import OURS
from nemo_geomask.tools.bench.result_columns import (
    COLLECTIVE_COLUMNS,
    GROUP_COLUMNS,
    LINEAR_COLUMNS,
    LOGPROB_COLUMNS,
    LONGEST_COLUMNS,
    POOLING_COLUMNS,
    STEP_COLUMNS,
    TARGET_COLUMNS,
    Row,
    TableColumn,
    format_number,
    measured_rows,
    page_table,
)
from nemo_geomask.tools.bench.result_tables import group_rows, longest_title, step_title
from nemo_geomask.tools.bench.speed_targets import check_linear, check_logprobs, check_loss
from nemo_geomask.tools.shared.markdown import markdown_table, replace_marked_text
from nemo_geomask.tools.shared.terminal_tables import ABSENT

__all__ = ["rewrite"]


def rewrite(text: str, folder: Path) -> str:
    """Return the page with tables generated from the JSON files in ``folder``.

    The tables of a benchmark are between ``<!-- NAME: begin -->`` and ``<!-- NAME: end -->``. The verdicts are those of
    the present targets on the recorded figures, not those that were recorded with them.

    Raises:
        ArgumentError: the markers of a benchmark are missing.
    """
    for name, write in _WRITERS.items():
        results = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(f"{name}-*.json"))]
        blocks = [f"**{_machine(result['machine'])}**\n\n{write(result)}" for result in results]
        text = replace_marked_text(text, name, "\n" + "\n\n".join(blocks) + "\n", page=f"{folder.name}.md")
    return text


def _machine(machine: Row) -> str:
    parts = [machine["name"], f"torch {machine['torch']}", machine["date"]]
    if machine["device"] == "cpu":
        parts.insert(1, f"{machine['threads']} of {machine['cores']} cores, load {machine['load'][0]:g}")
    return ", ".join(parts)


def _logprobs(result: Row) -> str:
    first, *rest = [case for case in result["cases"] if "error" not in case]
    measured = measured_rows(first["paths"])
    blocks = [
        f"{first['title']}; a copy moves {first['copy_gb_s']:.1f} GB/s.",
        page_table(LOGPROB_COLUMNS, measured),
        _unmeasured(first),
    ]
    if rest:
        our_names = {path.name for path in OURS}
        peers = [row["path"] for row in measured if row["path"] not in our_names]
        head = ["case", "ours, ms", "of a copy", *(f"× {name}" for name in peers)]
        blocks += [
            "Our time, and how many times longer each peer takes:",
            markdown_table(head, [_comparison(case, peers) for case in (first, *rest)]),
        ]
    return "\n\n".join([*blocks, _targets(check_logprobs(result["cases"], result["machine"]["device"]))])


def _unmeasured(case: Row) -> str:
    # An error's first sentence; torch's about memory goes on for lines.
    reasons = [
        f"{row['path']} ({row['reason'].partition('. ')[0]})" for row in case["paths"] if row["status"] != "measured"
    ]
    return f"Not measured: {'; '.join(reasons)}." if reasons else "All paths were measured."


def _comparison(case: Row, peers: Sequence[str]) -> list[str]:
    """Return the cells of one case: our time, its share of a copy's bandwidth, and each peer's time over ours."""
    rows = {row["path"]: row for row in measured_rows(case["paths"])}
    ours = rows.get(OURS[0].name)
    if ours is None:
        return [case["title"], *[ABSENT] * (2 + len(peers))]
    our_time = ours["ms"]["median"]
    ratios = [format_number(rows[name]["ms"]["median"] / our_time) if name in rows else ABSENT for name in peers]
    return [case["title"], format_number(our_time), f"{ours['of_copy']:.0%}", *ratios]


def _targets(targets: Iterable[Row]) -> str:
    verdicts = {True: "pass", False: "**fail**", None: "not measured"}
    return page_table((*TARGET_COLUMNS, TableColumn("verdict", lambda row: verdicts[row["passed"]])), targets)


def _loss(result: Row) -> str:
    if "on_logprobs" not in result:
        return str(result["reason"])
    measured = measured_rows(result["on_logprobs"])
    losses = list(dict.fromkeys(row["loss"] for row in measured))
    layouts = list(dict.fromkeys(row["how"] for row in measured))
    clock = "processor_ms" if all("processor_ms" in row for row in measured) else "ms"
    clock_name = "CPU time" if clock == "processor_ms" else "time"
    cells = {
        (row["loss"], row["how"]): f"{format_number(row[clock]['median'])} ms"
        + (f", {row['launches']}" if "launches" in row else "")
        for row in measured
    }
    blocks = [
        f"{result['rows']} sequences of up to {result['length']} tokens, forward and backward: {clock_name}, "
        "operations.",
        markdown_table(
            ["loss", *layouts],
            [[loss, *(cells.get((loss, layout), ABSENT) for layout in layouts)] for loss in losses],
        ),
    ]
    skewed = result.get("skewed", {"ways": ()})
    times = [[row["way"], f"{format_number(row[clock]['median'])} ms"] for row in skewed["ways"] if clock in row]
    if times:
        title = "{sequences} packed sequences of {tokens} tokens, the longest {longest}: {clock_name}."
        blocks += [title.format(**skewed, clock_name=clock_name), markdown_table(["way", clock_name], times)]
    return "\n\n".join([*blocks, _targets(check_loss(result, result["machine"]["device"]))])


def _linear(result: Row) -> str:
    blocks = []
    for case in result["cases"]:
        if "error" in case:
            blocks.append(f"{case['title']}: {case['error']}.")
            continue
        blocks += [
            f"{case['title']}: logits of {case['logits_bytes'] / 1e6:.0f} MB; four matrix products alone take "
            f"{format_number(case['products']['ms']['median'])} ms, {format_number(case['products_tflop_s'])} TFLOP/s.",
            page_table(LINEAR_COLUMNS, measured_rows(case["paths"])),
            _unmeasured(case),
        ]
    if "collectives" in result:
        counts = result["collectives"]
        title = (
            "Collectives of {tp} tensor-parallel ranks, forward and backward, for {tokens} tokens of {hidden} numbers."
        )
        rows = [{"path": path, **row} for path, row in counts["paths"].items() if "error" not in row]
        blocks += [title.format(**counts), page_table(COLLECTIVE_COLUMNS, rows)]
    return "\n\n".join([*blocks, _targets(check_linear(result["cases"], result["machine"]["device"]))])


def _segments(result: Row) -> str:
    blocks = [
        f"3 statistics of {result['sequences']} sequences, {result['tokens']} tokens over {result['world']} ranks "
        f"({result['backend']}).",
        page_table(POOLING_COLUMNS, measured_rows(result["ways"])),
    ]
    microbatch = result["microbatch"]
    if "groups" in microbatch:
        title = (
            "A microbatch of {tokens} tokens, {sequences} sequences, TP {tp} × CP {cp}: bytes that a rank contributes."
        )
        blocks += [title.format(**microbatch), page_table(GROUP_COLUMNS, group_rows(microbatch))]
    return "\n\n".join(blocks)


def _step(result: Row) -> str:
    if "cases" not in result:
        return str(result["reason"])
    blocks = []
    for case in result["cases"]:
        if "error" in case:
            blocks.append(f"{case['title']}: {case['error']}.")
            continue
        blocks += [f"{step_title(case)}.", page_table(STEP_COLUMNS, measured_rows(case["paths"])), _unmeasured(case)]
    longest = result["longest"]
    return "\n\n".join([*blocks, longest_title(longest), page_table(LONGEST_COLUMNS, measured_rows(longest["paths"]))])


_WRITERS: dict[str, Callable[[Row], str]] = {
    "logprobs": _logprobs,
    "linear": _linear,
    "loss": _loss,
    "segments": _segments,
    "step": _step,
}


def _main() -> None:
    page = Path(sys.argv[1])
    page.write_text(rewrite(page.read_text(encoding="utf-8"), page.parents[1] / "performance"), encoding="utf-8")


if __name__ == "__main__":
    _main()
