"""``install`` and ``uninstall`` against a NeMo-RL of a few lines."""

from __future__ import annotations

import importlib
import logging
import pickle
import subprocess
import sys
import types

import pytest

import nemo_geomask
from nemo_geomask.errors import ConfigError, MissingDependencyError
from nemo_geomask.hosts.nemo_rl import HostAPIError, facts, installed, installed_version, loss_dispatch
from nemo_geomask.losses import PolicyLoss, Variant
from nemo_geomask.losses.variants import CLIPPED_PG

GSPO = {"name": "gspo", "token_level_loss": False}
QUIET = Variant(surrogate=CLIPPED_PG.surrogate, pool=CLIPPED_PG.pool, defaults={"reference_policy_kl_penalty": 0.0})


def build(config):
    return importlib.import_module("nemo_rl.algorithms.grpo").setup(config)


def config(loss, **settings):
    return loss.ClippedPGLossConfig(**settings)


def test_a_name_selects_the_loss_and_no_name_leaves_nemo_rls_own(host):
    loss = host()
    nemo_geomask.install()
    ours = build(config(loss, **GSPO, masks=[{"preset": "geometric", "min": 0.9, "max": 1.2}]))
    assert type(ours) is PolicyLoss
    assert ours.config.masks[0].max == 1.2
    plain = config(loss, ratio_clip_min=0.1)
    own = build(plain)
    assert type(own) is loss.ClippedPGLossFn
    assert own.cfg is plain


@pytest.mark.parametrize("when", ["before", "after"])
def test_it_does_not_matter_when_a_trainer_was_imported(host, when):
    loss = host()
    if when == "before":
        importlib.import_module("nemo_rl.algorithms.grpo")
    nemo_geomask.install()
    assert isinstance(build(config(loss, **GSPO)), PolicyLoss)


def test_only_the_fields_that_were_given_count(host):
    loss = host()
    nemo_geomask.install()
    assert build(config(loss, name="gspo")).config.ratio_clip_min == 3e-4
    assert build(config(loss, name="gspo", ratio_clip_min=0.1)).config.ratio_clip_min == 0.1


def test_the_class_stays_the_class(host):
    loss = host()
    nemo_geomask.install()
    own = build(config(loss))
    assert isinstance(own, loss.ClippedPGLossFn)
    assert not isinstance(build(config(loss, **GSPO)), loss.ClippedPGLossFn)
    assert pickle.loads(pickle.dumps(own)).cfg == own.cfg
    assert pickle.loads(pickle.dumps(loss.ClippedPGLossFn)) is loss.ClippedPGLossFn

    class Mine(loss.ClippedPGLossFn):
        pass

    assert type(Mine(config(loss, **GSPO))) is Mine


def everything():
    """Every module of NeMo-RL's and every class in one, by what they hold."""
    modules = [module for name, module in sys.modules.items() if name.split(".")[0] == "nemo_rl"]
    found = {}
    for owner in [
        *modules,
        *(value for module in modules for value in vars(module).values() if isinstance(value, type)),
    ]:
        for name, value in vars(owner).items():
            if name not in ("__weakref__", "__dict__", "__abstractmethods__"):
                found[owner, name] = value
        found[owner, "__class__"] = type(owner)
    return found


def test_idempotent_and_undone(host):
    loss = host()
    loss_code = ("algorithms.loss.utils", "algorithms.loss.wrapper")
    for name in (
        *loss_code,
        "distributed.model_utils",
        "algorithms.grpo",
        "models.automodel",
        "models.policy.lm_policy",
        "distributed.worker_groups",
    ):
        importlib.import_module(f"nemo_rl.{name}")
    before = everything()
    for _ in range(2):
        assert not installed()
        nemo_geomask.install()
        nemo_geomask.install()
        assert installed()
        for backend in ("nemo_rl", "geomask", "geomask"):
            build(config(loss, **GSPO, logprob_backend=backend, batch_veto={"max": 1.0}))
        changed = {name for (owner, name), value in everything().items() if before.get((owner, name)) is not value}
        assert changed == {
            *("__class__", "IsolatedWorkerInitializer", "__init__", "train", "prepare_loss_input", "__call__"),
            *("DistributedLogprob", "ChunkedDistributedLogprob", "apply", "__module__"),
        }
        nemo_geomask.uninstall()
        nemo_geomask.uninstall()
        after = everything()
        assert after.keys() == before.keys()
        assert [key for key, value in after.items() if value is not before[key]] == []
    assert type(build(config(loss, **GSPO))) is loss.ClippedPGLossFn


def test_what_was_imported_in_between_is_undone_too(host):
    loss = host()
    nemo_geomask.install()
    build(config(loss, **GSPO))
    late = types.ModuleType("nemo_rl.late")
    sys.modules[late.__name__] = late
    late.prepare_loss_input = importlib.import_module("nemo_rl.algorithms.loss.utils").prepare_loss_input
    assert hasattr(late.prepare_loss_input, "__wrapped__")
    nemo_geomask.uninstall()
    assert not hasattr(late.prepare_loss_input, "__wrapped__")


