"""``nemo-geomask check``: what a recipe trains, and what is known to go wrong with it."""

from __future__ import annotations

import argparse
import json
import math
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_geomask.checks import MISMATCH_KL, RULES, Finding, RecipeFacts, Report, check, describe
from nemo_geomask.checks.expectation import judged, kept_fraction
from nemo_geomask.cli.arguments import above_zero
from nemo_geomask.errors import ConfigError, GeomaskError, Problem
from nemo_geomask.losses import Part
from nemo_geomask.recipe import read_recipe

if TYPE_CHECKING:
    from nemo_geomask.diagnosis.measured import Measured

__all__ = ["add", "run"]

_EPILOG = """\
exit status
  0  no errors (warnings are printed)
  1  warnings, under --strict
  2  errors, or a recipe that can't be read

A rule is silenced by --ignore, or by a comment in the recipe or in a file it inherits from:
  # nemo-geomask: ignore GM108, GM110

examples
  nemo-geomask check recipes/llm/grpo-gspo-qwen3-30ba3b-8n8g-megatron-cp2-geomask.yaml
  nemo-geomask check recipe.yaml ++loss_fn.is_correction_level=sequence --gpu A100 --strict --format json
"""


def add(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "check",
        help="say what a recipe trains, and what is known to go wrong with it",
        description="Read a NeMo-RL recipe with all that it inherits, validate its loss_fn, print the objective, and "
        "warn of settings that are known to cause mismatch, to do nothing, or to be refused by NeMo-RL.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", nargs="?", metavar="RECIPE.yaml", help="the recipe")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key.path=value",
        help="settings that replace the recipe's, as NeMo-RL takes them: ++key.path=value where it has no such key",
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 if there are warnings")
    parser.add_argument(
        "--ignore", action="append", default=[], metavar="GMnnn,…", help="rules to silence (may be repeated)"
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="of the output (default: text)")
    parser.add_argument("--gpu", metavar="NAME", help="GPU that samples, such as A100: some rules depend on it")
    parser.add_argument(
        "--mismatch-kl",
        type=above_zero,
        metavar="NATS",
        help="mean KL between the engines to reckon with, per token (metric geomask/mismatch_k3; default: "
        f"{MISMATCH_KL:g}, or what is measured by --from)",
    )
    parser.add_argument(
        "--from",
        dest="run_of",
        type=Path,
        metavar="DIR",
        help="records or logs of a run like it: reckon with its mismatch and its responses' length, and try the masks "
        "on its last batches",
    )
    parser.add_argument("--list-rules", action="store_true", help="print the rules and exit")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if arguments.list_rules:
        for rule in RULES:
            print(f"{rule.id}  {rule.severity:7}  {rule.title}\n{'':16}{rule.source}")
        return 0
    try:
        facts, objective, report, measured = _checked(arguments)
    except GeomaskError as error:
        if arguments.format == "json":
            # Who reads the output gets an object whatever happens; the same message goes to standard error.
            _print_json(_unread(arguments.recipe, error.problems))
        raise
    if arguments.format == "json":
        _print_json(_as_json(facts, objective, report, measured))
    else:
        print("\n".join(_as_text(facts, objective, report, measured)))
    if report.count("error"):
        return 2
    return 1 if arguments.strict and report.count("warning") else 0


def _checked(arguments: argparse.Namespace) -> tuple[RecipeFacts, tuple[Part, ...], Report, Measured | None]:
    if arguments.recipe is None:
        raise ConfigError("check needs a recipe; see nemo-geomask check --help")
    # What only data, environments and loggers need is no obstacle here.
    recipe = read_recipe(arguments.recipe, arguments.overrides, leave=("data", "env", "logger"))
    facts = RecipeFacts.of(recipe, mismatch_kl=arguments.mismatch_kl or MISMATCH_KL, gpu=arguments.gpu)
    measured = None
    if arguments.run_of is not None:
        from nemo_geomask.diagnosis.measured import measure_run  # which needs packages of its own

        settings = recipe.data.get("loss_fn") if facts.loss and not facts.nameless else None
        measured = measure_run(arguments.run_of, settings)
        kl = arguments.mismatch_kl or max(measured.mismatch_kl, 1e-12)
        facts = replace(facts, mismatch_kl=kl, measured_tokens=measured.response_tokens)
    ignore = [rule for group in arguments.ignore for rule in group.split(",") if rule.strip()]
    return facts, describe(facts.loss) if facts.loss else (), check(facts, ignore=ignore), measured


def _as_text(facts: RecipeFacts, objective: tuple[Part, ...], report: Report, measured: Measured | None) -> list[str]:
    lines = [f"{facts.recipe.path}" + (f", on the NeMo-RL in {facts.nemo_rl}" if facts.nemo_rl else "")]
    if objective and facts.nameless:
        lines += [
            "",
            "loss_fn has no name: NeMo-RL's own ClippedPGLossFn trains. Its objective (that of `clipped_pg`), without "
            "masks and whatever else NeMo-RL ignores:",
        ]
    if objective:
        lines += ["", *(f"  {part.formula}" for part in objective), "", *(f"  {part.words}" for part in objective)]
    if facts.other_algorithm:
        lines += ["", f"{facts.other_algorithm}: no policy loss trains, so there is none to check"]
    lines += _expected_lines(facts)
    lines += _measured_lines(measured) if measured else []
    for finding in report.findings:
        rule = finding.rule
        lines += ["", f"{_place(finding)}{rule.severity} {rule.id} {finding.key}", f"  {finding.message}"]
        lines += [f"  source: {rule.source}"]
    counts = ", ".join(_counted(report.count(severity), severity) for severity in ("error", "warning", "note"))
    lines += ["", counts]
    if report.ignored:
        lines.append(f"ignored: {', '.join(sorted({finding.rule.id for finding in report.ignored}))}")
    if facts.loss is None and not facts.other_algorithm:
        lines.append("not checked until loss_fn is valid: everything but loss_fn itself and the names of keys")
    for rule, missing in report.unjudged:
        lines.append(f"not checked without {_NEEDS[missing]}: {rule.id}, {rule.title}")
    return lines


