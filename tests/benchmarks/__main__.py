"""Measure what ``docs/performance`` records: ``python -m tests.benchmarks [NAME ...] --out docs/performance``."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from nemo_geomask.tools.bench import step
from nemo_geomask.tools.bench.command import run_benchmark
from tests.benchmarks import collectives, linear, logits, losses

RUNS = {
    "logprobs": logits.run,
    "linear": linear.run,
    "loss": losses.run,
    "segments": collectives.run,
    "step": step.run,
}
"""Benchmarks by the name of their results."""
_DEFAULTS = {
    "cuda": {"repeats": 20, "batch": (64, 8192), "dtypes": "bfloat16", "memory_limit": None, "vocab": 151_936}
    | {"tokens": [8192, 16_384, 32_768, 65_536], "layers": 4, "hidden": 2048, "heads": 16},
    "cpu": {"repeats": 9, "batch": (16, 2048), "dtypes": "float32", "memory_limit": 0.125, "vocab": 32_768}
    | {"tokens": [256], "layers": 4, "hidden": 128, "heads": 4},
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"benchmarks (default: {', '.join(RUNS)})")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--paths", metavar="P,P,...", help="measure only these, each by its name or a part of it")
    parser.add_argument("--compile", action="store_true", help="measure compiled losses, too")
    parser.add_argument("--repeats", type=int, default=argparse.SUPPRESS, metavar="N", help="measured rounds")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the inputs")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write <benchmark>-<machine>-<date>.json there")
    arguments = parser.parse_args()
    options = argparse.Namespace(**{"cases": None, **_DEFAULTS[arguments.device], **vars(arguments)})
    for name in arguments.names or RUNS:
        try:
            run_benchmark(name, options, torch.device(arguments.device), RUNS[name])
        except ImportError as error:  # such as pydantic, which a GPU's machine may lack
            print(f"{name}: absent: {error}\n")


if __name__ == "__main__":
    main()
