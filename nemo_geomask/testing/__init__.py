"""Holds a loss to what the package promises, whoever wrote its variant, mask, statistic, level or truncation.

``assert_promises("my_losses:UNCLIPPED")`` in a test, or ``nemo-geomask test-variant my_losses:UNCLIPPED``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nemo_geomask.config.corrections import LEVELS, STATISTICS, TRUNCATIONS, MaskStatistic
from nemo_geomask.config.presets import PLUGINS as PRESETS
from nemo_geomask.errors import PluginError
from nemo_geomask.losses import BeforeStep, registry
from nemo_geomask.losses.build import examined
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
"""What a variant given by its name is tried under: alone, and with a weight and masks."""


def assert_promises(subject: str | Mapping[str, Any]) -> None:
    """Raise unless a loss keeps every promise.

    Args:
        subject: a name or ``module:attribute``, tried under each of its :func:`trials`; or whole settings of
            ``loss_fn``.

    Raises: AssertionError: with a line for each. ConfigError: as :func:`nemo_geomask.build_loss`.
    """
    found = [
        f"{promise.name}: {text}"
        for case in ([subject] if isinstance(subject, Mapping) else trials(subject).values())
        for promise, text in broken_promises(case)
        if text
    ]
    if found:
        raise AssertionError("\n".join(found))


def broken_promises(settings: Mapping[str, Any]) -> Iterator[tuple[Promise, str]]:
    """Each promise with what the loss does instead, empty where it keeps it.

    Args:
        settings: as :func:`nemo_geomask.build_loss` takes them.
    """
    loss, _ = examined({"reference_policy_kl_penalty": 0.0, "compile": False, **settings})
    before, tried = BeforeStep(loss.config), uneven_batch()
    if before.needed:
        tried |= before(tried).changes
    for promise in PROMISES:
        try:
            yield promise, promise.broken(loss, tried)
        except Exception as error:
            yield promise, f"{type(error).__name__}: {' '.join(str(error).split())}"


def trials(name: str) -> dict[str, Mapping[str, Any]]:
    """The settings of ``loss_fn`` that a name is tried under, by a few words.

    Args:
        name: registered in one of the plugins' groups, or ``module:attribute``: a variant; a mask's preset or
            statistic; a level or truncation of the weight.

    Raises: PluginError: it is none of these.
    """
    unknown: PluginError | None = None
    for load, settings in _TRIALS:
        try:
            found = load(name)
        except PluginError as error:
            unknown = unknown or error
        else:
            return settings(name, found)
    assert unknown is not None
    raise unknown


def _of_variant(name: str, found: Any) -> dict[str, Mapping[str, Any]]:
    words = ("alone", "with a weight and masks")
    return {said: {**case, "name": name} for said, case in zip(words, SETTINGS, strict=True)}


def _of_statistic(name: str, found: MaskStatistic) -> dict[str, Mapping[str, Any]]:
    # A bound that half of the tokens are beyond.
    data = uneven_batch()
    trained = data["token_mask"] != 0
    bound = float(found.of(data["prev_logprobs"][trained], data["generation_logprobs"][trained]).abs().median())
    bounds = {"max": bound, **({"min": -bound} if found.signed else {})}
    limits = {"token": bounds, "sequence_mean": {"drop_at_most": 0.3}, "prefix_max": bounds}
    rule = {"log_ratio": "mismatch", "statistic": name}
    return {f"at level {level}": {"masks": [{**rule, "level": level, **limit}]} for level, limit in limits.items()}


def _of_truncation(name: str, found: Any) -> dict[str, Mapping[str, Any]]:
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
    (registry.load, _of_variant),
    (PRESETS.load, lambda name, found: {"as a mask": {"masks": [{"preset": name}]}}),
    (STATISTICS.load, _of_statistic),
    (LEVELS.load, lambda name, found: {"as the weight": {**_WEIGHTED, "is_correction_level": name}}),
    (TRUNCATIONS.load, _of_truncation),
)
