"""The benchmarks that the arguments of ``bench`` select."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.bench import (
    linear_bench,
    logprob_bench,
    loss_bench,
    result_files,
    result_tables,
    segment_bench,
    speed_targets,
    step_bench,
    traffic,
)
from nemo_geomask.tools.bench.bench_arguments import (
    BENCHMARKS,
    SCALE,
    refuse_unread_options,
    with_defaults,
)
from nemo_geomask.tools.bench.linear_cases import LinearCase
from nemo_geomask.tools.bench.logprob_cases import LogprobCase
from nemo_geomask.tools.bench.paths import PATHS, Absent, LogprobPath, Setting, linear_paths, step_paths
from nemo_geomask.tools.bench.step_cases import StepCase
from nemo_geomask.tools.shared.json_output import to_json

__all__ = ["run", "select_paths"]

_SEGMENT_SIZES = {"tokens": 65_536, "sequences": 32}
# Names of the paths of each benchmark that has several.
_PATH_NAMES = {
    "logprobs": tuple(path.name for path in PATHS),
    "linear": tuple(linear_paths.PATHS),
    "step": tuple(step_paths.PATHS),
}


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmarks that the arguments select.

    Returns:
        0, even if a speed target is missed: targets are for certain machines only, and the report has the verdicts.

    Raises:
        ConfigError: torch sees no GPU for ``--device cuda``, ``--paths`` has an unknown name, the vocabulary can't be
            divided into N equal shards, an option is not for this benchmark, or has several values where the benchmark
            takes one.
    """
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU here; use --device cpu")
    refuse_unread_options(arguments)
    if arguments.benchmark == SCALE:
        return _scale(arguments)
    selected = arguments.benchmark if arguments.benchmark in _PATH_NAMES else "logprobs"
    path_names = {**_PATH_NAMES, selected: select_paths(arguments.paths, _PATH_NAMES[selected])}
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    if arguments.batch is not None and len(arguments.batch) != 2:
        raise ConfigError(
            f"--batch needs two numbers, the number of sequences and their length, but it has {len(arguments.batch)}: "
            f"{', '.join(map(str, arguments.batch))}"
        )
    setting = Setting(device, kernel=arguments.kernel or "auto")
    machine = result_files.describe_machine(device)

    def save_cases(benchmark: str, cases: Sequence[Mapping[str, Any]]) -> None:
        if arguments.out is not None:
            result_files.write_result(arguments.out, benchmark, machine, {"cases": cases}, partial=True)

    print(
        f"{machine['name']}, torch {machine['torch']}, {machine['threads']} threads, load {machine['load']}, "
        f"{machine['date']}\n"
    )
    runs: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
        "logprobs": lambda options: _logprobs(
            options, setting, [path for path in PATHS if path.name in path_names["logprobs"]], save_cases
        ),
        "linear": lambda options: _linear(options, setting, path_names["linear"], save_cases),
        "loss": lambda options: _loss(options, setting),
        "segments": lambda options: _segments(device, options.repeats),
        "step": lambda options: _step(options, setting, path_names["step"], save_cases),
    }
    for benchmark in [arguments.benchmark] if arguments.benchmark else BENCHMARKS:
        try:
            result = runs[benchmark](with_defaults(arguments, device, benchmark))
        except Absent as reason:
            print(f"{benchmark}: absent: {reason}\n")
            result = {"status": "absent", "reason": str(reason)}
        print(result_tables.format_targets(result.get("bars", [])), flush=True)
        if arguments.out is not None:
            print(f"{result_files.write_result(arguments.out, benchmark, machine, result)}\n")
    setting.close()
    return 0


def _refuse_unequal_shards(cases: Iterable[LogprobCase | LinearCase]) -> None:
    for case in cases:
        if case.vocab % case.tp:
            raise ConfigError(
                f"--vocab {case.vocab} can't be divided into --tp {case.tp} equal shards; use a multiple of {case.tp}"
            )


def _scale(arguments: argparse.Namespace) -> int:
    from nemo_geomask.recipe import read_recipe
    from nemo_geomask.recipe.shipped_files import find_recipe
    from nemo_geomask.tools.bench import scale_bench, scale_costs  # need pydantic, which the other benchmarks do not

    if arguments.recipe is None:
        raise ConfigError("bench scale needs a recipe: nemo-geomask bench scale RECIPE.yaml [key.path=value ...]")
    peak = scale_costs.H100.peak if arguments.peak is None else arguments.peak * 1e12
    measured = arguments.measured and scale_costs.read_costs(*result_files.read_results(arguments.measured), peak=peak)
    recipe = read_recipe(find_recipe(arguments.recipe), arguments.overrides, leave=("data", "env", "logger"))
    estimate = scale_bench.estimate_scale(
        recipe,
        gpus=arguments.gpus or scale_bench.GPUS,
        costs=measured or scale_costs.H100._replace(peak=peak),
        mfu=arguments.mfu or 0.3,
        trained=(arguments.fractions or [1.0])[0],
    )
    print(scale_bench.format_estimate(estimate))
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        path = arguments.out / f"scale-{recipe.path.stem}.json"
        path.write_text(to_json(estimate) + "\n", encoding="utf-8")
        print(path)
    return 0


_SaveCases = Callable[[str, Sequence[Mapping[str, Any]]], None]


def _case_reporter(
    benchmark: str, format_case: Callable[[dict[str, Any]], str], save_cases: _SaveCases
) -> Callable[[dict[str, Any]], None]:
    """Return a function that prints a case and saves all cases so far, so that an interrupted run keeps them."""
    cases: list[dict[str, Any]] = []

    def report(case: dict[str, Any]) -> None:
        print(format_case(case), flush=True)
        cases.append(case)
        save_cases(benchmark, cases)

    return report


