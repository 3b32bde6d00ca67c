"""``nemo-geomask probe``: find out which settings make a recipe's sampler and trainer disagree."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_geomask.cli.arguments import positive_number
from nemo_geomask.errors import ConfigError

if TYPE_CHECKING:
    from nemo_geomask.tools.probe.probe_run import ProbeResult

EXIT_STATUS = {
    0: "a switch accounts for some of the mismatch, or there is none",
    1: "a check found a fault, no switch accounts for the mismatch (on other prompts, too), the scores are not "
    "repeatable, or the budget ended before all were tried",
    2: "a mistake in the arguments, a recipe that can't be read, no NeMo-RL; the recipe's own settings can't be scored",
}
DEFAULT_PROMPTS = 24
_GENERATIONS = 2  # responses to each prompt

_EPILOG = """\
A probe freezes prompts and responses, scores the same tokens by the engine's decode, by its prefill and by the trainer,
and repeats that with one setting at a time at its conservative value. Everything runs through NeMo-RL's own workers,
with a tiny random model of the recipe's architecture, as in `nemo-geomask rehearse`: what a probe finds is in the
settings and the code, and not in the weights of the real model.

NeMo-RL is the checkout at NEMO_RL_ROOT; the interpreter is this one, and must have NeMo-RL's requirements and vLLM.

Every start of the workers is kept in --out with a hash. After a kill, or with a larger budget, --resume goes on.

examples
  nemo-geomask probe recipe.yaml
  nemo-geomask probe recipe.yaml ++policy.precision=bfloat16 --switches trainer_precision,engine_precision
  nemo-geomask probe recipe.yaml --budget 20 --out results/probe/mine --resume
"""


_MEGATRON = "policy.megatron_cfg.enabled"
_ASYNC = "policy.generation.vllm_cfg.async_engine"
_REPLAY = "policy.router_replay.enabled"
_ENGINE_TP, _ENGINE_EP = (f"policy.generation.vllm_cfg.{axis}_parallel_size" for axis in ("tensor", "expert"))


def _size(values: Mapping[str, Any], key: str) -> int:
    size = values.get(key, 1)
    if not isinstance(size, int) or isinstance(size, bool):
        raise ConfigError(f"{key} must be a whole number, but it is {str(size)[:100]!r}")
    return size


def _hindrances(values: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield each setting with which a probe can't score: its key, why, and the overrides without it."""
    if values.get(_ASYNC):
        overrides = f"++{_ASYNC}=false ++grpo.async_grpo.enabled=false"
        yield _ASYNC, "a probe scores by vLLM's synchronous engine", overrides
    if values.get(_REPLAY) and values.get(_MEGATRON):
        reason = "the given tokens of a probe have no routes that the trainer could replay"
        yield _REPLAY, reason, f"++{_REPLAY}=false"
    if _size(values, _ENGINE_EP) > _size(values, _ENGINE_TP):
        reason = f"above {_ENGINE_TP} the engines of several workers wait for each other, and a probe calls one alone"
        yield _ENGINE_EP, reason, f"++{_ENGINE_EP}=1"


def check_supported(values: Mapping[str, Any]) -> None:
    """Check that a recipe has no setting under which a probe can't score.

    Args:
        values: the recipe's values by dotted key.

    Raises:
        ConfigError: it has; the message names all such settings, and the overrides that turn them off. Or a size is no
            whole number.
    """
    from nemo_geomask.yaml_text import as_yaml

    if hindrances := list(_hindrances(values)):
        reasons = "; ".join(f"{key} is {as_yaml(values[key])}, and {reason}" for key, reason, _ in hindrances)
        overrides = " ".join(overrides for _, _, overrides in hindrances)
        raise ConfigError(f"{reasons}. To probe everything else, give {overrides}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments and its help."""
    parser.description = "Find out which settings make a recipe's sampler and trainer disagree on log-probs."
    parser.epilog = _EPILOG
    parser.add_argument("recipe", metavar="RECIPE.yaml", help="the recipe")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key.path=value", help="settings that replace the recipe's"
    )
    parser.add_argument(
        "--switches", metavar="NAME,…", help="switches or groups to try (default: all that the recipe leaves open)"
    )
    parser.add_argument(
        "--budget",
        type=positive_number,
        default=60.0,
        metavar="MINUTES",
        help="no start of the workers is begun that would not end within it (default: 60)",
    )
    parser.add_argument(
        "--prompts", type=_even_number, default=DEFAULT_PROMPTS, metavar="N", help="prompts (default: %(default)s)"
    )
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="processes that train (default: 1)")
    parser.add_argument(
        "--timeout", type=positive_number, default=900.0, metavar="S", help="seconds for one start (default: 900)"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the probe in --out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON; -: standard output")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the scores (default: results/probe/<recipe>)"
    )


