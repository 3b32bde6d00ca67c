"""What a NeMo-RL may change, what stops a run, and what the user accepts with ``--accept``."""

from __future__ import annotations

import importlib
import logging
import os
import sys

import pytest

import nemo_geomask
from nemo_geomask.cli import main
from nemo_geomask.errors import ConfigError, HostAPIError
from nemo_geomask.hosts.nemo_rl import accepted_apis, host_api, prepare_worker
from nemo_geomask.hosts.nemo_rl.geomask_setup import is_wrapped
from nemo_geomask.hosts.nemo_rl.script_source import read_script
from nemo_geomask.hosts.nemo_rl.source_signature import Uses, compare
from nemo_geomask.losses import PolicyLoss
from nemo_geomask.recipe import nemo_rl_root

SETUP = "nemo_rl.algorithms.grpo.setup"
CALL = "nemo_rl.algorithms.loss.loss_functions.ClippedPGLossFn.__call__"
MESH = "self, next_token_logprobs, data, global_valid_seqs, global_valid_toks, mesh"
TRAIN = "nemo_rl.models.policy.lm_policy.Policy.train"


@pytest.fixture(autouse=True)
def _nothing_accepted(monkeypatch):
    monkeypatch.setenv(accepted_apis.VARIABLE, "")


def edit(tmp_path, module, old, new):
    path = tmp_path.joinpath("nemo_rl", *module.split(".")).with_suffix(".py")
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


FORM = ("self", "cluster", "name")
PARAMETERS = {
    "the known parameters": ("self, cluster, name", None),
    "a known one has a default": ("self, cluster, name='x'", None),
    "two more with defaults": ("self, cluster, name, timeout=None, retries=3", None),
    "one more by keyword": ("self, cluster, name, *, timeout=None", None),
    "further options": ("self, cluster, name, *args, **kwargs", None),
    "one more without a default": ("self, cluster, name, timeout", ", where timeout has no default"),
    "one more by keyword without": ("self, cluster, name, *, timeout", ", where timeout has no default"),
    "one fewer": ("self, cluster", ", without name"),
    "another name": ("self, cluster, label", ", without name"),
    "another order": ("self, name, cluster", ""),
    "one in between": ("self, cluster, timeout=None, name=None", ""),
}


@pytest.mark.parametrize(("parameters", "reason"), PARAMETERS.values(), ids=PARAMETERS)
@pytest.mark.parametrize("is_replaced", [True, False])
def test_parameters_that_a_function_may_have(tmp_path, parameters, reason, is_replaced):
    """One in whose place ours is called has the known ones first; one that is wrapped has them somewhere."""
    (tmp_path / "m.py").write_text(f"class C:\n    async def f({parameters}): ...\n", encoding="utf-8")
    api = Uses("nemo_rl.m", "C", {"f": FORM}, "a test", is_replaced=is_replaced)
    differences = compare(api, tmp_path).differences
    assert bool(differences) == (reason is not None and (is_replaced or "without" in reason))
    for difference in differences:
        names = parameters.replace("=None", "").replace("*, ", "")
        assert difference.api == "nemo_rl.m.C.f"
        assert difference.message == f"nemo_rl.m.C.f takes ({names}){reason}"
        assert not difference.is_missing


def run_setup(setup, loss, **settings):
    """The policy and the loss that ``setup`` returns."""
    config = importlib.import_module("nemo_rl.algorithms.grpo").MasterConfig(loss.ClippedPGLossConfig(**settings))
    policy, _, loss_fn, *_ = setup(config)
    return policy, loss_fn


def test_an_accepted_api_does_not_stop_the_run_and_each_run_says_so(host, install, caplog):
    loss = host(loss_call=MESH)
    with pytest.raises(HostAPIError, match=f"go on at your own risk with --accept {CALL}. See docs/how_to/upgrade.md$"):
        install()
    assert not is_wrapped(sys.modules["__main__"].setup)
    accepted_apis.accept([CALL])
    for _ in range(2):
        caplog.clear()
        install()
        (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert warning.message.startswith(f"accepted at your own risk (--accept): {CALL} differs from the tested")
        assert "mesh), where mesh has no default" in warning.message
        nemo_geomask.uninstall()
    _, ours = run_setup(install(), loss, name="gspo")
    assert isinstance(ours, PolicyLoss)


def test_all_differences_are_named_and_one_that_is_left_stops_the_run(host, install, tmp_path):
    host(loss_call=MESH, setup="config, policy_factory=None")
    with pytest.raises(HostAPIError, match=f"--accept {CALL} --accept {SETUP}. See"):
        install()
    accepted_apis.accept([CALL])
    with pytest.raises(HostAPIError, match=f"risk with --accept {SETUP}. See") as caught:
        install()
    assert CALL not in str(caught.value)
    accepted_apis.accept([SETUP])
    install()


def test_accepting_what_does_not_differ_is_an_error_that_names_what_does(host, install):
    host(loss_call=MESH)
    accepted_apis.accept([CALL, SETUP, "nemo_rl.no.such"])
    with pytest.raises(ConfigError) as caught:
        install()
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"--accept {SETUP}", "--accept nemo_rl.no.such"]
    assert all(f"accept one that differs: {CALL} (" in line for line in lines)
    assert not is_wrapped(sys.modules["__main__"].setup)


