"""Entry into NeMo-RL through its own extension points: what ``setup`` returns goes to every training loop.

:func:`with_geomask` wraps NeMo-RL's ``setup`` functions. The wrapped function builds the loss that ``loss_fn.name``
selects, checks that the workers can receive it, calls the original, and puts the loss, the policy and the logger of
this package in the place of NeMo-RL's in what that returned. Nothing in NeMo-RL's modules is replaced for this.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import logging
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import nemo_geomask
from nemo_geomask.errors import ConfigError, HostAPIError, Problem
from nemo_geomask.hosts.nemo_rl import host_api, loss_block, patch, worker_setup
from nemo_geomask.hosts.nemo_rl.facts import (
    FIELDS_READ_BY_TRAINERS,
    FUSED_LOGPROBS,
    LOSS_CLASS,
    LOSS_CONFIG,
    LOSS_MODULE,
    POLICY,
    describe_filter,
    neutral_values,
    replace_loss_config,
)
from nemo_geomask.hosts.nemo_rl.honoured_settings import own_loop_settings, require_honoured
from nemo_geomask.hosts.nemo_rl.host_patches import make_patches
from nemo_geomask.hosts.nemo_rl.installed_version import describe_version
from nemo_geomask.hosts.nemo_rl.logit_backends import LogitLoss
from nemo_geomask.hosts.nemo_rl.loop_values import RewardLogger
from nemo_geomask.hosts.nemo_rl.policies import convert_policy, geomask_class
from nemo_geomask.hosts.nemo_rl.step_recorder import check_recording
from nemo_geomask.losses import PolicyLoss, available, build_loss

_log = logging.getLogger("nemo_geomask")
_IS_WRAPPED = "_nemo_geomask_is_wrapped"


loss_choices: list[str | None] = []
"""Name of each loss that a recipe has chosen in this process, by a wrapped ``setup`` or a script; None: NeMo-RL's."""
logged_messages: set[str] = set()
"""Messages that were logged in this process and are not logged again."""


