"""Statistics of one step, computed from a block of its records."""

from __future__ import annotations

import numpy as np

from nemo_geomask.tools.diagnose.measure.bootstrap_draws import poisson_draws
from nemo_geomask.tools.diagnose.measure.context import explained_advantage
from nemo_geomask.tools.diagnose.measure.logprob_checks import UNSURE_LOGPROB, LogprobFaults, find_faults, find_shifts
from nemo_geomask.tools.diagnose.measure.logprob_gap import logit_noise
from nemo_geomask.tools.diagnose.measure.run_statistics import WORST_COUNT, RunStatistics, WorstSequence, WorstToken
from nemo_geomask.tools.diagnose.measure.step_sums import (
    BOOTSTRAP_REPLICATES,
    BOOTSTRAP_SUMS,
    FAULTS,
    TOKEN_SUMS,
    StepSums,
)
from nemo_geomask.tools.diagnose.measure.token_table import limit_table, tabulate
from nemo_geomask.tools.diagnose.measure.token_values import MAX_CAPPED_ABS, TrainedTokens, select_trained_tokens
from nemo_geomask.tools.diagnose.read.record_reader import Array, RecordBlock

MAX_SEQUENCE_LOG_WEIGHT = 300.0
"""Logarithm at which sequence weights saturate, so that sums of their squares stay finite in float64.

The limit is higher than for tokens because the log-ratios of a long sequence add up to large numbers, and an effective
sample size depends only on the ratios of the weights.
"""
MAX_ADVANTAGE = 3.0
"""Value at which the magnitude of a sequence's mean advantage is clipped."""
MAX_NOISE = 0.1
"""Noise on a logit, |curr − prev| / (1 − p), that numerics alone hardly exceed; healthy rehearsals have 0.02."""
CONTEXT_TOKENS = 8
"""Tokens that are kept before each of the worst tokens."""


def survey_block(block: RecordBlock) -> RunStatistics:
    """Compute the statistics of one block, whose sequences all belong to the same step."""
    statistics = RunStatistics()
    if not len(block):
        return statistics
    step = int(block.sequences["step"][0])
    sequence = np.repeat(np.arange(len(block)), np.diff(block.offsets))
    mask = block.tokens["mask"].astype(bool)
    not_recorded = np.full(len(mask), np.nan)
    gen = block.tokens.get("gen", not_recorded).astype(float)
    prev = block.tokens.get(trainer_column(block), not_recorded).astype(float)
    sums = statistics.steps[step] = StepSums()
    faults = find_faults(sums, mask, gen, prev, sequence, len(block))
    if "gen" not in block.tokens:
        sums["nonfinite"] = 0.0  # NaN stands for "not recorded" here
    comparable = faults.comparable & np.isfinite(gen) & np.isfinite(prev)
    is_in_loss = block.sequences["sample_mask"] != 0
    masked_out = np.flatnonzero(comparable & ~is_in_loss[sequence])
    sums["masked_out_sequences"] = float((~is_in_loss).sum())
    sums["masked_out_capped_abs"] = float(np.minimum(np.abs(prev[masked_out] - gen[masked_out]), MAX_CAPPED_ABS).sum())
    sums["masked_out_tokens"] = float(len(masked_out))
    trained = select_trained_tokens(block, np.flatnonzero(comparable & is_in_loss[sequence]), sequence, gen, prev)
    if "curr" in block.tokens and trainer_column(block) == "prev":
        _compare_with_current(sums, block, comparable & is_in_loss[sequence], prev, sequence)
    _sum_tokens_and_sequences(sums, trained)
    _sum_advantages(sums, trained)
    _sum_contexts(sums, trained)
    _sum_masks(sums, trained)
    fault_sums = _sum_faults(trained, faults, np.where(mask & is_in_loss[sequence], prev, np.nan), sequence)
    for name, per_sequence in fault_sums.items():
        sums[name] = float(per_sequence.sum())
    draws = poisson_draws(step, block.sequences["row"], BOOTSTRAP_REPLICATES)
    by_sequence = {name: fault_sums.get(name) for name in BOOTSTRAP_SUMS}
    sums.bootstrap = draws @ np.stack(
        [trained.sum_per_sequence(name) if column is None else column for name, column in by_sequence.items()], axis=1
    )
    # Faulty log-probs would look like a mismatch of the part of the data they are in, so no part contains them.
    is_sound = ~(faults.zero | faults.positive | faults.shifted[sequence])[trained.index]
    sound = trained.select(is_sound)
    statistics.tables = [limit_table(tabulate(sound, mask, sequence))]
    statistics.worst_sequences = _worst_sequences(trained, step)
    statistics.worst_tokens = _worst_tokens(trained, step)
    return statistics


