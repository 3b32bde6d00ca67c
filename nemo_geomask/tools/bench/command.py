"""Arguments of ``bench``, and the benchmarks that they select."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from nemo_geomask.errors import ConfigError
from nemo_geomask.kernels import KERNELS
from nemo_geomask.tools.bench import (
    linear_bench,
    logprob_bench,
    loss_bench,
    machine,
    result_tables,
    segment_bench,
    speed_targets,
    traffic,
)
from nemo_geomask.tools.bench.logprob_cases import LogprobCase
from nemo_geomask.tools.bench.paths import PATHS, Absent, LogprobPath, Setting
from nemo_geomask.tools.bench.sweep_plot import write_plot
from nemo_geomask.tools.shared.json_output import to_json

__all__ = ["add_arguments", "run", "select_paths"]

_BENCHMARKS = ("logprobs", "linear", "loss", "segments")
_SCALE = "scale"
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# On a GPU, cases large enough to fill it; on a CPU, cases that end within a minute.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {
        "tokens": [8192, 2048, 32_768, 131_072],
        "vocab": [151_936, 32_768, 262_144],
        "tp": [1, 8],
        "fractions": [1.0, 0.5, 0.2],
        "entropy": [False, True],
        "temperatures": [1.0, 0.7],
        "repeats": 20,
        "batch": [64, 8192],
        "hidden": [4096, 2048],
    },
    "cpu": {
        "tokens": [256],
        "vocab": [151_936],
        "tp": [1],
        "fractions": [1.0],
        "entropy": [False],
        "temperatures": [1.0],
        "repeats": 9,
        "batch": [16, 2048],
        "hidden": [1024],
    },
}
_STATISTICS = {"tokens": 65_536, "sequences": 32}
_STATISTICS_REPEATS = 50

_Value = TypeVar("_Value")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the benchmarks."""
    parser.add_argument(
        "benchmark",
        nargs="?",
        choices=(*_BENCHMARKS, _SCALE),
        help="default: all except scale, which measures nothing but extrapolates measured times to a recipe's size",
    )
    parser.add_argument("recipe", nargs="?", metavar="RECIPE.yaml", help="scale: the recipe")
    parser.add_argument(
        "overrides", nargs="*", metavar="key.path=value", help="scale: settings that replace the recipe's"
    )
    parser.add_argument("--gpus", type=_list(_positive), metavar="N,N,...", help="scale: numbers of GPUs that train")
    parser.add_argument(
        "--mfu",
        type=_fraction,
        metavar="F",
        help="scale: fraction of the GPU's peak FLOP/s that the model reaches (default: 0.3)",
    )
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="DIR",
        help="scale: folder with linear-*.json and logprobs-*.json of one GPU, written by --out (default: of an H100)",
    )
    parser.add_argument(
        "--peak",
        type=_above_zero,
        metavar="TFLOP/S",
        help="scale: peak of the measured GPU for dense bfloat16 products (default: 989)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if torch sees a GPU")
    parser.add_argument("--tokens", type=_list(_positive), metavar="T,T,...", help="rows of logits")
    parser.add_argument("--vocab", type=_list(_positive), metavar="V,V,...", help="size of the global vocabulary")
    parser.add_argument(
        "--tp",
        type=_list(_positive),
        metavar="N,N,...",
        help="the logits are one of N vocabulary shards; no collectives are run",
    )
    parser.add_argument(
        "--fractions", type=_list(_fraction), metavar="F,F,...", help="fraction of the tokens that train"
    )
    parser.add_argument(
        "--entropy", type=_list(_switch), metavar="off,on", help="compute the entropy and its gradient, too"
    )
    parser.add_argument("--temperatures", type=_list(_above_zero), metavar="X,X,...")
    parser.add_argument(
        "--dtypes", type=_list(_dtype), metavar="D,D,...", help=f"types of the logits: {', '.join(_DTYPES)}"
    )
    parser.add_argument(
        "--grid",
        action="store_true",
        help="measure all combinations; default: vary one setting at a time around the first values",
    )
    parser.add_argument(
        "--paths",
        metavar="P,P,...",
        help="logprobs, linear: paths to measure, each by its name, which may contain commas, or by a part of its name",
    )
    parser.add_argument("--kernel", choices=KERNELS, help="kernel of our paths (default: auto)")
    parser.add_argument("--hidden", type=_list(_positive), metavar="H,H,...", help="linear: size of the hidden states")
    parser.add_argument(
        "--batch", type=_list(_positive), metavar="B,T", help="loss: number of padded sequences and their length"
    )
    parser.add_argument(
        "--compile", action="store_true", help="loss: measure compiled losses, too; takes a minute on a CPU"
    )
    parser.add_argument("--repeats", type=_positive, metavar="N", help="measured rounds")
    parser.add_argument("--threads", type=_positive, metavar="N", help="CPU threads")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the inputs (default: 0)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write <benchmark>-<machine>-<date>.json there")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="logprobs: plot the sweep")


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
    _refuse_unread_options(arguments)
    if arguments.benchmark == _SCALE:
        return _scale(arguments)
    names = tuple(linear_bench.PATHS) if arguments.benchmark == "linear" else tuple(path.name for path in PATHS)
    path_names = select_paths(arguments.paths, names)
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    defaults = _DEFAULTS[device.type] | {"kernel": "auto", "seed": 0, "dtypes": [torch.bfloat16]}
    vocab, statistics_repeats = arguments.vocab or defaults["vocab"][:1], arguments.repeats or _STATISTICS_REPEATS
    for key, value in defaults.items():
        if getattr(arguments, key) is None:
            setattr(arguments, key, value)
    if len(arguments.batch) != 2:
        raise ConfigError(
            f"--batch needs two numbers, the number of sequences and their length, but it has {len(arguments.batch)}: "
            f"{', '.join(map(str, arguments.batch))}"
        )
    setting = Setting(device, kernel=arguments.kernel)
    description = machine.describe(device)
    print(
        f"{description['name']}, torch {description['torch']}, {description['threads']} threads, "
        f"load {description['load']}, {description['date']}\n"
    )
    runs: dict[str, Callable[[], dict[str, Any]]] = {
        "logprobs": lambda: _logprobs(arguments, setting, [path for path in PATHS if path.name in path_names]),
        "linear": lambda: _linear(
            arguments, setting, path_names if arguments.benchmark else tuple(linear_bench.PATHS), vocab
        ),
        "loss": lambda: _loss(arguments, setting),
        "segments": lambda: _segments(device, statistics_repeats),
    }
    for benchmark in [arguments.benchmark] if arguments.benchmark else _BENCHMARKS:
        result = runs[benchmark]()
        print(result_tables.format_targets(result.get("bars", [])), flush=True)
        if arguments.out is not None:
            arguments.out.mkdir(parents=True, exist_ok=True)
            path = arguments.out / f"{benchmark}-{machine.slug(description)}-{description['date']}.json"
            document = {"benchmark": benchmark, "machine": machine.describe(device), **result}
            path.write_text(to_json(document) + "\n", encoding="utf-8")
            print(f"{path}\n")
    setting.close()
    return 0


