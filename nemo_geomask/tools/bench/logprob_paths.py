"""Cases of ``bench logprobs``, their random inputs, and the methods from hidden states to log-probs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nemo_geomask.errors import MissingDependencyError
from nemo_geomask.parallel import linear_logprobs, vocab_parallel_logprobs
from nemo_geomask.tools.bench.peers import CHUNK, Absent, NotApplicable, Setting, import_peer

IGNORE = -100
FUSED_CHUNK = 1024  # rows in a chunk of NeMo-RL's fused path
SPREAD = 3.0  # standard deviation of the logits: neither nearly equal nor dominated by one


class LogprobCase(NamedTuple):
    """One measured shape."""

    tokens: int  # number of tokens, T
    hidden: int  # size of a hidden state, H
    vocab: int  # size of the global vocabulary, V
    tp: int = 1  # number of equal vocabulary shards, of which the weight is one; no collectives are run
    fraction: float = 1.0  # fraction of the tokens that train
    entropy: bool = False  # True if the entropy and its gradient are also computed
    temperature: float = 1.0  # temperature that the logits are divided by
    dtype: torch.dtype = torch.bfloat16  # type of the hidden states and the weight

    @property
    def width(self) -> int:
        """Number of columns of the shard."""
        return self.vocab // self.tp

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
        parts += [f"temperature {self.temperature:g}"] if self.temperature != 1 else []
        return ", ".join(parts + (["with entropy"] if self.entropy else []))


class LogprobSample(NamedTuple):
    """Random inputs of the paths."""

    hidden: Tensor  # [T, H], a leaf tensor
    weight: Tensor  # [V/TP, H], a leaf tensor
    targets: Tensor  # [T] int64, ``IGNORE`` where a token does not train
    is_trained: Tensor  # [T] bool, the tokens that train
    g: Tensor  # [T] float32, incoming gradient of the log-probs, 0 where a token does not train
    h: Tensor  # [T] float32, incoming gradient of the entropies, 0 where a token does not train

    @property
    def labels(self) -> Tensor:
        """Targets for paths that compute all rows, [T] int64 with 0 in place of ``IGNORE``."""
        return self.targets.clamp(min=0)

    def logits(self, case: LogprobCase, *, float32: bool = False) -> Tensor:
        """Compute the logits, divided by the temperature as NeMo-RL's workers do it, in their type or in float32."""
        logits = torch.nn.functional.linear(self.hidden, self.weight)
        logits = logits.float() if float32 else logits
        return logits if case.temperature == 1 else logits / case.temperature


Outputs = tuple[Tensor, Tensor | None]
"""Log-probs [T], and entropies [T] if the case has them."""
Path = Callable[[LogprobSample, LogprobCase, Setting], Outputs]
"""Function that computes a case's outputs by one method; raises :class:`peers.Absent` if it can't."""


def refuse_entropy(case: LogprobCase) -> None:
    """Raise NotApplicable if the case has entropies; for paths that do not compute them."""
    if case.entropy:
        raise NotApplicable("has no entropy")


def _geomask_linear(sample: LogprobSample, case: LogprobCase, setting: Setting) -> Outputs:
    function: Any = linear_logprobs
    options = {"group": setting.group, "entropy": case.entropy}
    outputs = function(sample.hidden, sample.weight, sample.targets, temperature=case.temperature, **options)
    return outputs if case.entropy else (outputs, None)


def _geomask(sample: LogprobSample, case: LogprobCase, setting: Setting) -> Outputs:
    logits = torch.nn.functional.linear(sample.hidden, sample.weight)
    function: Any = vocab_parallel_logprobs
    options = {"group": setting.group, "entropy": case.entropy, "inplace_gradient": True}
    outputs = function(logits, sample.targets, temperature=case.temperature, **options)
    return outputs if case.entropy else (outputs, None)


def _nemo_rl(sample: LogprobSample, case: LogprobCase, setting: Setting) -> Outputs:
    refuse_entropy(case)
    function = import_peer("nemo_rl.distributed.model_utils").DistributedLogprob
    start, logits = setting.rank * case.width, sample.logits(case, float32=True).unsqueeze(0)
    shard = (start, start + case.width, setting.required_group(), False)
    return function.apply(logits, sample.labels.unsqueeze(0), *shard).squeeze(0), None


