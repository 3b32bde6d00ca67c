"""A probe's folder that somebody else has written: one error that names the file, and nothing outside it is touched."""

import hashlib
import json
import os
import time
import tracemalloc

import pytest

from nemo_geomask.errors import ConfigError, DataError, GeomaskError, InputLimitError
from nemo_geomask.tools.probe.probe_folder import prepare_folder
from nemo_geomask.tools.probe.start_store import Start, StartStore
from nemo_geomask.tools.shared.json_output import write_json_file
from tests.tools.probe.synthetic_stack import SyntheticStack

START = Start("baseline")


def store_in(folder):
    return StartStore(folder, SyntheticStack(), prompts=4, generations=2)


def digest(content):
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@pytest.fixture
def folder(tmp_path):
    """A stored start and its frozen sequences."""
    store_in(tmp_path).answer(START)
    return tmp_path


def start_file(folder):
    return folder / "starts" / f"{START.file_name}.json"


def replaced(value, path, new):
    """Return the value with what lies at a path of keys replaced, or taken out if ``new`` is Ellipsis."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    if new is ... and len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = new if len(path) == 1 else replaced(copy[path[0]], path[1:], new)
    return copy


BASE = ("scores", "decode", "base")
CONTENTS = [
    ((), None),
    ((), []),
    ((), {}),
    (("weights",), 5),
    (("weights",), [5, None]),
    (("seconds",), "x"),
    (("error",), "x" * 10_000),
    (("scores",), []),
    (("scores",), "x"),
    (("scores", "trainer"), ...),
    (("scores", "trainer"), {}),
    (("scores", "prefill"), None),
    (("scores", "engine_settings"), [1]),
    (("scores", "layers"), [1]),
    (("scores", "layers"), {"a": 1}),
    (("scores", "layers"), {"error": "", "own": {"0 layer": "x"}}),
    (("scores", "layers"), {"error": "", "head": [[0.0]]}),
    (("scores", "adapters"), 5),
    ((*BASE, "seconds"), None),
    ((*BASE, "seconds"), -1.0),
    ((*BASE, "seconds"), float("nan")),
    ((*BASE, "logprobs"), [5]),
    ((*BASE, "logprobs"), [["x"]]),
    ((*BASE, "logprobs"), [[[0.0, 1.0]]]),
]


@pytest.mark.parametrize(("path", "new"), CONTENTS)
def test_a_start_of_other_types_is_an_error_whatever_its_hash(folder, path, new):
    file = start_file(folder)
    content = replaced(json.loads(file.read_text())["content"], path, new)
    file.write_text(json.dumps({"sha256": digest(content), "content": content}))
    with pytest.raises(DataError, match=rf"{START.file_name}\.json"):
        store_in(folder).answer(START)


FROZEN = [
    ((), [1]),
    ((), {}),
    (("sequences",), []),
    (("sequences", 0), ["x"]),
    (("sequences", 0, 0), 10**400),
    (("sequences", 0, 0), -1),
    (("prompt_lengths", 0), "3"),
    (("prompt_lengths", 0), 10**9),
    (("prompt_lengths", 0), -(10**9)),
    (("prompts", 0), "0"),
    (("prompts",), [0] * 8),
    (("prompts", 0), float("nan")),
    (("by_trainer",), [True]),
    (("by_trainer", 0), 1),
    (("sampled",), [[1.0]]),
    (("sampled", 0, 0), float("nan")),
    (("texts",), [1]),
    (("texts",), {"1": "x" * 10_000}),
    (("trainer_error",), "x" * 5_000_000),
]


@pytest.mark.parametrize(("path", "new"), FROZEN)
def test_frozen_sequences_of_other_types_are_an_error_whatever_their_hash(folder, path, new):
    frozen = replaced(json.loads((folder / "frozen.json").read_text()), path, new)
    (folder / "frozen.json").write_text(json.dumps(frozen))
    content = json.loads(start_file(folder).read_text())["content"] | {"frozen": digest(frozen)}
    start_file(folder).write_text(json.dumps({"sha256": digest(content), "content": content}))
    with pytest.raises(DataError, match=r"frozen\.json: ") as caught:
        store_in(folder).answer(START)
    assert len(str(caught.value)) < 1000


def fifo(path):
    os.mkfifo(path)


def sparse(path):
    with path.open("wb") as file:
        file.truncate(3 * 2**30)


PLANTS = {
    "fifo": fifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "memory of the process": lambda path: path.symlink_to("/proc/self/mem"),
    "link to itself": lambda path: path.symlink_to(path),
    "link to nowhere": lambda path: path.symlink_to(path.parent / "nowhere"),
    "folder": lambda path: path.mkdir(),
    "brackets": lambda path: path.write_text("[" * 100_000),
    "objects": lambda path: path.write_text('{"a":' * 100_000),
    "bytes": lambda path: path.write_bytes(b"\xff\xfe"),
    "mark of byte order": lambda path: path.write_bytes(b"\xef\xbb\xbf{}"),
    "long number": lambda path: path.write_text('{"a": 1' + "0" * 5000 + "}"),
    "null": lambda path: path.write_text("null"),
    "empty": lambda path: path.write_text(""),
    "hole": sparse,
}


def read(folder, name):
    if name == "probe.json":
        prepare_folder(folder, {"sizes": {}}, resume=True)
    else:
        store_in(folder).answer(START)


@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS)
@pytest.mark.parametrize("name", ["start", "frozen.json", "probe.json"])
def test_whatever_lies_in_a_files_place_is_an_error_at_once(folder, name, plant):
    path = start_file(folder) if name == "start" else folder / name
    path.unlink(missing_ok=True)
    plant(path)
    begun = time.process_time()
    tracemalloc.start()
    with pytest.raises(GeomaskError, match=path.name):
        read(folder, name)
    assert tracemalloc.get_traced_memory()[1] < 2**26
    tracemalloc.stop()
    assert time.process_time() - begun < 5


def test_workers_do_not_read_what_was_not_looked_at(folder):
    start_file(folder).unlink()
    (folder / "frozen.json").unlink()
    os.mkfifo(folder / "frozen.json")
    with pytest.raises(InputLimitError, match="frozen.json: is a FIFO"):
        store_in(folder).answer(START)


@pytest.mark.parametrize("sections", [[], None, 5, {"sizes": None}, {"sizes": [1]}])
def test_a_description_of_other_types_is_an_error(tmp_path, sections):
    (tmp_path / "probe.json").write_text(json.dumps(sections))
    with pytest.raises(DataError, match=r"probe\.json"):
        prepare_folder(tmp_path, {"sizes": {}}, resume=True)


def test_names_in_an_error_are_short(tmp_path):
    (tmp_path / "probe.json").write_text(json.dumps({"sizes": {"x" * 1_000_000: 1}}))
    with pytest.raises(ConfigError, match="differs in sizes") as caught:
        prepare_folder(tmp_path, {"sizes": {}}, resume=True)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", ["starts", "work"])
def test_a_probe_writes_through_no_link(tmp_path, name):
    probe, elsewhere = tmp_path / "probe", tmp_path / "elsewhere"
    elsewhere.mkdir()
    prepare_folder(probe, {}, resume=False)
    (probe / name).symlink_to(elsewhere)
    with pytest.raises(ConfigError, match=f"{name} is no folder of its own"):
        prepare_folder(probe, {}, resume=True)


def test_an_out_that_can_be_no_folder_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"^--out: .* can't be a folder: Not a directory"):
            prepare_folder(folder, {}, resume=False)


def test_json_replaces_a_link_and_leaves_what_it_names(tmp_path):
    (tmp_path / "precious").write_text("precious")
    for name in ("a.json", "a.partial", "a.json.partial"):
        (tmp_path / name).symlink_to("precious")
    write_json_file(tmp_path / "a.json", {"b": 1})
    assert (tmp_path / "precious").read_text() == "precious"
    assert json.loads((tmp_path / "a.json").read_text()) == {"b": 1}
    assert not (tmp_path / "a.json").is_symlink()
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_json_file(tmp_path / "folder", {})
    assert len(list(tmp_path.iterdir())) == 5
