"""Check the artifacts that pip installed, by the report of ``pip install --report``, against a list of hashes.

For torch, whose build (CPU or CUDA) depends on where pip finds it: under ``--require-hashes`` pip would take the CUDA
build of the index in place of a CPU build on the machine's own disk. A file of this machine (``file:``) is its owner's
choice and taken as it is; everything that came over a network must have a hash of the list.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path


def unlisted(report: dict, listed: set[str]) -> list[str]:
    """Return a line for each artifact that came over a network and whose SHA-256 is not among ``listed``."""
    problems = []
    for package in report["install"]:
        source = package["download_info"]
        if source["url"].startswith("file:"):
            continue
        digest = source.get("archive_info", {}).get("hashes", {}).get("sha256")
        if digest not in listed:
            name, version = package["metadata"]["name"], package["metadata"]["version"]
            problems.append(f"{name} {version} from {source['url']}: sha256 {digest} is not listed")
    return problems


def main(report: str, *files: str) -> int:
    """Print what the files do not list; the exit status is 1 if there is anything."""
    text = "".join(Path(file).read_text(encoding="utf-8") for file in files)
    listed = set(re.findall(r"--hash=sha256:([0-9a-f]{64})", text))
    problems = unlisted(json.loads(Path(report).read_text(encoding="utf-8")), listed)
    for problem in problems:
        print(f"{problem} in {' or '.join(files)}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
