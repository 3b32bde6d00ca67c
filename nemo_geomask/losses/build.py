"""From a configuration to a loss."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from nemo_geomask.config import LossConfig, parse
from nemo_geomask.errors import ConfigError, PluginError
from nemo_geomask.losses.loss import PolicyLoss
from nemo_geomask.losses.registry import load
from nemo_geomask.losses.variant import Variant

__all__ = ["build_loss"]

_PREFIX = "loss_fn"


def build_loss(
    config: LossConfig | Mapping[str, Any] | BaseModel, *, use_fused_linear_logprobs: bool = False
) -> PolicyLoss:
    """The loss that ``config`` describes.

    Args:
        config: a :class:`~nemo_geomask.LossConfig`, the ``loss_fn:`` mapping of a recipe, or another pydantic model
            of it such as NeMo-RL's ``ClippedPGLossConfig`` (of which only the fields that were given count).
        use_fused_linear_logprobs: passed on to NeMo-RL, see :class:`~nemo_geomask.losses.PolicyLoss`.

    Returns:
        A picklable callable under NeMo-RL's loss protocol.

    Raises:
        ConfigError: unknown keys, values out of range, settings at odds with each other or with the variant.
        PluginError: the variant can't be loaded.

    Example:
        >>> from nemo_geomask import build_loss
        >>> loss = build_loss({"name": "gspo", "use_importance_sampling_correction": True,
        ...                    "is_correction_level": "sequence_mean"})
        >>> loss.loss_type.value
        'sequence_level'
    """
    if isinstance(config, BaseModel) and not isinstance(config, LossConfig):
        config = config.model_dump(exclude_unset=True)
    if not isinstance(config, LossConfig):
        if not isinstance(config, Mapping):
            raise ConfigError(f"{_PREFIX} must be a mapping or a LossConfig, but it is a {type(config).__name__}")
        config = parse(LossConfig, config, prefix=_PREFIX)
    variant = load(config.name)
    _check_settings(config.name, variant)
    for message in _doubts(config, variant):
        warnings.warn(message, UserWarning, stacklevel=2)
    config = _in_force(config, variant)
    options = parse(variant.options, config.options, prefix=f"{_PREFIX}.options")
    return PolicyLoss(config, variant, options, use_fused_linear_logprobs=use_fused_linear_logprobs)


def _check_settings(name: str, variant: Variant) -> None:
    unknown = [
        key for key in (*variant.defaults, *variant.forces, *variant.refuses) if key not in LossConfig.model_fields
    ]
    if unknown:
        raise PluginError(f"the variant '{name}' speaks of unknown settings: {', '.join(unknown)}")


def _doubts(config: LossConfig, variant: Variant) -> Iterator[str]:
    """What is allowed and probably not meant."""
    if config.truncated_importance_sampling_type == "tis" and config.truncation is None:
        # NeMo-RL v0.6.0's base recipe has type: tis with ratio: null, which means no truncation.
        yield (
            f"{_PREFIX}.truncated_importance_sampling_type: tis does nothing while "
            f"{_PREFIX}.truncated_importance_sampling_ratio is null; give a ratio, or set the type to null"
        )
    for key, own in _defaults(config, variant).items():
        value = getattr(config, key)
        # NeMo-RL's base recipes spell out every default, so such a value was probably inherited.
        if key in config.model_fields_set and value == LossConfig.model_fields[key].default != own:
            yield (
                f"{_PREFIX}.{key}: {_yaml(value)} is NeMo-RL's default, but name: {config.name} prescribes "
                f"{_yaml(own)}; if it was inherited from a base recipe, set {key}: {_yaml(own)} (or another value of "
                "yours)"
            )


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _defaults(config: LossConfig, variant: Variant) -> dict[str, Any]:
    defaults = dict(variant.defaults)
    if config.loss_normalization is not None:
        # The newer key says it all; a default for the older one would contradict it.
        defaults.pop("token_level_loss", None)
    return defaults


def _in_force(config: LossConfig, variant: Variant) -> LossConfig:
    refused = [
        f"{_PREFIX}.{key}: {_yaml(getattr(config, key))} does not go with name: {config.name}; {reason}. "
        f"Remove {key}, or choose another name"
        for key, reason in variant.refuses.items()
        if getattr(config, key)
    ]
    if refused:
        raise ConfigError("\n".join(refused))
    given = {key: getattr(config, key) for key in config.model_fields_set}
    defaults = _defaults(config, variant)
    try:
        return parse(LossConfig, {**defaults, **given, **variant.forces}, prefix=_PREFIX)
    except ConfigError as error:
        implied = ", ".join(f"{key}: {_yaml(value)}" for key, value in {**defaults, **variant.forces}.items())
        raise ConfigError(f"{error} (name: {config.name} implies {implied})") from None