def trainer_column(block: RecordBlock) -> str:
    """Return the column with the training engine's log-probs.

    This is ``prev``, or ``curr`` if π_old was not computed but the log-probs of the current policy were recorded.
    """
    if "curr" not in block.tokens:
        return "prev"
    return block.trainer or ("prev" if block.has_prev else "curr")


def _compare_with_current(sums: StepSums, block: RecordBlock, mask: Array, prev: Array, sequence: Array) -> None:
    """Count sequences whose log-probs at their update are those of the pass that computed ``prev``, or shifted.

    No weight changes between the two at a batch's first update. Which sequences it has is not recorded.
    """
    curr = block.tokens["curr"].astype(float)
    # A log-prob of 0 stands for one that was not computed.
    is_compared = mask & np.isfinite(curr) & ~((curr == 0) & (prev < UNSURE_LOGPROB))
    is_checked, later, earlier = find_shifts(is_compared, prev, curr, sequence, len(block))
    noise = np.where(is_compared, logit_noise(curr - prev, prev), 0.0)
    noisy, tokens = (
        np.bincount(sequence[flags], minlength=len(block)) for flags in (is_compared & (noise > MAX_NOISE), is_compared)
    )
    counts = {"sequences": is_checked, "shifted": later | earlier, "same": is_checked & (2 * noisy < tokens)}
    for name, flags in counts.items():
        sums[f"curr_{name}"] = float(flags.sum())


def _sum_tokens_and_sequences(sums: StepSums, trained: TrainedTokens) -> None:
    for name in TOKEN_SUMS:
        sums[name] = float(trained.values[name].sum())
    tokens = trained.sum_per_sequence("tokens")
    has_tokens = tokens > 0
    sums["sequences"] = float(has_tokens.sum())
    delta = trained.sum_per_sequence("delta")[has_tokens]
    for name, log_weight in (("sequence_weight", delta), ("mean_weight", delta / tokens[has_tokens])):
        weight = np.exp(np.minimum(log_weight, MAX_SEQUENCE_LOG_WEIGHT))
        sums[name] = float(weight.sum())
        sums[f"{name}_squared"] = float(np.square(weight).sum())
    sums["response_tokens"] = float((trained.column("length") - trained.column("prompt_length"))[has_tokens].sum())
    for name, count_name in (("reward", "sequences_with_reward"), ("staleness", "sequences_with_staleness")):
        values = trained.column(name)
        sums[name] = float(np.nansum(values))
        sums[count_name] = float(np.isfinite(values).sum())
    entropy = trained.block.tokens.get("entropy")
    if entropy is not None:
        entropy = entropy[trained.index]
        sums["entropy"] = float(np.nansum(entropy, dtype=float))
        sums["tokens_with_entropy"] = float(np.isfinite(entropy).sum())
    versions = trained.column("weight_version")
    if np.isfinite(versions).any():
        sums.versions = float(np.nanmin(versions)), float(np.nanmax(versions))


def _sum_faults(trained: TrainedTokens, faults: LogprobFaults, prev: Array, sequence: Array) -> dict[str, Array]:
    """Return [S] for each of ``FAULT_SUMS``, the sums over each sequence's tokens.

    ``prev`` and ``sequence`` are of all tokens of the block; ``prev`` is NaN where they are not trained.
    """
    shifted = faults.shifted[trained.sequence]
    positive = faults.positive[trained.index] & ~shifted
    flags = {"zero": faults.zero[trained.index] & ~shifted & ~positive, "positive": positive, "shifted": shifted}
    count = len(trained.block)
    per_sequence = {
        f"{fault}_{measure}": np.bincount(trained.sequence, trained.values[measure] * flags[fault], minlength=count)
        for fault in FAULTS
        for measure in ("k3", "capped_abs")
    }
    index = np.flatnonzero(faults.missing[sequence] & np.isfinite(prev))
    missing = select_trained_tokens(trained.block, index, sequence, np.zeros_like(prev), prev)
    return per_sequence | {f"missing_{measure}": missing.sum_per_sequence(measure) for measure in ("k3", "capped_abs")}