# The benchmarks that read each option.
_READERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("device", "repeats", "threads"), _BENCHMARKS),
    **dict.fromkeys(("tokens", "vocab", "kernel", "seed"), ("logprobs", "linear", "loss")),
    "temperatures": ("logprobs", "loss"),
    **dict.fromkeys(("tp", "entropy", "dtypes"), ("logprobs", "linear")),
    "fractions": ("logprobs", "linear", _SCALE),
    **dict.fromkeys(("recipe", "gpus", "mfu", "measured", "peak"), (_SCALE,)),
    **dict.fromkeys(("grid", "plot"), ("logprobs",)),
    "paths": ("logprobs", "linear"),
    **dict.fromkeys(("batch", "compile"), ("loss",)),
    "hidden": ("linear",),
}
# For each benchmark, the options that take only one value.
_SINGLE_VALUED: dict[str | None, tuple[str, ...]] = {
    "loss": ("tokens", "vocab", "temperatures"),
    _SCALE: ("fractions",),
}


def _refuse_unread_options(arguments: argparse.Namespace) -> None:
    for option, benchmarks in _READERS.items():
        selected = set(_BENCHMARKS) if arguments.benchmark is None else {arguments.benchmark}
        value = getattr(arguments, option)
        if selected.isdisjoint(benchmarks) and value is not None and value is not False:
            command = " ".join(["bench", *filter(None, [arguments.benchmark])])
            raise ConfigError(f"--{option} is for bench {' and '.join(benchmarks)}; {command} does not read it")
    for option in _SINGLE_VALUED.get(arguments.benchmark, ()):
        if len(values := getattr(arguments, option) or ()) > 1:
            raise ConfigError(f"--{option}: bench {arguments.benchmark} takes one value, not {len(values)}")


def _refuse_unequal_shards(cases: Iterable[LogprobCase | linear_bench.LinearCase]) -> None:
    for case in cases:
        if case.vocab % case.tp:
            raise ConfigError(
                f"--vocab {case.vocab} can't be divided into --tp {case.tp} equal shards; use a multiple of {case.tp}"
            )