def _even_number(text: str) -> int:
    if not text.isdecimal() or int(text) < 4 or int(text) % 2:
        raise argparse.ArgumentTypeError(f"'{text}' is not an even number of at least 4: half of the prompts confirm")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from nemo_geomask.tools.probe.probe_report import as_json, as_text
    from nemo_geomask.tools.shared.json_output import to_json

    result = probe_recipe(
        *(arguments.recipe, arguments.overrides),
        folder=arguments.out or Path("results", "probe", Path(arguments.recipe).stem),
        switches=None if arguments.switches is None else arguments.switches.split(","),
        budget=60 * arguments.budget,
        prompts=arguments.prompts,
        ranks=arguments.ranks,
        timeout=arguments.timeout,
        resume=arguments.resume,
    )
    content = to_json(as_json(result))
    if str(arguments.json) == "-":
        print(content)
    else:
        print("\n".join(as_text(result)))
        if arguments.json is not None:
            arguments.json.write_text(content + "\n", encoding="utf-8")
    return 0 if result.is_answered and result.ledger.is_complete and not result.faults else 1


def probe_recipe(
    recipe: str | Path,
    overrides: Sequence[str],
    *,
    folder: Path,
    switches: Sequence[str] | None,
    budget: float,
    prompts: int = DEFAULT_PROMPTS,
    ranks: int = 1,
    timeout: float = 900.0,
    resume: bool = False,
) -> ProbeResult:
    """Probe a recipe with the workers of a rehearsal, and print each start to standard error.

    Args:
        recipe: path of the recipe.
        overrides: its overrides.
        folder: folder of the probe.
        switches: ids or groups of switches to try; None tries all.
        budget: seconds after which no further start is begun; the first one always is.
        prompts: number of prompts.
        ranks: largest number of processes that train.
        timeout: time limit of one start in seconds.
        resume: go on with the probe in the folder.

    Raises:
        ConfigError: the recipe can't be probed, or the folder holds something else.
        EngineError: the recipe can't be scored with its own settings.
    """
    from nemo_geomask.recipe import read_recipe
    from nemo_geomask.tools.probe.probe_folder import describe_probe, dotted_settings, prepare_folder
    from nemo_geomask.tools.probe.probe_run import ADAPTER_KEYS, BATCH_TOKENS, choose_switches, probe
    from nemo_geomask.tools.probe.scoring_job import FUNCTION
    from nemo_geomask.tools.rehearse.hosted_job import JobSession, reads_key, values_in_force
    from nemo_geomask.tools.rehearse.rehearsal import has_gpus, nemo_rl_checkout
    from nemo_geomask.tools.rehearse.supervision import signals_as_exceptions
    from nemo_geomask.tools.shared.machine import device_names
    from nemo_geomask.tools.shared.mismatch_switches import mismatch_switches

    try:
        folder = folder.resolve()
    except (OSError, RuntimeError) as error:  # a loop of links
        raise ConfigError(f"--out: {folder} can't be a folder: {error}; choose another") from None
    names = ("temperature", "top_p", "top_k", "colocated.enabled")
    more_keys = [*(f"policy.generation.{name}" for name in names), *ADAPTER_KEYS, _ASYNC, _REPLAY, _MEGATRON]
    of_switches = [key for switch in mismatch_switches() for key in (switch.key, *switch.also, *switch.keeps)]
    keys = [*of_switches, *more_keys, *BATCH_TOKENS]
    recipe_settings = dotted_settings(read_recipe(recipe, overrides, leave=("data", "env")).data)
    values, replaced, unprobed = values_in_force(recipe, overrides, [*keys, *recipe_settings], ranks=ranks)
    check_supported(values)
    chosen, untried_rows = choose_switches(
        *(values, replaced),
        names=switches,
        is_read=reads_key,
        trainer="megatron" if values.get(_MEGATRON) else "dtensor",
        has_gpus=has_gpus(),
    )
    sizes = (prompts, _GENERATIONS, ranks)
    description = describe_probe(recipe_settings, values, sizes, nemo_rl_checkout(), device_names())
    prepare_folder(folder, description, resume=resume)
    workers = JobSession(recipe, overrides, FUNCTION, folder=folder / "work", ranks=ranks, timeout=timeout)
    with signals_as_exceptions(), contextlib.closing(workers):
        return probe(
            *(recipe, overrides, workers, chosen, untried_rows, values),
            folder=folder,
            prompts=prompts,
            generations=_GENERATIONS,
            budget=budget,
            replaced=replaced,
            unprobed=unprobed,
            # On GPUs a former engine may leave memory behind, and engines of several processes start anew.
            replaces_engines=not has_gpus() and bool(values.get("policy.generation.colocated.enabled", True)),
            progress=lambda line: print(f"probe: {line}", file=sys.stderr, flush=True),
        )
