"""The list ``loss_fn.masks``: presets of this package, those of other distributions, and raw rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from nemo_geomask.config.masks import MaskPreset, wrong_label
from nemo_geomask.config.plugins import PluginGroup
from nemo_geomask.config.presets import PRESETS
from nemo_geomask.config.strict import StrictModel, nearest, repeated
from nemo_geomask.errors import PluginError

__all__ = ["PLUGINS", "validate_masks"]

PLUGINS = PluginGroup(
    group="nemo_geomask.mask_presets",
    what="preset",
    key="loss_fn.masks",
    must_be="a class derived from nemo_geomask.config.MaskPreset (see docs/plugins.md)",
    fits=lambda found: isinstance(found, type) and issubclass(found, MaskPreset),
    built_in={name: f"{model.__module__}:{model.__qualname__}" for name, model in PRESETS.items()},
)


def validate_masks(masks: Any, validate: Callable[[Any], tuple[Any, ...]]) -> tuple[Any, ...]:
    """The masks, each as ``validate`` makes it from a tuple of one.

    Raises: PydanticCustomError: it is no list. pydantic.ValidationError: what is wrong with any of them, each at its
    own key.
    """
    if not isinstance(masks, (list, tuple)):
        raise PydanticCustomError("masks", "must be a list of masks, such as [{preset: geometric, max: 1.02}]")
    made: list[Any] = []
    errors: list[InitErrorDetails] = []
    for index, mask in enumerate(masks):
        place = 1  # where a location begins: after pydantic's own index
        try:
            if isinstance(mask, MaskPreset):
                made.append(_labelled(mask))
            elif (own := _plugin(mask)) is not None:
                place = 0
                made.append(_labelled(own.model_validate(mask)))
            else:
                made += validate((_known_preset(mask),))
        except PluginError as error:
            text = "; ".join(problem.message for problem in error.problems)
            kind = PydanticCustomError("preset", "{text}", {"text": text})
            errors.append(InitErrorDetails(type=kind, loc=(index, "preset"), input=mask["preset"]))
        except ValidationError as error:
            errors += [repeated(dict(item), (index, *item["loc"][place:])) for item in error.errors()]
    if errors:
        raise ValidationError.from_exception_data("masks", errors)
    return tuple(made)


def _labelled(mask: MaskPreset) -> MaskPreset:
    """The mask of a plugin, whose rule may have a label that no field has seen."""
    label = mask.rule().label
    if wrong := wrong_label(label):
        error = PydanticCustomError("label", "{text}", {"text": wrong})
        raise ValidationError.from_exception_data("masks", [InitErrorDetails(type=error, loc=("label",), input=label)])
    return mask


def _plugin(mask: Any) -> type[MaskPreset] | None:
    """The model of a preset that another distribution brings, or that is given as ``module:attribute``."""
    name = mask.get("preset") if isinstance(mask, Mapping) else None
    if not isinstance(name, str):
        return None
    # One of this package's has a model of its own, unless somebody else claims its name too.
    if ":" not in name and (name not in PLUGINS.available() or PLUGINS.is_own(name)):
        return None
    found: type[MaskPreset] = PLUGINS.load(name)
    return found


def _known_preset(mask: Any) -> Any:
    if isinstance(mask, StrictModel):
        return mask
    location: tuple[int | str, ...] = (0,)
    if not isinstance(mask, Mapping):
        guess = nearest(mask, PRESETS) if isinstance(mask, str) else None
        example = f"{{preset: {guess}, …}}" if guess else "{preset: geometric, max: 1.02}"
        error = PydanticCustomError("mask", "must be a mapping, such as {example}", {"example": example})
    elif "preset" not in mask or mask["preset"] in tuple(PRESETS):
        return mask
    else:
        guess = nearest(str(mask["preset"]), PRESETS)
        hint = f"did you mean '{guess}'?" if guess else "known: " + ", ".join(PRESETS)
        error = PydanticCustomError("preset", "unknown preset", {"hint": hint})
        location, mask = (0, "preset"), mask["preset"]
    raise ValidationError.from_exception_data("masks", [InitErrorDetails(type=error, loc=location, input=mask)])
