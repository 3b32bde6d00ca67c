"""Text output of ``nemo-geomask check``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from nemo_geomask.tools.check.recipe_check import RULES, SEVERITIES, CheckedRecipe, MaskForecast
from nemo_geomask.tools.check.recipe_facts import RecipeFacts
from nemo_geomask.tools.check.rule import Finding
from nemo_geomask.tools.shared.mismatch_switches import MismatchSwitch, settings_left_open
from nemo_geomask.tools.shared.terminal_tables import count_with_noun
from nemo_geomask.tools.shared.terminal_text import escape_line, escape_lines

if TYPE_CHECKING:
    from nemo_geomask.tools.diagnose import MeasuredRun


_KEYS_LISTED = 3
_MAX_FINDINGS_OF_A_RULE = 5  # more are one list
OPTION_FOR = {"gpu": "--gpu", "nemo_rl": "NeMo-RL's source (set NEMO_RL_ROOT to a checkout)"}
"""What the user has to provide so that an attribute of ``RecipeFacts`` is known."""


def list_rules() -> str:
    """Return the table of the rules as text, and the next free id of each hundred for those who add one."""
    rows = [f"{rule.id}  {rule.severity:7}  {rule.title}\n{'':16}{rule.source}" for rule in RULES]
    highest = {rule.id[:3]: int(rule.id[2:]) for rule in RULES}  # of ids in ascending order
    return "\n".join([*rows, f"next free ids: {', '.join(f'GM{number + 1:03}' for number in highest.values())}"])


def as_text(checked: CheckedRecipe) -> str:
    """Return the result of a check as text: objective, expected effect of masks, findings, and what is unchecked."""
    facts, report = checked.facts, checked.report
    sections = [
        [escape_line(f"{facts.recipe.path}") + (f", on the NeMo-RL in {facts.nemo_rl}" if facts.nemo_rl else "")],
        *_objective_sections(checked),
        _forecast_lines(checked.forecasts),
        _measured_lines(checked.measured) if checked.measured else [],
        *_finding_sections(report.findings),
        [", ".join(count_with_noun(report.count(severity), severity) for severity in SEVERITIES), *_remarks(checked)],
    ]
    return join_sections(sections)


def join_sections(sections: Iterable[Sequence[str]]) -> str:
    """Return sections of lines as text, with control characters escaped and an empty line between sections."""
    return "\n\n".join("\n".join(escape_lines(line, "    ") for line in lines) for lines in sections if lines)


def _objective_sections(checked: CheckedRecipe) -> Iterator[list[str]]:
    facts, objective = checked.facts, checked.objective
    if objective and facts.trains_nemo_rl_loss:
        ignored = sorted({finding.key for finding in checked.report.findings if finding.rule.id == "GM003"})
        without = f" without {', '.join(ignored)}, which NeMo-RL ignores" if ignored else ""
        yield [
            "loss_fn has no name, so NeMo-RL's own ClippedPGLossFn trains. Its objective is that of `clipped_pg`"
            f"{without}:"
        ]
    yield [f"  {part.formula}" for part in objective]
    yield [f"  {part.explanation}" for part in objective]
    if facts.other_algorithm:
        yield [f"This recipe ({facts.other_algorithm}) trains no policy loss, so there is no loss_fn to check."]


def _forecast_lines(forecasts: Sequence[MaskForecast]) -> list[str]:
    if not forecasts:
        return []
    kls = " | ".join(f"{kl:.4g}" for kl, _ in forecasts[0].kept)
    lines = [
        f"  expected fraction that each mask keeps, for responses of {forecasts[0].tokens} tokens at a mismatch KL of "
        f"{kls} nats per token:"
    ]
    for forecast in forecasts:
        rule, unit = forecast.mask
        fractions = " | ".join(f"{100 * fraction:.3g} %" for _, fraction in forecast.kept)
        condition = "" if rule.when == "always" else f" with {rule.when.replace('_', ' ')}"
        lines.append(f"    {rule.label}: {fractions} of {unit}{condition}")
    return lines


def _measured_lines(measured: MeasuredRun) -> list[str]:
    low, high = measured.interval
    first, last = measured.steps
    staleness = "" if math.isnan(measured.staleness) else f", staleness {measured.staleness:.3g} steps"
    summary = (
        f"  measured in {measured.directory}, steps {first} to {last}: mismatch KL {measured.mismatch_kl:.3g} nats per "
        f"token ({low:.3g} to {high:.3g}), responses of {measured.response_tokens} tokens{staleness}"
    )
    masks = [f"    {label} keeps {fraction:.3%} of its last batches" for label, fraction in measured.kept.items()]
    return [summary, *masks]


def finding_lines(finding: Finding) -> list[str]:
    """Return a finding as lines of text: location, severity, rule and key, then the message and the source."""
    rule = finding.rule
    location = f"{finding.origin}: " if finding.origin else ""
    return [
        escape_line(f"{location}{rule.severity} {rule.id} {finding.key}"),
        f"  {finding.message}",
        f"  source: {rule.source}",
    ]


def _finding_sections(findings: Sequence[Finding]) -> Iterator[list[str]]:
    """Yield the lines of each finding; of many of one rule, those of one list."""
    for rule, group in itertools.groupby(findings, lambda finding: finding.rule):
        members = list(group)
        if len(members) <= _MAX_FINDINGS_OF_A_RULE:
            yield from map(finding_lines, members)
            continue
        heads = [f"{f'{each.origin}: ' if each.origin else ''}{each.key}: {each.message}" for each in members]
        yield [f"{rule.severity} {rule.id}, {len(members)} times: {rule.title}", *(f"  {head}" for head in heads)]


def _remarks(checked: CheckedRecipe) -> Iterator[str]:
    """Yield what the findings don't cover: rules that were ignored or could not be checked."""
    facts, report = checked.facts, checked.report
    if report.ignored:
        yield f"ignored: {', '.join(sorted({finding.rule.id for finding in report.ignored}))}"
    for problem in facts.not_imported:
        yield f"not checked: {problem}"
    if facts.loss is None and not facts.other_algorithm:
        until = "with --no-import" if facts.not_imported and not facts.problems else "until loss_fn is valid"
        yield f"not checked {until}: its objective, and {', '.join(sorted(facts.unsettled))}"
    if facts.largest_lag:
        steps = facts.steps_per_rollout
        updates = f", that is {facts.largest_lag * steps:g} optimiser steps" if steps and steps > 1 else ""
        yield (
            f"asynchronous: samples may be up to {count_with_noun(facts.largest_lag, 'weight update')} older than the "
            f"policy that they train{updates}{', which the expected fractions leave out' if checked.forecasts else ''}"
        )
    if facts.other_algorithm:
        left_out = sum(rule.needs_loss for rule in RULES)
        yield (
            f"not checked: {left_out} of {len(RULES)} rules, which are about GRPO and PPO; this recipe trains "
            f"{facts.other_algorithm}"
        )
    if settings := settings_of_probe(facts):
        keys = [switch.key for switch, _ in settings]
        more = f" and {len(keys) - _KEYS_LISTED} more" if len(keys) > _KEYS_LISTED else ""
        yield (
            f"settings that can make sampler and trainer disagree: {', '.join(keys[:_KEYS_LISTED])}{more}; "
            f"nemo-geomask probe {facts.recipe.path} measures which of them do"
        )
    for attribute, option in OPTION_FOR.items():
        ids = [rule.id for rule, unknown in report.unchecked if unknown == attribute]
        if ids:
            yield f"not checked without {option}: {', '.join(ids)}"


def settings_of_probe(facts: RecipeFacts) -> list[tuple[MismatchSwitch, Any]]:
    """Return the settings that a probe of the recipe would try."""
    if not facts.uses_vllm:
        return []
    return settings_left_open(facts.get, "megatron" if facts.uses_megatron else "dtensor")
