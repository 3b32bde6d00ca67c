"""What holds for every loss, each as a test of one on a batch."""

from __future__ import annotations

import contextlib
import functools
import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nemo_geomask.losses import PolicyLoss
from nemo_geomask.losses.batch import KEYS, Raw, keys_read
from nemo_geomask.losses.evaluate import evaluate
from nemo_geomask.losses.prestep import valid_counts
from nemo_geomask.losses.variant import SurrogateInputs
from nemo_geomask.processes import run
from nemo_geomask.segments import PackedSegments, PaddedSegments

__all__ = ["PROMISES", "Promise", "uneven_batch"]

_CLOSE = 2e-5
_STEP = 1e-6
_COLUMNS = 16  # divides into the chunks of any number of ranks up to 8
_RANKS = 2
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Promise:
    """One thing that holds for every loss.

    Attributes:
        name: in a few words.
        broken: what a loss does instead on a batch; empty where it keeps the promise.
    """

    name: str
    broken: Callable[[PolicyLoss, Batch], str]


def uneven_batch() -> Batch:
    """Rows in NeMo-RL's layout [B, T+1]: uneven, one with a tool's tokens, one empty, one whose sample is masked."""
    draw = torch.Generator().manual_seed(7)
    lengths = (16, 9, 13, 5, 0, 7)
    shape = (len(lengths), _COLUMNS + 1)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(shape, generator=draw)

    tilt = torch.linspace(-0.15, 0.15, len(lengths)).unsqueeze(1)
    gen = -0.2 - 2.0 * torch.rand(shape, generator=draw)
    prev = gen + tilt + normal(0.2)
    mask = (torch.arange(shape[1]) >= 1) & (torch.arange(shape[1]) <= torch.tensor(lengths).unsqueeze(1))
    mask[2, 5:8] = False
    sign = torch.tensor([1.0, -1.0]).repeat(len(lengths) // 2).unsqueeze(1)
    return {
        "curr": prev + tilt + normal(0.3),
        "prev_logprobs": prev,
        "generation_logprobs": gen,
        "reference_policy_logprobs": prev + normal(0.3),
        "advantages": sign * (0.3 + torch.rand(shape, generator=draw)),
        "token_mask": mask.float(),
        "sample_mask": torch.tensor([1.0] * (len(lengths) - 1) + [0.0]),
        "rewards": sign[:, 0],
    }


def _padded(loss: PolicyLoss, batch: Batch, counts: tuple[Tensor, Tensor] | None = None) -> tuple[float, Tensor]:
    """Value, and gradient by each of the log-probs [B, T]."""
    curr = batch["curr"][:, 1:].clone().requires_grad_()
    value, _ = loss.for_prepared_batches()(curr, batch, *(counts or valid_counts([batch])))
    return value.item(), _gradient(value, curr)


def _packed(
    loss: PolicyLoss, batch: Batch, *, rank: int = 0, world: int = 1, groups: Sequence[Any] = ()
) -> tuple[float, Tensor, Tensor]:
    """Value, gradient by this rank's log-probs, and where they stand among the [B * T]."""
    rows = batch["curr"].shape[0]
    segments = PackedSegments(
        list(range(0, (rows + 1) * _COLUMNS, _COLUMNS)), cp_rank=rank, cp_size=world, groups=tuple(groups)
    )
    where = segments.token_index
    data = {key: value[:, 1:].reshape(-1)[where] if value.dim() == 2 else value for key, value in batch.items()}
    curr = data["curr"].clone().requires_grad_()
    value, _ = loss.for_prepared_batches().packed(curr, data, segments, *valid_counts([batch]))
    return value.item(), _gradient(value, curr), where


def _gradient(value: Tensor, curr: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(value, curr, allow_unused=True)
    return torch.zeros_like(curr) if found is None else found


def _apart(what: str, found: tuple[float, Tensor], true: tuple[float, Tensor]) -> str:
    """How far a loss and its gradient are from those that they should be."""
    off = abs(found[0] - true[0])
    if not off <= _CLOSE * max(abs(true[0]), 1e-3):
        return f"{what} gives a loss of {found[0]:.6g}, not {true[0]:.6g}; reduce over no tokens, ask for means by pool"
    worst, size = (found[1] - true[1]).abs().max().item(), true[1].abs().max().item()
    return (
        "" if worst <= _CLOSE * max(size, 1e-6) else f"{what} gives a gradient that is {worst:.2g} off, of {size:.2g}"
    )


def _splits(loss: PolicyLoss, batch: Batch) -> str:
    counts, value, gradients = valid_counts([batch]), 0.0, []
    for rows in (slice(0, 1), slice(1, 4), slice(4, None)):
        part, gradient = _padded(loss, {key: tensor[rows] for key, tensor in batch.items()}, counts)
        value += part
        gradients.append(gradient)
    return _apart("the sum over three microbatches", (value, torch.cat(gradients)), _padded(loss, batch))


def _packs(loss: PolicyLoss, batch: Batch) -> str:
    value, gradient, _ = _packed(loss, batch)
    whole, true = _padded(loss, batch)
    return _apart("the packed row", (value, gradient), (whole, true.reshape(-1)))


def _share(rank: int, world: int, settings: bytes, batch: Batch) -> tuple[float, list[float], list[int]]:
    import torch.distributed as dist

    value, gradient, where = _packed(pickle.loads(settings), batch, rank=rank, world=world, groups=(dist.group.WORLD,))
    return value, gradient.tolist(), where.tolist()


def _shares(loss: PolicyLoss, batch: Batch) -> str:
    whole, true = _padded(loss, batch)
    gradient, texts = torch.zeros_like(true).reshape(-1), []
    for value, part, where in run(_RANKS, _share, pickle.dumps(loss), batch, timeout=300):
        gradient[torch.tensor(where)] = torch.tensor(part)
        texts.append(_apart("a context-parallel rank", (value, true), (whole, true)))
    return next(filter(None, texts), _apart("context parallelism", (whole, gradient), (whole, true.reshape(-1))))


def _ignores(loss: PolicyLoss, batch: Batch) -> str:
    value, gradient = _padded(loss, batch)
    out = (batch["token_mask"] * batch["sample_mask"].unsqueeze(1)) == 0
    for junk in (math.nan, math.inf, -math.inf, 1e6):
        tokens = {key: tensor for key, tensor in batch.items() if tensor.dim() == 2 and key != "token_mask"}
        soiled = batch | {key: tensor.masked_fill(out, junk) for key, tensor in tokens.items()}
        other, others = _padded(loss, soiled)
        if other != value or not torch.equal(others, gradient):
            return f"{junk} at tokens that don't train changes the loss or its gradient"
    return "" if not gradient[out[:, 1:]].any() else "tokens that don't train have a gradient"


def _finite(loss: PolicyLoss, batch: Batch) -> str:
    # The direction alternates, so that products and means are extreme on both sides.
    by = torch.where(torch.arange(len(batch["curr"])) % 2 == 0, 100.0, -100.0).unsqueeze(1)
    far, here = batch["curr"] - by, batch["curr"]
    prev, gen = (far, here) if loss.config.ratio_anchor == "prev" else (here, far)
    value, gradient = _padded(loss, batch | {"prev_logprobs": prev, "generation_logprobs": gen})
    done = math.isfinite(value) and bool(gradient.isfinite().all())
    return "" if done else "log-ratios of ±100 give a loss or a gradient that is not finite; use F.saturating_exp"


def _travels(loss: PolicyLoss, batch: Batch) -> str:
    return _apart("the loss that was unpickled", _padded(pickle.loads(pickle.dumps(loss)), batch), _padded(loss, batch))


def _compiles(loss: PolicyLoss, batch: Batch) -> str:
    others = {name: batch[KEYS[name]] for name in keys_read(loss.config) if KEYS[name] in batch}
    tokens = {name: value[:, 1:] if value.dim() == 2 else value for name, value in others.items()}
    raw = Raw(batch["curr"][:, 1:], batch["token_mask"][:, 1:], batch["sample_mask"], tokens)
    raw = raw._replace(bounds=loss.bounds(batch, batch["curr"].device))
    counts = [count.float() for count in valid_counts([batch])]
    function = functools.partial(evaluate, loss.config, loss.variant, loss.options)
    torch.compiler.reset()  # graphs of other losses would count against this one's limit
    graph = torch.compile(function, fullgraph=True, dynamic=True, backend="eager")
    zero = torch.zeros(())
    # As PolicyLoss compiles it: settings are constants.
    with torch._dynamo.config.patch(specialize_float=True):
        found, true = (call(raw, PaddedSegments(), (), *counts)[0].item() for call in (graph, function))
    return _apart("the compiled graph", (found, zero), (true, zero))


class _Frozen(TorchFunctionMode):
    """Replays what was detached, so that differences see what a gradient does: constants."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []
        self.place: int | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        cuts = func in (torch.Tensor.detach, torch.detach, torch.Tensor.data.__get__)  # type: ignore[attr-defined]
        if not (cuts or not torch.is_grad_enabled()) or not isinstance(result, Tensor):
            return result
        if self.place is None:
            self.kept.append(result.clone())
            return result
        self.place += 1
        return self.kept[self.place - 1]


def _differentiates(loss: PolicyLoss, batch: Batch) -> str:
    """The variant's own functions in float64, each token moved by itself."""
    variant, double = loss.variant, {key: value.double() for key, value in batch.items()}
    mask = (double["token_mask"] * double["sample_mask"].unsqueeze(1))[:, 1:]
    anchor = double["generation_logprobs" if loss.config.ratio_anchor == "gen" else "prev_logprobs"][:, 1:]
    spread = torch.rand(mask.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5
    frozen = _Frozen()

    def total(curr: Tensor) -> Tensor:
        curr = torch.where(mask != 0, curr, 0.0)
        ratio = torch.where(mask != 0, curr - anchor, 0.0)
        advantages = torch.where(mask != 0, double["advantages"][:, 1:], 0.0)
        inputs = SurrogateInputs(curr, ratio, advantages, loss.config, loss.options)
        pooled = variant.pool(inputs) if variant.pool is not None else {}
        count = mask.sum(1, keepdim=True).clamp(min=1) if variant.pooled_by == "mean" else 1.0
        means = {name: ((value * mask).sum(1, keepdim=True) / count).expand_as(mask) for name, value in pooled.items()}
        found = variant.surrogate(inputs, means)
        per_token = found.loss if found.penalty is None else found.loss + found.penalty
        return (mask * spread * per_token).sum()

    def slope(place: list[int], mode: Any) -> float:
        values = []
        for step in (_STEP, -_STEP):
            moved = curr.detach().clone()
            moved[tuple(place)] += step
            frozen.place = 0
            with mode:
                values.append(total(moved.requires_grad_()).item())
        return (values[0] - values[1]) / (2 * _STEP)

    curr = double["curr"][:, 1:].clone().requires_grad_()
    with frozen:
        value = total(curr)
    (gradient,) = torch.autograd.grad(value, curr)
    wrong = 0.0
    for place in (mask != 0).nonzero().tolist():
        true = gradient[tuple(place)].item()
        # What is detached is a constant to the gradient, or only chooses between branches that meet there.
        wrong = max(wrong, min(abs(slope(place, mode) - true) for mode in (frozen, contextlib.nullcontext())))
    size = gradient.abs().max().item()
    return (
        "" if wrong <= 1e-4 * max(size, 1e-3) else f"the gradient is {wrong:.2g} off finite differences, of {size:.2g}"
    )


PROMISES = (
    Promise("microbatches add up to the whole", _splits),
    Promise("packed is padded", _packs),
    Promise("nothing comes from what doesn't train", _ignores),
    Promise("finite at log-ratios of ±100", _finite),
    Promise("the gradient is that of finite differences", _differentiates),
    Promise("travels by pickle", _travels),
    Promise("one graph under torch.compile", _compiles),
    Promise("context parallelism is one rank", _shares),
)
"""In the order in which they are tried: the last two take seconds."""
