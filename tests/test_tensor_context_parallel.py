"""From vocabulary-sharded logits of context-parallel shares to the gradient of each rank's logits: TP × CP processes
against one float64 oracle of the whole."""

import math
from dataclasses import replace

import batches
import numpy as np
import oracle
import pytest
import torch
from batches import MASKS, VARIANTS
from gloo import run
from test_context_parallel import packed

from nemo_geomask import build_loss
from nemo_geomask.parallel import vocab_parallel_logprobs
from nemo_geomask.segments import PackedSegments

VOCAB, TEMPERATURE = 19, 0.8
CORRECTED = {"use_importance_sampling_correction": True, "is_correction_level": "sequence_mean"}
CONFIGS = {
    **VARIANTS,
    **{
        f"{name}-corrected": {**config, **CORRECTED, "masks": list(MASKS.values())} for name, config in VARIANTS.items()
    },
}


def whole():
    """A batch, its packed logits [N, V] whose log-probs of the targets are the batch's, and the targets."""
    batch = batches.rollouts(seed=6, width=23)
    # rollouts() draws log-ratios and does not mind a positive log-prob; logits do.
    keys = ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
    lower = {key: batch.data[key] - 4.0 for key in keys}
    batch = replace(batch.with_data(**lower), curr=batch.curr - 4.0)
    curr, data, offsets, where = packed(batch)
    draw = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(len(curr), VOCAB, dtype=torch.float64, generator=draw)
    targets = torch.randint(0, VOCAB, (len(curr),), generator=draw)
    # The target's logit that gives it the wanted probability beside the others; -100 where nothing trains.
    wanted = torch.where(curr.isnan(), -1.0, curr.double())
    others = torch.logsumexp(logits.scatter(1, targets[:, None], -math.inf), dim=1)
    own = others + wanted - torch.log1p(-wanted.exp())
    logits = logits.scatter(1, targets[:, None], own[:, None]) * TEMPERATURE
    row = where[0]
    trains = data["token_mask"].bool() & data["sample_mask"].bool()[row]
    return batch, logits.float(), torch.where(trains, targets, -100), data, offsets, where


def truth(config, batch, logits, targets, where):
    """The oracle's loss and metrics, and the gradient of the logits by the softmax's derivative, in float64."""
    loss_fn = build_loss(config)
    answer = oracle.evaluate(
        loss_fn.config, batch.curr, batch.data, batch.seqs, batch.toks, loss_fn.options.model_dump()
    )
    rows, columns, inside = where
    outer = np.where(inside, np.array(answer.grad)[rows, columns], 0.0)
    grad = np.zeros(logits.shape)
    for t in range(len(grad)):
        if targets[t] >= 0:
            z = [float(x) / TEMPERATURE for x in logits[t]]
            peak = max(z)
            total = sum(math.exp(x - peak) for x in z)
            for j, x in enumerate(z):
                grad[t, j] = outer[t] * (float(j == int(targets[t])) - math.exp(x - peak) / total) / TEMPERATURE
    return answer, grad


def _on_rank(rank, world, tp, cp):
    import torch.distributed as dist

    # Ranks of a tensor-parallel group are neighbours, as Megatron places them.
    tp_groups = [dist.new_group(list(range(c * tp, c * tp + tp))) for c in range(cp)]
    cp_groups = [dist.new_group(list(range(t, world, tp))) for t in range(tp)]
    tp_rank, cp_rank = rank % tp, rank // tp
    batch, logits, targets, data, offsets, _ = whole()
    segments = PackedSegments(offsets, cp_rank=cp_rank, cp_size=cp, groups=(cp_groups[tp_rank],))
    index = segments.token_index
    sizes = [VOCAB // tp + (r < VOCAB % tp) for r in range(tp)]
    start = sum(sizes[:tp_rank])
    share = {key: value[index] if key in batches.TOKEN_KEYS else value for key, value in data.items()}
    found = {}
    for name, config in CONFIGS.items():
        shard = logits[index, start : start + sizes[tp_rank]].clone().requires_grad_()
        logprobs = vocab_parallel_logprobs(
            shard, targets[index], group=tp_groups[cp_rank], temperature=TEMPERATURE, shard_sizes=sizes
        )
        loss, metrics = build_loss(config).packed(logprobs, share, segments, batch.seqs, batch.toks)
        loss.backward()
        found[name] = (loss.item(), metrics, shard.grad.numpy())
    return index.numpy(), start, found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("tp", "cp"), [(2, 1), (2, 2)])
def test_logits_gradient_equals_oracle(tp, cp):
    results = run(tp * cp, _on_rank, tp, cp, timeout=240)
    batch, logits, targets, _, _, where = whole()
    for name, config in CONFIGS.items():
        answer, grad = truth(config, batch, logits, targets, where)
        assert np.abs(grad).max() > 1e-4
        covered = np.zeros(grad.shape, dtype=int)
        for index, start, found in results:
            loss, metrics, mine = found[name]
            assert loss == pytest.approx(answer.loss, rel=1e-4, abs=1e-6)
            for metric, value in answer.metrics.items():
                assert metrics[metric] == pytest.approx(value, rel=1e-4, abs=2e-6), (name, metric)
            end = start + mine.shape[1]
            np.testing.assert_allclose(mine, grad[index, start:end], rtol=5e-4, atol=2e-7, err_msg=name)
            covered[index, start:end] += 1
        assert (covered == 1).all()
