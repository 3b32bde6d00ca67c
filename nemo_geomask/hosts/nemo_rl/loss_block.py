"""Conversion of the trainer's ``loss_fn`` configuration into settings of one of this package's losses."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from nemo_geomask.config import LossConfig
from nemo_geomask.config.strict import as_yaml
from nemo_geomask.errors import ConfigError, Problem
from nemo_geomask.hosts.nemo_rl.facts import FIELDS_READ_BY_TRAINERS

__all__ = ["check_agreement", "plain_settings", "selects_loss"]


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
    return {str(key): _to_plain(value) for key, value in config.items()}


def _to_plain(value: Any) -> Any:
    # OmegaConf's containers are a Mapping and a Sequence, but neither a dict nor a list.
    if isinstance(value, Mapping):
        return {str(key): _to_plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_to_plain(item) for item in value]
    return value


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
