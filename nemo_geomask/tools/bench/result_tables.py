"""Results of the benchmarks as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_geomask.tools.bench.result_columns import (
    COLLECTIVE_COLUMNS,
    GROUP_COLUMNS,
    LINEAR_COLUMNS,
    LOGPROB_COLUMNS,
    LONGEST_COLUMNS,
    LOSS_COLUMNS,
    POOLING_COLUMNS,
    SKEWED_COLUMNS,
    STEP_COLUMNS,
    TARGET_COLUMNS,
    Row,
    TableColumn,
    format_number,
    measured_rows,
    terminal_table,
)

__all__ = [
    "format_collectives",
    "format_linear",
    "format_logprobs",
    "format_longest",
    "format_loss",
    "format_segments",
    "format_step",
    "format_targets",
    "group_rows",
    "longest_title",
    "step_title",
]


def format_logprobs(case: Row) -> str:
    """Return the text of one case of ``bench logprobs``."""
    if "error" in case:
        return f"{case['title']}: {case['error']}\n"
    title = (
        f"{case['title']}: a copy moves {case['copy_gb_s']:.1f} GB/s; the least traffic is {case['floor_bytes']:g} B/el"
    )
    return "\n".join([title, *_path_lines(LOGPROB_COLUMNS, case["paths"]), ""])


def format_linear(case: Row) -> str:
    """Return the text of one case of ``bench linear``."""
    if "error" in case:
        return f"{case['title']}: {case['error']}\n"
    title = (
        f"{case['title']}: logits of {case['logits_bytes'] / 1e6:.0f} MB; four matrix products take "
        f"{format_number(case['products']['ms']['median'])} ms ({case['products_tflop_s']:.3g} TFLOP/s), the log-prob "
        f"kernels {format_number(case['kernels']['ms']['median'])} ms"
    )
    return "\n".join([title, *_path_lines(LINEAR_COLUMNS, case["paths"]), ""])


def format_collectives(counts: Row) -> str:
    """Return the text of the collectives of the log-prob paths, with or without logits."""
    title = f"collectives over {counts['tp']} tensor-parallel ranks, forward and backward, {counts['tokens']} tokens"
    title += f" of {counts['hidden']} numbers" if "hidden" in counts else ""
    rows = [{"path": path, **row} for path, row in counts["paths"].items()]
    failures = [f"  {row['path']}: failed: {row['error']}" for row in rows if "error" in row]
    counted = [row for row in rows if "error" not in row]
    return "\n".join([title, terminal_table(COLLECTIVE_COLUMNS, counted), *failures, ""])


def format_loss(result: Row) -> str:
    """Return the text of ``bench loss``."""
    lines = [
        f"{result['rows']} sequences of up to {result['length']} tokens, forward and backward",
        terminal_table(LOSS_COLUMNS, measured_rows(result["on_logprobs"])),
        *_reasons(result["on_logprobs"], "loss", "how"),
        "",
        "{sequences} packed sequences, {tokens} tokens, the longest {longest}".format(**result["skewed"]),
        terminal_table(SKEWED_COLUMNS, measured_rows(result["skewed"]["ways"])),
        *_reasons(result["skewed"]["ways"], "way"),
        "",
    ]
    for row in result["from_logits"]:
        if row["of_logprobs"] is None:
            lines.append(f"  from logits, {row['loss']}: {row['reason']}")
            continue
        total, logprob_pass = (format_number(times["ms"]["median"]) for times in (row, row["logprobs"]))
        lines.append(f"from logits, {row['loss']}: {total} ms; the log-prob pass alone {logprob_pass} ms")
    return "\n".join([*lines, ""])


def format_segments(result: Row) -> str:
    """Return the text of ``bench segments``."""
    lines = [
        f"3 statistics of {result['sequences']} sequences, {result['tokens']} tokens over {result['world']} ranks "
        f"({result['backend']})",
        terminal_table(POOLING_COLUMNS, measured_rows(result["ways"])),
        *_reasons(result["ways"], "way"),
    ]
    microbatch = result["microbatch"]
    if "groups" not in microbatch:
        return "\n".join([*lines, f"communication of a microbatch: {microbatch['status']}: {microbatch['reason']}", ""])
    title = "one microbatch of {tokens} tokens, {sequences} sequences, TP {tp} × CP {cp}, per rank"
    lines += ["", title.format(**microbatch), terminal_table(GROUP_COLUMNS, group_rows(microbatch))]
    return "\n".join([*lines, ""])


def format_step(case: Row) -> str:
    """Return the text of one case of ``bench step``."""
    if "error" in case:
        return f"{case['title']}: {case['error']}\n"
    return "\n".join([step_title(case), *_path_lines(STEP_COLUMNS, case["paths"]), ""])


def step_title(case: Row) -> str:
    """Return the line above the table of one case of ``bench step``."""
    return (
        f"{case['title']}: logits of {case['logits_bytes'] / 1e6:.0f} MB; the decoder alone takes "
        f"{format_number(case['decoder']['ms']['median'])} ms; loss and gradients of all measured paths agree within "
        f"{case['tolerance']:g}"
    )


def format_longest(longest: Row) -> str:
    """Return the text of the longest sequences of which a step fits into memory."""
    return "\n".join([longest_title(longest), *_path_lines(LONGEST_COLUMNS, longest["paths"]), ""])


def longest_title(longest: Row) -> str:
    """Return the line above the table of the longest sequences, which says what limits them."""
    if longest["limit_bytes"] is None:
        return "Longest sequence, in tokens, that fits: torch runs out of memory beyond it."
    limit = f"{longest['limit_bytes'] / 1e9:g} GB"
    return (
        f"Longest sequence, in tokens, of which a step takes at most {limit} beyond weights and batch, a chosen limit."
    )


def group_rows(microbatch: Row) -> list[Row]:
    """Return one row for each collective of a microbatch."""
    return [
        {"group": group, "collective": operation, "bytes": payload}
        for group, counts in microbatch["groups"].items()
        for operation, payload in counts["each"]
    ]


def format_targets(targets: Sequence[Row]) -> str:
    """Return the text of the speed targets with their verdicts; empty without targets."""
    if not targets:
        return ""
    verdicts = {True: "pass", False: "FAIL", None: "–"}
    verdict = TableColumn(
        "verdict", lambda row: verdicts[row["passed"]] + (f" ({row['reason']})" if "reason" in row else "")
    )
    return terminal_table((*TARGET_COLUMNS, verdict), targets) + "\n"


def _path_lines(columns: Sequence[TableColumn], rows: Sequence[Row]) -> list[str]:
    """Return the table of the measured paths, and a line for each path or meter that failed."""
    measured = measured_rows(rows)
    unmetered = [f"  {row['path']}: not metered: {row['meters']}" for row in measured if "meters" in row]
    return [terminal_table(columns, measured), *_reasons(rows, "path"), *unmetered]


def _reasons(rows: Sequence[Row], *keys: str) -> list[str]:
    """Return a line for each row that was not measured; ``keys`` name it."""
    return [
        f"  {', '.join(row[key] for key in keys)}: {row['status']}: {row['reason']}"
        for row in rows
        if row["status"] != "measured"
    ]
