"""Loss calls of random shapes and settings, eager and compiled."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from nemo_geomask import build_loss
from tests.helpers import batches, oracle
from tests.helpers.agreement import merged
from tests.helpers.batches import MASKS, VARIANTS, Batch
from tests.soak.outcome import Outcome, resident_mib

CORRECTED = {"use_importance_sampling_correction": True}
COMPILED = ("ppo", "gspo", "gmpo")


def settings(compile_: bool) -> Iterator[dict[str, Any]]:
    """Each variant plain, and with a weight and a mask; of the compiled ones few, since each takes a graph."""
    names = COMPILED if compile_ else VARIANTS
    masks = [MASKS[name] for name in ("geometric", "icepop", "k3_worst", "dppo_tv")]
    for index, name in enumerate(names):
        yield {**VARIANTS[name], "compile": compile_}
        yield {**merged(name, CORRECTED), "masks": [masks[index % len(masks)]], "compile": compile_}


def random_batch(draw: random.Random) -> Batch:
    """One to six responses of up to 40 tokens, an empty one and one that is masked out."""
    offsets = tuple(draw.uniform(-0.4, 0.4) for _ in range(draw.randint(1, 6)))
    return batches.rollouts(draw.randrange(2**31), width=draw.randint(12, 40), offsets=offsets)


def difference(result: batches.Result, loss: float, gradient: torch.Tensor, metrics: Mapping[str, float]) -> str:
    """What of an answer is further from another one than float32 explains; empty if nothing is."""
    close = {"rtol": 2e-4, "atol": 2e-6}
    if not torch.isclose(result.loss.double(), torch.tensor(loss).double(), **close):
        return f"loss {float(result.loss)}, not {loss}"
    if not torch.isclose(result.grad.double(), gradient.double(), **close).all():
        return "gradient"
    for name, value in metrics.items():
        if not torch.isclose(torch.tensor(result.metrics[name]).double(), torch.tensor(value).double(), **close):
            return f"metric {name} {result.metrics[name]}, not {value}"
    return ""


def call_losses(count: int, *, compile_: bool, seed: int = 0, check_every: int = 100) -> Outcome:
    """Call losses in turn on random batches; every ``check_every``-th call is compared.

    Eager calls are compared with the float64 oracle, compiled ones with eager ones. Every call's loss and gradient must
    be finite, the gradient 0 wherever no token is trained.
    """
    outcome = Outcome("loss calls, compiled" if compile_ else "loss calls, eager")
    draw, half = random.Random(seed), 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        losses = [(config, build_loss(config)) for config in settings(compile_)]
        references = [build_loss({**config, "compile": False}) for config, _ in losses]
    undecided = 0
    for number in range(count):
        if number == max(count // 2, 1):
            half = resident_mib()
        index = number % len(losses)
        config, loss_fn = losses[index]
        batch = random_batch(draw)
        result = batches.evaluate(loss_fn, batch)
        trained = batch.data["token_mask"][:, 1:] * batch.data["sample_mask"][:, None] > 0
        if not (torch.isfinite(result.loss) and torch.isfinite(result.grad).all()):
            outcome.problems.append(f"call {number}, {config}: not finite")
        elif result.grad[~trained].any():
            outcome.problems.append(f"call {number}, {config}: a gradient at a token that is not trained")
        if number % check_every == index % check_every:
            if compile_:
                plain = batches.evaluate(references[index], batch)
                found = difference(result, float(plain.loss), plain.grad, dict(plain.metrics))
            else:
                answer = oracle.evaluate(
                    loss_fn.config, batch.curr, batch.data, batch.seqs, batch.toks, loss_fn.options.model_dump()
                )
                if answer.margin <= 1e-5:  # a decision within rounding of its bound
                    undecided += 1
                    continue
                found = difference(result, answer.loss, torch.tensor(answer.grad), answer.metrics)
            outcome.checked += 1
            if found:
                outcome.problems.append(f"call {number}, {config}: {found}")
        outcome.done += 1
    outcome.growth_mib = resident_mib() - half
    outcome.done = count
    if undecided:
        outcome.facts["within rounding of a bound, not compared"] = undecided
    return outcome
