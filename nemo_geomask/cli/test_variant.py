"""``nemo-geomask test-variant``: whether a loss or correction of one's own keeps what the package promises."""

from __future__ import annotations

import argparse
from typing import Any

__all__ = ["add", "run"]

_EPILOG = """\
exit status
  0  every promise is kept
  1  one is broken
  2  it can't be loaded, or the settings are wrong

examples
  nemo-geomask test-variant my_losses:UNCLIPPED
  nemo-geomask test-variant gspo ratio_anchor=gen
  nemo-geomask test-variant my_corrections:GAP name=gspo
"""


def add(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "test-variant",
        help="hold a loss or correction of your own to what the package promises",
        description="Try a variant, alone and with a weight and masks, or a mask's preset or statistic, a level or "
        "truncation of the weight: microbatches add up, packed is padded, context "
        "parallelism is one rank, nothing comes from masked positions, the gradient is that of finite differences, it "
        "travels by pickle and compiles as one graph.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="a registered name, or module:attribute")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="settings of loss_fn for every trial")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from nemo_geomask.testing import broken_promises, trials
    from nemo_geomask.translate.read import nested, words

    more = nested(dict(words(arguments.overrides)))
    broken = 0
    for said, settings in trials(arguments.name).items():
        print(f"{arguments.name} {said}")
        for promise, text in broken_promises({**settings, **more}):
            broken += bool(text)
            print(f"  {'BROKEN' if text else 'ok':6}  {promise.name}{': ' + text if text else ''}", flush=True)
    return 1 if broken else 0
