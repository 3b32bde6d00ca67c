"""NeMo-RL's ``loss_fn`` configuration, as it stands in the trainer, read as the settings of one of our losses."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from nemo_geomask.config import LossConfig
from nemo_geomask.config.strict import as_yaml
from nemo_geomask.errors import ConfigError, Problem

__all__ = ["check_agreement", "selects", "settings"]

# What NeMo-RL reads in loss_fn itself: whether to load a reference model, to correct under async and FP8, and so on.
_READ_BY_NEMO_RL = (
    "force_on_policy_ratio",
    "reference_policy_kl_penalty",
    "reference_policy_kl_type",
    "use_importance_sampling_correction",
    "use_kl_in_reward",
)


def settings(config: Any) -> dict[str, Any]:
    """The settings that the recipe gives, as plain dicts and lists.

    Args:
        config: NeMo-RL's configuration of the loss: a mapping (v0.6.0), a pydantic model (later; only the fields that
            were given count), either with OmegaConf containers inside or out.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(config, BaseModel):
        config = config.model_dump(exclude_unset=True)
    if not isinstance(config, Mapping):
        message = f"must be a mapping or a pydantic model, but it is a {type(config).__name__}"
        raise ConfigError(Problem(("loss_fn",), message))
    return {str(key): _plain(value) for key, value in config.items()}


def _plain(value: Any) -> Any:
    # OmegaConf's containers are a Mapping and a Sequence, but no dict and no list.
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(item) for item in value]
    return value


def selects(given: Mapping[str, Any], known: Collection[str]) -> bool:
    """Whether the recipe selects one of our losses, by ``loss_fn.name``.

    Args:
        given: from :func:`settings`.
        known: the fields of the installed NeMo-RL's own loss.

    Raises:
        ConfigError: there is no name, but a setting that NeMo-RL's own loss would ignore and ours has.
    """
    if given.get("name") is not None:
        return True
    ignored = [
        key
        for key, field in LossConfig.model_fields.items()
        if key in given and key not in known and given[key] not in (None, field.default, [], {})
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


def check_agreement(config: Any, in_force: LossConfig) -> None:
    """Make sure that NeMo-RL's own gates see the values that the loss uses.

    A variant may prescribe settings that the recipe leaves out; NeMo-RL knows nothing of them.

    Raises:
        ConfigError: NeMo-RL reads another value than the one in force.
    """
    for key in _READ_BY_NEMO_RL:
        default = LossConfig.model_fields[key].default
        read = config.get(key, default) if isinstance(config, Mapping) else getattr(config, key, default)
        used = getattr(in_force, key)
        if read != used:
            message = (
                f"NeMo-RL itself reads {as_yaml(read)} from the recipe, but name: {in_force.name} puts {as_yaml(used)} "
                f"in force; write {key}: {as_yaml(used)}"
            )
            raise ConfigError(Problem((f"loss_fn.{key}",), message))
