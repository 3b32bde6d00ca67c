"""``nemo-geomask test-variant``: whether a loss or correction of one's own keeps what the package promises."""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_geomask.errors import ConfigError

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
  nemo-geomask test-variant my_masks:Within 'masks=[{preset: my_masks:Within, factor: 1.02}]'
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

    more = _settings(arguments.overrides) if arguments.overrides else {}
    broken = 0
    for said, settings in trials(arguments.name).items():
        print(f"{arguments.name} {said}")
        try:
            for promise, text in broken_promises({**settings, **more}):
                broken += bool(text)
                print(f"  {'BROKEN' if text else 'ok':6}  {promise.name}{': ' + text if text else ''}", flush=True)
        except ConfigError as error:
            if "masks" in more or settings.get("masks") != [{"preset": arguments.name}]:
                raise
            # A preset's trial is of its defaults, and it has none.
            fields = [key.rpartition(".")[2] for problem in error.problems for key in problem.keys]
            mask = ", ".join([f"preset: {arguments.name}", *(f"{field}: …" for field in fields)])
            fix = f"give the preset's settings: nemo-geomask test-variant {arguments.name} 'masks=[{{{mask}}}]'"
            raise ConfigError(*error.problems, fix) from None
    return 1 if broken else 0


def _settings(words: Sequence[str]) -> Mapping[str, Any]:
    from nemo_geomask.optional import require
    from nemo_geomask.recipe import Origins
    from nemo_geomask.recipe.overrides import apply_override

    omegaconf = require("omegaconf", "a setting on the command line needs", "recipes").OmegaConf
    config, origins = omegaconf.create({}), Origins()
    for word in words:
        if not re.match(r"\w[\w.]*=", word):
            raise ConfigError(f"'{word}' is no setting; write key=value")
        config, origins = apply_override(config, origins, word, new_keys=True)
    for one, other in itertools.permutations(words, 2):
        if f"{other.partition('=')[0]}.".startswith(f"{one.partition('=')[0]}."):
            raise ConfigError(f"'{one}' and '{other}' set the same; leave one of them out")
    found: dict[str, Any] = omegaconf.to_container(config, resolve=False)
    return found
