"""A preflight on a CPU: starts Ray as a rehearsal's driver does, and then what a user types.

Run as a program with the environment of :func:`~nemo_geomask.tools.rehearse.launch_environment.launch_environment`.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

from nemo_geomask.cli import main
from nemo_geomask.tools.rehearse import driver
from nemo_geomask.tools.rehearse.launch_environment import SETTINGS

if __name__ == "__main__":
    settings = json.loads(Path(os.environ[SETTINGS]).read_text(encoding="utf-8"))
    driver.register_environment()
    driver.start_ray_without_gpus(settings["gpu_count"], settings["ray"])
    status = 1
    try:
        status = main(["run", *sys.argv[1:]])
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:  # os._exit would hide it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
