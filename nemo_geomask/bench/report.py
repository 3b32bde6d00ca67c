"""Results as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["bars", "collectives", "linear", "logprobs", "loss", "segments", "table"]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as they need, the first to the left and the others to the right."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def logprobs(result: Mapping[str, Any]) -> str:
    """One case of ``bench logprobs``."""
    if "error" in result:
        return f"{result['title']}: {result['error']}\n"
    head = ["path", "ms", "IQR", "forward", "backward", "CPU ms", "B/el", "GB/s", "of copy", "extra MB", "launches"]
    head += ["syncs", "collectives", "err logp", "err grad"]
    rows = []
    measured, reasons = _measured(result)
    for row in measured:
        errors = row.get("errors", {})
        extra = row.get("extra_bytes")
        rows.append(
            [
                row["path"],
                *_ms(row),
                _number(row["forward_ms"]["median"]),
                _number(row["backward_ms"]["median"]),
                _processor_ms(row),
                _number(row["bytes_per_element"]),
                _number(row["gb_s"]),
                f"{row['of_copy']:.0%}",
                _number(None if extra is None else extra / 1e6),
                _number(row.get("launches")),
                _number(row.get("host_syncs")),
                _number(row.get("collectives")),
                _error(errors.get("logprob")),
                _error(errors.get("gradient")),
            ]
        )
    title = (
        f"{result['title']}: a copy moves {result['copy_gb_s']:.1f} GB/s; {result['floor_bytes']:g} B/el have to move"
    )
    return "\n".join([title, table(head, rows), *reasons, ""])


def linear(result: Mapping[str, Any]) -> str:
    """One case of ``bench linear``."""
    if "error" in result:
        return f"{result['title']}: {result['error']}\n"
    head = ["path", "ms", "IQR", "forward", "backward", "of products", "extra MB", "of logits", "syncs", "err logp"]
    head += ["err grad"]
    rows = []
    measured, reasons = _measured(result)
    for row in measured:
        errors, extra = row.get("errors", {}), row.get("extra_bytes")
        rows.append(
            [
                row["path"],
                *_ms(row),
                _number(row["forward_ms"]["median"]),
                _number(row["backward_ms"]["median"]),
                f"{row['of_products']:.0%}",
                _number(None if extra is None else extra / 1e6),
                "–" if extra is None else f"{row['of_logits']:.1%}",
                _number(row.get("host_syncs")),
                _error(errors.get("logprob")),
                _error(errors.get("gradient")),
            ]
        )
    title = (
        f"{result['title']}: logits of {result['logits_bytes'] / 1e6:.0f} MB; four matrix products take "
        f"{_number(result['products']['ms']['median'])} ms ({result['products_tflop_s']:.3g} TFLOP/s), the log-prob "
        f"kernels {_number(result['kernels']['ms']['median'])} ms"
    )
    return "\n".join([title, table(head, rows), *reasons, ""])


def collectives(result: Mapping[str, Any]) -> str:
    """Collectives of the log-prob paths, or of those without logits."""
    rows = [
        [name, str(found["calls"]), _number(found["payload_bytes_per_token"])]
        if "error" not in found
        else [name, "–", found["error"]]
        for name, found in result["paths"].items()
    ]
    title = f"collectives over {result['tp']} tensor-parallel ranks, forward and backward, {result['tokens']} tokens"
    title += f" of {result['hidden']} numbers" if "hidden" in result else ""
    return "\n".join([title, table(["path", "collectives", "payload B/token"], rows), ""])


def loss(result: Mapping[str, Any]) -> str:
    """``bench loss``."""
    head = ["loss", "how", "ms", "IQR", "CPU ms", "operations", "syncs"]
    rows, reasons = [], []
    for row in result["on_logprobs"]:
        if row["status"] != "measured":
            reasons.append(f"  {row['loss']}, {row['how']}: {row['status']}: {row['reason']}")
            continue
        rows.append(
            [
                row["loss"],
                row["how"],
                *_ms(row),
                _processor_ms(row),
                _number(row.get("launches")),
                _number(row.get("host_syncs")),
            ]
        )
    lines = [
        f"{result['rows']} sequences of up to {result['length']} tokens, forward and backward",
        table(head, rows),
        *reasons,
        *_skewed(result["skewed"]),
    ]
    for row in result["from_logits"]:
        if row["of_logprobs"] is None:
            lines.append(f"  from logits, {row['loss']}: {row['reason']}")
            continue
        alone, whole = row["logprobs"]["ms"]["median"], row["ms"]["median"]
        lines.append(f"from logits, {row['loss']}: {_number(whole)} ms; the log-prob pass alone {_number(alone)} ms")
    return "\n".join([*lines, ""])


def _skewed(found: Mapping[str, Any]) -> list[str]:
    rows, reasons = [], []
    for row in found["ways"]:
        if row["status"] != "measured":
            reasons.append(f"  {row['way']}: {row['status']}: {row['reason']}")
            continue
        rows.append([row["way"], *_ms(row), _processor_ms(row)])
    title = "{sequences} packed sequences, {tokens} tokens, the longest {longest}".format(**found)
    return ["", title, table(["way", "ms", "IQR", "CPU ms"], rows), *reasons, ""]


def segments(result: Mapping[str, Any]) -> str:
    """``bench segments``."""
    rows = []
    for row in result["ways"]:
        if row["status"] != "measured":
            rows.append([row["way"], "–", row["reason"], "–", "–"])
            continue
        rows.append([row["way"], *_ms(row), str(row["collectives"]), _number(row["sent_bytes"])])
    lines = [
        f"3 statistics of {result['sequences']} sequences, {result['tokens']} tokens over {result['world']} ranks "
        f"({result['backend']})",
        table(["way", "ms", "IQR", "collectives", "bytes sent a rank"], rows),
    ]
    micro = result["microbatch"]
    if "groups" not in micro:
        return "\n".join([*lines, f"communication of a microbatch: {micro['status']}: {micro['reason']}", ""])
    lines += [
        "",
        "one microbatch of {tokens} tokens, {sequences} sequences, TP {tp} × CP {cp}, per rank".format(**micro),
    ]
    groups = [
        [name, str(found["calls"]), str(found["payload_bytes"]), _number(found["sent_bytes"])]
        for name, found in micro["groups"].items()
    ]
    return "\n".join([*lines, table(["group", "collectives", "payload", "bytes sent"], groups), ""])


def bars(found: Sequence[Mapping[str, Any]]) -> str:
    """Pass or fail."""
    if not found:
        return ""
    words = {True: "pass", False: "FAIL", None: "–"}
    rows = [
        [
            bar["name"],
            bar["bound"],
            _number(bar["found"]),
            _number(bar.get("by_processor_time")),
            words[bar["passed"]] + (f" ({bar['reason']})" if "reason" in bar else ""),
        ]
        for bar in found
    ]
    return table(["bar", "bound", "found", "by CPU time", "verdict"], rows) + "\n"


def _measured(result: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], list[str]]:
    """The paths that were measured, and of what was not a line each."""
    rows = [row for row in result["paths"] if row["status"] == "measured"]
    reasons = [
        f"  {row['path']}: {row['status']}: {row['reason']}" for row in result["paths"] if row["status"] != "measured"
    ]
    return rows, reasons + [f"  {row['path']}: not metered: {row['meters']}" for row in rows if "meters" in row]


def _ms(row: Mapping[str, Any]) -> list[str]:
    """Median and quartiles."""
    ms = row["ms"]
    return [_number(ms["median"]), f"{_number(ms['q1'])}–{_number(ms['q3'])}"]


def _processor_ms(row: Mapping[str, Any]) -> str:
    return _number(row.get("processor_ms", {}).get("median"))


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    if isinstance(value, int) or abs(value) >= 100:
        return str(round(value))
    return f"{value:.3g}"


def _error(value: float | None) -> str:
    return "–" if value is None else f"{value:.1e}"
