"""Conversion of the trainer's ``loss_fn`` configuration into settings of one of this package's losses."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import BaseModel

from nemo_geomask.config import LossConfig
from nemo_geomask.config.fields import PULL_REQUEST_KEYS
from nemo_geomask.config.strict import to_builtins
from nemo_geomask.errors import ConfigError, Problem
from nemo_geomask.hosts.nemo_rl.facts import FIELDS_READ_BY_TRAINERS, NeutralValues
from nemo_geomask.yaml_text import as_yaml, inline_yaml


def plain_settings(config: Any) -> dict[str, Any]:
    """Return the settings that a recipe sets, as plain dicts and lists.

    Args:
        config: NeMo-RL's configuration of the loss. In v0.6.0 it is a mapping, which may be or contain OmegaConf
            containers. In later versions it is a pydantic model; fields that the recipe does not set are left out.

    Raises:
        ConfigError: the configuration is neither a mapping nor a pydantic model.
    """
    if isinstance(config, BaseModel):
        config = config.model_dump(exclude_unset=True)
    if not isinstance(config, Mapping):
        message = f"must be a mapping or a pydantic model, but it is a {type(config).__name__}"
        raise ConfigError(Problem(("loss_fn",), message))
    return {str(key): to_builtins(value) for key, value in config.items()}


def selects_loss(settings: Mapping[str, Any], nemo_rl_fields: Collection[str]) -> bool:
    """Return True if the settings select one of this package's losses by ``loss_fn.name``.

    Args:
        settings: from :func:`plain_settings`.
        nemo_rl_fields: configuration fields of the installed NeMo-RL's own loss.

    Raises:
        ConfigError: ``name`` is missing, but a setting is given that only this package's losses read. NeMo-RL's own
            loss would ignore it.
    """
    if settings.get("name") is not None:
        return True
    ignored = [
        key
        for key, field in LossConfig.model_fields.items()
        if key in settings and key not in nemo_rl_fields and settings[key] not in (None, field.default, [], {})
    ]
    if ignored:
        raise ConfigError(
            *(
                Problem(
                    (f"loss_fn.{key}",),
                    "given without loss_fn.name, and NeMo-RL's own loss ignores it; add name: clipped_pg (or another "
                    f"loss of nemo_geomask), or remove {key}",
                )
                for key in ignored
            )
        )
    return False


def unread_fields(settings: Mapping[str, Any], neutral_values: NeutralValues) -> dict[str, Problem | None]:
    """Return the fields of the installed NeMo-RL's own loss that the settings contain and no loss of this package has.

    NeMo-RL's recipes may set such fields, so they are allowed at a value that changes nothing.

    Args:
        settings: the ``loss_fn`` block.
        neutral_values: from :func:`~nemo_geomask.hosts.nemo_rl.facts.neutral_values` of the installed version.

    Returns:
        The fields by name, each with the problem of its value; None if the value changes nothing.
    """
    unread = [key for key in settings if key in neutral_values and key not in LossConfig.model_fields]
    return {key: _unread_problem(key, settings[key], neutral_values[key]) for key in unread}


def _unread_problem(key: str, value: Any, neutral: tuple[Any, ...]) -> Problem | None:
    if value in neutral:
        return None
    equivalent = f", write {PULL_REQUEST_KEYS[key][1]} instead" if key in PULL_REQUEST_KEYS else ""
    default = f", or set {inline_yaml(neutral[0])}, which changes nothing" if neutral else ""
    message = (
        f"the installed NeMo-RL's own loss reads it (found {inline_yaml(value)}), but no loss of nemo_geomask does, so "
        f"it would have no effect; delete it with ~loss_fn.{key}{equivalent}{default}"
    )
    return Problem((f"loss_fn.{key}",), message, frozenset({key}))


def without_unread_fields(settings: Mapping[str, Any], neutral_values: NeutralValues) -> dict[str, Any]:
    """Return the settings without :func:`unread_fields`.

    Raises:
        ConfigError: the value of such a field does not leave NeMo-RL's own loss unchanged.
    """
    unread = unread_fields(settings, neutral_values)
    problems = [problem for problem in unread.values() if problem is not None]
    if problems:
        raise ConfigError(*problems)
    return {key: value for key, value in settings.items() if key not in unread}


def check_agreement(config: Any, resolved: LossConfig) -> None:
    """Check that NeMo-RL's trainers and the loss use the same values of the settings that both read.

    They can differ: a loss may prescribe a value for a setting that the recipe leaves out, and the trainer then uses
    NeMo-RL's default.

    Args:
        config: as for :func:`plain_settings`.
        resolved: the settings of the loss that was built.

    Raises:
        ConfigError: NeMo-RL reads another value than the loss uses.
    """
    for key in FIELDS_READ_BY_TRAINERS:
        default = LossConfig.model_fields[key].default
        trainer_value = config.get(key, default) if isinstance(config, Mapping) else getattr(config, key, default)
        loss_value = getattr(resolved, key)
        if trainer_value != loss_value:
            message = (
                f"NeMo-RL itself reads {as_yaml(trainer_value)} from the recipe, but name: {resolved.name} puts "
                f"{as_yaml(loss_value)} in force; write {key}: {as_yaml(loss_value)}"
            )
            raise ConfigError(Problem((f"loss_fn.{key}",), message))
