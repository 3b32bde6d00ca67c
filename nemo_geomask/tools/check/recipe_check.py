"""``nemo-geomask check``: reads a recipe, builds its loss, applies the rules, and predicts what its masks keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nemo_geomask.objectives.variant import Part
from nemo_geomask.recipe import Recipe, read_recipe
from nemo_geomask.tools.check import MISMATCH_KL, UNCHECKED_SECTIONS
from nemo_geomask.tools.check.all_rules import Report, check
from nemo_geomask.tools.check.expectation import PredictableMask, kept_fraction, predictable_masks
from nemo_geomask.tools.check.objective_text import describe
from nemo_geomask.tools.check.recipe_facts import RecipeFacts

if TYPE_CHECKING:
    from nemo_geomask.tools.diagnose import MeasuredRun

__all__ = ["CheckOptions", "CheckedRecipe", "MaskForecast", "check_recipe"]

# Smallest KL that the formulas accept. Noise can make a measured KL negative.
_SMALLEST_KL = 1e-12


@dataclass(frozen=True)
class CheckOptions:
    """Options of a check.

    Attributes:
        recipe: path of the recipe.
        overrides: ``key.path=value`` settings that replace the recipe's.
        ignore: ids of rules to silence.
        gpu: name of the GPU that samples, such as A100; None if unknown.
        mismatch_kl: expected mean KL between the engines in nats per token; None: the measured one, else
            :data:`MISMATCH_KL`.
        similar_run: folder with the records or logs of a similar run, in which mismatch and response length are
            measured; None: nothing is measured.
        cache: folder of the similar run's converted logs; None: a folder beside them.
    """

    recipe: str
    overrides: Sequence[str] = ()
    ignore: Sequence[str] = ()
    gpu: str | None = None
    mismatch_kl: float | None = None
    similar_run: Path | None = None
    cache: Path | None = None


class MaskForecast(NamedTuple):
    """Expected fraction of the tokens or sequences that a mask keeps.

    Attributes:
        mask: the mask.
        tokens: number of tokens of a response.
        kept: (mismatch KL in nats per token, fraction) pairs.
    """

    mask: PredictableMask
    tokens: int
    kept: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class CheckedRecipe:
    """Result of a check.

    Attributes:
        facts: the recipe, with the mismatch and the response length that the rules assumed.
        objective: formula and explanation of each part of the loss; empty if there is no valid loss.
        forecasts: fraction that each mask is expected to keep, for the masks of which it can be computed.
        report: findings of the rules.
        measured: measurements of the similar run; None without one.
    """

    facts: RecipeFacts
    objective: tuple[Part, ...]
    forecasts: tuple[MaskForecast, ...]
    report: Report
    measured: MeasuredRun | None


def check_recipe(options: CheckOptions, recipe: Recipe | None = None) -> CheckedRecipe:
    """Check a recipe.

    Args:
        options: what to check, and how.
        recipe: the recipe if it was read already, with its overrides and ``leave=UNCHECKED_SECTIONS``.

    Raises:
        ConfigError: the recipe can't be read, or an option has an unknown value.
        DataError: the similar run has no records that can be measured.
    """
    recipe = recipe or read_recipe(options.recipe, options.overrides, leave=UNCHECKED_SECTIONS)
    facts = RecipeFacts.from_recipe(recipe, mismatch_kl=options.mismatch_kl or MISMATCH_KL, gpu=options.gpu)
    measured = None
    if options.similar_run is not None:
        # Imported here, since it needs the packages of the diagnose extra.
        from nemo_geomask.tools.diagnose import measure_run

        has_own_loss = facts.loss is not None and not facts.trains_nemo_rl_loss
        settings = recipe.data.get("loss_fn") if has_own_loss else None
        measured = measure_run(options.similar_run, settings, options.cache)
        kl = options.mismatch_kl or max(measured.mismatch_kl, _SMALLEST_KL)
        facts = replace(facts, mismatch_kl=kl, measured_tokens=measured.response_tokens)
    return CheckedRecipe(
        facts=facts,
        objective=describe(facts.loss) if facts.loss else (),
        forecasts=_forecast_masks(facts),
        report=check(facts, ignore=options.ignore),
        measured=measured,
    )


def _forecast_masks(facts: RecipeFacts) -> tuple[MaskForecast, ...]:
    """Predict what each mask keeps at the expected mismatch and at five times as much."""
    tokens = facts.response_tokens
    has_masks = facts.loss is not None and (not facts.trains_nemo_rl_loss or facts.config.truncation is not None)
    if not has_masks or tokens is None:
        return ()
    forecasts = []
    for mask in predictable_masks(facts.config):
        fractions = [(kl, kept_fraction(mask.rule, kl, tokens)) for kl in (facts.mismatch_kl, 5 * facts.mismatch_kl)]
        kept = tuple((kl, fraction) for kl, fraction in fractions if fraction is not None)
        forecasts.append(MaskForecast(mask, tokens, kept))
    return tuple(forecasts)
