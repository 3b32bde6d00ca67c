"""``nemo-geomask test-variant``: tests whether a plugin keeps the package's promises about every loss."""

from __future__ import annotations

import argparse
import itertools
import time

EXIT_STATUS = {
    0: "every promise is kept",
    1: "a promise is broken",
    2: "the name can't be loaded, or the settings are invalid",
}

_EPILOG = """\
examples
  nemo-geomask test-variant my_losses:UNCLIPPED
  nemo-geomask test-variant gspo ratio_anchor=gen
  nemo-geomask test-variant my_corrections:GAP name=gspo
  nemo-geomask test-variant my_masks:Within 'masks=[{preset: my_masks:Within, factor: 1.02}]'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments and its help."""
    parser.description = (
        "Test a variant, alone and with a weight and masks; or a mask preset or mask statistic; or a level or "
        "truncation of the weight. The numbers must be finite. Microbatches must add up. Packed sequences and context "
        "parallelism must give the result of padded sequences on one rank. Masked positions must have no effect. The "
        "gradient must be that of finite differences. The loss must be picklable and compile as one graph."
    )
    parser.epilog = _EPILOG
    parser.add_argument("name", metavar="NAME", help="a registered name, or module:attribute")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="settings of loss_fn for every trial")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    # Imported here, so that --help does not wait for torch.
    from nemo_geomask.testing import trials
    from nemo_geomask.testing.plugin_trials import parse_settings, run_trials
    from nemo_geomask.tools.shared.progress_bar import print_time_left

    is_broken = False
    began = time.monotonic()
    results = run_trials(arguments.name, parse_settings(arguments.overrides))
    for done, (trial, outcomes) in enumerate(itertools.groupby(results, key=lambda result: result.trial)):
        if done:
            print_time_left(done, len(trials(arguments.name)), time.monotonic() - began, "trials")
        print(f"{arguments.name} {trial}", flush=True)
        for _, promise, violation in outcomes:
            is_broken |= bool(violation)
            print(
                f"  {'BROKEN' if violation else 'ok':6}  {promise}{': ' + violation if violation else ''}", flush=True
            )
    return 1 if is_broken else 0
