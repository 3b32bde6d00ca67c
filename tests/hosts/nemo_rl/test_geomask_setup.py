"""``with_geomask`` and ``install`` against a NeMo-RL of a few lines."""

from __future__ import annotations

import importlib
import logging
import sys
import types
from pathlib import Path

import pytest

import nemo_geomask
from nemo_geomask.errors import ConfigError, HostAPIError, MissingDependencyError
from nemo_geomask.hosts.nemo_rl import (
    build_nemo_rl_loss,
    facts,
    geomask_setup,
    installed_version,
    prepare_policy,
    with_geomask,
)
from nemo_geomask.losses import PolicyLoss, Variant
from nemo_geomask.objectives.clipped_pg import CLIPPED_PG

GSPO = {"name": "gspo", "token_level_loss": False}
REFUSED = {"nonfinite": "raise"}  # by the fake
QUIET = Variant(surrogate=CLIPPED_PG.surrogate, pool=CLIPPED_PG.pool, defaults={"reference_policy_kl_penalty": 0.0})


def grpo():
    return importlib.import_module("nemo_rl.algorithms.grpo")


def config(loss, settings, **sections):
    return grpo().MasterConfig(loss.ClippedPGLossConfig(**settings), **sections)


def run_setup(loss, settings, **sections):
    """What the wrapped ``setup`` returns, by name."""
    names = ("policy", "generation", "loss", "logger", "checkpointer", "config")
    result = with_geomask(grpo().setup)(config(loss, settings, **sections))
    return types.SimpleNamespace(**dict(zip(names, result, strict=True)))


def build(loss, settings, **sections):
    return run_setup(loss, settings, **sections).loss


@pytest.fixture(autouse=True)
def messages_are_logged_again():
    geomask_setup.logged_messages.clear()


def test_a_name_selects_the_loss_and_no_name_leaves_nemo_rls_own(host):
    loss = host()
    result = run_setup(loss, {**GSPO, "masks": [{"preset": "geometric", "min": 0.9, "max": 1.2}]})
    assert type(result.loss) is PolicyLoss
    assert result.loss.config.masks[0].max == 1.2
    assert type(result.policy).__name__ == "GeomaskPolicy"
    assert result.policy.geomask_resumed_step == 7
    # All else is what setup returned.
    assert (result.generation, type(result.logger).__name__, result.config.name) == ("generation", "Logger", "gspo")
    plain = run_setup(loss, {"ratio_clip_min": 0.1})
    assert type(plain.loss) is loss.ClippedPGLossFn
    assert plain.loss.cfg is plain.config
    assert type(plain.policy).__name__ == "Policy"


def test_arguments_reach_setup_by_position_and_by_name(host):
    loss = host()
    setup = with_geomask(grpo().setup)
    made = []

    def factory(**kwargs):
        made.append(grpo().Policy(**kwargs))
        return made[-1]

    for arguments, named in (((), {"policy_factory": factory}), (("tokenizer", factory), {})):
        policy, *_ = setup(config(loss, GSPO), *arguments, **named)
        assert policy is made[-1]
        assert type(policy).__name__ == "GeomaskPolicy"


def test_the_configuration_need_not_be_the_first_argument(host):
    loss = host(setup="tokenizer, master_config, policy_factory=None")
    policy, *_ = with_geomask(grpo().setup)("tokenizer", config(loss, GSPO))
    assert type(policy).__name__ == "GeomaskPolicy"


def test_a_setup_without_a_factory_has_its_policys_class_changed(host):
    loss = host(setup="master_config, tokenizer=None, *, policy_factory_of_others=None")
    path = Path(sys.modules["nemo_rl"].__path__[0], "algorithms", "grpo.py")
    path.write_text(path.read_text(encoding="utf-8").replace("(policy_factory or Policy)", "Policy"), encoding="utf-8")
    result = run_setup(loss, GSPO)
    assert type(result.policy).__name__ == "GeomaskPolicy"
    assert isinstance(result.policy, grpo().Policy)


def test_wrapping_twice_is_wrapping_once(host):
    host()
    setup = with_geomask(grpo().setup)
    assert with_geomask(setup) is setup