def test_an_api_that_does_not_differ_or_is_gone_cannot_be_accepted(host, install, tmp_path):
    host()
    accepted_apis.accept([CALL])
    with pytest.raises(ConfigError, match="does not differ .*; none differs here; leave it out"):
        install()
    edit(tmp_path, "algorithms.loss.loss_functions", "def __call__(self, next", "def run(self, next")
    with pytest.raises(HostAPIError, match=f"--accept {CALL}: {CALL} is not defined, so a run cannot go on with it"):
        install()
    os.environ[accepted_apis.VARIABLE] = ""
    with pytest.raises(HostAPIError) as caught:
        install()
    assert "--accept" not in str(caught.value)


def test_an_api_of_the_policy_is_accepted_by_its_name_too(host, install, caplog):
    loss = host(train="self, batch, loss_fn, eval_mode=False")
    setup = install()
    with pytest.raises(HostAPIError, match=rf"takes \(self, batch.*, without data\. Remove .* --accept {TRAIN}$"):
        run_setup(setup, loss, name="gspo")
    nemo_geomask.uninstall()
    accepted_apis.accept([TRAIN])
    setup = install()
    assert f"(--accept): {TRAIN} differs" in caplog.text
    caplog.clear()
    run_setup(setup, loss, name="gspo")
    assert f"(--accept): {TRAIN} differs" in caplog.text


def test_a_worker_accepts_what_the_driver_accepts(host):
    host()
    wrapper = importlib.import_module("nemo_rl.algorithms.loss.wrapper").SequencePackingLossWrapper
    call = wrapper.__call__
    wrapper.__call__ = lambda self, logits, data, global_valid_seqs, global_valid_toks: None
    try:
        with pytest.raises(HostAPIError, match=r"--accept nemo_rl\S+wrapper.SequencePackingLossWrapper.__call__$"):
            prepare_worker()
        # NeMo-RL passes the driver's environment variables on to its workers.
        os.environ[accepted_apis.VARIABLE] = f"{wrapper.__module__}.SequencePackingLossWrapper.__call__"
        assert prepare_worker()
    finally:
        nemo_geomask.uninstall()
        wrapper.__call__ = call


def test_a_run_and_its_accepted_api(host, tmp_path, monkeypatch, capsys):
    host(loss_call=MESH)
    path = tmp_path / "train.py"
    lines = (
        *("import sys", "from nemo_rl.algorithms.grpo import setup", "if __name__ == '__main__':"),
        "    raise SystemExit(' '.join(sys.argv[1:]))",
    )
    path.write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", sys.argv[:])
    monkeypatch.setattr(sys, "path", sys.path[:])
    assert main(["run", str(path)]) == 2
    assert f"--accept {CALL}" in capsys.readouterr().err
    for arguments in (["--accept", CALL], [f"--accept={CALL}"]):
        assert main(["run", str(path), *arguments]) == 2
        assert "write it before the script" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="^--config recipe.yaml$"):
        main(["run", "--accept", CALL, str(path), "--config", "recipe.yaml"])


ROOT = nemo_rl_root()
real = pytest.mark.skipif(ROOT is None, reason="needs a NeMo-RL checkout: NEMO_RL_ROOT")


@real
def test_a_real_nemo_rl_differs_in_nothing():
    states = host_api.compare_all(ROOT / "nemo_rl")
    assert [state for state in states if state.difference] == []


@real
def test_the_scripts_of_a_real_nemo_rl():
    """Those that train a policy are run, and all others that call a ``setup`` are refused."""
    scripts = [path for path in sorted((ROOT / "examples").rglob("run_*.py")) if "setup" in path.read_text("utf-8")]
    problems = {path.stem: read_script(str(path)).problem for path in scripts}
    policy_loss = {name for name in problems if "grpo" in name or "ppo" in name}
    assert len(policy_loss) >= 4
    assert {name for name, problem in problems.items() if not problem} == policy_loss
    assert all(problem.startswith("imports none of setup of") for problem in problems.values() if problem)
