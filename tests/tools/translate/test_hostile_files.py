"""Hostile files end in one sentence within the limits of time and memory, and run no code."""

from __future__ import annotations

import pytest

from nemo_geomask.cli import main
from nemo_geomask.errors import ConfigError
from nemo_geomask.tools.translate import PEERS, translate
from nemo_geomask.tools.translate.shell_reader import program_runs
from tests.helpers.limited_commands import limited_commands
from tests.tools.translate.hostile_files import MALFORMED, OVER_A_LIMIT, STRANGE

IMPORTED_BEFORE = ("omegaconf", "nemo_geomask.cli.translate", "nemo_geomask.tools.translate", "torch")
MAX_BYTES = 2**30


@pytest.fixture(scope="module")
def commands():
    with limited_commands(IMPORTED_BEFORE) as running:
        yield running


def run(commands, folder, file):
    name, content = file
    path = folder / name
    if callable(content):
        content(path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    outcome = commands.run("translate", path)
    assert "Traceback" not in outcome.output
    assert outcome.status in (0, 1, 2), outcome.output
    assert outcome.peak_bytes < MAX_BYTES
    assert not (folder / "executed").exists()
    return outcome


@pytest.mark.slow
@pytest.mark.parametrize(("file", "limit"), OVER_A_LIMIT.values(), ids=OVER_A_LIMIT)
def test_a_file_over_a_limit_is_refused_by_its_name(commands, tmp_path, file, limit):
    outcome = run(commands, tmp_path, file)
    assert outcome.status == 2
    assert outcome.output.startswith("nemo-geomask: error: ")
    assert limit in outcome.output
    assert " " in limit or not limit or "raise it with --limit " in outcome.output


@pytest.mark.slow
@pytest.mark.parametrize("file", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_file_is_one_error(commands, tmp_path, file):
    outcome = run(commands, tmp_path, file)
    assert outcome.status == 2
    assert outcome.output.startswith("nemo-geomask: error: ")


@pytest.mark.slow
@pytest.mark.parametrize("file", STRANGE.values(), ids=STRANGE)
def test_a_strange_file_is_read_or_refused(commands, tmp_path, file):
    assert run(commands, tmp_path, file).output != ""


def test_a_limit_is_raised_by_its_option(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(f"actor_rollout_ref: {{rollout: {{n: 4}}}}\ncritic: {'[' * 110}{']' * 110}")
    assert main(["translate", str(path)]) == 2
    assert "--limit nesting=NUMBER" in capsys.readouterr().err
    assert main(["translate", str(path), "--limit", "nesting=120"]) in (0, 1)


def test_a_file_that_is_written_has_no_control_characters_and_an_error_names_the_file(tmp_path, capsys):
    path, out = tmp_path / "run.py", tmp_path / "out.yaml"
    path.write_text('GRPOConfig(beta=0.1, loss_type="\\x1b[2J\\ud800", x="\\x1b]0;title\\x07")')
    assert main(["translate", str(path), "--out", str(out)]) == 1
    assert out.read_text().count(r"\x1b") >= 1
    assert "\x1b" not in out.read_text()
    path.write_text("GRPOConfig(epsilon=3j)")
    assert main(["translate", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_a_script_reads_no_file_outside_its_checkout(tmp_path, monkeypatch):
    """Secrets of whoever translates the script must not reach what is published of it."""
    monkeypatch.chdir(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    scripts = tmp_path / "checkout" / "scripts"
    for folder in (scripts, elsewhere):
        folder.mkdir(parents=True)
    (tmp_path / "secret.sh").write_text("KEY=secret")
    (tmp_path / "checkout" / "common.sh").write_text("KEY=common")
    script = scripts / "run.sh"
    script.write_text("source ../common.sh\nsource ../../secret.sh\npython train.py --key $KEY")

    def key():
        return program_runs(script.read_text(), scripts)[0].settings["key"]

    assert key() == "secret"  # it is in the current folder
    monkeypatch.chdir(elsewhere)
    assert key() == "$KEY"
    (tmp_path / "checkout" / ".git").mkdir()
    assert key() == "common"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert key() == "common"  # the home folder holds secrets
    monkeypatch.chdir("/")
    assert key() == "common"


def test_settings_of_an_object_are_not_those_of_a_dict(tmp_path, capsys):
    path = tmp_path / "run.py"
    path.write_text("GRPOConfig(beta=0.1, **Settings().dict())")
    assert main(["translate", str(path)]) == 1
    assert "NOT EXPRESSED: Settings().dict() (line 1): " in capsys.readouterr().out
    path.write_text("GRPOConfig(**dict(beta=0.1, epsilon=0.3))")
    assert main(["translate", str(path)]) == 0


def test_an_error_names_the_file_of_the_setting_once(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text("a: [")
    assert main(["translate", str(path)]) == 2
    assert capsys.readouterr().err.count(str(path)) == 1


VALUES = [
    *(None, True, "", "x", [], [1], ["a", "b", "c"], b"x", {1: 2}),
    *(-1, 0, 10**400, float("inf"), float("nan"), 1e308),
]


@pytest.mark.parametrize("name", PEERS)
def test_any_value_of_any_setting_is_translated_or_one_error(name):
    peer = PEERS[name]
    messages = []
    for key in peer.defaults:
        for value in VALUES:
            try:
                translate({**switches(name), key: value}, name)
            except ConfigError as error:
                messages.append(str(error))
    assert messages
    assert max(map(len, messages)) < 2000


def switches(name):
    """Settings under which a peer reads more of the others."""
    return {
        "areal": {"actor.use_decoupled_loss": True, "actor.rejection_sampling.metric": "kl_k1"},
        "slime": {"use_tis": True, "custom_tis_function_path": "a.compute_mis_weights", "use_rs": True},
        "openrlhf": {"algo.advantage.is_correction_enable": True},
        "verl": {"algorithm.rollout_correction.rollout_rs": "seq_mean_k1", "actor_rollout_ref.actor.use_kl_loss": True},
        "trl": {"use_vllm": True},
    }.get(name, {})
