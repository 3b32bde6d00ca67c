"""``python -m nemo_geomask.cli``."""

from __future__ import annotations

import sys

from nemo_geomask.cli import main

sys.exit(main())
