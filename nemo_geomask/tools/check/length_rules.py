"""GM401 to GM407: weights, masks and batch sizes that don't suit the length of responses or the expected mismatch."""

from __future__ import annotations

import math
from collections.abc import Iterator

from nemo_geomask.tools.check.expectation import (
    clipped_fractions,
    kept_fraction,
    mean_log_ratio_deviation,
    median_weight,
    predictable_masks,
)
from nemo_geomask.tools.check.recipe_facts import RecipeFacts
from nemo_geomask.tools.check.rule import Hit, Rule

__all__ = ["RULES"]

# A mask that is expected to keep less is reported. The limit is below a half, since useful bounds may keep about half:
# the mismatch study's 0.999 and 1.002 are as far from 1 as the expected mean.
_MIN_KEPT_FRACTION = 0.25
_ASSUMPTION = "(assuming independent tokens and normal log-ratios)"


def _vanishing_weight(facts: RecipeFacts) -> Iterator[Hit]:
    config, tokens, kl = facts.config, facts.response_tokens, facts.mismatch_kl
    if not config.applies_weight or config.correction_level != "sequence" or tokens is None:
        return
    median = median_weight(kl, tokens)
    if median < 0.5:
        yield Hit(
            "loss_fn.is_correction_level",
            f"sequence: for responses of {tokens} tokens at a mean mismatch KL of {kl:g} nats per token, half of the "
            f"weights are below {median:.2g}, and the effective sample size is {median**2:.2g} of the batch "
            f"{_ASSUMPTION}; set is_correction_level: sequence_mean, whose median is {math.exp(-kl):.4f} at any length",
        )


def _mask_removes_most(facts: RecipeFacts) -> Iterator[Hit]:
    tokens, kl = facts.response_tokens, facts.mismatch_kl
    if tokens is None:
        return
    for rule, unit in predictable_masks(facts.config):
        kept = kept_fraction(rule, kl, tokens)
        if kept is not None and kept < _MIN_KEPT_FRACTION:
            is_product = rule.level == "sequence" and rule.statistic == "ratio"
            fix = (
                "use preset: geometric, since a product of ratios exceeds any fixed bounds as responses grow"
                if is_product
                else "widen the bounds"
            )
            counted = "tokens in responses" if unit == "tokens" else "responses"
            yield Hit(
                rule.key,
                f"mask {rule.label} is expected to keep only {kept:.1%} of {counted} of {tokens} tokens at a mean "
                f"mismatch KL of {kl:g} nats per token {_ASSUMPTION}; {fix}",
            )


def _clip_narrower_than_mismatch(facts: RecipeFacts) -> Iterator[Hit]:
    config, tokens, kl = facts.config, facts.response_tokens, facts.mismatch_kl
    if tokens is None or not config.sequence_level_importance_ratios or config.ratio_anchor != "gen":
        return
    below, above = clipped_fractions(config, kl, tokens)
    if max(below, above) > 0.5:
        lowest_useful = 1 - math.exp(-kl - 2 * mean_log_ratio_deviation(kl, tokens))
        yield Hit(
            "loss_fn.ratio_anchor",
            f"gen: the sequence's ratio contains the mismatch, so for responses of {tokens} tokens at a mean mismatch "
            f"KL of {kl:g} nats per token, ratio_clip_min: {config.ratio_clip_min:g} and ratio_clip_max: "
            f"{config.ratio_clip_max:g} clip {below:.0%} of those with A < 0 and {above:.0%} of those with A > 0 "
            f"before the first update {_ASSUMPTION}; set ratio_anchor: prev with is_correction_level: sequence_mean, "
            f"or ratio_clip_min: {lowest_useful:.1g} or more",
        )


def _every_batch_vetoed(facts: RecipeFacts) -> Iterator[Hit]:
    veto = facts.config.batch_veto
    if veto is not None and veto.max < facts.mismatch_kl:
        yield Hit(
            "loss_fn.batch_veto.max",
            f"{veto.max:g} is below the expected mean mismatch KL of {facts.mismatch_kl:g} nats per token, so hardly "
            "any batch would be trained on; raise it, for example to 0.1 as in the mismatch study",
        )


def _loss_depends_on_split(facts: RecipeFacts) -> Iterator[Hit]:
    config = facts.config
    is_per_microbatch = config.positive_example_nll_normalization == "microbatch"
    if facts.has_rewards and config.positive_example_nll_weight and is_per_microbatch:
        yield Hit(
            "loss_fn.positive_example_nll_normalization",
            "microbatch: the NLL is divided by the tokens of one microbatch, so the loss changes with "
            "train_micro_batch_size, packing, dynamic batching and the number of GPUs; set loss",
        )


def _scoring_batch_size(facts: RecipeFacts) -> Iterator[Hit]:
    training = facts.number("policy.train_micro_batch_size")
    scoring = facts.number("policy.logprob_batch_size")
    tensor_parallel = facts.tensor_parallel
    uses_one_size = training is None or scoring in (None, training)
    # From a tensor-parallel size of 4 on, NeMo-RL refuses the recipe, which GM307 reports.
    if not 2 <= tensor_parallel < 4 or uses_one_size or facts.config.force_on_policy_ratio:
        return
    yield Hit(
        "policy.logprob_batch_size",
        f"{scoring:g}, but train_micro_batch_size: {training:g}: under tensor parallelism (here {tensor_parallel}), "
        "some kernels' results depend on the batch size, so curr and prev differ for the same weights; make them equal",
    )


def _short_vllm_context(facts: RecipeFacts) -> Iterator[Hit]:
    key = "policy.generation.vllm_cfg.max_model_len"
    context, trained_length = facts.number(key), facts.number("policy.max_total_sequence_length")
    if facts.uses_vllm and context and trained_length and context < trained_length:
        yield Hit(
            key,
            f"{context:g}: vLLM's context is shorter than policy.max_total_sequence_length ({trained_length:g}), so a "
            "longer prompt ends the run with an error, and responses are cut off; make them equal",
        )


RULES = (
    Rule(
        "GM401",
        "warning",
        "`sequence`-level weights that vanish for responses of the configured length",
        "https://github.com/NVIDIA-NeMo/RL/pull/2269; https://github.com/huggingface/trl/issues/5814",
        _vanishing_weight,
    ),
    Rule(
        "GM402",
        "warning",
        "mask that removes most responses of the configured length",
        "https://github.com/NVIDIA-NeMo/RL/pull/2269",
        _mask_removes_most,
    ),
    Rule(
        "GM403",
        "warning",
        "loss that depends on how the batch is split",
        "docs/reference/loss_reference.md; NeMo-RL `ClippedPGLossFn` (`positive_nll_loss`)",
        _loss_depends_on_split,
    ),
    Rule(
        "GM404",
        "note",
        "tensor parallelism of 2 or 3 with different batch sizes for training and scoring",
        "NeMo-RL docs/guides/dtensor-tp-accuracy.md",
        _scoring_batch_size,
    ),
    Rule(
        "GM405",
        "warning",
        "batch veto below the expected mismatch",
        "the mismatch study, see GM201",
        _every_batch_vetoed,
    ),
    Rule(
        "GM406",
        "warning",
        "vLLM context shorter than the trainer's",
        "NeMo-RL `vllm_worker.py`",
        _short_vllm_context,
    ),
    Rule(
        "GM407",
        "warning",
        "clip bounds narrower than the mismatch that the sequence ratio contains",
        "GSPO, arXiv:2507.18071 section 5.1, whose bounds are for π_θ/π_old; docs/reference/loss_reference.md",
        _clip_narrower_than_mismatch,
    ),
)
