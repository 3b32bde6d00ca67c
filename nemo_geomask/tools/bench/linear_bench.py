"""``bench linear``: our paths and peers' from hidden states to log-probs and to the gradients of both operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nemo_geomask.parallel import linear_logprobs, vocab_parallel_logprobs
from nemo_geomask.tools.bench.logprob_cases import IGNORE
from nemo_geomask.tools.bench.paths.path import Setting, import_peer, refuse_entropy, require_gpu
from nemo_geomask.tools.bench.resource_meters import count_host_syncs, extra_memory
from nemo_geomask.tools.bench.timing import (
    Clock,
    Lap,
    describe_error,
    free_memory,
    interleave,
    measure_cases,
    summarise,
)

__all__ = ["PATHS", "LinearCase", "benchmark", "draw", "gradients"]

_CHUNK = 1024  # rows in a chunk of the paths that work in chunks
_ROWS = 8  # rows that are compared with float64
_PRODUCTS, _KERNELS = "the four matrix products alone", "the log-prob kernels alone"


class LinearCase(NamedTuple):
    """One measured shape.

    Attributes:
        tokens: number of tokens, T.
        hidden: size of a hidden state, H.
        vocab: size of the global vocabulary, V.
        tp: number of equal vocabulary shards, of which the weight is one; no collectives are run.
        fraction: fraction of the tokens that train.
        entropy: True if the entropy and its gradient are also computed.
        dtype: type of the hidden states and the weight.
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
        """Number of columns of the shard."""
        return self.vocab // self.tp

    @property
    def product(self) -> float:
        """Floating-point operations of one matrix product over the rows that train."""
        return 2.0 * round(self.fraction * self.tokens) * self.hidden * self.width

    @property
    def logits_bytes(self) -> int:
        """Size of the logits in bytes."""
        return self.tokens * self.width * self.dtype.itemsize

    def describe(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {**self._asdict(), "dtype": str(self.dtype).removeprefix("torch.")}

    def __str__(self) -> str:
        parts = [f"T={self.tokens}", f"H={self.hidden}", f"V={self.vocab}{f'/{self.tp}' if self.tp > 1 else ''}"]
        parts += [str(self.dtype).removeprefix("torch.")]
        parts += [f"{self.fraction:g} of the tokens train"] if self.fraction < 1 else []
        return ", ".join(parts + (["with entropy"] if self.entropy else []))


class LinearSample(NamedTuple):
    """Inputs of the paths.

    Attributes:
        hidden: [T, H], a leaf tensor.
        weight: [V/TP, H], a leaf tensor.
        targets: [T] int64, ``IGNORE`` where a token does not train.
        is_trained: [T] bool, the tokens that train.
        g: [T] float32, incoming gradient of the log-probs, 0 where a token does not train.
        h: [T] float32, incoming gradient of the entropies, 0 where a token does not train.
    """

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    is_trained: Tensor
    g: Tensor
    h: Tensor

    @property
    def labels(self) -> Tensor:
        """Targets for paths that compute all rows, [T] int64 with 0 in place of ``IGNORE``."""
        return self.targets.clamp(min=0)


_Outputs = tuple[Tensor, Tensor | None]  # log-probs [T], and entropies [T] if the case has them
_Path = Callable[[LinearSample, LinearCase, Setting], _Outputs]


def draw(case: LinearCase, device: torch.device, seed: int) -> LinearSample:
    """Draw the inputs of a case; the same seed gives the same inputs."""
    source = torch.Generator(device).manual_seed(seed)
    hidden = torch.randn(case.tokens, case.hidden, generator=source, device=device, dtype=torch.float32)
    weight = torch.randn(case.width, case.hidden, generator=source, device=device, dtype=torch.float32)
    weight *= 3.0 * case.hidden**-0.5  # such logits are neither nearly equal nor dominated by one
    order = torch.randperm(case.tokens, generator=source, device=device)
    is_trained = torch.zeros(case.tokens, dtype=torch.bool, device=device)
    is_trained[order[: round(case.fraction * case.tokens)]] = True
    labels = torch.randint(0, case.width, (case.tokens,), generator=source, device=device)
    g, h = torch.randn(2, case.tokens, generator=source, device=device, dtype=torch.float32) * is_trained
    leaves = (hidden.to(case.dtype).requires_grad_(), weight.to(case.dtype).requires_grad_())
    return LinearSample(*leaves, labels.where(is_trained, IGNORE), is_trained, g, h)


def _ours(sample: LinearSample, case: LinearCase, setting: Setting) -> _Outputs:
    function: Any = linear_logprobs
    options = {"group": setting.group, "entropy": case.entropy, "kernel": setting.kernel}
    outputs = function(sample.hidden, sample.weight, sample.targets, **options)
    return outputs if case.entropy else (outputs, None)


def _with_logits(sample: LinearSample, case: LinearCase, setting: Setting) -> _Outputs:
    logits = torch.nn.functional.linear(sample.hidden, sample.weight)
    function: Any = vocab_parallel_logprobs
    options = {"group": setting.group, "entropy": case.entropy, "kernel": setting.kernel, "inplace_gradient": True}
    outputs = function(logits, sample.targets, **options)
    return outputs if case.entropy else (outputs, None)


def _torch(sample: LinearSample, case: LinearCase, setting: Setting) -> _Outputs:
    refuse_entropy(case.entropy)
    logits = torch.nn.functional.linear(sample.hidden, sample.weight)
    return -torch.nn.functional.cross_entropy(logits, sample.targets, reduction="none", ignore_index=IGNORE), None


def _torch_chunked(sample: LinearSample, case: LinearCase, setting: Setting) -> _Outputs:
    def chunk(hidden: Tensor, weight: Tensor, targets: Tensor) -> _Outputs:
        logp = torch.nn.functional.linear(hidden, weight).float().log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1) if case.entropy else None
        return logp.gather(1, targets.unsqueeze(1)).squeeze(1), entropy

    parts = [
        torch.utils.checkpoint.checkpoint(chunk, hidden, sample.weight, targets, use_reentrant=False)
        for hidden, targets in zip(torch.split(sample.hidden, _CHUNK), torch.split(sample.labels, _CHUNK), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies) if case.entropy else None


def _nemo_rl(sample: LinearSample, case: LinearCase, setting: Setting) -> _Outputs:
    refuse_entropy(case.entropy)
    function = import_peer("nemo_rl.distributed.model_utils").ChunkedDistributedHiddenStatesToLogprobs
    hidden, labels = sample.hidden.unsqueeze(1), sample.labels.unsqueeze(0)
    logprobs = function.apply(hidden, labels, sample.weight, 0, case.width, _CHUNK, setting.required_group(), False)
    return logprobs.squeeze(0), None


def _skyrl(sample: LinearSample, case: LinearCase, setting: Setting) -> _Outputs:
    refuse_entropy(case.entropy)
    function = import_peer(
        "skyrl.backends.skyrl_train.distributed.megatron.model_utils"
    ).FusedLinearChunkedDistributedLogprob
    hidden, labels = sample.hidden.unsqueeze(0), sample.labels.unsqueeze(0)
    logprobs = function.apply(hidden, sample.weight, labels, 0, case.width, _CHUNK, setting.required_group(), False)
    return logprobs.squeeze(0), None


def _verl(sample: LinearSample, case: LinearCase, setting: Setting) -> _Outputs:
    function = import_peer("verl.utils.experimental.torch_functional").FusedLinearForPPO(chunk_size=_CHUNK)
    logprobs, entropy = function(sample.hidden, sample.weight, sample.labels)
    return logprobs, entropy if case.entropy else None


def _verl_kernels(sample: LinearSample, case: LinearCase, setting: Setting) -> _Outputs:
    require_gpu(setting.device)
    function = import_peer("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
    logprobs, entropy = function(sample.hidden, sample.weight, sample.labels, 1.0, "none", None)
    return logprobs, entropy if case.entropy else None


def _liger(sample: LinearSample, case: LinearCase, setting: Setting) -> _Outputs:
    refuse_entropy(case.entropy)
    require_gpu(setting.device)
    function = import_peer("liger_kernel.ops.fused_linear_cross_entropy").LigerFusedLinearCrossEntropyFunction
    loss = function.apply(
        sample.hidden, sample.weight, sample.targets, None, None, IGNORE, 0.0, 0.0, "none", None, False, torch.float32
    )
    return -(loss[0] if isinstance(loss, tuple) else loss), None


def _quack(sample: LinearSample, case: LinearCase, setting: Setting) -> _Outputs:
    # QuACK's chunked form returns only a sum or mean of the losses, so this is its form with logits.
    refuse_entropy(case.entropy)
    require_gpu(setting.device)
    function = import_peer("quack.linear_cross_entropy").linear_cross_entropy_func
    arguments = (sample.hidden, sample.weight, None, sample.targets, IGNORE, "none", True)
    loss: Tensor = function(*arguments)
    return -loss, None


def _cut_cross_entropy(sample: LinearSample, case: LinearCase, setting: Setting) -> _Outputs:
    refuse_entropy(case.entropy)
    require_gpu(setting.device)
    function = import_peer("cut_cross_entropy").linear_cross_entropy
    loss: Tensor = function(sample.hidden, sample.weight, sample.targets, reduction="none", filter_eps=None)
    return -loss, None


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
    "cut-cross-entropy": _cut_cross_entropy,
    "QuACK linear_cross_entropy_func": _quack,
}
"""The paths by name; each returns log-probs [T] and, if the case has them, entropies [T]."""


def benchmark(
    cases: Sequence[LinearCase],
    setting: Setting,
    *,
    repeats: int,
    paths: Sequence[str] = tuple(PATHS),
    seed: int = 0,
    report: Callable[[dict[str, Any]], object] = lambda case: None,
) -> list[dict[str, Any]]:
    """Measure paths of :data:`PATHS` in every case.

    Args:
        cases: the cases.
        setting: device, kernel and process group.
        repeats: number of measured rounds for each case.
        paths: names of the paths.
        seed: seed of the inputs.
        report: function that is called with each case's result.
    """
    return measure_cases(cases, lambda case: _measure(case, setting, paths, repeats, seed), report)


def _measure(case: LinearCase, setting: Setting, paths: Sequence[str], repeats: int, seed: int) -> dict[str, Any]:
    """Measure times, memory beyond inputs and gradients, errors against float64, and the matrix products alone.

    No path without logits can avoid four matrix products. ``of_products`` is the time of these products alone, divided
    by the time of the path.
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
        if name in failures:  # these baselines hold all logits, which may not fit into memory
            raise torch.OutOfMemoryError(f"{name}: {failures[name]}")
    baselines = {name: summarise(laps.pop(name), ("both", "nothing"), setting.device) for name in (_PRODUCTS, _KERNELS)}
    products = baselines[_PRODUCTS]["ms"]["median"] / 1e3
    for name, reason in failures.items():
        rows[name] |= {"status": _status(reason), "reason": reason.partition(": ")[2] or reason}
    reference = _float64_reference(sample, case)
    for name in laps:
        row = {"status": "measured", **summarise(laps[name], ("forward", "backward"), setting.device)}
        row["of_products"] = products / (row["ms"]["median"] / 1e3)
        row["tflop_s"] = 4 * case.product / (row["ms"]["median"] / 1e3) / 1e12
        try:
            row |= _meter(name, sample, case, setting, reference)
        except Exception as error:  # a peer that fails under a meter keeps its times
            row["meters"] = describe_error(error)
        rows[name] |= row
        free_memory()
    return {
        "case": case.describe(),
        "title": str(case),
        "logits_bytes": case.logits_bytes,
        "products": baselines[_PRODUCTS],
        "kernels": baselines[_KERNELS],
        "products_tflop_s": 4 * case.product / products / 1e12,
        "paths": list(rows.values()),
    }


def _status(reason: str) -> str:
    """Return the status of a path that raised an error; ``reason`` begins with the error's type."""
    return {"Absent": "absent", "NotApplicable": "not applicable"}.get(reason.partition(":")[0], "failed")


def gradients(outputs: _Outputs, sample: LinearSample) -> list[Tensor]:
    """Return the gradients of the hidden states and of the weight."""
    leaves, (logprobs, entropy) = [sample.hidden, sample.weight], outputs
    if entropy is None:
        return list(torch.autograd.grad(logprobs, leaves, sample.g.to(logprobs.dtype)))
    incoming = [sample.g.to(logprobs.dtype), sample.h.to(entropy.dtype)]
    return list(torch.autograd.grad([logprobs, entropy], leaves, incoming))


def _candidate(
    name: str, sample: LinearSample, case: LinearCase, setting: Setting, clock: Clock
) -> Callable[[int], Lap]:
    path = PATHS[name]
    return lambda turn: clock.lap(lambda: path(sample, case, setting), lambda outputs: gradients(outputs, sample))


def _products(sample: LinearSample, clock: Clock) -> Callable[[int], Lap]:
    """Return a candidate that runs four matrix products over the trained rows: logits twice, each gradient once.

    They have the type in which the paths run them, which is float32 on a CPU.
    """
    dtype = torch.float32 if clock.device.type == "cpu" else sample.hidden.dtype
    hidden = sample.hidden.detach()[sample.is_trained].to(dtype)
    weight = sample.weight.detach().to(dtype)

    def multiply() -> Tensor:
        logits = hidden @ weight.T
        torch.mm(hidden, weight.T, out=logits)
        return (logits @ weight).sum() + (logits.T @ hidden).sum()

    return lambda turn: clock.lap(multiply, lambda _: None)


def _kernels(sample: LinearSample, case: LinearCase, setting: Setting, clock: Clock) -> Callable[[int], Lap]:
    """Return a candidate that runs the log-prob kernels, forward and backward, on logits that exist already."""
    hidden, targets = sample.hidden.detach()[sample.is_trained], sample.targets[sample.is_trained]
    incoming = [sample.g[sample.is_trained], sample.h[sample.is_trained]][: 1 + case.entropy]

    def forward_backward(logits: Tensor) -> Tensor:
        function: Any = vocab_parallel_logprobs
        options = {"entropy": case.entropy, "kernel": setting.kernel, "inplace_gradient": True}
        return torch.autograd.grad(function(logits, targets, **options), logits, incoming)[0]

    def lap(turn: int) -> Lap:
        # Repeat the logits of 64 rows: computing all logits would take longer than the pass over them.
        repeated = (hidden[:64] @ sample.weight.detach().T).repeat(-(-len(hidden) // 64), 1)[: len(hidden)]
        logits = repeated.requires_grad_() * 1  # the output of an operation, so that the gradient may reuse its memory
        return clock.lap(lambda: forward_backward(logits), lambda _: None)

    return lap


def _float64_reference(sample: LinearSample, case: LinearCase) -> tuple[Tensor, Tensor, Tensor]:
    """Return the indices of a few trained rows, and their log-probs and hidden-state gradients in float64."""
    rows = sample.is_trained.nonzero().squeeze(1)[:_ROWS]
    weight = sample.weight.detach()
    gradient = torch.zeros(len(rows), case.hidden, dtype=torch.float64, device=weight.device)
    logits = torch.cat([sample.hidden.detach()[rows].double() @ part.double().T for part in _parts(weight)], dim=1)
    logp = logits.log_softmax(1)
    p, target = logp.exp(), sample.targets[rows].unsqueeze(1)
    slope = -p.scatter_add(1, target, -torch.ones_like(target, dtype=p.dtype)) * sample.g[rows].double().unsqueeze(1)
    if case.entropy:
        entropy = -(p * logp).sum(1, keepdim=True)
        slope -= sample.h[rows].double().unsqueeze(1) * p * (logp + entropy)
    for weight_part, slope_part in zip(_parts(weight), _parts(slope.T), strict=True):
        gradient += slope_part.T @ weight_part.double()
    return rows, logp.gather(1, target).squeeze(1), gradient


def _parts(values: Tensor) -> Sequence[Tensor]:
    return torch.split(values, 8192)


def _meter(
    name: str, sample: LinearSample, case: LinearCase, setting: Setting, reference: tuple[Tensor, Tensor, Tensor]
) -> dict[str, Any]:
    def step() -> Tensor:
        return gradients(PATHS[name](sample, case, setting), sample)[1]

    rows, logprobs, gradient = reference
    outputs = PATHS[name](sample, case, setting)
    hidden_gradient = gradients(outputs, sample)[0][rows].double()
    error = (hidden_gradient - gradient).abs().amax(1) / gradient.abs().amax(1).clamp(min=1e-30)
    result: dict[str, Any] = {
        "errors": {
            "logprob": float((outputs[0].detach()[rows].double() - logprobs).abs().max()),
            "gradient": float(error.max()),
        }
    }
    del outputs, hidden_gradient
    free_memory()
    extra = extra_memory(step, sample.weight)
    # The meter subtracts the weight's gradient; the hidden states' gradient is not extra memory, either.
    result["extra_bytes"] = extra = None if extra is None else extra - sample.hidden.nbytes
    result["of_logits"] = None if extra is None else extra / case.logits_bytes
    if setting.device.type == "cuda":
        result["host_syncs"] = count_host_syncs(step)
    return result
