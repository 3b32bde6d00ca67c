"""``nemo-geomask bench``: what a recipe or this GPU gains, by one benchmark a subcommand with options of its own."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from nemo_geomask.cli.arguments import positive_integer, positive_number
from nemo_geomask.errors import ConfigError

EXIT_STATUS = {0: "measured or estimated", 2: "a mistake in the arguments, the recipe or the installation"}
_DTYPES = ("bfloat16", "float16", "float32")
_Value = TypeVar("_Value")


class _ByDevice(NamedTuple):
    """Default of an option on a GPU, and on a CPU, where the benchmarks are smaller."""

    cuda: Any
    cpu: Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments and its help."""
    parser.description = (
        "Measure what this package gains on this machine, beside NeMo-RL's own code and other libraries that can be "
        "imported, in mixed order: median times with quartiles, memory, and errors. Or estimate what a recipe gains "
        "on a cluster. Without a benchmark, logprobs, loss and step run with their defaults."
    )
    benchmarks = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK")
    for name, (declare, text) in _BENCHMARKS.items():
        sentence = f"{text[0].upper()}{text[1:]}."
        subparser = benchmarks.add_parser(name, help=text, description=sentence, formatter_class=parser.formatter_class)
        declare(subparser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if arguments.benchmark == "scale":
        from nemo_geomask.tools.bench import scale

        return scale.run(arguments)
    import torch

    from nemo_geomask.tools.bench.command import run_benchmark

    if arguments.benchmark is None:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        return max(run(parser.parse_args([name])) for name in ("logprobs", "loss", "step"))
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU here; use --device cpu")
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    for key, value in vars(arguments).items():
        if isinstance(value, _ByDevice):
            setattr(arguments, key, getattr(value, device))
    return run_benchmark(arguments.benchmark, arguments, torch.device(device))


def _scale(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE.yaml", help="the recipe")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key.path=value", help="settings that replace the recipe's"
    )
    parser.add_argument(
        "--gpus",
        type=_list(positive_integer),
        metavar="N,N,...",
        help="numbers of GPUs that train (default: 8,64,512,4096); the recipe's own is added",
    )
    parser.add_argument(
        "--mfu",
        type=_fraction,
        default=0.3,
        metavar="F",
        help="fraction of the GPU's peak FLOP/s that the model reaches (default: 0.3)",
    )
    parser.add_argument(
        "--fractions", type=_fraction, default=1.0, metavar="F", help="fraction of the tokens that train (default: 1)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write scale-<recipe>.json there")


def _logprobs(parser: argparse.ArgumentParser) -> None:
    whole_numbers = _list(positive_integer)
    _add(parser, "--tokens", whole_numbers, "T,T,...", "number of tokens", _ByDevice([8192, 16_384], [256]))
    _add(parser, "--hidden", whole_numbers, "H,H,...", "size of the hidden states", _ByDevice([4096], [128]))
    _add(parser, "--vocab", whole_numbers, "V,V,...", "size of the global vocabulary", [151_936])
    tp_help = "the output layer is one of N vocabulary shards; no collectives are run"
    _add(parser, "--tp", whole_numbers, "N,N,...", tp_help, _ByDevice([1, 8], [1]))
    fractions = _ByDevice([1.0, 0.2], [1.0])
    _add(parser, "--fractions", _list(_fraction), "F,F,...", "fraction of the tokens that train", fractions)
    _add(parser, "--entropy", _list(_switch), "off,on", "compute the entropy and its gradient, too", [False])
    temperatures_help = "temperatures that the logits are divided by"
    _add(parser, "--temperatures", _list(positive_number), "X,X,...", temperatures_help, [1.0])
    dtypes_help = f"types of hidden states and weight: {', '.join(_DTYPES)}"
    _add(parser, "--dtypes", _list(_dtype), "D,D,...", dtypes_help, _ByDevice(["bfloat16"], ["float32"]))
    _add_paths(parser)
    _add_common(parser, repeats=_ByDevice(9, 5))


def _loss(parser: argparse.ArgumentParser) -> None:
    _add(parser, "--batch", _batch, "B,T", "number of sequences and their length", _ByDevice((64, 8192), (16, 2048)))
    parser.add_argument("--compile", action="store_true", help="measure compiled losses, too; takes minutes")
    _add_common(parser, repeats=9)


def _step(parser: argparse.ArgumentParser) -> None:
    tokens = _ByDevice([8192, 32_768], [256])
    _add(parser, "--tokens", _list(positive_integer), "T,T,...", "length of the sequence, in each case", tokens)
    for option, placeholder, text, default in (
        ("--vocab", "V", "size of the vocabulary", _ByDevice(151_936, 32_768)),
        ("--layers", "N", "number of the decoder's layers", 4),
        ("--hidden", "H", "size of the hidden states", _ByDevice(2048, 128)),
        ("--heads", "N", "number of attention heads", _ByDevice(16, 4)),
    ):
        _add(parser, option, positive_integer, placeholder, text, default)
    dtypes_help = f"type of the weights: {', '.join(_DTYPES)}"
    _add(parser, "--dtypes", _dtype, "D", dtypes_help, _ByDevice("bfloat16", "float32"))
    limit_help = "memory that a step may take beyond weights and batch, for the longest sequence that fits"
    _add(parser, "--memory-limit", positive_number, "GB", limit_help, _ByDevice(None, 0.125))
    _add_paths(parser)
    _add_common(parser, repeats=5)


_BENCHMARKS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], str]] = {
    "scale": (_scale, "estimate memory and time of the log-probs in a recipe's step, on up to 4,096 GPUs"),
    "step": (_step, "measure a whole step of a decoder on each path, and find the longest sequence that fits"),
    "loss": (_loss, "measure each loss on padded and packed log-probs, beside NeMo-RL's class"),
    "logprobs": (
        _logprobs,
        "measure log-probs from hidden states, with gradients, by each method that a recipe can choose",
    ),
}


