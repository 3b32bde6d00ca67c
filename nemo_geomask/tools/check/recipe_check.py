"""``nemo-geomask check``: reads a recipe, builds its loss, applies the rules, and predicts what its masks keep."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nemo_geomask.errors import ConfigError
from nemo_geomask.hosts.nemo_rl.source_words import is_in_source
from nemo_geomask.objectives.variant import Part
from nemo_geomask.recipe import Recipe, read_recipe
from nemo_geomask.tools.check.expectation import PredictableMask, kept_fraction, predictable_masks
from nemo_geomask.tools.check.objective_text import describe
from nemo_geomask.tools.check.recipe_facts import RecipeFacts
from nemo_geomask.tools.check.rule import Finding, Hit, Rule, load_rules
from nemo_geomask.yaml_text import inline_yaml

if TYPE_CHECKING:
    from nemo_geomask.tools.diagnose import MeasuredRun

RULES = load_rules()
"""All rules, by id."""
UNCHECKED_SECTIONS = ("data", "env", "logger")
"""Sections with paths and credentials. The environment variables that they refer to need not be set here."""
_BY_ID = {rule.id: rule for rule in RULES}

# "# nemo-geomask: ignore GM108, GM110 (reason)" in the recipe or a file that it inherits from. The name may be written
# with an underscore, and the colon left out before "ignore".
_COMMENT = re.compile(r"#\s*nemo[-_]geomask\s*(?::|(?=\signore\b))\s*(?P<verb>\S*)\s*(?P<ids>\w+(?:\s*,\s*\w+)*)?")

SEVERITIES = ("error", "warning", "note")
# Smallest KL that the formulas accept. Noise can make a measured KL negative.
_SMALLEST_KL = 1e-12


@dataclass(frozen=True)
class CheckOptions:
    """Options of a check.

    Attributes:
        mismatch_kl: expected mean KL between the engines in nats per token; None: the measured one, else the usual
            one of the recipe's precisions.
        similar_run: folder with the records or logs of a similar run, in which mismatch and response length are
            measured; None: nothing is measured.
    """

    recipe: str  # path of the recipe
    overrides: Sequence[str] = ()  # ``key.path=value`` settings that replace the recipe's
    ignore: Sequence[str] = ()  # ids of rules to silence
    gpu: str | None = None  # name of the GPU that samples, such as A100; None if unknown
    mismatch_kl: float | None = None
    similar_run: Path | None = None
    cache: Path | None = None  # folder of the similar run's converted logs; None: a folder beside them


class MaskForecast(NamedTuple):
    """Expected fraction of the tokens or sequences that a mask keeps."""

    mask: PredictableMask  # the mask
    tokens: int  # number of tokens of a response
    kept: tuple[tuple[float, float], ...]  # (mismatch KL in nats per token, fraction) pairs


@dataclass(frozen=True)
class CheckedRecipe:
    """Result of a check.

    Attributes:
        forecasts: fraction that each mask is expected to keep, for the masks of which it can be computed.
    """

    facts: RecipeFacts  # the recipe, with the mismatch and the response length that the rules assumed
    objective: tuple[Part, ...]  # formula and explanation of each part of the loss; empty if there is no valid loss
    forecasts: tuple[MaskForecast, ...]
    report: Report  # findings of the rules
    measured: MeasuredRun | None  # measurements of the similar run; None without one


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
    facts = RecipeFacts.from_recipe(recipe, mismatch_kl=options.mismatch_kl, gpu=options.gpu)
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


@dataclass(frozen=True)
class Report:
    """Findings of the rules in a recipe.

    Attributes:
        unchecked: rules that could not be checked, each with the attribute of :class:`RecipeFacts` that is unknown.
    """

    findings: tuple[Finding, ...]  # errors first, then warnings, then notes, each in the order of the rules
    ignored: tuple[Finding, ...] = ()  # findings that ``--ignore`` or a comment silenced
    unchecked: tuple[tuple[Rule, str], ...] = ()

    def count(self, severity: str) -> int:
        """Return the number of findings of one severity."""
        return sum(finding.rule.severity == severity for finding in self.findings)


def check(facts: RecipeFacts, *, ignore: Collection[str] = ()) -> Report:
    """Apply every rule to a recipe.

    Args:
        facts: facts about the recipe.
        ignore: ids of rules to silence, in addition to those in comments of the recipe's files.

    Raises:
        ConfigError: an id does not exist, or its rule can't be ignored.
    """
    ignored_ids = {_resolve_id(rule_id, "--ignore") for rule_id in ignore}
    for path, text in facts.recipe.files:
        ignored_ids |= _ids_in_comments(path, text)
    findings: list[Finding] = []
    unchecked: list[tuple[Rule, str]] = []
    for rule in RULES:
        if (rule.needs_loss and not facts.has_config) or (facts.is_lab and not rule.applies_to_lab):
            continue
        unknown = next((name for name in rule.needs if getattr(facts, name) is None), None)
        if unknown is None:
            findings += _findings(rule, facts)
        elif rule.id not in ignored_ids:
            unchecked.append((rule, unknown))
    findings = [_without_refused_fix(each, facts) for each in _without_consequences(findings, facts)]
    findings.sort(key=_rank)
    return Report(
        tuple(finding for finding in findings if finding.rule.id not in ignored_ids),
        tuple(finding for finding in findings if finding.rule.id in ignored_ids),
        tuple(unchecked),
    )


def _without_consequences(findings: list[Finding], facts: RecipeFacts) -> list[Finding]:
    """Leave out what another finding says better, and advice about settings that have to be given up."""
    by_severity = sorted(findings, key=_rank, reverse=True)  # of several findings about a key, the most severe counts
    explained = {each.key: _rank(each) for each in by_severity if not each.rule.gives_way}
    findings = [
        each
        for each in findings
        if not each.rule.gives_way
        or all(explained.get(key, len(SEVERITIES)) > _rank(each) for key in (each.key, *each.others))
    ]
    settled: set[str] = set()
    for cause in (each for each in findings if each.rule.gives_up):
        for key, value in cause.fix.items():
            fixed = facts.with_setting(key, value)
            others = {finding.rule for finding in findings} - {cause.rule}
            settled |= {rule.id for rule in others if not any(_findings(rule, fixed))}
    return [finding for finding in findings if finding.rule.id not in settled]


def _rank(finding: Finding) -> int:
    return SEVERITIES.index(finding.rule.severity)


def _without_refused_fix(finding: Finding, facts: RecipeFacts) -> Finding:
    """Leave out a word that resembles one that NeMo-RL knows, but refuses in this recipe."""
    if finding.rule.id != "GM324" or not (word := finding.fix.get(finding.key)):
        return finding
    if all(finding.key not in each.keys for each in facts.with_setting(finding.key, word).start_refusals):
        return finding
    return replace(finding, fix={}, message=finding.message.removesuffix(f"; set {inline_yaml(word)}"))


def _findings(rule: Rule, facts: RecipeFacts) -> Iterator[Finding]:
    """Yield the findings of a rule in the policy's settings, and in those of the other models that it is about."""
    findings = [*_findings_of_policy(rule, facts)]
    yield from findings
    messages = {finding.message for finding in findings}
    for section in (each for each in rule.models if each in facts.of_models):
        rename = functools.partial(re.sub, r"\bpolicy\.(?!generation)", f"{section}.")
        for finding in _findings_of_policy(rule, facts.of_models[section]):
            key, message = rename(finding.key), rename(finding.message)
            # What the model takes over from the policy is reported once.
            if key != finding.key and finding.message not in messages:
                fix = {rename(name): value for name, value in finding.fix.items()}
                yield replace(finding, key=key, message=message, fix=fix)


