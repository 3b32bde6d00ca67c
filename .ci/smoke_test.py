"""Run the commands of README and help texts with the package as an index would deliver it, in a folder of one recipe.

``python .ci/smoke_test.py bare`` expects what an installation without extras does, and ``… demo`` what one with the
extra ``demo`` does. The interpreter is that of the environment with the wheel. The repository is not on its path.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple


class Trial(NamedTuple):
    """A command, and what it must do.

    Attributes:
        words: arguments of ``nemo-geomask``.
        status: exit status; None: one without a traceback.
        printed: text that standard output or standard error must contain.
    """

    words: str
    status: int | None
    printed: str


RECIPE = """\
loss_fn: {name: gspo, token_level_loss: false, ratio_clip_min: 3.0e-4, ratio_clip_max: 4.0e-4}
"""
SMOKE = "recipes/llm/grpo-qwen3-0.6b-1n1g-smoke-geomask.yaml"
BOTH = [
    Trial("--version", 0, "nemo-geomask "),
    Trial("--help", 0, "rehearse"),
    Trial("recipes", 0, "recipes/lab/demo.yaml"),
    Trial("schema", 0, '"LossConfig"'),
    Trial("check --list-rules", 0, "GM001"),
    Trial("test-variant gspo", 0, "ok"),
    Trial("doctor", 1, "nemo_rl"),  # NeMo-RL is not installed
    Trial("chek recipe.yaml", 2, "did you mean 'check'?"),
]
BARE = [
    *BOTH,
    Trial("check recipe.yaml", 2, '"nemo-geomask[recipes]"'),
    Trial(f"rehearse {SMOKE}", 2, '"nemo-geomask[recipes,diagnose]"'),
    Trial("lab recipes/lab/demo.yaml", 2, '"nemo-geomask[demo]"'),
    Trial("lab report records", 2, '"nemo-geomask[demo]"'),
    Trial("diagnose records", 2, '"nemo-geomask[diagnose]"'),
    Trial("sweep records", 2, '"nemo-geomask[diagnose]"'),
    Trial("translate recipe.yaml", 2, '"nemo-geomask[recipes]"'),
]
DEMO = [
    *BOTH,
    Trial("check recipe.yaml", 0, "0 errors"),
    Trial("translate --to verl recipe.yaml", 1, "clip_ratio"),  # one setting has no counterpart
    Trial(f"check {SMOKE}", 2, "NEMO_RL_ROOT"),  # it inherits from NeMo-RL's recipes
    Trial("lab recipes/lab/demo.yaml --steps 2 --out demo", 0, "Steps, rollouts and summary: demo"),
    Trial("lab report demo", 0, "clipped_pg"),
    Trial("diagnose demo --json", None, '"verdict"'),  # whose status is the verdict on two steps
    Trial("recipes recipes/lab/demo.yaml --copy .", 0, "recipes/lab/search.yaml"),
    Trial("lab recipes/lab/demo.yaml --steps 1 --seed 2 --out copied", 0, "Steps, rollouts and summary: copied"),
]


def failures(trials: list[Trial], folder: Path) -> list[str]:
    """Return a line for each command whose status or output is another."""
    command = Path(sys.executable).with_name("nemo-geomask")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "NEMO_RL_ROOT")}
    (folder / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    lines = []
    for trial in trials:
        done = subprocess.run(
            [command, *trial.words.split()],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        is_expected = trial.status in (None, done.returncode) and trial.printed in done.stdout
        if not is_expected or "Traceback" in done.stdout:
            tail = "\n".join(done.stdout.splitlines()[-15:])
            lines.append(f"nemo-geomask {trial.words}: status {done.returncode}, expected {trial}\n{tail}")
    return lines


def main(kind: str) -> int:
    """Run the trials of an installation and print what failed; the exit status is 1 if anything did."""
    trials = {"bare": BARE, "demo": DEMO}[kind]
    with tempfile.TemporaryDirectory() as folder:
        lines = failures(trials, Path(folder))
    print("\n".join([*lines, f"{len(trials) - len(lines)} of {len(trials)} commands did as expected ({kind})"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