def test_the_single_controllers_setup(host):
    loss = host(single_controller=True)
    module = importlib.import_module("nemo_rl.algorithms.single_controller_utils.setup")
    actor_args, timing = with_geomask(module.setup_single_controller)(config(loss, GSPO), "tokenizer")
    assert type(actor_args.loss_fn) is PolicyLoss
    assert type(actor_args.trainer_handle).__name__ == "GeomaskPolicy"
    assert type(actor_args) is module.SingleControllerActorArgs
    assert timing == "timing"


def test_a_setup_that_returns_no_loss_is_an_error_and_not_nemo_rls_loss_in_silence(host):
    loss = host(call="object()")
    with pytest.raises(HostAPIError, match=r"returned 0 objects of ClippedPGLossFn \(GeomaskPolicy, str, object"):
        run_setup(loss, GSPO)


def test_only_the_fields_that_the_recipe_sets_count(host):
    loss = host()
    assert build(loss, {"name": "gspo"}).config.ratio_clip_min == 3e-4
    assert build(loss, {"name": "gspo", "ratio_clip_min": 0.1}).config.ratio_clip_min == 0.1


def test_settings_that_nemo_rls_own_loss_refuses(host, caplog):
    loss = host()
    caplog.set_level(logging.INFO, logger="nemo_geomask")
    settings = {**GSPO, **REFUSED}
    with pytest.raises(AssertionError):
        loss.ClippedPGLossFn(loss.ClippedPGLossConfig(**settings))
    master_config = config(loss, {**settings, "reference_policy_kl_penalty": 0.0})
    before = master_config.loss_fn
    *_, seen = with_geomask(grpo().setup)(master_config)
    # Only setup saw a stand-in, with what the trainers read.
    assert master_config.loss_fn is before
    assert seen is not before
    assert seen.reference_policy_kl_penalty == 0.0
    assert not hasattr(seen, "nonfinite")
    assert "NeMo-RL's own ClippedPGLossFn refuses these settings of loss_fn (AssertionError" in caplog.text
    # And only until it fails.
    grpo().Policy.__init__ = lambda self, **kwargs: 1 / 0
    with pytest.raises(ZeroDivisionError):
        with_geomask(grpo().setup)(master_config)
    assert master_config.loss_fn is before


def all_attributes():
    """Every module of NeMo-RL's and every class in one, by what they hold."""
    modules = [module for name, module in sys.modules.items() if name.split(".")[0] == "nemo_rl"]
    classes = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    attributes = {}
    for owner in [*modules, *classes]:
        for name, value in vars(owner).items():
            if name not in ("__weakref__", "__dict__", "__abstractmethods__"):
                attributes[owner, name] = value
        attributes[owner, "__class__"] = type(owner)
    return attributes


def import_everything():
    for name in (
        *("algorithms.loss.wrapper", "algorithms.grpo", "distributed.model_utils", "distributed.worker_groups"),
        *("models.policy.lm_policy", "models.megatron.train", "models.automodel"),
    ):
        importlib.import_module(f"nemo_rl.{name}")


@pytest.mark.parametrize(
    ("settings", "policy", "changed"),
    [
        ({}, {}, set()),
        ({"batch_veto": {"max": 1.0}, "ratio_anchor": "gen"}, {}, set()),
        ({}, {"sequence_packing": {"enabled": True}}, {"__call__"}),
        ({"metrics": "nemo_rl"}, {"sequence_packing": {"enabled": True}}, set()),
        (
            {"logprob_backend": "geomask"},
            {"sequence_packing": {"enabled": True}},
            {"__call__", "DistributedLogprob", "ChunkedDistributedLogprob"},
        ),
        (
            {"logprob_backend": "geomask_linear"},
            {},
            {
                *("DistributedLogprob", "ChunkedDistributedLogprob", "__call__"),
                *("forward_with_post_processing_fn", "model_forward"),
            },
        ),
    ],
    ids=["default", "pre-step", "packed", "packed sums", "kernels", "hidden states"],
)
def test_what_is_replaced_and_that_it_is_put_back(host, settings, policy, changed):
    loss = host()
    import_everything()
    before = all_attributes()
    for _ in range(2):
        build(loss, {**GSPO, **settings}, policy=policy)
        during = all_attributes()
        assert {key[1] for key in before if key in during and during[key] is not before[key]} == changed
        nemo_geomask.uninstall()
        nemo_geomask.uninstall()
        after = all_attributes()
        assert after.keys() == before.keys()
        assert [key for key, value in after.items() if value is not before[key]] == []


