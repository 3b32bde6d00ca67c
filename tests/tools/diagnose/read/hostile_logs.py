"""Hostile inputs for ``diagnose`` and ``sweep`` that are no Parquet files: each writes what an attacker could write."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

LOG, METRICS = "train_data_step1.jsonl", "metrics.jsonl"
GIGABYTE = 2**30

Plant = Callable[[Path], None]
"""Writes the hostile input under a path."""


def valid_line(**changes: Any) -> bytes:
    """Return a line as NeMo-RL writes it, with some values replaced."""
    values = {
        "idx": 0,
        "input_lengths": [4],
        "token_ids": [[1, 2, 3, 4]],
        "token_loss_mask": [[0, 0, 1, 1]],
        "generation_logprobs": [[0.0, 0.0, -0.5, -0.7]],
        "prev_logprobs": [[0.0, 0.0, -0.5, -0.7]],
        "advantages": [[0.5, 0.5, 0.5, 0.5]],
        "rewards": [1.0],
        "sample_loss_mask": [1.0],
    }
    return json.dumps(values | changes).encode() + b"\n"


def valid_lines(count: int, **changes: Any) -> bytes:
    """Return the lines of a step with some sequences."""
    return b"".join(valid_line(idx=index, **changes) for index in range(count))


def content(data: bytes | Callable[[], bytes]) -> Plant:
    return lambda path: path.write_bytes(data() if callable(data) else data) and None


def log(**changes: Any) -> Plant:
    return content(valid_line(**changes))


def sparse(prefix: bytes) -> Plant:
    """Return a plant of a file of 1 GB that takes no room on the disk."""

    def plant(path: Path) -> None:
        path.write_bytes(prefix)
        os.truncate(path, GIGABYTE)

    return plant


def event_link(target: str) -> Plant:
    """Return a plant of valid metrics, and beside them a link to an event file that can't be read."""

    def plant(path: Path) -> None:
        path.write_bytes(b'{"step": 1, "gen_kl_error": 0.1}\n')
        (path.parent / "events.out.tfevents.1").symlink_to(target)

    return plant


def unreadable_loop(path: Path) -> None:
    path.symlink_to(path.name)


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def unknown_key(value: bytes) -> bytes:
    return valid_line().replace(b'{"idx"', b'{"x": ' + value + b', "idx"')


HOSTILE_LOGS: dict[str, tuple[Plant, str]] = {
    # name: what is planted as train_data_step1.jsonl, and what the error must say
    "fifo": (os.mkfifo, "is a FIFO"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is a character device"),
    "folder": (lambda path: path.mkdir(), "can't be read"),
    "dangling link": (lambda path: path.symlink_to("nowhere"), LOG),
    "link to itself": (unreadable_loop, LOG),
    "empty": (content(b""), "no sequence"),
    "binary": (content(lambda: os.urandom(2**20)), "not JSON"),
    "invalid UTF-8": (content(b'{"idx": "\xff\xfe"}\n'), "not JSON"),
    "1 GB line": (sparse(b'{"x": "'), "line_bytes"),
    "1 GB line after a good one": (sparse(valid_line()), "line_bytes"),
    "list nested 50,000 deep": (content(lambda: unknown_key(nested(50_000))), "nesting"),
    "unclosed brackets": (content(lambda: b"[" * 90_000 + b"\n"), "nesting"),
    "10 million lists": (content(lambda: unknown_key(b"[" + b"[]," * 10_000_000 + b"0]")), "line_containers"),
    "20 MB number": (content(lambda: unknown_key(b"1" * 20_000_000)), "not JSON"),
    "list at the top": (content(b"[1, 2]\n"), "has no input_lengths"),
    "negative length": (log(input_lengths=[-1]), "input_lengths = -1"),
    "length beyond the lists": (log(input_lengths=[10**12]), "input_lengths = 1000000000000"),
    "length without a number": (log(input_lengths=["four"]), "a value that NeMo-RL does not write"),
    "object for tokens": (log(token_ids=[{"a": 1}]), "a value that NeMo-RL does not write"),
    "nested log-probs": (log(prev_logprobs=[[[1.0], [2.0], [3.0], [4.0]]]), "prev_logprobs must hold"),
    "row beyond 32 bits": (log(idx=2**63), "a value that NeMo-RL does not write"),
    "reward of text": (log(rewards=["good"]), "a value that NeMo-RL does not write"),
}
HOSTILE_METRICS: dict[str, tuple[Plant, str]] = {
    # name: what is planted as metrics.jsonl, and what the error must say
    "fifo": (os.mkfifo, "holds neither records"),
    "empty": (content(b""), "holds neither records"),
    "binary": (content(lambda: os.urandom(2**20) + b"\n"), "not JSON"),
    "1 GB": (sparse(b'{"step": 1}\n'), "metrics_bytes"),
    "nested 50,000 deep": (content(lambda: nested(50_000) + b"\n"), "nesting"),
    "infinite step": (content(b'{"step": Infinity, "token_mult_prob_error": 1.0}\n'), "not an object with a step"),
    "number beyond a float": (content(b'{"step": 1, "gen_kl_error": ' + b"9" * 400 + b"}\n"), "not an object with"),
    "list": (content(b"[1, 2]\n"), "not an object with a step"),
    "too many numbers": (content(lambda: b'{"step":1,"a":1}\n' * 1_100_000), "metric_values"),
    "link of events to nowhere": (event_link("nowhere"), "can't be read"),
    "link of events to itself": (event_link("events.out.tfevents.1"), "can't be read"),
}