def _linear(
    arguments: argparse.Namespace, setting: Setting, paths: Sequence[str], save_cases: _SaveCases
) -> dict[str, Any]:
    fields: dict[str, Sequence[Any]] = {
        "dtype": arguments.dtypes,
        "fraction": arguments.fractions,
        "entropy": arguments.entropy,
        "tp": arguments.tp,
        "hidden": arguments.hidden,
        "tokens": arguments.tokens,
        "vocab": arguments.vocab,
    }
    first = LinearCase(**{name: values[0] for name, values in fields.items()})
    cases = [first, *(first._replace(**{name: value}) for name, values in fields.items() for value in values[1:])]
    _refuse_unequal_shards(cases)
    results = linear_bench.benchmark(
        list(dict.fromkeys(cases)),
        setting,
        repeats=arguments.repeats,
        paths=paths,
        seed=arguments.seed,
        report=_case_reporter("linear", result_tables.format_linear, save_cases),
    )
    collectives = traffic.count_linear_collectives(paths)
    print(result_tables.format_collectives(collectives))
    return {
        "cases": results,
        "bars": speed_targets.check_linear(results, setting.device.type),
        "collectives": collectives,
    }


def _logprobs(
    arguments: argparse.Namespace, setting: Setting, paths: Sequence[LogprobPath], save_cases: _SaveCases
) -> dict[str, Any]:
    cases = logprob_bench.sweep(
        tokens=arguments.tokens,
        vocab=arguments.vocab,
        tp=arguments.tp,
        fractions=arguments.fractions,
        entropy=arguments.entropy,
        temperatures=arguments.temperatures,
        dtypes=arguments.dtypes,
        grid=arguments.grid,
    )
    _refuse_unequal_shards(cases)
    results = logprob_bench.benchmark(
        cases,
        setting,
        repeats=arguments.repeats,
        paths=paths,
        seed=arguments.seed,
        report=_case_reporter("logprobs", result_tables.format_logprobs, save_cases),
    )
    result: dict[str, Any] = {"cases": results, "bars": speed_targets.check_logprobs(results, setting.device.type)}
    result["models"] = [
        {
            "path": path.name,
            "bytes_per_element": None if path.traffic is None else path.traffic(1.0),
            "counted": path.traffic_source,
        }
        for path in paths
    ]
    result["collectives"] = traffic.count_logprob_collectives([path.name for path in paths])
    print(result_tables.format_collectives(result["collectives"]))
    return result


def _loss(arguments: argparse.Namespace, setting: Setting) -> dict[str, Any]:
    rows, length = arguments.batch
    case = LogprobCase(arguments.tokens[0], arguments.vocab[0], temperature=arguments.temperatures[0])
    result = loss_bench.benchmark(
        setting,
        rows=rows,
        length=length,
        case=case,
        compiled=arguments.compile,
        repeats=arguments.repeats,
        seed=arguments.seed,
    )
    print(result_tables.format_loss(result), flush=True)
    return result


def _segments(device: torch.device, repeats: int) -> dict[str, Any]:
    result = segment_bench.benchmark(device, repeats=repeats, **_SEGMENT_SIZES)
    print(result_tables.format_segments(result), flush=True)
    return result


def _step(
    arguments: argparse.Namespace, setting: Setting, paths: Sequence[str], save_cases: _SaveCases
) -> dict[str, Any]:
    hidden, heads = arguments.hidden[0], arguments.heads
    if hidden % heads:
        raise ConfigError(f"--hidden {hidden} can't be divided among --heads {heads}; use a multiple of {heads}")
    if (shortest := min(arguments.tokens)) < 2:
        raise ConfigError(f"--tokens {shortest}: bench step needs at least 2, a token and the one that it predicts")
    cases = [
        StepCase(tokens, arguments.vocab[0], arguments.layers, hidden, heads, arguments.dtypes[0])
        for tokens in arguments.tokens
    ]
    limit = None if arguments.memory_limit is None else arguments.memory_limit * 1e9
    results = step_bench.benchmark(
        cases,
        setting,
        repeats=arguments.repeats,
        paths=paths,
        seed=arguments.seed,
        report=_case_reporter("step", result_tables.format_step, save_cases),
    )
    longest = step_bench.find_longest_steps(cases[0], setting, memory_limit=limit, paths=paths, seed=arguments.seed)
    print(result_tables.format_longest(longest), flush=True)
    return {"cases": results, "longest": longest}


def select_paths(text: str | None, names: Sequence[str]) -> tuple[str, ...]:
    """Return the paths that ``--paths`` selects, in the order of ``names``; all paths for None.

    Raises:
        ConfigError: a word of ``--paths`` is not in the name of any path.
    """
    if text is None:
        return tuple(names)
    lower = [name.lower() for name in names]
    words = [word.strip().lower() for word in text.split(",")]
    selected: set[str] = set()
    while words:
        # Names may contain commas, so look for the longest run of words that is a name.
        runs = (count for count in range(len(words), 0, -1) if ", ".join(words[:count]) in lower)
        count = next(runs, 0)
        matches = [", ".join(words[:count])] if count else [name for name in lower if words[0] in name]
        if not words[0] or not matches:
            raise ConfigError(f"--paths {text}: '{words[0]}': no such path; there are: {'; '.join(names)}")
        selected.update(matches)
        del words[: count or 1]
    return tuple(name for name, lowered in zip(names, lower, strict=True) if lowered in selected)