@pytest.mark.parametrize("is_fused", [False, True])
def test_fused_linear_logprobs_are_passed_on(host, is_fused):
    loss = host()
    megatron = {"megatron_cfg": {"enabled": True, "use_fused_linear_logprobs": is_fused}}
    assert build(loss, GSPO, policy=megatron).use_fused_linear_logprobs is is_fused
    off = {"megatron_cfg": {"enabled": False, "use_fused_linear_logprobs": True}}
    assert not build(loss, GSPO, policy=off).use_fused_linear_logprobs


@pytest.mark.parametrize("container", ["dict", "omegaconf"])
def test_a_mapping_as_in_v0_6_0(host, container):
    loss = host(pydantic=False)
    settings = {**GSPO, "masks": [{"preset": "geometric", "min": 0.9, "max": 1.2}], "options": {}}
    if container == "omegaconf":
        settings = pytest.importorskip("omegaconf").OmegaConf.create(settings)
    master_config = {"loss_fn": settings, "policy": {}}
    setup = with_geomask(grpo().setup)
    policy, _, ours, *_ = setup(master_config)
    assert ours.config.masks[0].max == 1.2
    assert type(policy).__name__ == "GeomaskPolicy"
    assert master_config["loss_fn"] is settings
    *_, own, _, _, _ = setup({"loss_fn": {"token_level_loss": True}, "policy": {}})
    assert type(own) is loss.ClippedPGLossFn
    # NeMo-RL's own loss needs keys that a recipe of ours may lack.
    master_config = {"loss_fn": {"name": "gspo"}, "policy": {}}
    *_, seen = setup(master_config)
    assert "token_level_loss" in seen
    assert master_config["loss_fn"] == {"name": "gspo"}


def test_omegaconf_inside_a_pydantic_model(host):
    omegaconf = pytest.importorskip("omegaconf")
    loss = host()
    text = "{bound: 1.2, masks: [{preset: geometric, min: 0.9, max: '${bound}'}]}"
    masks = omegaconf.OmegaConf.create(text)["masks"]
    assert build(loss, {**GSPO, "masks": masks}).config.masks[0].max == 1.2


def test_a_configuration_of_another_kind_is_named(host):
    host()
    with pytest.raises(ConfigError, match="loss_fn: must be a mapping or a pydantic model, but it is a list"):
        with_geomask(grpo().setup)(grpo().MasterConfig([1]))


def test_our_settings_without_a_name_are_refused(host):
    loss = host()
    with pytest.raises(ConfigError, match="loss_fn.masks: given without loss_fn.name.*add name: clipped_pg"):
        build(loss, {"masks": [{"preset": "veto", "max": 9.0}]})
    # Defaults that are written out, and nulls, select nothing.
    spelt_out = {"name": None, "masks": [], "options": {}, "nonfinite": "drop_sequence"}
    assert type(build(loss, spelt_out)) is loss.ClippedPGLossFn
    # NeMo-RL itself judges its own settings and unknown ones.
    assert type(build(loss, {"force_on_policy_ratio": True, "comment": "x"})) is loss.ClippedPGLossFn


def test_a_typo_is_an_error_before_setup(host):
    loss = host(call="1 / 0")
    with pytest.raises(
        ConfigError, match="loss_fn.is_corection_level: unknown key; did you mean 'is_correction_level'"
    ):
        build(loss, {**GSPO, "is_corection_level": "token"})


def test_a_trainer_and_the_loss_must_use_the_same_value(host):
    loss = host()
    settings = {"name": f"{__name__}:QUIET"}
    with pytest.raises(ConfigError, match="reads 0.01 .* puts 0.0 in force; write reference_policy_kl_penalty: 0.0"):
        build(loss, settings)
    assert isinstance(build(loss, {**settings, "reference_policy_kl_penalty": 0.0}), PolicyLoss)


