"""Checks that a loss keeps the package's promises, for authors of variants, masks, statistics, levels and truncations.

A promise is a property that every loss must have, such as that microbatches add up to the whole batch; see
:data:`PROMISES`. A trial is a block of ``loss_fn`` settings under which a plugin is tested.

Use ``assert_promises("my_losses:UNCLIPPED")`` in a test, or ``nemo-geomask test-variant my_losses:UNCLIPPED``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nemo_geomask.config.corrections import LEVELS, STATISTICS, TRUNCATIONS, MaskStatistic
from nemo_geomask.config.presets import PRESET_GROUP
from nemo_geomask.data_keys import GENERATION_LOGPROBS, PREV_LOGPROBS, TOKEN_MASK
from nemo_geomask.errors import PluginError
from nemo_geomask.losses import PrestepPass
from nemo_geomask.losses.build import build_with_warnings
from nemo_geomask.objectives import registry
from nemo_geomask.testing.promises import PROMISES, Promise, uneven_batch

__all__ = ["PROMISES", "SETTINGS", "Promise", "assert_promises", "broken_promises", "trials"]

SETTINGS: tuple[Mapping[str, Any], ...] = (
    {},
    {
        "ratio_anchor": "prev",
        "use_importance_sampling_correction": True,
        "is_correction_level": "sequence_mean",
        "masks": [{"preset": "geometric", "min": 0.9, "max": 1.1}, {"preset": "opsm", "delta": 0.2}],
    },
)
"""Settings under which a variant is tried: none besides its name, and an importance-sampling weight with masks."""


def assert_promises(subject: str | Mapping[str, Any]) -> None:
    """Raise AssertionError unless a loss keeps every promise.

    Args:
        subject: a plugin's name or ``module:attribute``, tested under each of its :func:`trials`; or complete settings
            of ``loss_fn``.

    Raises: AssertionError: a promise is broken; the message has a line for each. ConfigError: the settings are invalid,
        as for :func:`nemo_geomask.build_loss`. PluginError: the name is not known, as for :func:`trials`.
    """
    violations = [
        f"{promise.name}: {violation}"
        for settings in ([subject] if isinstance(subject, Mapping) else trials(subject).values())
        for promise, violation in broken_promises(settings)
        if violation
    ]
    if violations:
        raise AssertionError("\n".join(violations))


def broken_promises(settings: Mapping[str, Any]) -> Iterator[tuple[Promise, str]]:
    """Yield every promise with a message that says how the loss breaks it; the message is "" if the loss keeps it.

    If the loss breaks the first promise, that of finite numbers, no other is tested: each compares numbers.

    Args:
        settings: settings of ``loss_fn``, as for :func:`nemo_geomask.build_loss`.
    """
    loss, _ = build_with_warnings({"reference_policy_kl_penalty": 0.0, "compile": False, **settings})
    prestep, batch = PrestepPass(loss.config), uneven_batch()
    if prestep.needed:
        batch |= prestep(batch).changes
    for promise in PROMISES:
        try:
            violation = promise.find_violation(loss, batch)
        except Exception as error:
            yield promise, f"{type(error).__name__}: {' '.join(str(error).split())}"
            continue
        if violation and promise is PROMISES[0]:
            yield promise, f"{violation}. The other promises compare numbers and were not tested"
            return
        yield promise, violation


def trials(name: str) -> dict[str, Mapping[str, Any]]:
    """Return the settings of ``loss_fn`` under which a plugin is tested, each with a short description as its key.

    Args:
        name: name of a registered plugin, or ``module:attribute``. The plugin is a variant, a mask preset, a mask
            statistic, or a level or truncation of the importance-sampling weight.

    Raises: PluginError: no such plugin can be loaded.
    """
    first_error: PluginError | None = None
    for load, make_trials in _TRIALS:
        try:
            plugin = load(name)
        except PluginError as error:
            first_error = first_error or error
        else:
            return make_trials(name, plugin)
    assert first_error is not None
    raise first_error


def _variant_trials(name: str, plugin: Any) -> dict[str, Mapping[str, Any]]:
    descriptions = ("alone", "with a weight and masks")
    return {
        description: {**settings, "name": name} for description, settings in zip(descriptions, SETTINGS, strict=True)
    }


def _statistic_trials(name: str, plugin: MaskStatistic) -> dict[str, Mapping[str, Any]]:
    # The median is the bound, so that half of the tokens are out of bounds. The promise of finite numbers reports NaN.
    batch = uneven_batch()
    is_trained = batch[TOKEN_MASK] != 0
    values = plugin.of(batch[PREV_LOGPROBS][is_trained], batch[GENERATION_LOGPROBS][is_trained])
    sizes = values[values.isfinite() & (values != 0)].abs()
    bound = float(sizes.median()) if sizes.numel() else 1.0
    bounds = {"max": bound, **({"min": -bound} if plugin.signed else {})}
    # In a mean, positive and negative values would cancel.
    sequence_level = "sequence_max" if plugin.signed else "sequence_mean"
    limits = {"token": bounds, sequence_level: {"drop_at_most": 0.3}, "prefix_max": bounds}
    rule = {"log_ratio": "mismatch", "statistic": name}
    return {f"at level {level}": {"masks": [{**rule, "level": level, **limit}]} for level, limit in limits.items()}


def _truncation_trials(name: str, plugin: Any) -> dict[str, Mapping[str, Any]]:
    bounds = {"truncated_importance_sampling_ratio": 1.2, "truncated_importance_sampling_ratio_min": 0.8}
    return {
        f"at level {level}": {
            **_WEIGHTED,
            "is_correction_level": level,
            "truncated_importance_sampling_type": name,
            **bounds,
        }
        for level in ("token", "sequence_mean")
    }


_WEIGHTED = {"use_importance_sampling_correction": True}
_Trials = Callable[[str, Any], dict[str, Mapping[str, Any]]]
_TRIALS: tuple[tuple[Callable[[str], Any], _Trials], ...] = (
    (registry.load, _variant_trials),
    (PRESET_GROUP.load, lambda name, plugin: {"as a mask": {"masks": [{"preset": name}]}}),
    (STATISTICS.load, _statistic_trials),
    (LEVELS.load, lambda name, plugin: {"as the weight": {**_WEIGHTED, "is_correction_level": name}}),
    (TRUNCATIONS.load, _truncation_trials),
)
