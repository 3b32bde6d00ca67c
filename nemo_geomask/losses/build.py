"""From a configuration to a loss."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from nemo_geomask.config import LossConfig, parse
from nemo_geomask.config.conflicts import conflicts
from nemo_geomask.config.loss import LossSettings
from nemo_geomask.config.strict import as_yaml
from nemo_geomask.errors import ConfigError, PluginError, Problem
from nemo_geomask.losses.loss import PolicyLoss
from nemo_geomask.losses.registry import load
from nemo_geomask.losses.variant import Variant

__all__ = ["build_loss", "examined"]

_PREFIX = "loss_fn"
_OPTIONS = f"{_PREFIX}.options"
_UNSET = object()


def build_loss(config: Mapping[str, Any] | BaseModel, *, use_fused_linear_logprobs: bool = False) -> PolicyLoss:
    """The loss that ``config`` describes.

    Args:
        config: a :class:`~nemo_geomask.LossConfig`, the ``loss_fn:`` mapping of a recipe, or another pydantic model
            of it such as NeMo-RL's ``ClippedPGLossConfig`` (of which only the fields that were given count).
        use_fused_linear_logprobs: passed on to NeMo-RL, see :class:`~nemo_geomask.losses.PolicyLoss`.

    Returns: a picklable callable under NeMo-RL's loss protocol.
    Raises: ConfigError: unknown keys, values out of range, settings at odds with each other or with the variant;
    PluginError: the variant can't be loaded.

    Example:
        >>> from nemo_geomask import build_loss
        >>> loss = build_loss({"name": "gspo", "use_importance_sampling_correction": True,
        ...                    "is_correction_level": "sequence_mean"})
        >>> loss.loss_type.value
        'sequence_level'
    """
    loss, doubts = examined(config, use_fused_linear_logprobs=use_fused_linear_logprobs)
    for doubt in doubts:
        warnings.warn(str(doubt), UserWarning, stacklevel=2)
    return loss


def examined(
    config: Mapping[str, Any] | BaseModel, *, use_fused_linear_logprobs: bool = False
) -> tuple[PolicyLoss, tuple[Problem, ...]]:
    """:func:`build_loss`, with what it warns of: settings that are allowed and probably not meant."""
    given = _given(config)
    wrong = _wrong(LossSettings, given, prefix=_PREFIX)
    unsettled = frozenset[str]().union(*(problem.fields for problem in wrong))
    settings = LossSettings.model_validate({key: value for key, value in given.items() if str(key) not in unsettled})
    try:
        variant = load(settings.name)
    except PluginError as error:
        if not wrong:
            raise
        raise ConfigError(*wrong, *error.problems) from error
    _check_settings(settings.name, variant)
    defaults = dict(variant.defaults)
    if settings.loss_normalization is not None:
        # The newer key says it all; a default for the older one would contradict it.
        defaults.pop("token_level_loss", None)
    values = {**defaults, **settings.given, **variant.forces}
    of_options = _wrong(variant.options, settings.options, prefix=_OPTIONS)
    own = () if of_options else _own_masks(settings, variant)
    if own:
        # A loss may be built from the dumped settings of one that has them already.
        values["masks"] = (*own, *(mask for mask in settings.masks if mask not in own))
    in_force = parse(LossSettings, values, prefix=_PREFIX)
    if "name" not in unsettled:
        wrong += _contradictions(settings, in_force, variant, unsettled)
        wrong += of_options
    if wrong:
        raise ConfigError(*wrong)
    options = variant.options.model_validate(settings.options)
    checked = LossConfig(**in_force.given).in_force(given=settings.model_fields_set, masks=len(own))
    loss = PolicyLoss(checked, variant, options, use_fused_linear_logprobs=use_fused_linear_logprobs)
    return loss, tuple(_doubts(settings, defaults, checked))


def _given(config: Mapping[str, Any] | BaseModel) -> dict[str, Any]:
    if isinstance(config, LossConfig):
        return config.given
    if isinstance(config, BaseModel):
        return config.model_dump(exclude_unset=True)
    if isinstance(config, Mapping):
        return dict(config)
    raise ConfigError(Problem((_PREFIX,), f"must be a mapping or a LossConfig, but it is a {type(config).__name__}"))


def _wrong(model: type[BaseModel], data: Mapping[str, Any], *, prefix: str) -> list[Problem]:
    try:
        parse(model, data, prefix=prefix)
    except ConfigError as error:
        return list(error.problems)
    return []


def _contradictions(
    settings: LossSettings, in_force: LossSettings, variant: Variant, unsettled: frozenset[str]
) -> Iterator[Problem]:
    """What contradicts the variant, and what contradicts each other under it, as far as the settings are known."""
    refused = [key for key in variant.refuses if getattr(settings, key)]
    for key in refused:
        yield _problem(
            (key, "name"),
            f"{key}: {as_yaml(getattr(settings, key))} does not go with name: {settings.name}; {variant.refuses[key]}. "
            f"Remove {key}, or choose another name",
        )
    given = settings.given
    implied = {key: value for key, value in in_force.given.items() if given.get(key, _UNSET) != value}
    for conflict in conflicts(in_force):
        # What the variant refuses has to go, and what is wrong by itself may be meant to agree.
        if not unsettled.union(refused).isdisjoint((*conflict.keys, *conflict.rests_on)):
            continue
        by_name = [key for key in conflict.keys if key in implied]
        keys = [key for key in conflict.keys if key not in implied]
        why = ", ".join(f"{key}: {as_yaml(implied[key])}" for key in by_name)
        yield _problem(
            (*keys, "name") if by_name else conflict.keys,
            conflict.message + (f" (name: {settings.name} implies {why})" if by_name else ""),
        )


def _problem(keys: Iterable[str], message: str) -> Problem:
    return Problem(tuple(f"{_PREFIX}.{key}" for key in keys), message)


def _check_settings(name: str, variant: Variant) -> None:
    """The variant's own settings are no fault of the recipe's."""
    unknown = [key for key in variant.refuses if key not in LossConfig.model_fields]
    found = [f"refuses unknown settings: {', '.join(unknown)}"] if unknown else []
    if variant.pooled_by not in ("mean", "sum"):
        found.append(f"has pooled_by {variant.pooled_by!r}, which must be 'mean' or 'sum'")
    if not (isinstance(variant.options, type) and issubclass(variant.options, BaseModel)):
        found.append(f"has options {variant.options!r}, which must be a pydantic model class")
    found += [f"gives {problem}" for problem in _wrong(LossSettings, {**variant.defaults, **variant.forces}, prefix="")]
    if found:
        raise PluginError(_problem(("name",), f"the variant '{name}' {', and '.join(found)}"))


def _own_masks(settings: LossSettings, variant: Variant) -> tuple[Any, ...]:
    """Those that belong to the objective; where they are wrong though no option was given, the variant is."""
    if variant.masks is None:
        return ()
    whose = f"the variant '{settings.name}'"
    try:
        brought = variant.masks(variant.options.model_validate(settings.options))
    except Exception as error:
        text = " ".join(str(error).split())
        raise PluginError(
            _problem(("name",), f"{whose} fails to make its masks: {type(error).__name__}: {text}")
        ) from error
    wrong = [] if settings.options else _wrong(LossSettings, {"masks": brought}, prefix="")
    if wrong:
        raise PluginError(_problem(("name",), f"{whose} brings {' and '.join(map(str, wrong))}"))
    return parse(LossSettings, {"masks": brought}, prefix=_OPTIONS).masks


def _doubts(config: LossSettings, defaults: Mapping[str, Any], in_force: LossConfig) -> Iterator[Problem]:
    """What is allowed and probably not meant; ``defaults`` are the variant's."""
    apart = [rule.label for rule in in_force.mask_rules if rule.key == "loss_fn.name" and rule.log_ratio == "total"]
    if apart and in_force.ratio_anchor == "prev" and not in_force.applies_weight:
        yield _problem(
            ("ratio_anchor", "name"),
            f"prev takes the ratio against π_old, while mask {apart[0]} of name: {config.name} compares with the "
            "generation engine, and no weight makes up for the mismatch between the two; its authors take both against "
            "one policy. Remove ratio_anchor, or set use_importance_sampling_correction: true; for both against π_old, "
            "as in verl, choose name: cispo and give the mask log_ratio: policy",
        )
    if config.truncated_importance_sampling_type == "tis" and config.truncation is None:
        # NeMo-RL v0.6.0's base recipe has type: tis with ratio: null, which means no truncation.
        yield _problem(
            ("truncated_importance_sampling_type",),
            f"tis does nothing while {_PREFIX}.truncated_importance_sampling_ratio is null; give a ratio, or set the "
            "type to null",
        )
    for key, own in defaults.items():
        value = getattr(config, key)
        # NeMo-RL's base recipes spell out every default they know, so such a value was probably inherited.
        inherited = key in config.model_fields_set and value == LossConfig.model_fields[key].default != own
        if inherited and key != "ratio_anchor":
            yield _problem(
                (key, "name"),
                f"{key}: {as_yaml(value)} is NeMo-RL's default, but name: {config.name} prescribes {as_yaml(own)}; if "
                f"it was inherited from a base recipe, set {key}: {as_yaml(own)} (or another value of yours)",
            )
