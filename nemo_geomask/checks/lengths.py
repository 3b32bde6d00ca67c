"""GM4: lengths and batch sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from nemo_geomask.checks.expectation import clipped_fractions, judged, kept_fraction, median_weight, spread_of_mean
from nemo_geomask.checks.facts import RecipeFacts
from nemo_geomask.checks.rule import Hit, Rule

__all__ = ["RULES"]

_LEVEL = "loss_fn.is_correction_level"


def _weight_vanishes(facts: RecipeFacts) -> Iterator[Hit]:
    config, tokens, kl = facts.config, facts.response_tokens, facts.mismatch_kl
    if not config.applies_weight or config.correction_level != "sequence" or tokens is None:
        return
    median = median_weight(kl, tokens)
    if median < 0.5:
        yield Hit(
            _LEVEL,
            f"sequence: for a response of {tokens} tokens at a mean mismatch KL of {kl:g} nats per token, half of the "
            f"weights are below {median:.2g}, and the effective sample size is {median**2:.2g} of the batch (tokens "
            "taken as independent, log-ratios as normal); is_correction_level: sequence_mean has the median "
            f"{math.exp(-kl):.4f} at every length",
        )


def _mask_removes_most(facts: RecipeFacts) -> Iterator[Hit]:
    tokens, kl = facts.response_tokens, facts.mismatch_kl
    if tokens is None:
        return
    for mask in judged(facts.config):
        rule, kept = mask.rule, kept_fraction(mask.rule, kl, tokens)
        if kept is not None and kept < 0.5:
            yield Hit(
                rule.key,
                f"mask {rule.label}: of {mask.of} in responses of {tokens} tokens at a mean mismatch KL of {kl:g} nats "
                f"per token, {kept:.1%} stay (tokens taken as independent, log-ratios as normal); "
                + (
                    "a product of ratios leaves any fixed bounds as it grows, use preset: geometric"
                    if rule.level == "sequence" and rule.statistic == "ratio"
                    else "widen the bounds"
                ),
            )


def _clip_below_mismatch(facts: RecipeFacts) -> Iterator[Hit]:
    config, tokens, kl = facts.config, facts.response_tokens, facts.mismatch_kl
    if tokens is None or not config.sequence_level_importance_ratios or config.ratio_anchor != "gen":
        return
    below, above = clipped_fractions(config, kl, tokens)
    if max(below, above) > 0.5:
        room = 1 - math.exp(-kl - 2 * spread_of_mean(kl, tokens))
        yield Hit(
            "loss_fn.ratio_anchor",
            f"gen: the sequence's ratio holds the mismatch, which is larger than ratio_clip_min: "
            f"{config.ratio_clip_min:g} and ratio_clip_max: {config.ratio_clip_max:g}: of responses of {tokens} tokens "
            f"at a mean mismatch KL of {kl:g} nats per token, {below:.0%} of those with A < 0 and {above:.0%} of those "
            "with A > 0 are clipped before the first update (tokens taken as independent, log-ratios as normal); set "
            f"ratio_anchor: prev with is_correction_level: sequence_mean, or a ratio_clip_min of {room:.1g} or more",
        )


def _every_batch_vetoed(facts: RecipeFacts) -> Iterator[Hit]:
    veto = facts.config.batch_veto
    if veto is not None and veto.max < facts.mismatch_kl:
        yield Hit(
            "loss_fn.batch_veto.max",
            f"{veto.max:g} is below the mean mismatch KL to reckon with ({facts.mismatch_kl:g} nats per token), so "
            "that no batch is trained on; 0.1 is the mismatch study's",
        )


def _loss_depends_on_split(facts: RecipeFacts) -> Iterator[Hit]:
    config = facts.config
    if config.positive_example_nll_weight and config.positive_example_nll_normalization == "microbatch":
        yield Hit(
            "loss_fn.positive_example_nll_normalization",
            "microbatch divides by the tokens of one microbatch, so that the loss changes with "
            "train_micro_batch_size, packing, dynamic batching and the number of GPUs; set loss",
        )


def _scored_in_other_batches(facts: RecipeFacts) -> Iterator[Hit]:
    training = facts.number("policy.train_micro_batch_size")
    scoring = facts.number("policy.logprob_batch_size")
    size = facts.tensor_parallel
    # From 4 on NeMo-RL refuses, see GM307.
    if not 2 <= size < 4 or facts.config.force_on_policy_ratio or training is None or scoring in (None, training):
        return
    yield Hit(
        "policy.logprob_batch_size",
        f"{scoring:g}, but train_micro_batch_size: {training:g}: kernels whose result depends on the batch give curr "
        f"and prev other values for the same tokens, seen with tensor parallelism (here {size}); make them equal",
    )


def _context(facts: RecipeFacts) -> Iterator[Hit]:
    key = "policy.generation.vllm_cfg.max_model_len"
    room, trained = facts.number(key), facts.number("policy.max_total_sequence_length")
    if facts.vllm and room and trained and room < trained:
        yield Hit(
            key,
            f"vLLM's context of {room:g} tokens is shorter than policy.max_total_sequence_length ({trained:g}): longer "
            "prompts end the run, and responses are cut; make them equal",
        )


RULES = (
    Rule(
        "GM401",
        "warning",
        "weights at `sequence` level that vanish at the length allowed",
        "https://github.com/NVIDIA-NeMo/RL/pull/2269; https://github.com/huggingface/trl/issues/5814",
        _weight_vanishes,
    ),
    Rule(
        "GM402",
        "warning",
        "a mask that removes most at the length allowed",
        "https://github.com/NVIDIA-NeMo/RL/pull/2269",
        _mask_removes_most,
    ),
    Rule(
        "GM403",
        "warning",
        "a loss that depends on how the batch is split",
        "docs/loss_reference.md; NeMo-RL `ClippedPGLossFn` (`positive_nll_loss`)",
        _loss_depends_on_split,
    ),
    Rule(
        "GM404",
        "warning",
        "training and scoring in batches of different size",
        "NeMo-RL docs/guides/dtensor-tp-accuracy.md",
        _scored_in_other_batches,
    ),
    Rule(
        "GM405",
        "warning",
        "a batch veto below the mismatch to reckon with",
        "the mismatch study, see GM201",
        _every_batch_vetoed,
    ),
    Rule("GM406", "warning", "a sampler's context below the trainer's", "NeMo-RL `vllm_worker.py`", _context),
    Rule(
        "GM407",
        "warning",
        "clip bounds on a sequence ratio within the mismatch it holds",
        "GSPO, arXiv:2507.18071 section 5.1, whose bounds are for π_θ/π_old; docs/loss_reference.md",
        _clip_below_mismatch,
    ),
)
