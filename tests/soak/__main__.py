"""Soak: losses called, steps recorded, recorders and labs killed, ranks that fail.

``python -m tests.soak [--scale 0.1] [--only NAME …]``. Each scenario checks what it does and how its memory grows; the
exit status is 1 if any of them finds a problem. Sizes are options, so that a short form runs as a test.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.soak.outcome import Outcome

SIZES = {"eager": 100_000, "compiled": 20_000, "steps": 10_000, "recorder-kills": 50, "lab-kills": 20, "faults": 13}
"""How often each scenario does what it does, at a scale of 1; the faults are always all."""


def scenario(name: str, size: int, folder: Path, seed: int) -> Outcome:
    """Run one scenario; its imports come with it, since not all of them are needed for each."""
    if name in ("eager", "compiled"):
        from tests.soak.loss_calls import call_losses

        every = 100 if name == "eager" else 10
        return call_losses(size, compile_=name == "compiled", seed=seed, check_every=min(every, max(1, size // 10)))
    if name == "steps":
        from tests.soak.recording import record_steps

        return record_steps(size, folder / "records", check_every=min(20, max(1, size // 10)))
    if name == "recorder-kills":
        from tests.soak.recording import kill_recorders

        return kill_recorders(size, folder / "records", seed=seed)
    if name == "lab-kills":
        from tests.soak.lab_runs import kill_labs

        return kill_labs(size, folder, seed=seed)
    from tests.soak.rank_faults import try_faults

    return try_faults()


def run(sizes: dict[str, int], *, seed: int = 0, report: Callable[[str], None] = print) -> list[Outcome]:
    """Run the scenarios of these sizes, report each, and return what they came to."""
    outcomes = []
    for name, size in sizes.items():
        with tempfile.TemporaryDirectory(prefix="geomask-soak-", ignore_cleanup_errors=True) as folder:
            began = time.monotonic()
            outcome = scenario(name, size, Path(folder), seed)
        report(f"{outcome.line()} ({time.monotonic() - began:.0f} s)")
        for problem in outcome.failures()[:20]:
            report(f"  {problem}")
        outcomes.append(outcome)
    return outcomes


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks for; 1 if anything went wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, help="of all sizes below but the faults (default 1)")
    parser.add_argument("--only", nargs="+", choices=SIZES, default=list(SIZES), help="scenarios to run")
    parser.add_argument("--seed", type=int, default=0)
    for name, size in SIZES.items():
        if name != "faults":
            parser.add_argument(f"--{name}", type=int, metavar="N", help=f"default {size}, times the scale")
    options = parser.parse_args(arguments)
    sizes = {}
    for name in options.only:
        given = getattr(options, name.replace("-", "_"), None)
        sizes[name] = given or max(1, round(SIZES[name] * (1 if name == "faults" else options.scale)))
    outcomes = run(sizes, seed=options.seed, report=lambda line: print(line, flush=True))
    return 1 if any(outcome.failures() for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