def with_geomask(setup: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap one of NeMo-RL's ``setup`` functions to train with the loss that a recipe's ``loss_fn.name`` selects.

    Args:
        setup: ``setup`` of ``nemo_rl.algorithms.grpo`` or ``ppo``, or ``setup_single_controller``.

    Returns: a function with the same arguments. If the recipe names a loss, what it returns contains that loss in the
        place of NeMo-RL's, and a policy that runs the pre-step pass, summarizes metrics and records. Otherwise it
        returns what ``setup`` returns.

    Raises (when called):
        ConfigError: the loss cannot be built, or contradicts another setting.
        WorkerError: a worker cannot load the loss.
        HostAPIError: the installed NeMo-RL differs from the tested versions, or ``setup`` returned no loss to replace.
        MissingDependencyError: a package that a setting needs is missing.
    """
    if is_wrapped(setup):
        return setup
    signature = inspect.signature(setup)

    @functools.wraps(setup)
    def geomask_setup(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        # NeMo-RL's setups call it so; a setup of the user's own takes it first.
        master_config = bound.arguments.get("master_config", next(iter(bound.arguments.values())))
        loss = build_nemo_rl_loss(master_config)
        if loss is None:
            result = setup(*args, **kwargs)
        else:
            host_api.require_every_run()
            worker_setup.check_environment(_section(master_config, "policy"), loss)
            if "policy_factory" in signature.parameters and bound.arguments.get("policy_factory") is None:
                # A setup of the user's own need not name the class; its policy is converted afterwards.
                policy_class = getattr(sys.modules.get(setup.__module__), POLICY[1], None)
                if policy_class is not None:
                    bound.arguments["policy_factory"] = geomask_class(policy_class)
            with _constructible_loss_config(master_config):
                result = setup(*bound.args, **bound.kwargs)
            result = _replace_results(result, loss)
        return result

    setattr(geomask_setup, _IS_WRAPPED, True)
    return geomask_setup


def is_wrapped(setup: object) -> bool:
    """Return True if a function is one that :func:`with_geomask` returned."""
    return getattr(setup, _IS_WRAPPED, False)


def build_nemo_rl_loss(master_config: Any) -> PolicyLoss | LogitLoss | None:
    """Build the loss that ``loss_fn.name`` selects, as NeMo-RL's workers take it; None if no name is set.

    Args:
        master_config: NeMo-RL's complete configuration: a pydantic model, or a mapping in v0.6.0.

    Raises:
        ConfigError: the loss cannot be built, or contradicts another setting.
        MissingDependencyError: a package that a setting needs is missing.
    """
    loss_config = _section(master_config, "loss_fn")
    settings = loss_block.plain_settings(loss_config)
    module = importlib.import_module(LOSS_MODULE)
    fields = neutral_values(getattr(module, LOSS_CONFIG, None))
    if not loss_block.selects_loss(settings, fields):
        _log_once("loss_fn.name is not set: NeMo-RL's own %s", LOSS_CLASS)
        loss_choices.append(None)
        return None
    read_settings = loss_block.without_unread_fields(settings, fields)
    if unread := {key: value for key, value in settings.items() if key not in read_settings}:
        _log_once("only NeMo-RL's own loss reads these settings, and they change nothing in it: %s", unread)
    policy_settings = _section(master_config, "policy")
    megatron = policy_settings.get("megatron_cfg") or {}
    is_fused = bool(megatron.get("enabled")) and bool(megatron.get(FUSED_LOGPROBS.rpartition(".")[2]))
    policy_loss = build_loss(read_settings, use_fused_linear_logprobs=is_fused)
    config = policy_loss.config
    loss_block.check_agreement(loss_config, config)
    check_recording(config)
    environment = _plain_sections(master_config).get("env") or {}
    if config.record is not None and environment.get("should_log_nemo_gym_responses"):
        _log_once(
            "loss_fn.record: rewards and environments will be null, since NeMo-RL logs no training batch under "
            "env.should_log_nemo_gym_responses: true; set it to false to have them recorded"
        )
    require_honoured(config, _plain_sections(master_config))
    loss = policy_loss if config.logprob_backend == "nemo_rl" else LogitLoss(policy_loss)
    if isinstance(loss, LogitLoss):
        _refuse_filter(config.logprob_backend, policy_settings.get("generation") or {})
    entries = available().get(config.name, ())
    _log_once(
        "policy loss: %s (%s), nemo_geomask %s, NeMo-RL %s; not at its default: %s",
        config.name,
        entries[0].distribution if entries else "module:attribute",
        nemo_geomask.__version__,
        describe_version(),
        config.model_dump(mode="json", exclude_defaults=True, exclude={"name"}),
    )
    loss_choices.append(config.name)
    return loss


def prepare_policy(policy: Any, loss: PolicyLoss | LogitLoss | None, *, checkpoint: object = None) -> Any:
    """Make a policy of NeMo-RL train with a loss of this package; for training loops that don't call ``setup``.

    Args:
        policy: NeMo-RL's, with running workers.
        loss: from :func:`build_nemo_rl_loss`.
        checkpoint: path of the checkpoint from which the run was resumed; None if it starts from the beginning.

    Returns: the policy, which is the same object.

    Raises:
        ConfigError: ``loss`` is None, so the recipe names no loss of this package; or its ``denominator`` is
            ``kept_in_loss``, whose factor no worker applies.
        WorkerError: a worker cannot load the loss.
        HostAPIError: NeMo-RL differs from the tested versions.
    """
    if loss is None:
        message = (
            "is not set, so build_nemo_rl_loss returned None and prepare_policy has no loss to prepare the policy for; "
            "set it, or train with NeMo-RL's own loss and the policy as it is"
        )
        raise ConfigError(Problem(("loss_fn.name",), message))
    # A batch of one's own may have the tokens' versions, but the optimiser's step is the worker's.
    if problems := tuple(own_loop_settings(loss.config, ["denominator"])):
        raise ConfigError(*problems)
    worker_setup.check_workers(policy, loss)
    has_packed_rows = bool((policy.cfg.get("sequence_packing") or {}).get("enabled"))
    worker_setup.prepare_workers(policy, loss, has_packed_rows=has_packed_rows)
    if loss.config.record is not None:
        patch.apply_all(list(make_patches(["asynchronous record"])))
    return convert_policy(policy, loss.config, checkpoint=checkpoint)


def _replace_results(result: Any, loss: PolicyLoss | LogitLoss) -> Any:
    """Put the loss, the policy and the logger of this package in the place of NeMo-RL's in what ``setup`` returned."""
    if isinstance(result, tuple) and result and dataclasses.is_dataclass(result[0]):  # the single controller's
        arguments: Any = result[0]
        _require_one([arguments.loss_fn], _is_nemo_rl_loss, LOSS_CLASS)
        prepare_policy(arguments.trainer_handle, loss, checkpoint=arguments.last_checkpoint_path)
        return (dataclasses.replace(arguments, loss_fn=loss), *result[1:])
    items = list(result) if isinstance(result, tuple) else [result]
    items[_require_one(items, _is_nemo_rl_loss, LOSS_CLASS)] = loss
    policy_class = getattr(importlib.import_module(POLICY[0]), POLICY[1])
    policy = items[_require_one(items, lambda item: isinstance(item, policy_class), POLICY[1])]
    checkpointers = [item for item in items if hasattr(item, "get_latest_checkpoint_path")]
    prepare_policy(policy, loss, checkpoint=checkpointers[0].get_latest_checkpoint_path() if checkpointers else None)
    if loss.config.record is not None:
        logs_mismatch = loss.config.needs_prev and loss.config.metrics == "full"
        items = [
            RewardLogger(item, logs_mismatch=logs_mismatch) if hasattr(item, "log_batched_dict_as_jsonl") else item
            for item in items
        ]
    return tuple(items)


def _is_nemo_rl_loss(item: object) -> bool:
    return isinstance(item, getattr(importlib.import_module(LOSS_MODULE), LOSS_CLASS))


def _require_one(items: list[Any], is_wanted: Callable[[Any], bool], name: str) -> int:
    """Return the index of the one item that is wanted."""
    indices = [index for index, item in enumerate(items) if is_wanted(item)]
    if len(indices) != 1:
        types = ", ".join(type(item).__name__ for item in items)
        raise HostAPIError(
            f"setup of NeMo-RL {describe_version()} returned {len(indices)} objects of {name} ({types}), where "
            "nemo_geomask knows one; the recipe's loss can't take its place. Use a tested NeMo-RL, or "
            "build_nemo_rl_loss and prepare_policy in a script of your own. See docs/how_to/install.md"
        )
    return indices[0]


@contextlib.contextmanager
def _constructible_loss_config(master_config: Any) -> Iterator[None]:
    """Let ``setup`` build NeMo-RL's own loss, which is then replaced, also where that refuses the recipe's settings.

    NeMo-RL asserts, for example, that truncation comes with a correction. Only then is ``loss_fn`` replaced during
    ``setup``, by the settings that NeMo-RL's trainers read themselves.
    """
    loss_config = _section(master_config, "loss_fn")
    module = importlib.import_module(LOSS_MODULE)
    try:
        getattr(module, LOSS_CLASS)(loss_config)
    except Exception as error:
        _log.info(
            "NeMo-RL's own %s refuses these settings of loss_fn (%s: %s), so setup builds it without them and logs "
            "their defaults; it is replaced by the loss of loss_fn.name",
            LOSS_CLASS,
            type(error).__name__,
            error,
        )
        settings = loss_block.plain_settings(loss_config)
        kept = {key: settings[key] for key in FIELDS_READ_BY_TRAINERS if key in settings}
        with replace_loss_config(master_config, getattr(module, LOSS_CONFIG), kept):
            yield
        return
    yield


def _refuse_filter(backend: str, generation: Mapping[str, Any]) -> None:
    sampling = types.SimpleNamespace(top_k=generation.get("top_k"), top_p=generation.get("top_p", 1.0))
    if description := describe_filter(sampling):
        message = (
            f"logprob_backend: {backend} computes log-probs over the whole vocabulary, but the policy samples with "
            f"{description}; set logprob_backend: nemo_rl, which filters as the sampler does, or sample without top-k "
            "and top-p"
        )
        raise ConfigError(Problem(("loss_fn.logprob_backend", "policy.generation"), message))


def _section(master_config: Any, name: str) -> Any:
    """Return a section of NeMo-RL's complete configuration.

    Raises:
        ConfigError: the configuration has no such section.
    """
    is_mapping = isinstance(master_config, Mapping)
    if not (name in master_config if is_mapping else hasattr(master_config, name)):
        message = (
            f"is missing in the configuration, a {type(master_config).__name__}; with_geomask takes setup of NeMo-RL's "
            "GRPO or PPO, or setup_single_controller, and the complete configuration is the first argument of each"
        )
        raise ConfigError(Problem((name,), message))
    return master_config[name] if is_mapping else getattr(master_config, name)


def _plain_sections(master_config: Any) -> Mapping[str, Any]:
    """Return the configuration with its sections as mappings."""
    names = ("grpo", "ppo", "on_policy_distillation", "env")
    sections = {}
    for name in names:
        section = master_config.get(name) if isinstance(master_config, Mapping) else getattr(master_config, name, None)
        if section is not None:
            sections[name] = loss_block.plain_settings(section)
    return sections


def _log_once(template: str, *values: object) -> None:
    """Log a message unless it is one of :data:`logged_messages`, because a run may build its loss more than once."""
    message = template % values
    if message not in logged_messages:
        logged_messages.add(message)
        _log.info("%s", message)
