"""What a recipe trains, and what is known to go wrong with it: rules as data, each with one function."""

from __future__ import annotations

from nemo_geomask.checks.facts import MISMATCH_KL, RecipeFacts
from nemo_geomask.checks.objective import describe
from nemo_geomask.checks.report import RULES, Report, check
from nemo_geomask.checks.rule import Finding, Hit, Rule, Severity

__all__ = ["MISMATCH_KL", "RULES", "Finding", "Hit", "RecipeFacts", "Report", "Rule", "Severity", "check", "describe"]
