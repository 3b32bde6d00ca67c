"""Reasons why a recipe can't be rehearsed, each with the key and the way out."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from nemo_geomask.errors import Problem
from nemo_geomask.tools.check import Finding, RecipeFacts, Report

BACKEND = "policy.generation.backend"
"""Key of the library that samples; a rehearsal observes vLLM alone."""

_REFUSALS_OF_VARIABLES: Mapping[str, str] = {"NRL_IGNORE_TP_ACCURACY_CHECK": "GM307"}
"""For each environment variable, the rule of `check` for the NeMo-RL refusal that the variable switches off."""
_REPLACED = frozenset({"policy.model_name", "policy.tokenizer.name"})
"""Keys whose value every rehearsal replaces."""
_REPLACED_WITH_PROMPTS = ("data.train", "data.validation", "env")
"""Sections that a rehearsal replaces, unless it has the recipe's own prompts and environment."""

LAUNCH_VARIABLES = tuple(_REFUSALS_OF_VARIABLES)
"""Environment variables that decide whether NeMo-RL starts a recipe."""

_NO_CPU: Mapping[str, str] = {"glm_moe_dsa": "sparse attention, for which vLLM has no CPU kernel"}
"""By model type: the part of the architecture that vLLM or the trainer can't compute on CPUs."""
_NO_CPU_ON_MEGATRON: Mapping[str, str] = {
    "gemma4_text": "layers with two head sizes, which Megatron-Bridge has only through transformer-engine",
    "qwen3_next": "gated delta nets, which Megatron has only through transformer-engine",
}
"""By model type: the part with which Megatron's own layers, in place of transformer-engine's, can't be rehearsed."""
_MEDIA = ("omni", "audio", "-vl", "_vl", "vision", "vlm")
"""Parts of model names, and of the names of data processors, that stand for images, video or sound."""


def errors_of(
    report: Report, environment: Mapping[str, str] = os.environ, *, own_environment: bool = False
) -> list[Finding]:
    """Return the errors that keep a rehearsal from starting a recipe in an environment.

    Errors about settings that the rehearsal replaces do not count: a launcher may fill in the model or the path of the
    data, for example.

    Args:
        environment: variables under which the rehearsal starts.
        own_environment: the rehearsal has the recipe's own prompts and environment.
    """
    waived = {rule for variable, rule in _REFUSALS_OF_VARIABLES.items() if environment.get(variable)}
    errors = [finding for finding in report.findings if finding.rule.severity == "error"]
    sections = () if own_environment else _REPLACED_WITH_PROMPTS
    return [
        error
        for error in errors
        if error.rule.id not in waived
        and error.key not in _REPLACED
        and not f"{error.key}.".startswith(tuple(f"{section}." for section in sections))
    ]


def recipe_refusals(facts: RecipeFacts, *, has_gpus: bool = False) -> Iterator[Problem]:
    """Yield a problem for each part of a recipe that a rehearsal can neither run nor leave out.

    Args:
        has_gpus: this machine has GPUs, so that no other sampler takes the place of the recipe's.
    """
    if (algorithm := facts.other_algorithm) is not None:
        message = f"the recipe trains by {algorithm}, which has no policy loss; only GRPO and PPO are rehearsed"
        yield Problem(("grpo",), message)
        return
    if (backend := facts.get(BACKEND, "vllm")) != "vllm" and has_gpus:
        message = f"{backend} samples in this recipe, and a rehearsal samples with vLLM alone; override {BACKEND}=vllm"
        yield Problem((BACKEND,), f"{message} to rehearse everything else")
    teachers = "on_policy_distillation.non_colocated_teachers.enabled"
    if facts.is_true("on_policy_distillation.enabled") and not facts.is_true(teachers):
        message = (
            "not true: NeMo-RL computes teachers' log-probs, this recipe's advantages, in workers of their own alone"
        )
        yield Problem((teachers,), f"{message}; set it, or on_policy_distillation.enabled=false")
    yield from _media(facts)


def _media(facts: RecipeFacts) -> Iterator[Problem]:
    """Yield a problem if the recipe trains on images, video or sound: the built-in prompts are text."""
    why = "images, video or sound, and a rehearsal has text alone"
    name = str(facts.get("policy.model_name", "")).lower()
    if any(part in name for part in _MEDIA):
        yield Problem(("policy.model_name",), f"{facts.get('policy.model_name')} is a model of {why}")
        return
    for key in ("data.default.processor", "data.train.processor"):
        if any(part in str(facts.get(key, "")).lower() for part in _MEDIA):
            yield Problem((key,), f"{facts.get(key)} reads {why}")
            return


def model_refusals(facts: RecipeFacts, model_type: str) -> Iterator[Problem]:
    """Yield a problem if CPUs can't run a recipe's architecture with its training backend."""
    missing_part = _NO_CPU.get(model_type) or (_NO_CPU_ON_MEGATRON.get(model_type) if facts.uses_megatron else None)
    if missing_part is not None:
        yield Problem(
            ("policy.model_name",),
            f"{facts.get('policy.model_name')} ({model_type}) has {missing_part}; rehearse it on a machine with GPUs",
        )
