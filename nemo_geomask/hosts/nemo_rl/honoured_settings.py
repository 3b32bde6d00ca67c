"""Settings of a loss that NeMo-RL's own loops and workers would not train as they say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nemo_geomask.config import LossConfig
from nemo_geomask.errors import ConfigError, Problem
from nemo_geomask.yaml_text import as_yaml

NO_ENTROPY = (
    "true, but NeMo-RL computes no entropies during training; set loss_fn.logprob_backend: geomask or geomask_linear, "
    "which compute them in their pass over the logits, or set entropy: false"
)
"""Message of the problem that :func:`lacks_entropy` finds; it follows the key ``loss_fn.record.entropy``."""

_VERSIONS = "it reads the tokens' versions, which NeMo-RL's batches do not have"
_OWN_LOOP: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "proximal_policy": (("recomputed",), _VERSIONS),
    "max_token_lag": ((None,), _VERSIONS),
    "denominator": (
        ("original", "kept"),
        "NeMo-RL's workers do not multiply the gradient by G/K (its PR 4171 does so for its own loss); with log_ratio: "
        "mismatch, denominator: kept removes the same sequences before the step, for a pass over prev_logprobs",
    ),
}
"""The values of a loss setting that NeMo-RL's loops and workers honour, and why no others."""


def require_honoured(config: LossConfig, recipe: Mapping[str, Any]) -> None:
    """Refuse a recipe whose loss NeMo-RL would not train as the settings say.

    Args:
        config: the settings of the loss.
        recipe: the recipe, or the sections that :func:`prev_readers` reads.

    Raises:
        ConfigError: see :func:`own_loop_settings` and :func:`prev_readers`.
    """
    if problems := [*own_loop_settings(config), *prev_readers(config, recipe)]:
        raise ConfigError(*problems)


def own_loop_settings(config: LossConfig, names: Iterable[str] = _OWN_LOOP) -> Iterator[Problem]:
    """Yield a problem for each setting, among ``names``, that needs a training loop of one's own."""
    for name in names:
        honoured, why = _OWN_LOOP[name]
        value = getattr(config, name)
        if value not in honoured:
            fix = {f"loss_fn.{name}": honoured[0]}
            message = f"{as_yaml(value)}, but {why}; {{fix}}, or train in a loop of your own"
            yield Problem((f"loss_fn.{name}",), message, fix=fix)


def prev_readers(config: LossConfig, recipe: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem for each setting that makes NeMo-RL read ``prev_logprobs``, if the loss has them not computed."""
    uses = {
        "grpo.seq_logprob_error_threshold": "masks sequences",
        "ppo.seq_logprob_error_threshold": "masks sequences",
        "on_policy_distillation.enabled": "makes advantages",
    }
    fix = {"loss_fn.audit_fraction": 1.0}
    for key, use in uses.items() if config.skips_prev else ():
        section, _, name = key.partition(".")
        value = (recipe.get(section) or {}).get(name)
        if value is not None and value is not False:
            yield Problem(
                (key, "loss_fn.ratio_anchor"),
                f"{key}: {as_yaml(value)} {use} by prev_logprobs, which are not computed under loss_fn.ratio_anchor: "
                f"gen or proximal_policy: interpolated; remove it, or {{fix}}, which computes all of them",
                fix=fix,
            )


def lacks_entropy(config: LossConfig) -> bool:
    """Return True if the loss records entropies that no worker computes."""
    return config.record is not None and config.record.entropy and not config.logprob_backend.startswith("geomask")
