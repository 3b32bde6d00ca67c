"""What is known to go wrong with a recipe: rules as data, each with one function."""

from __future__ import annotations

from nemo_geomask.config.checks.rule import Finding, Hit, Rule, Severity
from nemo_geomask.config.checks.run import RULES, Report, judge
from nemo_geomask.config.checks.subject import Subject

__all__ = ["RULES", "Finding", "Hit", "Report", "Rule", "Severity", "Subject", "judge"]