def test_a_failing_installation_changes_nothing(host):
    host()
    groups = importlib.import_module("nemo_rl.distributed.worker_groups")
    builder = groups.RayWorkerBuilder
    groups.RayWorkerGroup.__init__ = 3
    before = everything()
    with pytest.raises(TypeError):
        nemo_geomask.install()
    assert {key for key, value in everything().items() if value is not before[key]} == set()
    assert builder.IsolatedWorkerInitializer is before[builder, "IsolatedWorkerInitializer"]


def test_uninstall_without_nemo_rl_does_nothing(host):
    nemo_geomask.uninstall()
    assert not installed()


@pytest.mark.parametrize("single_controller", [False, True])
def test_fused_linear_logprobs_are_forwarded(host, single_controller):
    call = "ClippedPGLossFn(config, use_fused_linear_logprobs=True)"
    parameters = "self, cfg, use_fused_linear_logprobs=False"
    loss = host(parameters=parameters, call=call, single_controller=single_controller)
    nemo_geomask.install()
    assert build(config(loss, **GSPO)).use_fused_linear_logprobs
    assert not loss.ClippedPGLossFn(config(loss, **GSPO)).use_fused_linear_logprobs
    assert type(loss.ClippedPGLossFn(cfg=config(loss))) is loss.ClippedPGLossFn


@pytest.mark.parametrize("container", ["dict", "omegaconf"])
def test_a_mapping_as_in_v0_6_0(host, container):
    loss = host(pydantic=False)
    nemo_geomask.install()
    given = {**GSPO, "masks": [{"preset": "geometric", "min": 0.9, "max": "${..top}"}], "options": {}}
    given["masks"][0]["max"] = 1.2
    if container == "omegaconf":
        given = pytest.importorskip("omegaconf").OmegaConf.create(given)
    ours = build(given)
    assert ours.config.masks[0].max == 1.2
    assert type(build({"token_level_loss": True})) is loss.ClippedPGLossFn


def test_omegaconf_inside_a_pydantic_model(host):
    omegaconf = pytest.importorskip("omegaconf")
    loss = host()
    nemo_geomask.install()
    text = "{bound: 1.2, masks: [{preset: geometric, min: 0.9, max: '${bound}'}]}"
    masks = omegaconf.OmegaConf.create(text)["masks"]
    assert build(config(loss, **GSPO, masks=masks)).config.masks[0].max == 1.2


def test_a_configuration_of_another_kind_is_named(host):
    host()
    nemo_geomask.install()
    with pytest.raises(ConfigError, match="loss_fn: must be a mapping or a pydantic model, but it is a list"):
        build([1])


def test_our_settings_without_a_name_are_refused(host):
    loss = host()
    nemo_geomask.install()
    with pytest.raises(ConfigError, match="loss_fn.masks: given without loss_fn.name.*add name: clipped_pg"):
        build(config(loss, masks=[{"preset": "veto", "max": 9.0}]))
    # Spelt-out defaults and nulls say nothing.
    assert type(build(config(loss, name=None, masks=[], options={}, nonfinite="drop_sequence"))) is loss.ClippedPGLossFn
    # A setting of NeMo-RL's own and one that nobody knows are NeMo-RL's business.
    assert type(build(config(loss, force_on_policy_ratio=True, comment="x"))) is loss.ClippedPGLossFn


def test_a_typo_is_an_error(host):
    loss = host()
    nemo_geomask.install()
    with pytest.raises(
        ConfigError, match="loss_fn.is_corection_level: unknown key; did you mean 'is_correction_level'"
    ):
        build(config(loss, **GSPO, is_corection_level="token"))


@pytest.mark.parametrize("pydantic", [True, False])
def test_what_nemo_rl_reads_itself_must_be_what_is_in_force(host, pydantic):
    loss = host(pydantic=pydantic)
    nemo_geomask.install()
    given = {"name": f"{__name__}:QUIET"}
    with pytest.raises(ConfigError, match="reads 0.01 .* puts 0.0 in force; write reference_policy_kl_penalty: 0.0"):
        build(config(loss, **given))
    assert isinstance(build(config(loss, **given, reference_policy_kl_penalty=0.0)), PolicyLoss)


def test_what_looks_at_a_batch_before_the_step_is_told_of_the_loss(host, monkeypatch):
    loss = host()
    told = []
    monkeypatch.setattr(loss_dispatch.prestep_hooks, "wrap_policy", told.append)
    nemo_geomask.install()
    ours = build(config(loss, **GSPO))
    build(config(loss))
    assert told == [ours]


def test_another_log_prob_backend_gets_the_logits(host):
    loss = host(parameters="self, cfg, use_fused_linear_logprobs=False")
    nemo_geomask.install()
    assert type(build(config(loss, **GSPO, logprob_backend="geomask"))).__name__ == "LogitLoss"
    assert type(build(config(loss, **GSPO, logprob_backend="nemo_rl"))) is PolicyLoss
    fused = {"use_fused_linear_logprobs": True}
    with pytest.raises(ConfigError, match="needs logits"):
        loss.ClippedPGLossFn(config(loss, **GSPO, logprob_backend="geomask"), **fused)


