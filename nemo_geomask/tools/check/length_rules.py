"""Weights, masks, batches and memory that don't suit the length of responses, the expected mismatch or each other."""

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
from nemo_geomask.tools.check.logit_memory import (
    GPU_BYTES,
    LOGPROB_METHODS,
    current_method,
    deferred_peak,
    output_work_of,
    settings_to_change,
)
from nemo_geomask.tools.check.model_shapes import shape_of
from nemo_geomask.tools.check.recipe_facts import RecipeFacts
from nemo_geomask.tools.check.rule import Hit, rule

_NOTABLE_FRACTION = 0.15  # of a GPU's memory, from which on logits are reported
# A mask that is expected to keep less is reported. The limit is below a half, since useful bounds may keep about half:
# the mismatch study's 0.999 and 1.002 are as far from 1 as the mean of a dense model in bfloat16.
_MIN_KEPT_FRACTION = 0.4
_ASSUMPTION = "(assuming independent tokens and normal log-ratios)"


@rule("GM401", "warning", "https://github.com/NVIDIA-NeMo/RL/pull/2269; https://github.com/huggingface/trl/issues/5814")
def _vanishing_weight(facts: RecipeFacts) -> Iterator[Hit]:
    """`sequence`-level weights that vanish for responses of the configured length."""
    config, tokens, kl = facts.config, facts.response_tokens, facts.mismatch_kl
    if not config.applies_weight or config.correction_level != "sequence" or tokens is None:
        return
    median = median_weight(kl, tokens)
    if median < 0.5:
        yield Hit(
            "loss_fn.is_correction_level",
            f"sequence: for responses of {tokens} tokens at a mean mismatch KL of {kl:g} nats per token, half of the "
            f"weights are below {median:.2g}, and the effective sample size is {median**2:.2g} of the batch "
            f"{_ASSUMPTION}; {{fix}}, whose median is {math.exp(-kl):.4f} at any length",
            fix={"loss_fn.is_correction_level": "sequence_mean"},
        )


@rule("GM402", "warning", "https://github.com/NVIDIA-NeMo/RL/pull/2269")
def _mask_removes_most(facts: RecipeFacts) -> Iterator[Hit]:
    """Mask that removes more than three fifths of the responses, or tokens, at the expected mismatch."""
    tokens, kl = facts.response_tokens, facts.mismatch_kl
    if tokens is None:
        return
    for mask, unit in predictable_masks(facts.config):
        kept = kept_fraction(mask, kl, tokens)
        if kept is not None and kept < _MIN_KEPT_FRACTION:
            is_product = mask.level == "sequence" and mask.statistic == "ratio"
            fix = (
                "use preset: geometric, since a product of ratios exceeds any fixed bounds as responses grow"
                if is_product
                else "widen the bounds"
            )
            counted = "tokens in responses" if unit == "tokens" else "responses"
            yield Hit(
                mask.key,
                f"mask {mask.label} is expected to keep only {kept:.1%} of {counted} of {tokens} tokens at a mean "
                f"mismatch KL of {kl:g} nats per token {_ASSUMPTION}; {fix}",
            )


@rule(
    "GM407",
    "warning",
    "GSPO, arXiv:2507.18071 section 5.1, whose bounds are for π_θ/π_old; docs/reference/loss_reference.md",
)
def _clip_narrower_than_mismatch(facts: RecipeFacts) -> Iterator[Hit]:
    """Clip bounds narrower than the mismatch that the sequence ratio contains."""
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
            f"before the first update {_ASSUMPTION}; {{fix}}, or ratio_clip_min: {lowest_useful:.1g} or more",
            fix={
                "loss_fn.ratio_anchor": "prev",
                "loss_fn.use_importance_sampling_correction": True,
                "loss_fn.is_correction_level": "sequence_mean",
            },
        )


