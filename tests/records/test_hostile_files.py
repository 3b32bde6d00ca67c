"""A hostile file in place of a record is an error within 5 seconds and 1 GB, in a process that can't have more."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("pyarrow")

from tests.helpers.hostile_records import HOSTILE, LIMITS

NAME = "step-0000001-driver.parquet"
MEMORY = 2**30
SECONDS = 5.0
READ = """
import json, resource, sys, time
from pathlib import Path
from nemo_geomask.errors import GeomaskError
from nemo_geomask.tools.diagnose.record_reader import read_blocks

limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
start, message, tokens = time.perf_counter(), "", 0
try:
    for block in read_blocks(Path(sys.argv[1])):
        tokens += int(block.offsets[-1])
except GeomaskError as error:
    message = str(error)
# Not ru_maxrss, which begins with the memory of the process that started this one.
(peak,) = (line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
peak = int(peak) * 1024
processor = time.process_time()
print(json.dumps({"message": message, "tokens": tokens, "processor": processor, "peak": peak}))
"""


def read_in_process(path):
    command = [sys.executable, "-c", READ, str(path), str(MEMORY)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_an_error_that_names_it(tmp_path, name):
    path = tmp_path / NAME
    HOSTILE[name](path)
    outcome = read_in_process(path)
    # Processor time, because this machine may be busy; start-up takes about a second of it.
    assert outcome["processor"] < SECONDS
    assert outcome["peak"] < MEMORY
    assert NAME in outcome["message"]
    assert outcome["tokens"] == 0
    assert "--limit" not in outcome["message"] or name in LIMITS
    if name in LIMITS:
        assert f"over the limit {LIMITS[name]}" in outcome["message"]
    # A file that claims no values at all is refused before its pages are looked at.
    if "that claims" in name and name != "bomb that claims 0 values":
        assert "claims 20,000,000 values in" in outcome["message"]
    if name == "bomb: a million names in one page":
        assert "claims 1,000,000 values in" in outcome["message"]
    # A long text is refused before it is decoded.
    if "a name of 20 MB" in name:
        assert "claims 1 values in 20,000,0" in outcome["message"]
