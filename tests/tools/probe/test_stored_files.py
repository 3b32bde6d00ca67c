"""A probe's folder that somebody else has written: one error that names the file, and nothing outside it is touched."""

import hashlib
import json
import os
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


@pytest.mark.parametrize(
    ("path", "new"),
    [((), None), ((), []), ((), {}), (("scores",), "x"), (("scores", "trainer"), ...), (("scores", "trainer"), {})],
)
def test_a_start_without_what_a_probe_writes_is_an_error_whatever_its_hash(folder, path, new):
    file = start_file(folder)
    content = replaced(json.loads(file.read_text())["content"], path, new)
    file.write_text(json.dumps({"sha256": digest(content), "content": content}))
    with pytest.raises(DataError, match=rf"{START.file_name}\.json"):
        store_in(folder).answer(START)


@pytest.mark.parametrize(
    ("path", "new"),
    [((), {}), (("sequences",), []), (("prompts",), [0] * 8), (("by_trainer",), [True]), (("sampled",), None)],
)
def test_frozen_sequences_of_another_number_are_an_error_whatever_their_hash(folder, path, new):
    frozen = replaced(json.loads((folder / "frozen.json").read_text()), path, new)
    (folder / "frozen.json").write_text(json.dumps(frozen))
    content = json.loads(start_file(folder).read_text())["content"] | {"frozen": digest(frozen)}
    start_file(folder).write_text(json.dumps({"sha256": digest(content), "content": content}))
    with pytest.raises(DataError, match=r"frozen\.json: "):
        store_in(folder).answer(START)


def fifo(path):
    os.mkfifo(path)


def sparse(path):
    with path.open("wb") as file:
        file.truncate(3 * 2**30)


PLANTS = {
    "fifo": fifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "memory of the process": lambda path: path.symlink_to("/proc/self/mem"),
    "folder": lambda path: path.mkdir(),
    "objects": lambda path: path.write_text('{"a":' * 100_000),
    "bytes": lambda path: path.write_bytes(b"\xff\xfe"),
    "long number": lambda path: path.write_text('{"a": 1' + "0" * 5000 + "}"),
    "null": lambda path: path.write_text("null"),
    "hole": sparse,
}


def read(folder, name):
    if name == "probe.json":
        prepare_folder(folder, {"sizes": {}}, resume=True)
    else:
        store_in(folder).answer(START)


@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS)
@pytest.mark.parametrize("name", ["start", "frozen.json", "probe.json"])
def test_whatever_lies_in_a_files_place_is_an_error_that_reads_little(folder, name, plant):
    path = start_file(folder) if name == "start" else folder / name
    path.unlink(missing_ok=True)
    plant(path)
    tracemalloc.start()
    with pytest.raises(GeomaskError, match=path.name):
        read(folder, name)
    assert tracemalloc.get_traced_memory()[1] < 2**26
    tracemalloc.stop()


def test_workers_do_not_read_what_was_not_looked_at(folder):
    start_file(folder).unlink()
    (folder / "frozen.json").unlink()
    os.mkfifo(folder / "frozen.json")
    with pytest.raises(InputLimitError, match="frozen.json: is a FIFO"):
        store_in(folder).answer(START)


@pytest.mark.parametrize("sections", [[], {"sizes": [1]}])
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