def _add(
    parser: argparse.ArgumentParser, option: str, type_: Callable[[str], Any], placeholder: str, text: str, default: Any
) -> None:
    if isinstance(default, _ByDevice):
        gpu, cpu = (_default_text(value) for value in default)
        text += f" (default: {gpu}; on a CPU {cpu})"
    else:
        text += f" (default: {_default_text(default)})"
    parser.add_argument(option, type=type_, metavar=placeholder, help=text, default=default)


def _default_text(value: Any) -> str:
    if value is None:
        return "until torch is out of memory"
    if isinstance(value, list | tuple):
        return ",".join(map(_default_text, value))
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else f"{value}"


def _add_paths(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--paths", metavar="P,P,...", help="measure only these, each by its name or a part of it")


def _add_common(parser: argparse.ArgumentParser, *, repeats: int | _ByDevice) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if torch sees a GPU")
    _add(parser, "--repeats", positive_integer, "N", "measured rounds", repeats)
    parser.add_argument("--threads", type=positive_integer, metavar="N", help="CPU threads")
    _add(parser, "--seed", int, "N", "seed of the inputs", 0)
    parser.add_argument("--out", type=Path, metavar="DIR", help="write <benchmark>-<machine>-<date>.json there")


def _list(convert: Callable[[str], _Value]) -> Callable[[str], list[_Value]]:
    return lambda text: [convert(word.strip()) for word in text.split(",")]


def _batch(text: str) -> list[int]:
    numbers = _list(positive_integer)(text)
    if len(numbers) != 2:
        raise argparse.ArgumentTypeError(f"'{text}' is not two numbers, the number of sequences and their length")
    return numbers


def _fraction(text: str) -> float:
    value = positive_number(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a fraction above 0 and up to 1")
    return value


def _switch(text: str) -> bool:
    if text not in ("off", "on"):
        raise argparse.ArgumentTypeError(f"'{text}' is neither off nor on")
    return text == "on"


def _dtype(text: str) -> str:
    if text not in _DTYPES:
        raise argparse.ArgumentTypeError(f"'{text}' is none of {', '.join(_DTYPES)}")
    return text
