"""Run of one benchmark: what it is measured with, its result's file, and the end of what it set up."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

from nemo_geomask.tools.bench import logprobs, loss, step
from nemo_geomask.tools.bench.peers import Setting, close_group
from nemo_geomask.tools.bench.results import describe_machine, write_result

_RUNS = {"logprobs": logprobs.run, "loss": loss.run, "step": step.run}


def run_benchmark(
    name: str, options: argparse.Namespace, device: torch.device, run: Callable[..., dict[str, Any]] | None = None
) -> int:
    """Run a benchmark, print its tables, and write its result into ``options.out``.

    Args:
        name: ``logprobs``, ``loss`` or ``step``, and the name of the file.
        options: its options.
        device: the device.
        run: another function of options and setting, which returns the result.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    machine = describe_machine(device)
    print("{name}, torch {torch}, {threads} threads, load {load}, {date}\n".format(**machine), flush=True)
    try:
        result = (run or _RUNS[name])(options, Setting(device))
    finally:
        close_group()
    if options.out is not None:
        print(f"{write_result(options.out, name, machine, result)}\n")
    return 0
