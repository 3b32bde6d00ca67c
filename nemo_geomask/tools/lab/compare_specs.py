"""Parser of ``--compare``: each SPEC changes a copy of the recipe's ``loss_fn:`` block.

In ``SPEC = name[:level][+preset]...``, ``name`` is a loss (``gspo``, or ``module:attribute``). ``level`` is ``token``,
``sequence``, ``sequence_mean`` or ``none`` (no correction). Each ``preset`` is a mask with the bounds in
``lab.presets``. Without a level or preset, the recipe's settings apply. Its ``loss_fn.options`` are those of its own
loss, and no other loss gets them.

A name may itself contain a colon. The text before the first colon is a registered loss if there is one with this name,
and otherwise a module. A last part ``token``, ``sequence``, ``sequence_mean`` or ``none`` is always the level. So an
attribute with one of these names needs a level after it: ``my_losses:token:none``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nemo_geomask.config import nearest
from nemo_geomask.config.corrections import LEVELS
from nemo_geomask.errors import ConfigError
from nemo_geomask.losses import available
from nemo_geomask.tools.lab.lab_recipe import LabConfig

DEFAULT_LOSS = "clipped_pg"
"""Name of the loss of a ``loss_fn:`` block without a name."""
_LEVELS = tuple(LEVELS.built_in)
_NONE = "none"
_CORRECTION_KEYS = (
    "is_correction_level",
    "truncated_importance_sampling_type",
    "truncated_importance_sampling_ratio",
    "truncated_importance_sampling_ratio_min",
)


def parse_compare(text: str | Iterable[str], base: Mapping[str, Any], lab: LabConfig) -> dict[str, dict[str, Any]]:
    """Parse a comma-separated list of SPECs into a ``loss_fn:`` block for each.

    Args:
        text: ``gspo:sequence,gspo:sequence_mean``, or a sequence of SPECs.
        base: the recipe's ``loss_fn:``, which every SPEC starts from.
        lab: the ``lab:`` section, with the presets' bounds.

    Raises: ConfigError: a SPEC is empty or listed twice, or its level is unknown.
    """
    specs = [spec.strip() for spec in (text.split(",") if isinstance(text, str) else text)]
    if "" in specs:
        raise ConfigError("--compare: an empty SPEC; separate SPECs by single commas, such as gspo:none,gspo:sequence")
    repeated = sorted({spec for spec in specs if specs.count(spec) > 1})
    if repeated:
        raise ConfigError(f"--compare: '{repeated[0]}' is listed twice; its curves would be equal. Remove one")
    return {spec: _block_of(spec, base, lab) for spec in specs}


def _block_of(spec: str, base: Mapping[str, Any], lab: LabConfig) -> dict[str, Any]:
    head, *presets = spec.split("+")
    name, level = _split_level(head, spec)
    block = {**base, "name": name}
    if name != base.get("name", DEFAULT_LOSS):
        block.pop("options", None)
    if level == _NONE:
        block = {key: value for key, value in block.items() if key not in _CORRECTION_KEYS}
        block["use_importance_sampling_correction"] = False
    elif level is not None:
        block |= {"use_importance_sampling_correction": True, "is_correction_level": level}
    if presets:
        masks = [{"preset": preset, **lab.preset_bounds.get(preset, {})} for preset in presets]
        block["masks"] = [*(block.get("masks") or ()), *masks]
    return block


def _split_level(head: str, spec: str) -> tuple[str, str | None]:
    """Split ``name[:level]`` into the name and the level, None if there is none."""
    parts = head.split(":")
    if not parts[0]:
        raise ConfigError(
            f"--compare: '{spec}' names no loss; a SPEC is name[:level][+preset...], such as "
            "gspo:sequence_mean+geometric"
        )
    if len(parts) == 1:
        return head, None
    *name, last = parts
    if last in (*_LEVELS, _NONE):
        return ":".join(name), last
    if last and len(parts) == 2 and parts[0] not in available():
        # module:attribute, without a level.
        return head, None
    guess = nearest(last, (*_LEVELS, _NONE))
    hint = f"did you mean '{guess}'? " if guess else ""
    raise ConfigError(
        f"--compare: '{spec}': unknown correction level '{last}'; {hint}levels: {', '.join(_LEVELS)}, {_NONE}. "
        f"The text before it, '{':'.join(name)}', is the loss"
    )
