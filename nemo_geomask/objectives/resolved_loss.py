"""The loss that a ``loss_fn:`` block describes: settings in force, with the objective's defaults and masks applied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from nemo_geomask.config.conflicts import find_conflicts
from nemo_geomask.config.loss_config import LossConfig
from nemo_geomask.config.loss_settings import LossSettings
from nemo_geomask.config.strict import parse
from nemo_geomask.errors import ConfigError, PluginError, Problem
from nemo_geomask.objectives import registry
from nemo_geomask.objectives.variant import Variant
from nemo_geomask.yaml_text import as_yaml

_PREFIX = "loss_fn"
_OPTIONS = f"{_PREFIX}.options"
_UNSET = object()


@dataclass(frozen=True)
class ResolvedLoss:
    """Objective and settings in force of a loss.

    Attributes:
        config: settings in force, with the objective's defaults applied.
        variant: the objective.
        options: the objective's own settings.
    """

    config: LossConfig
    variant: Variant
    options: BaseModel


def resolve_loss(config: Mapping[str, Any] | BaseModel) -> tuple[ResolvedLoss, tuple[Problem, ...]]:
    """Return what ``config`` describes, and warnings: settings that are allowed but probably not meant.

    Argument and errors are those of :func:`nemo_geomask.build_loss`. This package's own objectives need no torch.
    """
    explicit = _explicit_settings(config)
    problems = _problems(LossSettings, explicit, prefix=_PREFIX)
    invalid_fields = frozenset[str]().union(*(problem.fields for problem in problems))
    valid_fields = LossSettings.model_fields.keys() - invalid_fields
    settings = LossSettings.model_validate({key: value for key, value in explicit.items() if str(key) in valid_fields})
    try:
        variant = registry.load(settings.name)
    except PluginError as error:
        if not problems:
            raise
        raise ConfigError(*problems, *error.problems) from error
    _check_variant(settings.name, variant)

    defaults = dict(variant.defaults)
    if settings.loss_normalization is not None:
        # loss_normalization replaces token_level_loss; a default for the latter would contradict it.
        defaults.pop("token_level_loss", None)
    # Later entries win: the variant's defaults, then the recipe's settings, then what the variant forces.
    values = {**defaults, **settings.explicit_settings, **variant.forces}
    option_problems = _problems(variant.options, settings.options, prefix=_OPTIONS)
    objective_masks = () if option_problems else _objective_masks(settings, variant)
    if objective_masks:
        # Settings that were dumped from a loss already contain the objective's masks.
        values["masks"] = (*objective_masks, *(mask for mask in settings.masks if mask not in objective_masks))
    in_force = parse(LossSettings, values, prefix=_PREFIX)
    if "name" not in invalid_fields:
        problems += _contradictions(settings, in_force, variant, invalid_fields)
        problems += option_problems
    if problems:
        raise ConfigError(*problems)

    loss_config = LossConfig(**in_force.explicit_settings).with_objective(
        explicit=settings.model_fields_set, objective_masks=len(objective_masks)
    )
    options = variant.options.model_validate(settings.options)
    return ResolvedLoss(loss_config, variant, options), tuple(_warnings(settings, defaults, loss_config))


def _explicit_settings(config: Mapping[str, Any] | BaseModel) -> dict[str, Any]:
    """Return the settings that the recipe or the caller set, without default values."""
    if isinstance(config, LossConfig):
        return config.explicit_settings
    if isinstance(config, BaseModel):
        return config.model_dump(exclude_unset=True)
    if isinstance(config, Mapping):
        return dict(config)
    raise ConfigError(Problem((_PREFIX,), f"must be a mapping or a LossConfig, but it is a {type(config).__name__}"))


def _problems(model: type[BaseModel], data: Mapping[str, Any], *, prefix: str) -> list[Problem]:
    """Return the problems of ``data`` under a pydantic model."""
    try:
        parse(model, data, prefix=prefix)
    except ConfigError as error:
        return list(error.problems)
    return []


def _contradictions(
    settings: LossSettings, in_force: LossSettings, variant: Variant, invalid_fields: frozenset[str]
) -> Iterator[Problem]:
    """Yield settings that the variant refuses, and settings in force that contradict each other.

    Args:
        settings: valid settings of the recipe.
        in_force: the same with the variant's defaults, forced settings and masks.
        variant: the objective.
        invalid_fields: names of settings that are invalid and reported already.
    """
    refused = [key for key in variant.refuses if getattr(settings, key)]
    for key in refused:
        fix = {key: LossConfig.model_fields[key].default}
        yield _problem(
            (key, "name"),
            f"{key}: {as_yaml(getattr(settings, key))} can't be used with name: {settings.name}: "
            f"{variant.refuses[key]}; {{fix}}, or choose another name",
            fix,
        )
    explicit = settings.explicit_settings
    implied = {key: value for key, value in in_force.explicit_settings.items() if explicit.get(key, _UNSET) != value}
    for conflict in find_conflicts(in_force):
        # Skip a conflict that involves a refused setting, which has to be removed anyway, or an invalid setting, which
        # may agree with the others once it is corrected.
        if not invalid_fields.union(refused).isdisjoint((*conflict.keys, *conflict.depends_on)):
            continue
        implied_keys = [key for key in conflict.keys if key in implied]
        explicit_keys = [key for key in conflict.keys if key not in implied]
        reason = ", ".join(f"{key}: {as_yaml(implied[key])}" for key in implied_keys)
        template, fix = conflict.template, dict(conflict.fix)
        if fix.keys() & {*variant.forces, *variant.refuses}:  # which a recipe can't change
            template, fix = template.replace("{fix}", "choose another name"), {}
        yield _problem(
            (*explicit_keys, "name") if implied_keys else conflict.keys,
            template + (f" (name: {settings.name} implies {reason})" if implied_keys else ""),
            fix,
        )


def _problem(keys: Iterable[str], message: str, fix: Mapping[str, Any] | None = None) -> Problem:
    settings = {f"{_PREFIX}.{key}": value for key, value in (fix or {}).items()}
    return Problem(tuple(f"{_PREFIX}.{key}" for key in keys), message, fix=settings)


def _check_variant(name: str, variant: Variant) -> None:
    """Raise PluginError if the variant's definition is invalid, which is not the recipe's error."""
    unknown = [key for key in variant.refuses if key not in LossConfig.model_fields]
    faults = [f"refuses unknown settings: {', '.join(unknown)}"] if unknown else []
    faults += variant.invalid_attributes()
    settings = {**variant.defaults, **variant.forces}
    faults += [f"sets {problem}" for problem in _problems(LossSettings, settings, prefix="")]
    if faults:
        raise PluginError(_problem(("name",), f"the variant '{name}' {', and '.join(faults)}"))


def _objective_masks(settings: LossSettings, variant: Variant) -> tuple[Any, ...]:
    """Return the masks that belong to the objective.

    Raises: ConfigError: an option makes them invalid. PluginError: they are invalid without any option.
    """
    if variant.masks is None:
        return ()
    subject = f"the variant '{settings.name}'"
    try:
        masks = variant.masks(variant.options.model_validate(settings.options))
    except Exception as error:
        # The message of another package's error may have several lines; that of a Problem has one.
        reason = " ".join(str(error).split())
        message = f"{subject} can't make its masks: {type(error).__name__}: {reason}"
        raise PluginError(_problem(("name",), message)) from error
    problems = [] if settings.options else _problems(LossSettings, {"masks": masks}, prefix="")
    if problems:
        raise PluginError(_problem(("name",), f"{subject} has invalid masks: {' and '.join(map(str, problems))}"))
    return parse(LossSettings, {"masks": masks}, prefix=_OPTIONS).masks


def _warnings(settings: LossSettings, defaults: Mapping[str, Any], in_force: LossConfig) -> Iterator[Problem]:
    """Yield settings that are allowed but probably not meant.

    Args:
        settings: settings of the recipe.
        defaults: the variant's defaults.
        in_force: the same settings with the variant's defaults, forced settings and masks.
    """
    for conflict in find_conflicts(in_force, severity="warning"):
        yield _problem(conflict.keys, conflict.template, conflict.fix)
    for key, default in defaults.items():
        value = getattr(settings, key)
        nemo_rl_default = LossConfig.model_fields[key].default
        # NeMo-RL's base recipes spell out every default they know, so such a value was probably inherited.
        is_inherited = key in settings.model_fields_set and value == nemo_rl_default != default
        if is_inherited and key != "ratio_anchor":
            yield _problem(
                (key, "name"),
                f"{key}: {as_yaml(value)} is NeMo-RL's default, but name: {settings.name} prescribes "
                f"{as_yaml(default)}; if it was inherited from a base recipe, {{fix}}, or a value of "
                "your choice",
                {key: default},
            )
