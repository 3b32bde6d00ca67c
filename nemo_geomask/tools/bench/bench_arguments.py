"""Arguments of ``bench``, their defaults, and which benchmark reads which of them.

torch is imported only to measure: a help page and a shell's completions do not wait for it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nemo_geomask.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["BENCHMARKS", "KERNELS", "SCALE", "add_arguments", "refuse_unread_options", "with_defaults"]

BENCHMARKS = ("logprobs", "linear", "loss", "segments", "step")
SCALE = "scale"
KERNELS = ("auto", "triton", "torch")
"""Values of ``--kernel``: ``nemo_geomask.kernels.KERNELS``."""
_DTYPES = ("bfloat16", "float16", "float32")
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
# For each benchmark, the defaults that differ from these.
_OWN_DEFAULTS: dict[str, dict[str, dict[str, Any]]] = {
    "linear": {"cuda": {"vocab": [151_936]}},
    "segments": {"cuda": {"repeats": 50}, "cpu": {"repeats": 50}},
    "step": {
        "cuda": {
            "tokens": [8192, 16_384, 32_768, 65_536],
            "vocab": [151_936],
            "layers": 4,
            "hidden": [2048],
            "heads": 16,
            "repeats": 9,
        },
        "cpu": {
            "tokens": [256],
            "vocab": [32_768],
            "layers": 4,
            "hidden": [128],
            "heads": 4,
            "dtypes": ["float32"],
            "memory_limit": 0.125,
            "repeats": 5,
        },
    },
}

_Value = TypeVar("_Value")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the benchmarks."""
    parser.add_argument(
        "benchmark",
        nargs="?",
        choices=(*BENCHMARKS, SCALE),
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
    parser.add_argument(
        "--tokens", type=_list(_positive), metavar="T,T,...", help="rows of logits; step: length of the sequence"
    )
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
    parser.add_argument(
        "--temperatures", type=_list(_above_zero), metavar="X,X,...", help="temperatures that the logits are divided by"
    )
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
        help="logprobs, linear, step: paths to measure, each by its name, which may contain commas, or by a part of it",
    )
    parser.add_argument("--kernel", choices=KERNELS, help="kernel of our paths (default: auto)")
    parser.add_argument(
        "--hidden", type=_list(_positive), metavar="H,H,...", help="linear, step: size of the hidden states"
    )
    parser.add_argument("--layers", type=_positive, metavar="N", help="step: number of the decoder's layers")
    parser.add_argument("--heads", type=_positive, metavar="N", help="step: number of attention heads")
    parser.add_argument(
        "--memory-limit",
        type=_above_zero,
        metavar="GB",
        help="step: memory that a step may take beyond weights and batch, for the longest sequence that fits (default "
        "on a GPU: until torch is out of memory; on a CPU: 0.125)",
    )
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


def with_defaults(arguments: argparse.Namespace, device: torch.device, benchmark: str) -> argparse.Namespace:
    """Return the arguments, in which those that the user left out have the benchmark's defaults for the device.

    ``dtypes`` of the result are torch's, and not their names.
    """
    import torch

    defaults = _DEFAULTS[device.type] | {"kernel": "auto", "seed": 0, "dtypes": ["bfloat16"]}
    defaults |= _OWN_DEFAULTS.get(benchmark, {}).get(device.type, {})
    chosen = {key: value for key, value in vars(arguments).items() if value is not None}
    settings = {**vars(arguments), **defaults, **chosen}
    return argparse.Namespace(**{**settings, "dtypes": [getattr(torch, name) for name in settings["dtypes"]]})


# The benchmarks that read each option.
_BENCHMARKS_OF_OPTION: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("device", "repeats", "threads"), BENCHMARKS),
    **dict.fromkeys(("tokens", "vocab", "seed"), ("logprobs", "linear", "loss", "step")),
    "kernel": ("logprobs", "linear", "loss"),
    "temperatures": ("logprobs", "loss"),
    **dict.fromkeys(("tp", "entropy"), ("logprobs", "linear")),
    "dtypes": ("logprobs", "linear", "step"),
    "fractions": ("logprobs", "linear", SCALE),
    **dict.fromkeys(("recipe", "gpus", "mfu", "measured", "peak"), (SCALE,)),
    "grid": ("logprobs",),
    "paths": ("logprobs", "linear", "step"),
    **dict.fromkeys(("batch", "compile"), ("loss",)),
    "hidden": ("linear", "step"),
    **dict.fromkeys(("layers", "heads", "memory_limit"), ("step",)),
}
# For each benchmark, the options that take only one value.
_SINGLE_VALUED: dict[str | None, tuple[str, ...]] = {
    "loss": ("tokens", "vocab", "temperatures"),
    "step": ("vocab", "hidden", "dtypes"),
    SCALE: ("fractions",),
}


def refuse_unread_options(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for an option that the selected benchmark does not read, or of which it reads one value."""
    for option, benchmarks in _BENCHMARKS_OF_OPTION.items():
        selected = set(BENCHMARKS) if arguments.benchmark is None else {arguments.benchmark}
        value = getattr(arguments, option)
        if selected.isdisjoint(benchmarks) and value is not None and value is not False:
            command = " ".join(["bench", *filter(None, [arguments.benchmark])])
            raise ConfigError(
                f"--{option.replace('_', '-')} is for bench {' and '.join(benchmarks)}; {command} does not read it"
            )
    for option in _SINGLE_VALUED.get(arguments.benchmark, ()):
        if len(values := getattr(arguments, option) or ()) > 1:
            raise ConfigError(f"--{option}: bench {arguments.benchmark} takes one value, not {len(values)}")


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


def _dtype(text: str) -> str:
    if text not in _DTYPES:
        raise argparse.ArgumentTypeError(f"'{text}' is none of {', '.join(_DTYPES)}")
    return text