def _findings_of_policy(rule: Rule, facts: RecipeFacts) -> Iterator[Finding]:
    """Yield the findings of a rule, unless NeMo-RL's source has none of the words that the rule rests on."""
    for hit in rule.check(facts):
        message = _message(hit, facts)
        # GM001 reports an invalid setting; what the other rules make of its default would mislead.
        if rule.needs_loss and facts.is_unsettled(hit.key, message):
            continue
        checkout = facts.nemo_rl
        if not rule.refusals or checkout is None or any(is_in_source(checkout, text) for text in rule.refusals):
            origin = hit.origin or facts.recipe.origins.at(hit.key)
            yield Finding(rule, hit.key, message, origin, hit.fix, hit.is_misspelt, hit.others)


def _message(hit: Hit, facts: RecipeFacts) -> str:
    """Return the message of a hit with its fix in words, and where a setting is inherited from."""
    settings = []
    for key, value in hit.fix.items():
        entry = facts.recipe.origins.entries.get(key)
        is_inherited = entry and entry.origin.line and entry.origin.where != str(facts.recipe.path.resolve())
        name = "" if [*hit.fix] == [hit.key] else f"{key}: "
        where = f" (inherited from {entry.origin})" if entry and is_inherited and name else ""
        settings.append(f"{name}{inline_yaml(value)}{where}")
    if not settings or hit.is_misspelt:
        return hit.message
    words = f"set {' and '.join(settings)}"
    return hit.message.replace("{fix}", words) if "{fix}" in hit.message else f"{hit.message}; {words}"


def _ids_in_comments(path: Path, text: str) -> set[str]:
    """Return the ids of the rules that comments of a file silence."""
    ids: set[str] = set()
    for number, line in enumerate(text.splitlines(), start=1):
        if match := _COMMENT.search(line):
            location = f"{path}:{number}: {match.group().strip()!r}"
            if match["verb"] != "ignore" or not match["ids"]:
                raise ConfigError(f"{location}: write '# nemo-geomask: ignore GM101, GM102'")
            ids |= {_resolve_id(rule_id, location) for rule_id in re.split(r"\s*,\s*", match["ids"])}
    return ids


def _resolve_id(rule_id: str, location: str) -> str:
    """Return the id in upper case; ``location`` is the option or comment that an error names."""
    name = rule_id.strip().upper()
    if name not in _BY_ID:
        # Many ids differ from one another by one digit, so the guess keeps the digits and corrects the letters only.
        guess = f"GM{re.sub('[^0-9]', '', name)}"
        hint = f"did you mean {guess}?" if guess in _BY_ID else "see nemo-geomask check --list-rules"
        raise ConfigError(f"{location}: there is no rule {rule_id}; {hint}")
    if not _BY_ID[name].may_be_ignored:
        raise ConfigError(f"{location}: {name} ({_BY_ID[name].title}) can't be ignored")
    return name