def test_a_log_prob_backend_that_takes_logits(host):
    loss = host()
    assert type(build(loss, {**GSPO, "logprob_backend": "geomask"})).__name__ == "LogitLoss"
    assert type(build(loss, {**GSPO, "logprob_backend": "nemo_rl"})) is PolicyLoss
    fused = {"megatron_cfg": {"enabled": True, "use_fused_linear_logprobs": True}}
    with pytest.raises(ConfigError, match="needs logits"):
        build(loss, {**GSPO, "logprob_backend": "geomask"}, policy=fused)
    filtered = {"generation": {"top_p": 0.9, "top_k": None}}
    with pytest.raises(ConfigError, match=r"policy samples with top_k: None, top_p: 0.9; set logprob_backend: nemo_rl"):
        build(loss, {**GSPO, "logprob_backend": "geomask"}, policy=filtered)
    assert build(loss, GSPO, policy=filtered)


@pytest.mark.parametrize(
    ("settings", "is_logged"),
    [({}, True), ({"metrics": "nemo_rl"}, False), ({"ratio_anchor": "gen"}, False)],
    ids=["full", "nemo_rl", "without prev"],
)
def test_a_recorded_run_logs_the_mismatch_of_each_environment(host, tmp_path, settings, is_logged):
    pytest.importorskip("pyarrow")
    result = run_setup(host(), {"name": "clipped_pg", "record": {"dir": str(tmp_path)}, **settings})
    to_log = {
        "agent_ref": [{"name": "math"}, {"name": "code"}],
        "input_lengths": [2, 2],
        "sample_loss_mask": [1.0, 1.0],
        "token_loss_mask": [[0, 1]] * 2,
        "generation_logprobs": [[0.0, -0.5]] * 2,
        "prev_logprobs": [[0.0, -0.6]] * 2,
    }
    result.logger.log_batched_dict_as_jsonl(to_log, "train_data_step1.jsonl")
    metrics = [f"geomask/environment/{name}/mismatch_k3" for name in ("code", "math")]
    assert result.logger.logged == ["train_data_step1.jsonl", *(metrics if is_logged else [])]


def test_a_recorded_run_whose_rewards_nemo_rl_does_not_log(host, tmp_path, caplog):
    pytest.importorskip("pyarrow")
    caplog.set_level(logging.INFO, logger="nemo_geomask")
    loss = host()
    record = {**GSPO, "record": {"dir": str(tmp_path)}}
    build(loss, record, env={"should_log_nemo_gym_responses": False})
    build(loss, GSPO, env={"should_log_nemo_gym_responses": True})
    assert "rewards and environments will be null" not in caplog.text
    build(loss, record, env={"should_log_nemo_gym_responses": True})
    assert "loss_fn.record: rewards and environments will be null" in caplog.text


def test_versions_and_the_resolved_loss_are_logged_once(host, caplog):
    loss = host(version="9.8.7")
    caplog.set_level(logging.INFO, logger="nemo_geomask")
    for _ in range(3):
        build(loss, {**GSPO, "use_importance_sampling_correction": True})
    build(loss, {})
    first, second = caplog.messages
    assert first.startswith(f"policy loss: gspo (nemo-geomask), nemo_geomask {nemo_geomask.__version__}, NeMo-RL 9.8.7")
    assert "'use_importance_sampling_correction': True" in first
    assert "'sequence_level_importance_ratios': True" in first
    assert second == "loss_fn.name is not set: NeMo-RL's own ClippedPGLossFn"


WRONG = {
    "loss": ({"loss_call": "self, logprobs, data"}, r"ClippedPGLossFn.__call__ takes \(self, logprobs, data\)"),
    "setup": ({"setup": "config, policy_factory=None"}, r"nemo_rl.algorithms.grpo.setup takes \(config, "),
    "policy": ({"train": "self, batch"}, r"Policy.train takes \(self, batch\)"),
}


@pytest.mark.parametrize(("how", "problem"), WRONG.values(), ids=WRONG)
def test_another_api_is_an_error(host, how, problem):
    loss = host(**how, version="9.8.7")
    with pytest.raises(HostAPIError, match=problem) as caught:
        build(loss, GSPO)
    assert "NeMo-RL 9.8.7" in str(caught.value)
    assert facts.TESTED_VERSIONS in str(caught.value)