def _sum_advantages(sums: StepSums, trained: TrainedTokens) -> None:
    """Write the sums that the correlation of Δ with the advantage is computed from; see ``ADVANTAGE_SUMS``."""
    if trained.advantages is None:
        return
    tokens = np.maximum(trained.sum_per_sequence("tokens"), 1)
    mean = np.bincount(trained.sequence, weights=trained.advantages, minlength=len(trained.block)) / tokens
    a, n = np.clip(np.nan_to_num(mean), -MAX_ADVANTAGE, MAX_ADVANTAGE), np.sqrt(tokens)
    d = trained.sum_per_sequence("scaled_delta") / n
    products = {"ad": a * d, "an": a * n, "a2d2": (a * d) ** 2, "a2dn": a * a * d * n, "a2n2": (a * n) ** 2}
    for name, product in products.items():
        sums[name] = float(product.sum())


def _sum_contexts(sums: StepSums, trained: TrainedTokens) -> None:
    is_trained = np.zeros(len(trained.block.tokens["mask"]), bool)
    is_trained[trained.index] = True
    if trained.advantages is None:
        return
    wrong = np.maximum(1 - trained.values["weight"], 0.0)
    sums["wrong_tokens"] = float(wrong.sum())
    sums["wrong_tokens_good"] = float(wrong[trained.advantages > 0].sum())
    sums["wrong_tokens_bad"] = float(wrong[trained.advantages < 0].sum())
    sums["sequences_with_advantages"] = float((trained.sum_per_sequence("tokens") > 0).sum())
    explained = explained_advantage(trained.block, is_trained)
    if explained is None:
        return
    explained = explained[trained.index]
    sums["tokens_with_context"] = float(len(wrong))
    sums["sequences_with_context"] = float(len(np.unique(trained.sequence[trained.advantages != 0])))
    # Σ s of tokens with the same Δ estimates a mean of V², so it is not negative, and needs no absolute value.
    pull = explained * np.abs(1 - trained.values["weight"]) / 2
    prompt = np.unique(trained.block.sequences["group"][trained.sequence], return_inverse=True)[1].ravel()
    for name, squared, values in (("explained_tokens", "explained_squared", explained), ("pull", "pull_squared", pull)):
        sums[name], sums[squared] = float(values.sum()), float(np.square(np.bincount(prompt, values)).sum())


def _sum_masks(sums: StepSums, trained: TrainedTokens) -> None:
    capped_abs, removed = trained.values["capped_abs"], trained.block.removed
    if removed:
        sums.maskable = np.array([len(capped_abs), capped_abs.sum()])
    for label, is_removed in removed.items():
        chosen = capped_abs[is_removed[trained.index]]
        sums.removed[label] = np.array([len(chosen), chosen.sum()])


def _worst_sequences(trained: TrainedTokens, step: int) -> list[WorstSequence]:
    columns, tokens = trained.block.sequences, trained.sum_per_sequence("tokens")
    mean = trained.sum_per_sequence("abs_delta") / np.maximum(tokens, 1)
    delta = trained.sum_per_sequence("delta")
    worst = [
        WorstSequence(
            mean_abs_delta=float(mean[index]),
            step=step,
            row=int(columns["row"][index]),
            group=int(columns["group"][index]),
            tokens=int(tokens[index]),
            k1=-float(delta[index] / tokens[index]),
        )
        for index in np.argsort(-mean)[:WORST_COUNT].tolist()
        if tokens[index]
    ]
    return sorted(worst, reverse=True)


def _worst_tokens(trained: TrainedTokens, step: int) -> list[WorstToken]:
    block, abs_delta = trained.block, trained.values["abs_delta"]
    count = min(WORST_COUNT, len(abs_delta))
    worst = []
    for place in np.argpartition(-abs_delta, count - 1)[:count].tolist() if count else ():
        index, sequence = int(trained.index[place]), int(trained.sequence[place])
        begin = int(block.offsets[sequence])
        context = tuple(block.tokens["tokens"][max(begin, index - CONTEXT_TOKENS) : index + 1].tolist())
        row = int(block.sequences["row"][sequence])
        gen, prev = float(trained.gen[place]), float(trained.prev[place])
        worst.append(WorstToken(float(abs_delta[place]), step, row, index - begin, gen, prev, context))
    return sorted(worst, reverse=True)
