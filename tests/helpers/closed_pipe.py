"""A command whose output nobody reads."""

from __future__ import annotations

import os
import subprocess
import sys


def run_unread(words: list[str], *, stderr_too: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a command with standard output, and standard error if asked for, closed at the reader's end."""
    read, write = os.pipe()
    os.close(read)
    try:
        return subprocess.run(
            [sys.executable, "-c", f"import sys; from nemo_geomask.cli import main; sys.exit(main({words!r}))"],
            stdout=write,
            stderr=write if stderr_too else subprocess.PIPE,
            text=True,
            timeout=500,
            check=False,
            # Unbuffered, argparse would swallow the error itself.
            env={key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"},
        )
    finally:
        os.close(write)