def test_logged_once_with_versions_and_the_resolved_loss(host, caplog):
    loss = host(version="9.8.7")
    caplog.set_level(logging.INFO, logger="nemo_geomask")
    nemo_geomask.install()
    nemo_geomask.install()
    for _ in range(3):
        build(config(loss, **GSPO, use_importance_sampling_correction=True))
    build(config(loss))
    first, second, third = caplog.messages
    assert first == f"nemo_geomask {nemo_geomask.__version__} on NeMo-RL 9.8.7: loss_fn.name selects the loss"
    assert second.startswith("policy loss: gspo (nemo-geomask)")
    assert "'use_importance_sampling_correction': True" in second
    assert "'sequence_level_importance_ratios': True" in second
    assert third == "loss_fn.name is not set: NeMo-RL's own ClippedPGLossFn"


WRONG = {
    "signature": ({"parameters": "self, cfg, mesh"}, r"ClippedPGLossFn.__init__\(.*\): takes \(self, cfg, mesh\)"),
    "another loss": ({"call": "dict(config)"}, "nemo_rl.algorithms.grpo builds .*: does not call ClippedPGLossFn"),
    "another call": (
        {"call": "ClippedPGLossFn(config, mesh=1)"},
        r"grpo builds .*: calls ClippedPGLossFn\(config, mesh",
    ),
    "unpacked": ({"call": "ClippedPGLossFn(*config)"}, r"grpo builds .*: calls ClippedPGLossFn\(\*config\)"),
}


@pytest.mark.parametrize(("how", "problem"), WRONG.values(), ids=WRONG)
def test_another_api_stops_the_installation(host, how, problem):
    loss = host(**how, version="9.8.7")
    metaclass = type(loss.ClippedPGLossFn)
    with pytest.raises(HostAPIError, match=problem) as caught:
        nemo_geomask.install()
    message = str(caught.value)
    assert "NeMo-RL 9.8.7" in message
    assert facts.TESTED_VERSIONS in message
    assert not installed()
    assert type(loss.ClippedPGLossFn) is metaclass


def test_a_module_that_is_gone_stops_the_installation(host, tmp_path):
    host()
    (tmp_path / "nemo_rl" / "algorithms" / "grpo.py").unlink()
    with pytest.raises(HostAPIError, match="nemo_rl.algorithms.grpo builds .*: there is no such module"):
        nemo_geomask.install()


def test_a_module_that_came_later_is_checked_where_it_is(host, tmp_path):
    host(single_controller=True)
    path = tmp_path / "nemo_rl" / "algorithms" / "single_controller_utils" / "setup.py"
    path.write_text("def setup(config):\n    return make_loss(config)\n", encoding="utf-8")
    with pytest.raises(HostAPIError, match=r"single_controller_utils.setup builds .*: does not call ClippedPGLossFn"):
        nemo_geomask.install()


def test_a_method_that_is_gone_stops_the_installation(host, tmp_path):
    host()
    path = tmp_path / "nemo_rl" / "algorithms" / "loss" / "loss_functions.py"
    path.write_text(path.read_text(encoding="utf-8").replace("def __call__(self, next", "def run(self, next"))
    with pytest.raises(HostAPIError, match=r"ClippedPGLossFn.__call__\(.*\): is not defined there"):
        nemo_geomask.install()


@pytest.mark.parametrize("placeholder", [False, True])
def test_without_nemo_rl(host, tmp_path, monkeypatch, placeholder):
    if placeholder:  # PyPI's nemo_rl is empty
        (tmp_path / "nemo_rl").mkdir()
        (tmp_path / "nemo_rl" / "__init__.py").touch()
        monkeypatch.syspath_prepend(str(tmp_path))
    else:
        monkeypatch.setattr(installed_version.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="NeMo-RL is not importable here; run this in NeMo-RL's own"):
        nemo_geomask.install()


def test_a_requirement_of_nemo_rls_is_named(host, tmp_path):
    host()
    path = tmp_path / "nemo_rl" / "distributed" / "worker_groups.py"
    path.write_text("import no_such_package\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(MissingDependencyError, match="NeMo-RL 9.8.7 can't be imported here.*no_such_package"):
        nemo_geomask.install()


@pytest.mark.slow
def test_the_package_stays_light():
    code = (
        "import sys, nemo_geomask; assert 'nemo_geomask.hosts' not in sys.modules; "
        "nemo_geomask.install; assert 'ray' not in sys.modules and 'nemo_rl' not in sys.modules; "
        "nemo_geomask.no_such"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500)
    assert done.stderr.strip().splitlines()[-1] == "AttributeError: module 'nemo_geomask' has no attribute 'no_such'"


def test_own_log_level_is_kept(host):
    host()
    logger = logging.getLogger("nemo_geomask")
    before = logger.level
    try:
        for level, after in ((logging.NOTSET, logging.INFO), (logging.WARNING, logging.WARNING)):
            logger.setLevel(level)
            nemo_geomask.install()
            assert logger.level == after
            nemo_geomask.uninstall()
    finally:
        logger.setLevel(before)
