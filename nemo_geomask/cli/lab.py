"""``nemo-geomask lab``: train a small policy on the CPU and compare losses."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

__all__ = ["add", "run"]

_EPILOG = """\
SPEC = name[:level][+preset]...
  name    clipped_pg, gspo, gspo_token, gmpo, cispo, sapo, a plugin's name, or module:attribute
  level   token, sequence, sequence_mean: importance-sampling correction at this level; none: no correction
  preset  geometric, product, icepop, opsm, veto, trust_region: a mask, with the bounds under lab.presets

examples
  nemo-geomask lab recipes/lab/demo.yaml
  nemo-geomask lab recipes/lab/demo.yaml --compare gspo:none,gspo:sequence_mean+geometric --seed 1
  nemo-geomask lab recipes/lab/demo.yaml grpo.max_num_steps=20 policy.lr=1e-3 loss_fn.ratio_clip_max=0.1
"""


def add(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "lab",
        help="train a small MoE policy on the CPU and compare losses",
        description="Train a small, randomly initialised Qwen3-MoE by reinforcement learning on the CPU, sampling from "
        "a bfloat16 copy of it, and compare losses on the real mismatch between the two.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", metavar="RECIPE.yaml", help="lab recipe, such as recipes/lab/demo.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="settings that replace the recipe's")
    parser.add_argument("--compare", metavar="SPEC,SPEC,...", help="variants to train side by side, see below")
    parser.add_argument("--seed", type=int, help="grpo.seed: weights, prompts, sampling")
    parser.add_argument("--steps", type=int, help="grpo.max_num_steps: rollout batches per variant")
    parser.add_argument(
        "--mismatch", type=float, metavar="X", help="policy.generation.mismatch: scale of added noise (default: none)"
    )
    parser.add_argument("--threads", type=int, help="lab.num_threads: CPU threads")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: results/lab/<recipe>-<time>")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    # Imported here, so that --help and other commands need no optional package.
    from nemo_geomask.lab.main import main

    flags = {
        "grpo.seed": arguments.seed,
        "grpo.max_num_steps": arguments.steps,
        "policy.generation.mismatch": arguments.mismatch,
        "lab.num_threads": arguments.threads,
    }
    overrides = [*arguments.overrides, *(f"{key}={value}" for key, value in flags.items() if value is not None)]
    return main(arguments.recipe, overrides, compare=arguments.compare, out=arguments.out)