def _nemo_rl_in_chunks(sample: LogprobSample, case: LogprobCase, setting: Setting) -> Outputs:
    utilities = import_peer("nemo_rl.distributed.model_utils")
    start, logits, group = setting.rank * case.width, sample.logits(case).unsqueeze(0), setting.required_group()
    shard = (start, start + case.width, CHUNK, group, False)
    logprobs = utilities.ChunkedDistributedLogprob.apply(logits, sample.labels.unsqueeze(0), *shard)
    if not case.entropy:
        return logprobs.squeeze(0), None
    # NeMo-RL's function returns Σ p·log p, the negative entropy.
    return logprobs.squeeze(0), -utilities.ChunkedDistributedEntropy.apply(logits, CHUNK, group, False).squeeze(0)


def _nemo_rl_fused(sample: LogprobSample, case: LogprobCase, setting: Setting) -> Outputs:
    refuse_entropy(case)
    function = import_peer("nemo_rl.distributed.model_utils").ChunkedDistributedHiddenStatesToLogprobs
    hidden = (sample.hidden if case.temperature == 1 else sample.hidden / case.temperature).unsqueeze(1)
    start = setting.rank * case.width
    shard = (start, start + case.width, FUSED_CHUNK, setting.required_group(), False)
    return function.apply(hidden, sample.labels.unsqueeze(0), sample.weight, *shard).squeeze(0), None


def _backend(name: str) -> Path:
    def path(sample: LogprobSample, case: LogprobCase, setting: Setting) -> Outputs:
        refuse_entropy(case)
        try:
            function = import_peer("nemo_geomask.hosts.logprob_libraries").logprob_backend(name)
        except MissingDependencyError as error:
            raise Absent(str(error)) from None
        group = setting.megatron_group() if name == "mcore" else setting.group
        logits = torch.nn.functional.linear(sample.hidden, sample.weight)
        return function(logits, sample.targets, group=group, temperature=case.temperature), None

    return path


def _torch(sample: LogprobSample, case: LogprobCase, setting: Setting) -> Outputs:
    if setting.group is not None:
        raise NotApplicable("does not support shards")
    logp = sample.logits(case, float32=True).log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1) if case.entropy else None
    return logp.gather(1, sample.labels.unsqueeze(1)).squeeze(1), entropy


PATHS: dict[str, Path] = {
    "geomask_linear": _geomask_linear,
    "geomask": _geomask,
    "NeMo-RL": _nemo_rl,
    "NeMo-RL, in chunks": _nemo_rl_in_chunks,
    "NeMo-RL, fused": _nemo_rl_fused,
    "mcore": _backend("mcore"),
    "te": _backend("te"),
    "torch": _torch,
}
"""Methods by name: NeMo-RL's as in ``bench scale``, the others as in ``logprob_backend``, and torch's log-softmax."""


def draw(case: LogprobCase, device: torch.device, seed: int) -> LogprobSample:
    """Draw the inputs of a case; the same seed gives the same inputs."""
    source = torch.Generator(device).manual_seed(seed)
    hidden = torch.randn(case.tokens, case.hidden, generator=source, device=device, dtype=torch.float32)
    weight = torch.randn(case.width, case.hidden, generator=source, device=device, dtype=torch.float32)
    weight *= SPREAD * case.hidden**-0.5
    order = torch.randperm(case.tokens, generator=source, device=device)
    is_trained = torch.zeros(case.tokens, dtype=torch.bool, device=device)
    is_trained[order[: round(case.fraction * case.tokens)]] = True
    labels = torch.randint(0, case.width, (case.tokens,), generator=source, device=device)
    g, h = torch.randn(2, case.tokens, generator=source, device=device, dtype=torch.float32) * is_trained
    leaves = (hidden.to(case.dtype).requires_grad_(), weight.to(case.dtype).requires_grad_())
    return LogprobSample(*leaves, labels.where(is_trained, IGNORE), is_trained, g, h)


def gradients(outputs: Outputs, sample: LogprobSample) -> list[Tensor]:
    """Return the gradients of the hidden states and of the weight."""
    leaves, (logprobs, entropy) = [sample.hidden, sample.weight], outputs
    if entropy is None:
        return list(torch.autograd.grad(logprobs, leaves, sample.g.to(logprobs.dtype)))
    incoming = [sample.g.to(logprobs.dtype), sample.h.to(entropy.dtype)]
    return list(torch.autograd.grad([logprobs, entropy], leaves, incoming))
