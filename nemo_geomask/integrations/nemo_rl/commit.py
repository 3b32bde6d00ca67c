"""Which commit a checkout of NeMo-RL is at.

Read from its files: git may not be there, or refuse another user's folder.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["commit_of"]

# NeMo-RL's container sets it.
_VARIABLE = "NEMO_RL_COMMIT"


def commit_of(checkout: Path) -> str | None:
    """The commit of a git checkout; without one what the container says of itself; None where nobody does."""
    try:
        found = _head(checkout / ".git")
    except OSError:
        found = os.environ.get(_VARIABLE)
    return found if re.fullmatch("[0-9a-f]{7,64}", found or "") else None


def _head(git: Path) -> str | None:
    if git.is_file():  # of a submodule or another work tree, whose folder is elsewhere
        git = git.parent / git.read_text(encoding="utf-8").removeprefix("gitdir:").strip()
    head = (git / "HEAD").read_text(encoding="utf-8").strip()
    if not head.startswith("ref:"):
        return head
    name = head.removeprefix("ref:").strip()
    shared = git / "commondir"
    home = git / shared.read_text(encoding="utf-8").strip() if shared.is_file() else git
    if (home / name).is_file():
        return (home / name).read_text(encoding="utf-8").strip()
    packed = (home / "packed-refs").read_text(encoding="utf-8").splitlines()
    return next((line.split()[0] for line in packed if line.endswith(f" {name}")), None)
