"""``python -m nemo_geomask.bench.pages docs/performance.md``: rewrite the page's tables from the JSON beside it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_geomask.bench.paths import OURS
from nemo_geomask.checks.pages import between_marks, markdown

__all__ = ["rewrite"]

Result = Mapping[str, Any]


def rewrite(text: str, folder: Path) -> str:
    """The page with its tables as the JSON files in ``folder`` have them.

    Each stands between ``<!-- NAME: begin -->`` and ``<!-- NAME: end -->``, with the name of a benchmark.

    Raises:
        ArgumentError: the markers of a benchmark are missing.
    """
    for name, write in _TABLES.items():
        found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(f"{name}-*.json"))]
        blocks = [f"**{_machine(result['machine'])}**\n\n{write(result)}" for result in found]
        text = between_marks(text, name, "\n" + "\n\n".join(blocks) + "\n", page=f"{folder.name}.md")
    return text


def _machine(machine: Result) -> str:
    parts = [machine["name"], f"torch {machine['torch']}", machine["date"]]
    if machine["device"] == "cpu":
        parts.insert(1, f"{machine['threads']} of {machine['cores']} cores, load {machine['load'][0]:g}")
    return ", ".join(parts)


def _logprobs(result: Result) -> str:
    first, *rest = [case for case in result["cases"] if "error" not in case]
    head = ["path", "ms (quartiles)", "CPU ms", "forward", "backward", "B/el", "of a copy", "extra MB", "launches"]
    head += ["error logp", "gradient"]
    blocks = [
        f"{first['title']}; a copy moves {first['copy_gb_s']:.1f} GB/s.",
        markdown(head, [_path(row) for row in first["paths"] if row["status"] == "measured"]),
        _missing(first),
    ]
    if rest:
        peers = [row["path"] for row in first["paths"] if row["status"] == "measured" and not _is_ours(row["path"])]
        head = ["case", "ours, ms", "of a copy", *(f"× {name}" for name in peers)]
        blocks += [
            "Our time, and how many times longer each peer takes:",
            markdown(head, [_case(case, peers) for case in (first, *rest)]),
        ]
    return "\n\n".join([*blocks, _bars(result["bars"])])


def _path(row: Result) -> list[str]:
    ms, errors = row["ms"], row.get("errors", {})
    extra = row.get("extra_bytes")
    return [
        row["path"],
        f"{_short(ms['median'])} ({_short(ms['q1'])}–{_short(ms['q3'])})",
        _short(row.get("processor_ms", {}).get("median")),
        _short(row["forward_ms"]["median"]),
        _short(row["backward_ms"]["median"]),
        _short(row["bytes_per_element"]),
        f"{row['of_copy']:.0%}",
        _short(None if extra is None else extra / 1e6),
        _short(row.get("launches")),
        _tiny(errors.get("logprob")),
        _tiny(errors.get("gradient")),
    ]


def _missing(case: Result) -> str:
    rows = [f"{row['path']} ({row['reason']})" for row in case["paths"] if row["status"] != "measured"]
    return f"Not measured: {'; '.join(rows)}." if rows else "All paths were measured."


def _case(case: Result, peers: Sequence[str]) -> list[str]:
    rows = {row["path"]: row for row in case["paths"] if row["status"] == "measured"}
    ours = rows.get(OURS[0].name)
    if ours is None:
        return [case["title"], *["–"] * (2 + len(peers))]
    own = ours["ms"]["median"]
    times = [_short(rows[name]["ms"]["median"] / own) if name in rows else "–" for name in peers]
    return [case["title"], _short(own), f"{ours['of_copy']:.0%}", *times]


def _bars(bars: Iterable[Result]) -> str:
    words = {True: "pass", False: "**fail**", None: "not measured"}
    rows = [
        [bar["name"], bar["bound"], _short(bar["found"]), _short(bar.get("by_processor_time")), words[bar["passed"]]]
        for bar in bars
    ]
    return markdown(["bar", "bound", "found", "by CPU time", ""], rows)


def _loss(result: Result) -> str:
    if "on_logprobs" not in result:
        return str(result["reason"])
    measured = [row for row in result["on_logprobs"] if row["status"] == "measured"]
    names = list(dict.fromkeys(row["loss"] for row in measured))
    ways = list(dict.fromkeys(row["how"] for row in measured))
    clock = "processor_ms" if all("processor_ms" in row for row in measured) else "ms"
    cells = {(row["loss"], row["how"]): f"{_short(row[clock]['median'])} ms" for row in measured}
    operations = {(row["loss"], row["how"]): f", {row['launches']}" for row in measured if "launches" in row}
    rows = [[name, *(cells.get((name, w), "–") + operations.get((name, w), "") for w in ways)] for name in names]
    what = "CPU time" if clock == "processor_ms" else "time"
    title = f"{result['rows']} sequences of up to {result['length']} tokens, forward and backward: {what}, operations."
    blocks = [title, markdown(["loss", *ways], rows)]
    if "skewed" in result:
        found = result["skewed"]
        timed = [[row["way"], f"{_short(row[clock]['median'])} ms"] for row in found["ways"] if clock in row]
        title = "{sequences} packed sequences of {tokens} tokens, the longest {longest}: {what}.".format(
            **found, what=what
        )
        blocks += [title, markdown(["way", what], timed)] if timed else []
    return "\n\n".join([*blocks, _bars(result["bars"])])


def _linear(result: Result) -> str:
    head = ["path", "ms (quartiles)", "forward", "backward", "of the products", "extra MB", "of the logits"]
    head += ["error logp", "gradient"]
    blocks = []
    for case in result["cases"]:
        if "error" in case:
            blocks.append(f"{case['title']}: {case['error']}.")
            continue
        products = case["products"]["ms"]["median"]
        blocks += [
            f"{case['title']}: logits of {case['logits_bytes'] / 1e6:.0f} MB; four matrix products alone take "
            f"{_short(products)} ms, {_short(case['products_tflop_s'])} TFLOP/s.",
            markdown(head, [_without_logits(row) for row in case["paths"] if row["status"] == "measured"]),
            _missing(case),
        ]
    if "collectives" in result:
        found = result["collectives"]
        title = "What crosses {tp} tensor-parallel ranks, forward and backward, of {tokens} tokens of {hidden} numbers."
        rows = [
            [name, str(row["calls"]), _short(row["payload_bytes_per_token"])]
            for name, row in found["paths"].items()
            if "error" not in row
        ]
        blocks += [title.format(**found), markdown(["path", "collectives", "bytes a token"], rows)]
    return "\n\n".join([*blocks, _bars(result["bars"])])


def _without_logits(row: Result) -> list[str]:
    ms, errors, extra = row["ms"], row.get("errors", {}), row.get("extra_bytes")
    return [
        row["path"],
        f"{_short(ms['median'])} ({_short(ms['q1'])}–{_short(ms['q3'])})",
        _short(row["forward_ms"]["median"]),
        _short(row["backward_ms"]["median"]),
        f"{row['of_products']:.0%}",
        _short(None if extra is None else extra / 1e6),
        "–" if extra is None else f"{row['of_logits']:.1%}",
        _tiny(errors.get("logprob")),
        _tiny(errors.get("gradient")),
    ]


def _segments(result: Result) -> str:
    rows = [
        [row["way"], _short(row["ms"]["median"]), str(row["collectives"]), _short(row["sent_bytes"])]
        for row in result["ways"]
        if row["status"] == "measured"
    ]
    title = (
        f"3 statistics of {result['sequences']} sequences, {result['tokens']} tokens over {result['world']} ranks "
        f"({result['backend']})."
    )
    blocks = [title, markdown(["way", "ms", "collectives", "bytes sent a rank"], rows)]
    micro = result["microbatch"]
    if "groups" in micro:
        each = [
            [group, kind, str(payload)] for group, found in micro["groups"].items() for kind, payload in found["each"]
        ]
        title = "A microbatch of {tokens} tokens, {sequences} sequences, TP {tp} × CP {cp}, bytes that a rank gives."
        blocks += [title.format(**micro), markdown(["group", "collective", "bytes"], each)]
    return "\n\n".join(blocks)


def _is_ours(name: str) -> bool:
    return any(path.name == name for path in OURS)


def _short(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _tiny(value: float | None) -> str:
    return "–" if value is None else f"{value:.0e}"


_TABLES: dict[str, Callable[[Result], str]] = {
    "logprobs": _logprobs,
    "linear": _linear,
    "loss": _loss,
    "segments": _segments,
}


def _main() -> None:
    page = Path(sys.argv[1])
    page.write_text(rewrite(page.read_text(encoding="utf-8"), page.with_suffix("")), encoding="utf-8")


if __name__ == "__main__":
    _main()
