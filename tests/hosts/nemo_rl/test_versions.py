"""What a NeMo-RL may change, what stops a run, and what the user accepts with ``--accept``."""

from __future__ import annotations

import ast
import importlib
import inspect
import logging
import os
import sys

import pytest

import nemo_geomask
from nemo_geomask.cli import main
from nemo_geomask.errors import ConfigError
from nemo_geomask.hosts.nemo_rl import HostAPIError, accepted_apis, host_api, installed, prepare_worker
from nemo_geomask.hosts.nemo_rl.source_signature import Signature, parse_module
from nemo_geomask.losses import PolicyLoss
from nemo_geomask.recipe import nemo_rl_root

INIT = "nemo_rl.algorithms.loss.loss_functions.ClippedPGLossFn.__init__"
CALL = "nemo_rl.algorithms.loss.loss_functions.ClippedPGLossFn.__call__"
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
ACCEPTED = {
    "the known parameters": (FORM, "self, cluster, name"),
    "a known one has a default": (FORM, "self, cluster, name='x'"),
    "one more with a default": (FORM, "self, cluster, name, timeout=None"),
    "two more": (FORM, "self, cluster, name='x', timeout=None, retries=3"),
    "one more by keyword": (FORM, "self, cluster, name, *, timeout=None"),
    "a known one by keyword": (FORM, "self, cluster, timeout=None, *, name"),
    "further options": (FORM, "self, cluster, name, *args, **kwargs"),
    "one more before the options": (("self", "a", "**options"), "self, a, timeout=None, **extra"),
    "one more behind *args": (("self", "a", "*rest"), "self, a, *rest, timeout=None"),
}
REFUSED = {
    "one more without a default": (FORM, "self, cluster, name, timeout", ", where timeout has no default"),
    "one more by keyword without": (FORM, "self, cluster, name, *, timeout", ", where timeout has no default"),
    "one fewer": (FORM, "self, cluster", ""),
    "another name": (FORM, "self, cluster, label", ", where label has no default"),
    "another order": (FORM, "self, name, cluster", ""),
    "one in between": (FORM, "self, cluster, timeout=None, name=None", ""),
    "options that are gone": (("self", "a", "**options"), "self, a", ""),
    "*args that are gone": (("self", "a", "*rest"), "self, a, rest=()", ""),
    "one that takes an argument of *args": (("self", "a", "*rest"), "self, a, timeout=None, *rest", ""),
}


def differences(form, parameters):
    tree = ast.parse(f"class C:\n    def f({parameters}): ...\n")
    return Signature("nemo_rl.m", "C.f", (form,)).differences(tree)


@pytest.mark.parametrize(("form", "parameters"), ACCEPTED.values(), ids=ACCEPTED)
def test_parameters_with_defaults_may_follow_the_known_ones(form, parameters):
    assert differences(form, parameters) == []


@pytest.mark.parametrize(("form", "parameters", "reason"), REFUSED.values(), ids=REFUSED)
def test_any_other_change_of_the_parameters_is_a_difference(form, parameters, reason):
    (difference,) = differences(form, parameters)
    names = parameters.replace("=None", "").replace("=()", "").replace("*, ", "")
    assert difference.api == "nemo_rl.m.C.f"
    assert difference.message == f"takes ({names}){reason}"
    assert not difference.is_missing


def test_one_form_of_several_is_enough():
    signature = Signature("nemo_rl.m", "f", (("a",), ("a", "b")))
    assert signature.differences(ast.parse("async def f(a, b, c=1): ...")) == []
    assert signature.differences(ast.parse("def f(b): ..."))[0].message == "takes (b)"


def test_a_worker_group_with_one_parameter_more(host, tmp_path):
    """NeMo-RL's pull requests 3714 and 3677."""
    loss = host()
    edit(
        tmp_path, "distributed.worker_groups", "        env_vars={},\n", "        env_vars={},\n        logger=None,\n"
    )
    nemo_geomask.install()
    ours = importlib.import_module("nemo_rl.algorithms.grpo").setup(loss.ClippedPGLossConfig(name="gspo"))
    assert isinstance(ours, PolicyLoss)
    group = importlib.import_module("nemo_rl.distributed.worker_groups").RayWorkerGroup
    builder = importlib.import_module("nemo_rl.distributed.worker_groups").RayWorkerBuilder("nemo_rl.a.value.Worker")
    assert group([1, 2], builder, logger="x").workers == [1, 2]
    assert "logger" in inspect.signature(group.__init__).parameters


