"""Records as a rehearsal's, made of random log-probs: of a healthy run, or with one fault."""

from __future__ import annotations

from pathlib import Path

import torch

from nemo_geomask.records.step_table import StepRows
from tests.helpers.record_rows import write_step

PROMPT, RESPONSE = 3, 14
OURS = "PolicyLoss(name='gspo', ratio_clip_max=0.3)"


def proof(step, *, calls=None, refits=None, weights=None):
    calls = {OURS: 4 * step} if calls is None and step else calls or {}
    counts = {
        "refits": step if refits is None else refits,
        "weights": [float(step), 9.0] if weights is None else weights,
    }
    return {"kind": "worker_counts", "step": step, "workers": [{"calls": calls, **counts}]}


def refit(number, *groups):
    differences = [{"group": group, "sent": 1.0, "in_engine": 1.1, "size": 0.1} for group in groups]
    return {"kind": "weights", "refits": number, "engines": 1, "groups": 5, "differences": differences}


def write_record(
    folder: Path, step: int, fault: str = "", *, update: str = "", noise: float = 0.01, sequences: int = 8
) -> None:
    """Write a step's record; the tokens are drawn from the distribution that the sampler has under the fault.

    ``update`` is a fault of π_θ, which else is π_old with a little noise. If it is not empty, π_θ has also moved in the
    second half of the rows; it is "moved" if that is all.
    """
    random = torch.Generator().manual_seed(step)
    shape = sequences, PROMPT + RESPONSE
    logits = 2.0 * torch.randn(*shape, 128, generator=random)
    trainer = torch.log_softmax(logits, -1)
    sampler = torch.log_softmax(logits + noise * torch.randn(logits.shape, generator=random), -1)
    if fault == "other model":
        sampler = torch.log_softmax(logits + 2.0 * torch.randn(logits.shape, generator=random), -1)
    elif fault == "temperature":
        sampler = torch.log_softmax(logits / 0.6, -1)
    elif fault == "top_p":
        order = sampler.argsort(-1, descending=True)
        before = sampler.exp().gather(-1, order).cumsum(-1) - sampler.exp().gather(-1, order)
        removed = torch.zeros_like(sampler, dtype=torch.bool).scatter(-1, order, before > 0.8)
        sampler = torch.log_softmax(sampler.masked_fill(removed, -torch.inf), -1)
    tokens = torch.multinomial(sampler.exp().flatten(0, 1), 1, generator=random).view(*shape)
    gen, prev = (side.gather(-1, tokens[..., None])[..., 0] for side in (sampler, trainer))
    curr = torch.log_softmax(logits + 0.003 * torch.randn(logits.shape, generator=random), -1)
    if update == "temperature":
        curr = torch.log_softmax(logits / 0.6, -1)
    curr = curr.gather(-1, tokens[..., None])[..., 0]
    curr[sequences // 2 :] += 0.2 if update else 0.0
    if update == "shift":
        curr = curr.roll(1, dims=1)
    elif update == "rows":
        curr[:4] = curr[[1, 0, 3, 2]]
    elif update == "noise":
        curr += 0.3 * torch.randn(curr.shape, generator=random)
    if fault == "shift":
        gen = gen.roll(1, dims=1)
    elif fault == "stale prompt":
        gen[:2] -= 0.5
    if fault in ("zero_prev", "zero_gen"):
        (prev if fault == "zero_prev" else gen)[0, PROMPT + int(prev[0, PROMPT:].argmin())] = 0.0
    if fault == "zeros_prev":
        prev = prev.where(prev > prev[:, PROMPT:].quantile(0.1), 0.0)
    curr = curr.where(prev != 0, 0.0)  # a trainer that filters does so in both passes
    if fault == "nan":
        prev[0, PROMPT] = torch.nan
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[:, PROMPT:] = True
    values = {
        "tokens": tokens,
        "mask": mask,
        "gen": gen * mask,
        "prev": torch.zeros_like(prev) if update == "no prev" else prev * mask,
        "curr": curr.masked_fill(~mask, torch.nan),
        "advantages": mask.float(),
        **{name: torch.zeros(sequences) for name in ("group", "sample", "reward")},
        "row": torch.arange(sequences),
        "prompt_length": torch.full((sequences,), PROMPT),
        **{name: torch.ones(sequences) for name in ("turns", "sample_mask")},
    }
    write_step(folder, step, StepRows(torch.full((sequences,), shape[1]), values))
