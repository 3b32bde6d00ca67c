"""``nemo-geomask lab``: train a small policy on the CPU and compare losses; ``lab report``: report on trained runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from nemo_geomask.errors import ConfigError
from nemo_geomask.recipe.shipped_files import find_recipe

EXIT_STATUS = {
    0: "all runs are trained, and reported on",
    1: "a run failed",
    2: "a mistake in the arguments, the recipe or the installation",
}

_EPILOG = """\
SPEC = name[:level][+preset]...
  name    clipped_pg, gspo, gspo_token, gmpo, cispo, sapo, a plugin's name, or module:attribute. The text before the
          first colon is a registered loss if there is one with this name, and otherwise a module
  level   token, sequence, sequence_mean: importance-sampling correction at this level; none: no correction. One of
          these as the last word is always the level, so an attribute with such a name needs a level after it
  preset  a mask by its name, such as geometric, icepop or dppo_tv, with the bounds under lab.presets

examples
  nemo-geomask lab recipes/lab/demo.yaml
  nemo-geomask lab recipes/lab/bfloat16.yaml --compare gspo:none,gspo:sequence_mean+geometric --seed 1
  nemo-geomask lab recipes/lab/bfloat16.yaml --compare my_losses:UNCLIPPED,my_losses:UNCLIPPED:sequence_mean+geometric
  nemo-geomask lab recipes/lab/demo.yaml --seeds 1..10 --jobs 8 --out results/demo
  nemo-geomask lab recipes/lab/bfloat16.yaml --vary loss_fn.reference_policy_kl_type=k1,k2,k3 --vary policy.lr=1e-3,2e-3
  nemo-geomask lab recipes/lab/bfloat16.yaml --loss-from my_nemo_rl_recipe.yaml
  nemo-geomask lab report results/demo --baseline clipped_pg:none
  nemo-geomask lab recipes/lab/bfloat16.yaml lab.tp=2 lab.cp=2
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments and its help."""
    parser.description = (
        "Train a small, randomly initialised Qwen3-MoE by reinforcement learning on the CPU, sampling from "
        "a bfloat16 copy of it or by vLLM, and compare losses on the real mismatch between the two."
    )
    parser.epilog = _EPILOG
    parser.add_argument(
        "recipe", metavar="RECIPE.yaml", help="lab recipe, such as recipes/lab/demo.yaml; or the word report"
    )
    # Without a default, argparse would name them in the error for a missing recipe, as if they were required.
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key.path=value",
        help="settings that replace the recipe's; for report: folders of runs",
    )
    parser.add_argument("--compare", metavar="SPEC,SPEC,...", help="variants to train and compare, see below")
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="KEY=V,V,...",
        help="train a variant for each value of a setting; with several --vary, for each combination",
    )
    parser.add_argument("--loss-from", type=Path, metavar="RECIPE.yaml", help="take loss_fn: from a NeMo-RL recipe")
    seeds = parser.add_mutually_exclusive_group()
    seeds.add_argument("--seed", type=int, help="grpo.seed: seed of weights, prompts and sampling")
    seeds.add_argument("--seeds", metavar="1..10", help="several seeds: 1..10, 1,2,5 or 1..3,7")
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="runs that train at the same time, each in a process (default: one per core)",
    )
    parser.add_argument(
        "--baseline",
        metavar="LABEL",
        help="for report: variant that the others are compared with (default: the uncorrected one)",
    )
    parser.add_argument("--steps", type=int, help="grpo.max_num_steps: rollout batches per variant")
    parser.add_argument("--engine", choices=("copy", "vllm"), help="policy.generation.backend: the engine that samples")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder of the runs, in which unfinished runs are resumed (default: results/lab/<recipe>-<time>)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    # Imported here, so that --help and other commands need no optional package.
    from nemo_geomask.tools.lab.train_recipe import report_runs, train_recipe

    if arguments.recipe == "report":
        return report_runs(arguments.overrides, baseline=arguments.baseline, out=arguments.out)
    if arguments.baseline is not None:
        raise ConfigError("--baseline belongs to nemo-geomask lab report DIR; remove it here")
    flags = {
        "grpo.seed": arguments.seed,
        "grpo.max_num_steps": arguments.steps,
        "policy.generation.backend": arguments.engine,
    }
    overrides = [*arguments.overrides, *(f"{key}={value}" for key, value in flags.items() if value is not None)]
    return train_recipe(
        find_recipe(arguments.recipe),
        overrides,
        compare=arguments.compare,
        vary=arguments.vary,
        seeds=arguments.seeds,
        loss_from=arguments.loss_from and find_recipe(arguments.loss_from),
        jobs=arguments.jobs,
        out=arguments.out,
    )
