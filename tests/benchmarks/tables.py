"""Write the tables of the results in ``docs/performance`` beside them: ``python -m tests.benchmarks.tables``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from nemo_geomask.tools.bench import logprobs, step
from nemo_geomask.tools.bench.results import Column, Row, cells, figure, format_number, measured
from nemo_geomask.tools.shared.terminal_tables import ABSENT
from tests.benchmarks import logits
from tests.benchmarks.collectives import COLLECTIVE_COLUMNS, POOLING_COLUMNS
from tests.benchmarks.logit_paths import OURS
from tests.benchmarks.targets import check_linear, check_logits, check_loss
from tests.helpers.markdown import markdown_table

FOLDER = Path(__file__).parents[2] / "docs" / "performance"
_TARGET_COLUMNS: tuple[Column, ...] = (
    ("target", lambda row: row["target"]),
    ("bound", lambda row: row["bound"]),
    figure("measured", "found"),
    figure("by CPU time", "by_processor_time"),
    ("verdict", lambda row: "pass" if row["passed"] else "**fail**"),
)
_HEAD = """# {title}

`make docs` makes this page from the JSON beside it. [Performance](../background/performance.md) says what is measured.
"""


def pages() -> dict[str, str]:
    """Return the text of each page, by the name of its file."""
    texts = {}
    for name, (title, write) in _WRITERS.items():
        blocks = [_HEAD.format(title=title)]
        for path in sorted(FOLDER.glob(f"{name}-*.json")):
            result = json.loads(path.read_text(encoding="utf-8"))
            blocks += [f"## {_machine(result['machine'])}", *write(result)]
        texts[f"{name}.md"] = "\n\n".join(block.strip() for block in blocks) + "\n"
    return texts


def _machine(machine: Row) -> str:
    parts = [machine["name"], f"torch {machine['torch']}", machine["date"]]
    if machine["device"] == "cpu":
        parts.insert(1, f"{machine['threads']} of {machine['cores']} cores, load {machine['load'][0]:g}")
    return ", ".join(parts)


def _table(columns: Sequence[Column], rows: Iterable[Row]) -> str:
    return markdown_table([head for head, _ in columns], cells(columns, rows))


def _targets(verdicts: Iterable[Row]) -> str:
    rows = list(verdicts)
    failed = sum(not row["passed"] for row in rows)
    return f"Targets: {len(rows) - failed} passed, {failed} failed.\n\n{_table(_TARGET_COLUMNS, rows)}"


def _cases(result: Row, format_title: Callable[[Row], str], columns: Sequence[Column]) -> Iterator[str]:
    """Yield for each case its title, its table, and why paths were not measured."""
    for case in result["cases"]:
        if "error" in case:
            yield f"{case['title']}: {case['error']}."
            continue
        # An error's first sentence; torch's about memory goes on for lines.
        reasons = [f"{row['path']} ({row['reason'].partition('. ')[0]})" for row in case["paths"] if "reason" in row]
        yield from (f"{format_title(case)}.", _table(columns, measured(case["paths"])))
        if reasons:
            yield f"Not measured: {'; '.join(reasons)}."


def _logprobs(result: Row) -> Iterator[str]:
    first, *rest = [case for case in result["cases"] if "error" not in case]
    yield from _cases({"cases": [first]}, logits.format_title, logits.COLUMNS)
    peers = [row["path"] for row in measured(first["paths"]) if row["path"] not in OURS]
    yield "Our time, and how many times longer each peer takes:"
    head = ["case", "ours, ms", "of a copy", *(f"× {name}" for name in peers)]
    yield markdown_table(head, [_comparison(case, peers) for case in (first, *rest)])
    yield _targets(check_logits(result))
    if "models" in result:
        yield "Bytes for each logit, forward and backward, and where they were counted, if all tokens train:"
        columns = figure("bytes", "bytes_per_element"), ("counted", lambda row: row["counted"])
        yield _table((("path", lambda row: row["path"]), *columns), result["models"])


def _comparison(case: Row, peers: Sequence[str]) -> list[str]:
    """Return the cells of one case: our time, its share of a copy's bandwidth, and each peer's time over ours."""
    rows = {row["path"]: row for row in measured(case["paths"])}
    ours = rows[next(iter(OURS))]
    our_time = ours["ms"]["median"]
    ratios = [format_number(rows[name]["ms"]["median"] / our_time) if name in rows else ABSENT for name in peers]
    return [case["title"], format_number(our_time), f"{ours['of_copy']:.0%}", *ratios]


def _linear(result: Row) -> Iterator[str]:
    yield from _cases(result, logprobs.format_title, logprobs.COLUMNS)
    if "collectives" in result:
        yield "Collectives of {tp} tensor-parallel ranks, for {tokens} tokens of {hidden} numbers:".format(
            **result["collectives"]
        )
        counts = result["collectives"]["paths"].items()
        yield _table(COLLECTIVE_COLUMNS, [{"path": path, **row} for path, row in counts if "error" not in row])
    yield _targets(check_linear(result))


def _loss(result: Row) -> Iterator[str]:
    rows = measured(result["on_logprobs"])
    clock = "processor_ms" if all("processor_ms" in row for row in rows) else "ms"
    clock_name = "CPU time" if clock == "processor_ms" else "time"
    texts = {
        (row["loss"], row["how"]): f"{format_number(row[clock]['median'])} ms"
        + (f", {row['launches']}" if "launches" in row else "")
        for row in rows
    }
    losses, layouts = (list(dict.fromkeys(row[key] for row in rows)) for key in ("loss", "how"))
    yield f"{result['rows']} sequences of up to {result['length']} tokens, with backward: {clock_name}, operations."
    lines = [[loss, *(texts.get((loss, layout), ABSENT) for layout in layouts)] for loss in losses]
    yield markdown_table(["loss", *layouts], lines)
    if ways := measured(result["skewed"]["ways"]):
        yield ("{sequences} packed sequences of {tokens} tokens, the longest {longest}: {clock_name}.").format(
            **result["skewed"], clock_name=clock_name
        )
        yield _table((("way", lambda row: row["way"]), figure(f"{clock_name}, ms", clock, "median")), ways)
    yield _targets(check_loss(result))


def _segments(result: Row) -> Iterator[str]:
    yield (
        f"3 statistics of {result['sequences']} sequences, {result['tokens']} tokens over {result['world']} ranks "
        f"({result['backend']})."
    )
    yield _table(POOLING_COLUMNS, measured(result["ways"]))
    if "microbatch" in result:
        title = (
            "A microbatch of {tokens} tokens, {sequences} sequences, TP {tp} × CP {cp}: bytes that a rank contributes."
        )
        yield title.format(**result["microbatch"])
        groups = result["microbatch"]["groups"].items()
        rows = [[group, name, str(payload)] for group, counts in groups for name, payload in counts["each"]]
        yield markdown_table(["group", "collective", "bytes"], rows)


def _step(result: Row) -> Iterator[str]:
    yield from _cases(result, step.format_title, step.COLUMNS)
    longest = result["longest"]
    yield from (step.longest_title(longest), _table(step.LONGEST_COLUMNS, measured(longest["paths"])))


_WRITERS: Mapping[str, tuple[str, Callable[[Row], Iterator[str]]]] = {
    "logprobs": ("Log-probs from logits", _logprobs),
    "linear": ("Log-probs from hidden states", _linear),
    "loss": ("Losses", _loss),
    "segments": ("Statistics of sequences across ranks", _segments),
    "step": ("A step of a decoder", _step),
}


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