def _expected(facts: RecipeFacts) -> list[dict[str, Any]]:
    """What each mask keeps at the mismatch to reckon with and at five times as much, where that can be reckoned."""
    tokens = facts.response_tokens
    if facts.loss is None or (facts.nameless and not facts.config.truncation) or tokens is None:
        return []
    return [
        {
            "key": mask.rule.key,
            "mask": mask.rule.label,
            "of": mask.of,
            "when": mask.rule.when,
            "tokens": tokens,
            "kept": [
                {"mismatch_kl": kl, "share": kept_fraction(mask.rule, kl, tokens)}
                for kl in (facts.mismatch_kl, 5 * facts.mismatch_kl)
            ],
        }
        for mask in judged(facts.config)
    ]


def _expected_lines(facts: RecipeFacts) -> list[str]:
    expected = _expected(facts)
    if not expected:
        return []
    kls = " | ".join(f"{kept['mismatch_kl']:.4g}" for kept in expected[0]["kept"])
    lines = ["", f"  kept of responses of {expected[0]['tokens']} tokens at a mismatch KL of {kls} nats per token:"]
    for mask in expected:
        shares = " | ".join(f"{100 * kept['share']:.3g} %" for kept in mask["kept"])
        which = "" if mask["when"] == "always" else f" with {mask['when'].replace('_', ' ')}"
        lines.append(f"    {mask['mask']}: {shares} of {mask['of']}{which}")
    return lines


def _measured_lines(measured: Measured) -> list[str]:
    low, high = measured.interval
    first, last = measured.steps
    stale = "" if math.isnan(measured.staleness) else f", staleness {measured.staleness:.3g} steps"
    lines = [
        "",
        f"  measured in {measured.directory}, steps {first} to {last}: mismatch KL {measured.mismatch_kl:.3g} nats per "
        f"token ({low:.3g} to {high:.3g}), responses of {measured.response_tokens} tokens{stale}",
    ]
    return lines + [f"    {label} keeps {share:.3%} of its last batches" for label, share in measured.kept.items()]


_NEEDS = {"gpu": "--gpu", "nemo_rl": "NeMo-RL (set NEMO_RL_ROOT)"}


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _place(finding: Finding) -> str:
    return f"{finding.origin}: " if finding.origin else ""


def _as_json(
    facts: RecipeFacts, objective: tuple[Part, ...], report: Report, measured: Measured | None
) -> dict[str, Any]:
    tree: Path | None = facts.nemo_rl
    return {
        "recipe": os.fspath(facts.recipe.path),
        "nemo_rl": str(tree) if tree else None,
        "loss_of": None if facts.loss is None else "nemo_rl" if facts.nameless else "nemo_geomask",
        "objective": [{"formula": part.formula, "words": part.words} for part in objective],
        "expected": _expected(facts),
        "measured": None if measured is None else _measured_as_json(measured),
        "settings": facts.config.model_dump(mode="json") if facts.loss else None,
        "findings": [_finding(finding) for finding in report.findings],
        "ignored": [_finding(finding) for finding in report.ignored],
        "unjudged": [{"rule": rule.id, "needs": _NEEDS[missing]} for rule, missing in report.unjudged],
        "summary": {severity: report.count(severity) for severity in ("error", "warning", "note")},
    }


def _unread(recipe: str | None, problems: tuple[Problem, ...]) -> dict[str, Any]:
    """The object of a recipe that was not judged: :func:`_as_json`'s keys, and errors that no rule found."""
    empty = dict.fromkeys(("rule", "severity", "key", "message", "file", "line", "override", "source"))
    findings = [
        {**empty, "severity": "error", "key": next(iter(problem.keys), None), "message": problem.message}
        for problem in problems
    ]
    return {
        "recipe": recipe,
        "nemo_rl": None,
        "loss_of": None,
        "objective": [],
        "expected": [],
        "measured": None,
        "settings": None,
        "findings": findings,
        "ignored": [],
        "unjudged": [],
        "summary": {"error": len(findings), "warning": 0, "note": 0},
    }


def _measured_as_json(measured: Measured) -> dict[str, Any]:
    staleness = None if math.isnan(measured.staleness) else measured.staleness
    return {**asdict(measured), "directory": str(measured.directory), "staleness": staleness}


def _print_json(result: dict[str, Any]) -> None:
    print(json.dumps(result, ensure_ascii=False, indent=2))


def _finding(finding: Finding) -> dict[str, Any]:
    origin = finding.origin
    return {
        "rule": finding.rule.id,
        "severity": finding.rule.severity,
        "key": finding.key,
        "message": finding.message,
        "file": origin.file if origin else None,
        "line": origin.line if origin else None,
        "override": origin.where if origin and origin.line is None else None,
        "source": finding.rule.source,
    }