def test_an_accepted_api_does_not_stop_the_run_and_each_run_says_so(host, caplog):
    loss = host(parameters="self, cfg, mesh", call="ClippedPGLossFn(config)")
    with pytest.raises(HostAPIError, match=f"go on at your own risk with --accept {INIT}. See docs/new_nemo_rl.md$"):
        nemo_geomask.install()
    assert not installed()
    accepted_apis.accept([INIT])
    for _ in range(2):
        caplog.clear()
        nemo_geomask.install()
        (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert warning.message.startswith(f"accepted at your own risk (--accept): {INIT} differs from the tested")
        assert "NeMo-RL: takes (self, cfg, mesh), where mesh has no default. What this run" in warning.message
        nemo_geomask.uninstall()
    nemo_geomask.install()
    setup = importlib.import_module("nemo_rl.algorithms.grpo").setup
    assert isinstance(setup(loss.ClippedPGLossConfig(name="gspo")), PolicyLoss)


def test_all_differences_are_named_and_one_that_is_left_stops_the_run(host, tmp_path):
    host(parameters="self, cfg, mesh", call="ClippedPGLossFn(config, mesh=1)")
    with pytest.raises(HostAPIError, match=f"--accept {INIT} --accept nemo_rl.algorithms.grpo. See"):
        nemo_geomask.install()
    accepted_apis.accept([INIT])
    with pytest.raises(HostAPIError, match="risk with --accept nemo_rl.algorithms.grpo. See") as caught:
        nemo_geomask.install()
    assert INIT not in str(caught.value)
    (tmp_path / "nemo_rl" / "algorithms" / "grpo.py").unlink()
    accepted_apis.accept(["nemo_rl.algorithms.grpo"])
    nemo_geomask.install()


def test_accepting_what_does_not_differ_is_an_error_that_names_what_does(host):
    host(parameters="self, cfg, mesh")
    accepted_apis.accept([INIT, CALL, "nemo_rl.no.such"])
    with pytest.raises(ConfigError) as caught:
        nemo_geomask.install()
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"--accept {CALL}", "--accept nemo_rl.no.such"]
    assert all(f"accept one that differs: {INIT} (" in line for line in lines)
    assert not installed()


def test_accepting_where_nothing_differs_is_an_error(host):
    host()
    accepted_apis.accept([INIT])
    with pytest.raises(ConfigError, match="does not differ .*; none differs here; leave it out"):
        nemo_geomask.install()


def test_an_api_that_is_gone_cannot_be_accepted(host, tmp_path):
    host()
    edit(tmp_path, "algorithms.loss.loss_functions", "def __call__(self, next", "def run(self, next")
    with pytest.raises(HostAPIError) as caught:
        nemo_geomask.install()
    assert "--accept" not in str(caught.value)
    accepted_apis.accept([CALL])
    with pytest.raises(HostAPIError, match=f"--accept {CALL}: is not defined there, so a run cannot go on with it"):
        nemo_geomask.install()


def test_an_api_that_some_settings_need_is_accepted_by_its_name_too(host, caplog):
    loss = host(train="self, batch, loss_fn, eval_mode=False")
    nemo_geomask.install()
    setup = importlib.import_module("nemo_rl.algorithms.grpo").setup
    settings = loss.ClippedPGLossConfig(name="gspo", batch_veto={"max": 1.0})
    with pytest.raises(HostAPIError, match=rf"takes \(self, batch.*, without data\. Remove .* --accept {TRAIN}$"):
        setup(settings)
    nemo_geomask.uninstall()
    accepted_apis.accept([TRAIN])
    nemo_geomask.install()
    assert f"(--accept): {TRAIN} differs" in caplog.text
    caplog.clear()
    setup(settings)
    assert f"(--accept): {TRAIN} differs from the tested versions of NeMo-RL: takes (self, batch" in caplog.text


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
    host(parameters="self, cfg, mesh")
    path = tmp_path / "train.py"
    path.write_text("import sys\nraise SystemExit(' '.join(sys.argv[1:]))", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", sys.argv[:])
    monkeypatch.setattr(sys, "path", sys.path[:])
    assert main(["run", str(path)]) == 2
    assert f"--accept {INIT}" in capsys.readouterr().err
    for arguments in (["--accept", INIT], [f"--accept={INIT}"]):
        assert main(["run", str(path), *arguments]) == 2
        assert "write it before the script" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="^--config recipe.yaml$"):
        main(["run", "--accept", INIT, str(path), "--config", "recipe.yaml"])


ROOT = nemo_rl_root()
real = pytest.mark.skipif(ROOT is None, reason="needs a NeMo-RL checkout: NEMO_RL_ROOT")
SIGNATURES = [api for api in host_api.EVERY_RUN if isinstance(api, Signature)]


@real
def test_a_real_nemo_rl_differs_in_nothing():
    states = host_api.compare_all(ROOT / "nemo_rl")
    assert [state for state in states if state.difference] == []


@real
@pytest.mark.parametrize("api", SIGNATURES, ids=lambda api: api.path)
@pytest.mark.parametrize("has_default", [True, False])
def test_a_real_function_may_get_one_parameter_more(api, has_default):
    tree = parse_module(api.module, ROOT / "nemo_rl")
    if tree is None:
        pytest.skip("this version does not have it")
    node = tree
    for name in api.path.split("."):
        node = next(child for child in node.body if getattr(child, "name", None) == name)
    node.args.kwonlyargs.append(ast.arg("further"))
    node.args.kw_defaults.append(ast.Constant(None) if has_default else None)
    messages = [difference.message for difference in api.differences(tree)]
    assert [message.endswith("where further has no default") for message in messages] == [True] * (not has_default)
