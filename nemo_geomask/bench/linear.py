"""``bench linear``: from hidden states to log-probs and to both gradients, ours beside peers that form no logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nemo_geomask.bench.clock import Clock, Lap, in_turn, interleave, release, summary, why
from nemo_geomask.bench.inputs import IGNORE
from nemo_geomask.bench.meters import extra_memory, host_syncs
from nemo_geomask.bench.paths.base import Setting, module, on_gpu, without_entropy
from nemo_geomask.parallel import linear_logprobs, vocab_parallel_logprobs

__all__ = ["PATHS", "LinearCase", "benchmark", "draw", "gradients"]

_CHUNK = 1024  # rows at a time, in paths that ask for a number
_ROWS = 8  # compared with float64
_PRODUCTS, _KERNELS = "the four matrix products alone", "the log-prob kernels alone"


class LinearCase(NamedTuple):
    """One measured shape.

    Attributes:
        tokens: T.
        hidden: H.
        vocab: V, the whole vocabulary.
        tp: the weight is one of this many equal shards; nothing crosses ranks.
        fraction: share of the tokens that train.
        entropy: whether the entropy and its gradient are wanted too.
        dtype: of hidden states and weight.
    """

    tokens: int
    hidden: int
    vocab: int
    tp: int = 1
    fraction: float = 1.0
    entropy: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def width(self) -> int:
        """Columns of the shard."""
        return self.vocab // self.tp

    @property
    def product(self) -> float:
        """Floating-point operations of one matrix product over the rows that train."""
        return 2.0 * round(self.fraction * self.tokens) * self.hidden * self.width

    @property
    def logits_bytes(self) -> int:
        """Bytes that the logits would take."""
        return self.tokens * self.width * self.dtype.itemsize

    def describe(self) -> dict[str, Any]:
        """For the JSON."""
        return {**self._asdict(), "dtype": str(self.dtype).removeprefix("torch.")}

    def __str__(self) -> str:
        parts = [f"T={self.tokens}", f"H={self.hidden}", f"V={self.vocab}{f'/{self.tp}' if self.tp > 1 else ''}"]
        parts += [str(self.dtype).removeprefix("torch.")]
        parts += [f"{self.fraction:g} of the tokens train"] if self.fraction < 1 else []
        return ", ".join(parts + (["with entropy"] if self.entropy else []))


class LinearSample(NamedTuple):
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    kept: Tensor
    g: Tensor
    h: Tensor

    @property
    def labels(self) -> Tensor:
        """Targets for paths that compute all rows."""
        return self.targets.clamp(min=0)


_Found = tuple[Tensor, Tensor | None]
_Path = Callable[[LinearSample, LinearCase, Setting], _Found]


def draw(case: LinearCase, device: torch.device, seed: int) -> LinearSample:
    """What the paths take, the same for the same seed."""
    source = torch.Generator(device).manual_seed(seed)
    hidden = torch.randn(case.tokens, case.hidden, generator=source, device=device, dtype=torch.float32)
    weight = torch.randn(case.width, case.hidden, generator=source, device=device, dtype=torch.float32)
    weight *= 3.0 * case.hidden**-0.5  # logits neither flat nor decided
    order = torch.randperm(case.tokens, generator=source, device=device)
    kept = torch.zeros(case.tokens, dtype=torch.bool, device=device)
    kept[order[: round(case.fraction * case.tokens)]] = True
    labels = torch.randint(0, case.width, (case.tokens,), generator=source, device=device)
    g, h = torch.randn(2, case.tokens, generator=source, device=device, dtype=torch.float32) * kept
    leaves = (hidden.to(case.dtype).requires_grad_(), weight.to(case.dtype).requires_grad_())
    return LinearSample(*leaves, labels.where(kept, IGNORE), kept, g, h)


def _ours(sample: LinearSample, case: LinearCase, setting: Setting) -> _Found:
    function: Any = linear_logprobs
    options = {"group": setting.group, "entropy": case.entropy, "kernel": setting.kernel}
    found = function(sample.hidden, sample.weight, sample.targets, **options)
    return found if case.entropy else (found, None)


def _with_logits(sample: LinearSample, case: LinearCase, setting: Setting) -> _Found:
    logits = torch.nn.functional.linear(sample.hidden, sample.weight)
    function: Any = vocab_parallel_logprobs
    options = {"group": setting.group, "entropy": case.entropy, "kernel": setting.kernel, "inplace_gradient": True}
    found = function(logits, sample.targets, **options)
    return found if case.entropy else (found, None)


def _torch(sample: LinearSample, case: LinearCase, setting: Setting) -> _Found:
    without_entropy(case.entropy)
    logits = torch.nn.functional.linear(sample.hidden, sample.weight)
    return -torch.nn.functional.cross_entropy(logits, sample.targets, reduction="none", ignore_index=IGNORE), None


def _torch_chunked(sample: LinearSample, case: LinearCase, setting: Setting) -> _Found:
    def chunk(hidden: Tensor, weight: Tensor, targets: Tensor) -> _Found:
        logp = torch.nn.functional.linear(hidden, weight).float().log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1) if case.entropy else None
        return logp.gather(1, targets.unsqueeze(1)).squeeze(1), entropy

    parts = [
        torch.utils.checkpoint.checkpoint(chunk, hidden, sample.weight, targets, use_reentrant=False)
        for hidden, targets in zip(torch.split(sample.hidden, _CHUNK), torch.split(sample.labels, _CHUNK), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies) if case.entropy else None


def _nemo_rl(sample: LinearSample, case: LinearCase, setting: Setting) -> _Found:
    without_entropy(case.entropy)
    function = module("nemo_rl.distributed.model_utils").ChunkedDistributedHiddenStatesToLogprobs
    hidden, labels = sample.hidden.unsqueeze(1), sample.labels.unsqueeze(0)
    found = function.apply(hidden, labels, sample.weight, 0, case.width, _CHUNK, setting.required_group(), False)
    return found.squeeze(0), None


def _skyrl(sample: LinearSample, case: LinearCase, setting: Setting) -> _Found:
    without_entropy(case.entropy)
    function = module(
        "skyrl.backends.skyrl_train.distributed.megatron.model_utils"
    ).FusedLinearChunkedDistributedLogprob
    hidden, labels = sample.hidden.unsqueeze(0), sample.labels.unsqueeze(0)
    found = function.apply(hidden, sample.weight, labels, 0, case.width, _CHUNK, setting.required_group(), False)
    return found.squeeze(0), None


def _verl(sample: LinearSample, case: LinearCase, setting: Setting) -> _Found:
    function = module("verl.utils.experimental.torch_functional").FusedLinearForPPO(chunk_size=_CHUNK)
    logprobs, entropy = function(sample.hidden, sample.weight, sample.labels)
    return logprobs, entropy if case.entropy else None


def _verl_kernels(sample: LinearSample, case: LinearCase, setting: Setting) -> _Found:
    on_gpu(setting.device)
    function = module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
    logprobs, entropy = function(sample.hidden, sample.weight, sample.labels, 1.0, "none", None)
    return logprobs, entropy if case.entropy else None


def _liger(sample: LinearSample, case: LinearCase, setting: Setting) -> _Found:
    without_entropy(case.entropy)
    on_gpu(setting.device)
    function = module("liger_kernel.ops.fused_linear_cross_entropy").LigerFusedLinearCrossEntropyFunction
    found = function.apply(
        sample.hidden, sample.weight, sample.targets, None, None, IGNORE, 0.0, 0.0, "none", None, False, torch.float32
    )
    return -(found[0] if isinstance(found, tuple) else found), None


def _quack(sample: LinearSample, case: LinearCase, setting: Setting) -> _Found:
    # Its chunks make the gradients with the loss's own sum or mean: of single tokens there are log-probs from logits.
    without_entropy(case.entropy)
    on_gpu(setting.device)
    function = module("quack.linear_cross_entropy").linear_cross_entropy_func
    arguments = (sample.hidden, sample.weight, None, sample.targets, IGNORE, "none", True)
    found: Tensor = function(*arguments)
    return -found, None


def _cut(sample: LinearSample, case: LinearCase, setting: Setting) -> _Found:
    without_entropy(case.entropy)
    on_gpu(setting.device)
    function = module("cut_cross_entropy").linear_cross_entropy
    found: Tensor = function(sample.hidden, sample.weight, sample.targets, reduction="none", filter_eps=None)
    return -found, None


PATHS: dict[str, _Path] = {
    "nemo_geomask linear_logprobs": _ours,
    "nemo_geomask with logits": _with_logits,
    "torch F.linear, F.cross_entropy": _torch,
    f"torch in chunks of {_CHUNK}, recomputed": _torch_chunked,
    f"NeMo-RL fused linear ({_CHUNK})": _nemo_rl,
    f"SkyRL fused linear ({_CHUNK})": _skyrl,
    f"verl FusedLinearForPPO ({_CHUNK})": _verl,
    "verl linear_cross_entropy kernels": _verl_kernels,
    "Liger fused linear CE": _liger,
    "cut-cross-entropy": _cut,
    "QuACK linear_cross_entropy_func": _quack,
}
"""Names and what each computes: log-probs [T], entropy [T] where asked for."""


def benchmark(
    cases: Sequence[LinearCase],
    setting: Setting,
    *,
    repeats: int,
    paths: Sequence[str] = tuple(PATHS),
    seed: int = 0,
    report: Callable[[dict[str, Any]], object] = lambda case: None,
) -> list[dict[str, Any]]:
    """Measure paths of :data:`PATHS` in every case; see :func:`_measure`."""
    return in_turn(cases, lambda case: _measure(case, setting, paths, repeats, seed), report)


def _measure(case: LinearCase, setting: Setting, paths: Sequence[str], repeats: int, seed: int) -> dict[str, Any]:
    """Time, memory beyond inputs and gradients, error against float64, and the rate of the matrix products.

    The rate of the products is that of three of the shapes that a step needs, without anything between them; ``of
    products`` counts the four that a path without logits cannot avoid, whatever it does beside.
    """
    sample = draw(case, setting.device, seed)
    clock = Clock(setting.device)
    rows = {name: {"path": name} for name in paths}
    candidates: dict[str, Callable[[int], Lap]] = {}
    for name in paths:
        candidates[name] = _candidate(name, sample, case, setting, clock)
    candidates |= {_PRODUCTS: _products(sample, clock), _KERNELS: _kernels(sample, case, setting, clock)}
    laps, failures = interleave(candidates, repeats, warmup=1)
    for name in (_PRODUCTS, _KERNELS):
        if name in failures:  # whole logits, which may not fit
            raise torch.OutOfMemoryError(f"{name}: {failures[name]}")
    base = {name: summary(laps.pop(name), ("both", "nothing"), setting.device) for name in (_PRODUCTS, _KERNELS)}
    products = base[_PRODUCTS]["ms"]["median"] / 1e3
    for name, reason in failures.items():
        rows[name] |= {"status": _kind(reason), "reason": reason.partition(": ")[2] or reason}
    truth = _truth(sample, case)
    for name in laps:
        row = {"status": "measured", **summary(laps[name], ("forward", "backward"), setting.device)}
        row["of_products"] = products / (row["ms"]["median"] / 1e3)
        row["tflop_s"] = 4 * case.product / (row["ms"]["median"] / 1e3) / 1e12
        try:
            row |= _meter(name, sample, case, setting, truth)
        except Exception as error:  # a meter that a peer trips over leaves its times standing
            row["meters"] = why(error)
        rows[name] |= row
        release()
    return {
        "case": case.describe(),
        "title": str(case),
        "logits_bytes": case.logits_bytes,
        "products": base[_PRODUCTS],
        "kernels": base[_KERNELS],
        "products_tflop_s": 4 * case.product / products / 1e12,
        "paths": list(rows.values()),
    }


def _kind(reason: str) -> str:
    return {"Absent": "absent", "Unfit": "not applicable"}.get(reason.partition(":")[0], "failed")


def gradients(found: _Found, sample: LinearSample) -> list[Tensor]:
    """Of the hidden states and of the weight."""
    leaves, (logprobs, entropy) = [sample.hidden, sample.weight], found
    if entropy is None:
        return list(torch.autograd.grad(logprobs, leaves, sample.g.to(logprobs.dtype)))
    given = [sample.g.to(logprobs.dtype), sample.h.to(entropy.dtype)]
    return list(torch.autograd.grad([logprobs, entropy], leaves, given))


def _candidate(
    name: str, sample: LinearSample, case: LinearCase, setting: Setting, clock: Clock
) -> Callable[[int], Lap]:
    path = PATHS[name]
    return lambda turn: clock.lap(lambda: path(sample, case, setting), lambda found: gradients(found, sample))


def _products(sample: LinearSample, clock: Clock) -> Callable[[int], Lap]:
    """Logits twice, both gradients once, of the rows that train, in the type that the products run in."""
    dtype = torch.float32 if clock.device.type == "cpu" else sample.hidden.dtype
    hidden = sample.hidden.detach()[sample.kept].to(dtype)
    weight = sample.weight.detach().to(dtype)

    def four() -> Tensor:
        logits = hidden @ weight.T
        torch.mm(hidden, weight.T, out=logits)
        return (logits @ weight).sum() + (logits.T @ hidden).sum()

    return lambda turn: clock.lap(four, lambda _: None)


def _kernels(sample: LinearSample, case: LinearCase, setting: Setting, clock: Clock) -> Callable[[int], Lap]:
    """The pass over logits that exist, in both directions."""
    hidden, targets = sample.hidden.detach()[sample.kept], sample.targets[sample.kept]
    given = [sample.g[sample.kept], sample.h[sample.kept]][: 1 + case.entropy]

    def both(logits: Tensor) -> Tensor:
        function: Any = vocab_parallel_logprobs
        options = {"entropy": case.entropy, "kernel": setting.kernel, "inplace_gradient": True}
        found = function(logits, targets, **options)
        return torch.autograd.grad(found, logits, given)[0]

    def lap(turn: int) -> Lap:
        # Logits of some rows, repeated: a product of all would take longer than what is measured.
        some = (hidden[:64] @ sample.weight.detach().T).repeat(-(-len(hidden) // 64), 1)[: len(hidden)]
        logits = some.requires_grad_() * 1
        return clock.lap(lambda: both(logits), lambda _: None)

    return lap


def _truth(sample: LinearSample, case: LinearCase) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, their log-probs and their hidden states' gradients in float64."""
    rows = sample.kept.nonzero().squeeze(1)[:_ROWS]
    weight = sample.weight.detach()
    gradient = torch.zeros(len(rows), case.hidden, dtype=torch.float64, device=weight.device)
    logits = torch.cat([sample.hidden.detach()[rows].double() @ part.double().T for part in _parts(weight)], dim=1)
    logp = logits.log_softmax(1)
    p, own = logp.exp(), sample.targets[rows].unsqueeze(1)
    slope = -p.scatter_add(1, own, -torch.ones_like(own, dtype=p.dtype)) * sample.g[rows].double().unsqueeze(1)
    if case.entropy:
        entropy = -(p * logp).sum(1, keepdim=True)
        slope -= sample.h[rows].double().unsqueeze(1) * p * (logp + entropy)
    for part, of_part in zip(_parts(weight), _parts(slope.T), strict=True):
        gradient += of_part.T @ part.double()
    return rows, logp.gather(1, own).squeeze(1), gradient


def _parts(values: Tensor) -> Sequence[Tensor]:
    return torch.split(values, 8192)


def _meter(
    name: str, sample: LinearSample, case: LinearCase, setting: Setting, truth: tuple[Tensor, Tensor, Tensor]
) -> dict[str, Any]:
    def step() -> Tensor:
        return gradients(PATHS[name](sample, case, setting), sample)[1]

    rows, logprobs, gradient = truth
    found = PATHS[name](sample, case, setting)
    of_hidden = gradients(found, sample)[0][rows].double()
    error = (of_hidden - gradient).abs().amax(1) / gradient.abs().amax(1).clamp(min=1e-30)
    result: dict[str, Any] = {
        "errors": {
            "logprob": float((found[0].detach()[rows].double() - logprobs).abs().max()),
            "gradient": float(error.max()),
        }
    }
    del found, of_hidden
    release()
    extra = extra_memory(step, sample.weight)
    # Both gradients are alive at the end.
    result["extra_bytes"] = extra = None if extra is None else extra - sample.hidden.nbytes
    result["of_logits"] = None if extra is None else extra / case.logits_bytes
    if setting.device.type == "cuda":
        result["host_syncs"] = host_syncs(step)
    return result