def test_a_module_that_is_gone_is_an_error(host, tmp_path):
    loss = host()
    master_config = config(loss, GSPO)
    setup = with_geomask(grpo().setup)
    (tmp_path / "nemo_rl" / "algorithms" / "grpo.py").unlink()
    with pytest.raises(HostAPIError, match="nemo_rl.algorithms.grpo.*there is no such module"):
        setup(master_config)


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


def test_install_wraps_setup_where_the_script_imported_it(host, monkeypatch):
    host()
    main = types.ModuleType("__main__")
    main.begin, main.other = grpo().setup, grpo().Policy
    monkeypatch.setitem(sys.modules, "__main__", main)
    before = all_attributes()
    for _ in range(2):
        nemo_geomask.install()
    assert geomask_setup.is_wrapped(main.begin)
    assert main.other is grpo().Policy
    assert all_attributes() == before
    main.begin = grpo().setup  # another import
    nemo_geomask.install()
    assert geomask_setup.is_wrapped(main.begin)
    for _ in range(2):
        nemo_geomask.uninstall()
        assert main.begin is grpo().setup
    nemo_geomask.install()
    main.begin = others = lambda config: None
    nemo_geomask.uninstall()
    assert main.begin is others


def test_a_setup_of_another_algorithm_is_named(host):
    host()

    def setup(master_config):
        raise AssertionError

    with pytest.raises(ConfigError, match="loss_fn: is missing in the configuration, a SimpleNamespace; with_geomask"):
        with_geomask(setup)(types.SimpleNamespace(policy={}))


def test_a_policy_without_a_loss_of_ours(host):
    loss = host()
    policy = run_setup(loss, {}).policy
    chosen = build_nemo_rl_loss(config(loss, {}))
    assert chosen is None
    with pytest.raises(ConfigError, match="loss_fn.name: is not set, so build_nemo_rl_loss returned None"):
        prepare_policy(policy, chosen)


SURVIVORS = {
    "denominator": "kept_in_loss",
    "kl_tokens": "kept",
    "masks": [{"log_ratio": "total", "level": "sequence_mean", "statistic": "ratio_abs", "max": 1.7}],
}


@pytest.mark.parametrize(
    ("settings", "key", "value"),
    [
        (SURVIVORS, "denominator", "kept_in_loss, but NeMo-RL's workers do not multiply the gradient by G/K"),
        ({"proximal_policy": "interpolated"}, "proximal_policy", "interpolated, but it reads the tokens' versions"),
        ({"max_token_lag": 2}, "max_token_lag", "2, but it reads the tokens' versions"),
    ],
)
def test_a_setting_that_needs_a_loop_of_ones_own_is_refused(host, settings, key, value):
    """Before a worker starts, in every way into NeMo-RL."""
    loss = host()
    ours = nemo_geomask.build_loss({"name": "clipped_pg", **settings})
    policy = run_setup(loss, GSPO).policy
    recipe = {"loss_fn": {"name": "clipped_pg", **settings}, "policy": {}}
    ways = [lambda: with_geomask(lambda master_config: pytest.fail("setup ran"))(recipe)]
    if key == "denominator":  # a batch of one's own may have versions, but the step is the worker's
        ways.append(lambda: prepare_policy(policy, ours))
    else:
        prepare_policy(policy, ours)
    for way in ways:
        with pytest.raises(ConfigError) as caught:
            way()
        (problem,) = caught.value.problems
        assert problem.keys == (f"loss_fn.{key}",)
        assert problem.message.startswith(value)
        assert problem.message.endswith(", or train in a loop of your own")


def test_install_where_the_script_has_no_setup_is_an_error(host, monkeypatch):
    host()
    grpo()
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    with pytest.raises(ConfigError, match="found no setup function of NeMo-RL in __main__.*with_geomask"):
        nemo_geomask.install()


def test_a_log_level_of_the_users_is_kept(host, install):
    host()
    logger = logging.getLogger("nemo_geomask")
    before = logger.level
    try:
        for level, after in ((logging.NOTSET, logging.INFO), (logging.WARNING, logging.WARNING)):
            logger.setLevel(level)
            install()
            assert logger.level == after
            nemo_geomask.uninstall()
    finally:
        logger.setLevel(before)