@rule("GM405", "warning", "the mismatch study, see GM201")
def _every_batch_vetoed(facts: RecipeFacts) -> Iterator[Hit]:
    """Batch veto below the expected mismatch."""
    veto = facts.config.batch_veto
    if veto is not None and veto.max < facts.mismatch_kl:
        yield Hit(
            "loss_fn.batch_veto.max",
            f"{veto.max:g} is below the expected mean mismatch KL of {facts.mismatch_kl:g} nats per token, so hardly "
            "any batch would be trained on; {fix}, as in the mismatch study, or higher",
            fix={"loss_fn.batch_veto.max": max(0.1, 2 * facts.mismatch_kl)},
        )


@rule(
    "GM314",
    "error",
    "NeMo-RL `_get_pack_sequence_parameters_for_megatron` (megatron/data.py)",
    refusals=("_get_pack_sequence_parameters_for_megatron",),
    models=("value", "teacher"),
    needs_loss=False,
)
def _padding_of_packed_sequences(facts: RecipeFacts) -> Iterator[Hit]:
    """Packed sequences padded to lengths that context and sequence parallelism can't split."""
    key, megatron = "policy.make_sequence_length_divisible_by", "policy.megatron_cfg"
    padding = facts.number(key)
    is_packed = facts.is_true("policy.sequence_packing.enabled") and not facts.is_true(
        "policy.dynamic_batching.enabled"
    )
    if not facts.uses_megatron or not is_packed or padding is None:
        return
    cp, tp = facts.size(f"{megatron}.context_parallel_size"), facts.tensor_parallel
    factors = {
        f"2 x context_parallel_size ({cp})": 2 * cp if cp > 1 else 1,
        f"tensor_model_parallel_size ({tp}, with sequence_parallel)": (
            tp if facts.is_true(f"{megatron}.sequence_parallel") else 1
        ),
    }
    required = math.prod(factors.values())
    if padding % required:
        product = " x ".join(name for name, factor in factors.items() if factor > 1)
        yield Hit(
            key,
            f"{padding:g} is not a multiple of {product} = {required}, into which packed sequences are split",
            fix={key: required},
        )


@rule("GM408", "note", "docs/background/performance.md#at-scale", applies_to_lab=False)
def _large_logits(facts: RecipeFacts) -> Iterator[Hit]:
    """Logits that take a large part of a GPU's memory."""
    shape = shape_of(str(facts.get("policy.model_name", "")))
    work = None if shape is None else output_work_of(facts, shape)
    if work is None:
        return
    method = current_method(facts)
    peak = LOGPROB_METHODS[method].peak(work)
    if peak < _NOTABLE_FRACTION * GPU_BYTES:
        return
    peaks = {name: other.peak(work) for name, other in LOGPROB_METHODS.items() if not settings_to_change(name, facts)}
    best = min(peaks, key=lambda name: peaks[name])
    fixes = []
    if peaks[best] < 0.5 * peak:
        fixes.append(f"{LOGPROB_METHODS[best].setting} takes {peaks[best] / 1e9:.3g} GB")
    if deferred := deferred_peak(method, facts, work):
        fixes.append(f"policy.megatron_cfg.defer_fp32_logits: true takes {deferred / 1e9:.3g} GB")
    fix = ", ".join(fixes) or "lower the tokens of a microbatch, or raise the context- or tensor-parallel size"
    is_scoring = LOGPROB_METHODS[method].scoring(work) == peak
    rows = work.scored if is_scoring else work.rows
    yield Hit(
        "loss_fn.logprob_backend",
        f"{facts.config.logprob_backend}: on each GPU, a {'scoring ' if is_scoring else ''}microbatch of {rows} rows "
        f"by {work.columns} columns has logits of {work.logit_bytes * rows * work.columns / 1e9:.3g} GB, and takes "
        f"{peak / 1e9:.3g} GB of an H100's {GPU_BYTES / 1e9:g} GB with "
        f"{'working memory' if is_scoring else 'their gradient and working memory'}; {fix}",
    )
