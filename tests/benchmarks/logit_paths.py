"""Paths from logits to log-probs and their gradient: ours, and those of torch, NeMo-RL and other peers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nemo_geomask.parallel import vocab_parallel_logprobs
from nemo_geomask.tools.bench.logprob_paths import IGNORE, LogprobCase, refuse_entropy
from nemo_geomask.tools.bench.peers import CHUNK, Absent, NotApplicable, Setting, import_peer


class LogitCase(LogprobCase):
    """A case that begins at the logits, so that its ``hidden`` is 0 and not said."""

    def describe(self) -> dict[str, Any]:
        return {key: value for key, value in super().describe().items() if key != "hidden"}

    def __str__(self) -> str:
        return super().__str__().replace("H=0, ", "")


class LogitSample(NamedTuple):
    """Inputs of one run: logits [T, V/TP], and otherwise as a ``LogprobSample``."""

    logits: Tensor
    targets: Tensor
    labels: Tensor
    is_trained: Tensor
    g: Tensor
    h: Tensor

    def tempered(self, case: LogitCase) -> Tensor:
        """Return the logits divided by the temperature, in their type; for paths without a temperature."""
        return self.logits if case.temperature == 1 else self.logits / case.temperature


class Output(NamedTuple):
    """Log-probs [T] if the path returns them, entropies [T] if the case has them, and the gradient of the logits."""

    logprobs: Tensor | None
    entropy: Tensor | None
    gradient: Callable[[LogitSample], Tensor]


def by_autograd(logprobs: Tensor, entropy: Tensor | None = None) -> Output:
    """Return an output whose gradient is computed by autograd."""

    def gradient(sample: LogitSample) -> Tensor:
        outputs = [(logprobs, sample.g), *([(entropy, sample.h)] if entropy is not None else [])]
        incoming = [g.to(output.dtype) for output, g in outputs]
        return torch.autograd.grad([output for output, _ in outputs], sample.logits, incoming)[0]

    return Output(logprobs.detach(), None if entropy is None else entropy.detach(), gradient)


Run = Callable[[LogitSample, LogitCase, Setting], Output]


class LogitPath(NamedTuple):
    """One implementation.

    Attributes:
        run: its forward pass.
        traffic: memory traffic, forward and backward, for logits of two bytes: bytes for each logit that every row has,
            and those that only a row that trains has; None if it is not known.
        source: where these bytes were counted.
        overwrites: True if the path overwrites the logits.
    """

    run: Run
    traffic: tuple[int, int] | None
    source: str
    overwrites: bool = False

    def bytes_per_element(self, fraction: float) -> float | None:
        return None if self.traffic is None else self.traffic[0] + fraction * self.traffic[1]


def _ours(sample: LogitSample, case: LogitCase, setting: Setting, *, in_place: bool = False, **options: Any) -> Output:
    # The gradient may overwrite only logits that are the output of an operation. A view is one, at no cost.
    logits = sample.logits.view_as(sample.logits) if in_place else sample.logits
    options |= {"temperature": case.temperature, "entropy": case.entropy, "ignore_index": IGNORE}
    options |= {"group": setting.group, "inplace_gradient": in_place}
    outputs = vocab_parallel_logprobs(logits, sample.targets, **options)
    return by_autograd(*(outputs if case.entropy else (outputs,)))


def _cross_entropy(sample: LogitSample, case: LogitCase, setting: Setting, *, upcast: bool) -> Output:
    _refuse_shards_and_entropy(case, setting)
    logits = sample.tempered(case)
    options = {"reduction": "none", "ignore_index": IGNORE}
    loss = torch.nn.functional.cross_entropy(logits.float() if upcast else logits, sample.targets, **options)
    return by_autograd(-loss)


def _log_softmax(sample: LogitSample, case: LogitCase, setting: Setting) -> Output:
    _refuse_shards(setting)
    logits = sample.logits.float()
    logp = torch.log_softmax(logits if case.temperature == 1 else logits / case.temperature, -1)
    entropy = -(logp.exp() * logp).sum(-1) if case.entropy else None
    return by_autograd(logp.gather(1, sample.labels.unsqueeze(1)).squeeze(1), entropy)


def _nemo_rl(sample: LogitSample, case: LogitCase, setting: Setting, *, chunked: bool) -> Output:
    utilities = import_peer("nemo_rl.distributed.model_utils")
    if not chunked:
        refuse_entropy(case)
    logits, labels = sample.tempered(case).unsqueeze(0), sample.labels.unsqueeze(0)
    columns = (setting.rank * case.width, (setting.rank + 1) * case.width)
    group = setting.required_group()
    if chunked:
        logp = utilities.ChunkedDistributedLogprob.apply(logits, labels, *columns, CHUNK, group, False)
    else:
        logp = utilities.DistributedLogprob.apply(logits.float(), labels, *columns, group, False)
    entropy = None
    if case.entropy:
        # NeMo-RL's function returns Σ p·log p, the negative entropy.
        entropy = -utilities.ChunkedDistributedEntropy.apply(logits, CHUNK, group, False).squeeze(0)
    return by_autograd(logp.squeeze(0), entropy)


def _megatron(sample: LogitSample, case: LogitCase, setting: Setting, *, module: str, name: str) -> Output:
    refuse_entropy(case)
    function = getattr(import_peer(f"megatron.core.{module}"), name)
    takes_group = "tp_group" in inspect.signature(function).parameters
    group = setting.required_group() if takes_group else setting.megatron_group()
    options = {"tp_group": group} if takes_group else {}
    return by_autograd(-function(sample.tempered(case).unsqueeze(1), sample.labels.unsqueeze(1), **options).squeeze(1))


def _verl(sample: LogitSample, case: LogitCase, setting: Setting) -> Output:
    _refuse_shards_and_entropy(case, setting)
    module = import_peer("verl.utils.torch_functional")
    if module.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE and setting.device.type != "cuda":
        raise Absent("it would call flash-attn, which needs a GPU")
    return by_autograd(module.logprobs_from_logits(sample.tempered(case), sample.labels))


def _transformer_engine(sample: LogitSample, case: LogitCase, setting: Setting) -> Output:
    function = import_peer("transformer_engine.pytorch.cross_entropy").parallel_cross_entropy
    logits, targets = sample.tempered(case).unsqueeze(0), sample.targets.unsqueeze(0)
    return by_autograd(-function(logits, targets, 0.0, False, setting.group, IGNORE).squeeze(0))


def _liger_vocab_parallel(sample: LogitSample, case: LogitCase, setting: Setting) -> Output:
    function = import_peer("liger_kernel.ops.vocab_parallel_cross_entropy").LigerVocabParallelCEFunction
    logits, targets = sample.tempered(case).unsqueeze(1), sample.targets.unsqueeze(1)
    return by_autograd(-function.apply(logits, targets, setting.group, IGNORE, 0.0, "pytorch", "global").squeeze(1))


def _liger_grpo(sample: LogitSample, case: LogitCase, setting: Setting) -> Output:
    _refuse_shards(setting)
    function = import_peer("liger_kernel.transformers.grpo_loss").triton_grpo_loss
    # The batch is one sequence, whose last row predicts nothing. Without old log-probs the ratio is 1, so with an
    # advantage of -1 the derivative of the loss with respect to the log-prob is 1.
    count = case.tokens - 1
    loss, *_ = function(
        sample.logits.unsqueeze(0),
        None,
        None,
        sample.labels[:count].unsqueeze(0).contiguous(),
        torch.full((1,), -1.0, dtype=torch.float32, device=setting.device),
        completion_mask=sample.is_trained[:count].unsqueeze(0).int().contiguous(),
        temperature=case.temperature,
        beta=0.0,
        inplace=False,
    )
    return Output(None, None, lambda s: torch.autograd.grad(loss, s.logits, s.g[:count].unsqueeze(0))[0])


def _flash_attn(sample: LogitSample, case: LogitCase, setting: Setting) -> Output:
    function = import_peer("flash_attn.ops.triton.cross_entropy").cross_entropy_loss
    options = {"logit_scale": 1 / case.temperature, "ignore_index": IGNORE, "process_group": setting.group}
    return by_autograd(-function(sample.logits, sample.targets, **options)[0])


def _fast_llm(sample: LogitSample, case: LogitCase, setting: Setting) -> Output:
    module, scale = import_peer("fast_llm.functional.triton.monolithic_loss"), 1 / case.temperature
    # As in Fast-LLM's GSPO: first the softmax of the row, then the gradient from one coefficient for each token.
    logits = sample.logits.detach()
    softmax = module._monolithic_forward_reduce(logits, sample.targets, setting.group, scale)
    max_logit, sum_exp, target_logit = softmax

    def gradient(s: LogitSample) -> Tensor:
        return module.triton_monolithic_loss_forward_backward(
            logits, s.targets, None, scale, setting.group, 1.0, gspo_coeff=-s.g * scale, softmax=softmax
        )[4]

    return Output(target_logit - sum_exp.log() - max_logit, None, gradient)


def _refuse_shards(setting: Setting) -> None:
    if setting.group is not None:
        raise NotApplicable("does not support shards")


def _refuse_shards_and_entropy(case: LogitCase, setting: Setting) -> None:
    _refuse_shards(setting)
    refuse_entropy(case)


def on_gpu(run: Callable[..., Any], *, has_entropy: bool = False) -> Callable[..., Any]:
    """Return a path that needs a GPU."""

    def path(sample: Any, case: Any, setting: Setting) -> Any:
        if setting.device.type != "cuda":
            raise Absent("needs a GPU")
        if not has_entropy:
            refuse_entropy(case)
        return run(sample, case, setting)

    return path


_KERNELS = "kernels/gpu.py: _statistics reads a trained row, _gradients reads it again and writes every row"
_partial = functools.partial

OURS: dict[str, LogitPath] = {
    "nemo_geomask": LogitPath(_ours, (2, 4), _KERNELS),
    "nemo_geomask, unchecked targets": LogitPath(_partial(_ours, validate=False), (2, 4), _KERNELS),
    "nemo_geomask, gradient in place": LogitPath(_partial(_ours, in_place=True), (2, 4), _KERNELS, overwrites=True),
}
PATHS: dict[str, LogitPath] = {
    **OURS,
    "torch F.cross_entropy": LogitPath(
        _partial(_cross_entropy, upcast=False),
        (12, 0),
        "log_softmax: 2 read, 2 written; nll_loss backward: 2 written; log_softmax backward: 4 read, 2 written",
    ),
    "torch F.cross_entropy of logits.float()": LogitPath(
        _partial(_cross_entropy, upcast=True),
        (36, 0),
        "the same at 4 bytes, 24, and the cast 2 + 4 forward, 4 + 2 backward",
    ),
    "torch log_softmax(logits.float()) and gather": LogitPath(
        _log_softmax, (36, 0), "as F.cross_entropy of logits.float(); with entropy more"
    ),
    f"NeMo-RL ChunkedDistributedLogprob({CHUNK})": LogitPath(
        _partial(_nemo_rl, chunked=True),
        (148, 0),
        "distributed/model_utils.py, ChunkedDistributedLogprob: forward 38, backward 110",
    ),
    "NeMo-RL DistributedLogprob of logits.float()": LogitPath(
        _partial(_nemo_rl, chunked=False),
        (68, 0),
        "distributed/model_utils.py, DistributedLogprob: forward 46, backward 22",
    ),
    "Megatron-core vocab_parallel_cross_entropy": LogitPath(
        _partial(_megatron, module="tensor_parallel.cross_entropy", name="vocab_parallel_cross_entropy"),
        (52, 0),
        "core/tensor_parallel/cross_entropy.py: forward 38, backward 14",
    ),
    "Megatron-core fused_vocab_parallel_cross_entropy": LogitPath(
        _partial(_megatron, module="fusions.fused_cross_entropy", name="fused_vocab_parallel_cross_entropy"),
        None,
        "core/fusions/fused_cross_entropy.py: depends on what the compiler fuses",
    ),
    "verl logprobs_from_logits": LogitPath(
        _verl,
        None,
        "utils/torch_functional.py: flash-attn's kernels where that is installed (6), else log_softmax row by row (16)",
        overwrites=True,
    ),
    "TransformerEngine parallel_cross_entropy": LogitPath(
        on_gpu(_transformer_engine),
        (20, 2),
        "common/triton/cross_entropy.py: online_softmax 2, cross_entropy 2 + 4 (float32 gradient), element_mul 4 + 4, "
        "autograd's cast 4 + 2",
    ),
    "Liger vocabulary-parallel CE": LogitPath(
        on_gpu(_liger_vocab_parallel),
        (18, 4),
        "ops/vocab_parallel_cross_entropy.py: amax 2, forward 2 + 4, backward 4 + 4, cast 4 + 2",
    ),
    "Liger GRPO loss": LogitPath(
        on_gpu(_liger_grpo),
        (2, 4),
        "ops/grpo_loss.py, token level: forward 2, backward 2 + 2, masked rows written only",
    ),
    "flash-attn CE": LogitPath(
        on_gpu(_flash_attn),
        (6, 0),
        "ops/triton/cross_entropy.py: 2 read forward, 2 read and 2 written backward, also for rows that do not train",
    ),
    "Fast-LLM monolithic loss": LogitPath(
        on_gpu(_fast_llm),
        (6, 0),
        "functional/triton/monolithic_loss.py after a forward pass of its own, as for GSPO: 2, then 2 + 2",
    ),
}
