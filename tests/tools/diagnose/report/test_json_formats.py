"""The JSON of the commands: a version, and a schema that describes exactly what is written."""

import json

import jsonschema
import pytest

from nemo_geomask.cli import main
from nemo_geomask.cli.schema import JSON_FORMATS, json_schema
from nemo_geomask.tools.shared.json_output import JSON_VERSION
from tests.evidence.diagnose.planted_causes import planted_step
from tests.evidence.diagnose.planted_logs import write_step

GSPO = "loss_fn: {name: gspo, token_level_loss: false, ratio_clip_min: 3.0e-4, ratio_clip_max: 4.0e-4, %s}\n"


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "records"
    for step in range(1, 13):
        write_step(folder, planted_step(0, step, "position", 1.0))
    return folder


def written(words, capsys):
    main(list(map(str, words)))
    return json.loads(capsys.readouterr().out)


def check(command, value):
    jsonschema.Draft202012Validator(json_schema(command)).validate(value)
    for each in value if isinstance(value, list) else [value]:
        assert each["version"] == JSON_VERSION


def test_check(tmp_path, capsys, records):
    pytest.importorskip("nemo_geomask.tools.check", reason="a tool can be deleted")
    settings = {"good": "masks: [{preset: geometric, max: 1.01}]", "bad": "nam: 1", "warned": "compile: true"}
    for name, more in settings.items():
        (tmp_path / f"{name}.yaml").write_text(GSPO % more, encoding="utf-8")
        check("check", written(["check", tmp_path / f"{name}.yaml", "--format", "json"], capsys))
    check("check", written(["check", tmp_path, "--format", "json"], capsys))
    measured = written(["check", tmp_path / "good.yaml", "--from", records, "--format", "json"], capsys)
    assert measured["measured"]["kept"]
    check("check", measured)
    check("check", written(["check", tmp_path / "missing.yaml", "--format", "json"], capsys))


def test_diagnose_and_sweep(capsys, records):
    diagnosis = written(["diagnose", records, "--json"], capsys)
    assert diagnosis[0]["causes"]
    check("diagnose", diagnosis)
    sweep = written(["sweep", records, "--steps", "1", "--json"], capsys)
    assert sweep["candidates"]
    check("sweep", sweep)


@pytest.mark.parametrize("command", JSON_FORMATS)
def test_the_schema_is_one_and_refuses_other_keys(command, capsys):
    schema = written(["schema", "--of", command], capsys)
    assert schema == json_schema(command)
    jsonschema.Draft202012Validator.check_schema(schema)
    value = {"version": 1, "no_such_key": 1}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate([value] if command == "diagnose" else value, schema)