def _scale(arguments: argparse.Namespace) -> int:
    from nemo_geomask.recipe import read_recipe
    from nemo_geomask.tools.bench import scale_bench  # needs pydantic, which the other benchmarks do not

    if arguments.recipe is None:
        raise ConfigError("bench scale needs a recipe: nemo-geomask bench scale RECIPE.yaml [key.path=value ...]")
    peak = scale_bench.H100.peak if arguments.peak is None else arguments.peak * 1e12
    measured = arguments.measured and scale_bench.read_costs(*_read_results(arguments.measured), peak=peak)
    recipe = read_recipe(arguments.recipe, arguments.overrides, leave=("data", "env", "logger"))
    estimate = scale_bench.estimate_scale(
        recipe,
        gpus=arguments.gpus or scale_bench.GPUS,
        costs=measured or scale_bench.H100._replace(peak=peak),
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


def _read_results(folder: Path) -> list[dict[str, Any]]:
    """Read the results of ``bench linear`` and ``bench logprobs`` in a folder."""
    results = []
    for name in ("linear", "logprobs"):
        paths = sorted(folder.glob(f"{name}-*.json"))
        if len(paths) != 1:
            raise ConfigError(
                f"--measured {folder}: has {len(paths)} files {name}-*.json, but needs exactly one; write it with "
                f"nemo-geomask bench {name} --out {folder} on the GPU"
            )
        try:
            result = json.loads(paths[0].read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"--measured: {paths[0]} can't be read: {error}") from None
        if not isinstance(result, dict) or result.get("benchmark") != name:
            raise ConfigError(f"--measured: {paths[0]} is not what nemo-geomask bench {name} --out {folder} writes")
        results.append(result)
    return results


def _linear(
    arguments: argparse.Namespace, setting: Setting, paths: Sequence[str], vocab: Sequence[int]
) -> dict[str, Any]:
    fields: dict[str, Sequence[Any]] = {
        "dtype": arguments.dtypes,
        "fraction": arguments.fractions,
        "entropy": arguments.entropy,
        "tp": arguments.tp,
        "hidden": arguments.hidden,
        "tokens": arguments.tokens,
        "vocab": vocab,
    }
    first = linear_bench.LinearCase(**{name: values[0] for name, values in fields.items()})
    cases = [first, *(first._replace(**{name: value}) for name, values in fields.items() for value in values[1:])]
    _refuse_unequal_shards(cases)
    results = linear_bench.benchmark(
        list(dict.fromkeys(cases)),
        setting,
        repeats=arguments.repeats,
        paths=paths,
        seed=arguments.seed,
        report=lambda case: print(result_tables.format_linear(case), flush=True),
    )
    collectives = traffic.count_linear_collectives(paths)
    print(result_tables.format_collectives(collectives))
    return {
        "cases": results,
        "bars": speed_targets.check_linear(results, setting.device.type),
        "collectives": collectives,
    }


def _logprobs(arguments: argparse.Namespace, setting: Setting, paths: Sequence[LogprobPath]) -> dict[str, Any]:
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
        report=lambda case: print(result_tables.format_logprobs(case), flush=True),
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
    if arguments.plot is not None:
        write_plot(results, arguments.plot)
    return result


def _loss(arguments: argparse.Namespace, setting: Setting) -> dict[str, Any]:
    rows, length = arguments.batch
    case = LogprobCase(arguments.tokens[0], arguments.vocab[0], temperature=arguments.temperatures[0])
    try:
        result = loss_bench.benchmark(
            setting,
            rows=rows,
            length=length,
            case=case,
            compiled=arguments.compile,
            repeats=arguments.repeats,
            seed=arguments.seed,
        )
    except Absent as reason:
        print(f"loss: absent: {reason}\n")
        return {"status": "absent", "reason": str(reason)}
    print(result_tables.format_loss(result), flush=True)
    return result


def _segments(device: torch.device, repeats: int) -> dict[str, Any]:
    result = segment_bench.benchmark(device, repeats=repeats, **_STATISTICS)
    print(result_tables.format_segments(result), flush=True)
    return result


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


def _list(convert: Callable[[str], _Value]) -> Callable[[str], list[_Value]]:
    def read(text: str) -> list[_Value]:
        return [convert(word.strip()) for word in text.split(",")]

    return read


def _number(text: str, convert: Callable[[str], _Value], is_valid: Callable[[Any], bool], meaning: str) -> _Value:
    try:
        value = convert(text)
        if is_valid(value):
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"'{text}' is not {meaning}")


def _positive(text: str) -> int:
    return _number(text, int, lambda value: value > 0, "a whole number above 0")


def _fraction(text: str) -> float:
    return _number(text, float, lambda value: 0 < value <= 1, "a fraction above 0 and up to 1")


def _above_zero(text: str) -> float:
    return _number(text, float, lambda value: 0 < value < float("inf"), "a number above 0")


def _switch(text: str) -> bool:
    if text not in ("off", "on"):
        raise argparse.ArgumentTypeError(f"'{text}' is neither off nor on")
    return text == "on"


def _dtype(text: str) -> torch.dtype:
    if text not in _DTYPES:
        raise argparse.ArgumentTypeError(f"'{text}' is none of {', '.join(_DTYPES)}")
    return _DTYPES[text]
