"""``python -m nemo_geomask.tools.bench``: ``nemo-geomask bench`` without the dependencies of the other commands."""

from __future__ import annotations

import argparse
import sys

from nemo_geomask.errors import GeomaskError
from nemo_geomask.tools.bench import add_arguments, run

__all__: list[str] = []


def _main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m nemo_geomask.tools.bench", description=sys.modules[__package__].__doc__
    )
    add_arguments(parser)
    try:
        return run(parser.parse_args())
    except GeomaskError as error:
        print(f"nemo-geomask: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(_main())
