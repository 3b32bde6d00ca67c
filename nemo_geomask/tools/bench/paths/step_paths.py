"""Paths of ``bench step`` from hidden states to the loss: NeMo-RL's, ours with and without logits, and torch's."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from nemo_geomask.tools.bench.loss_cases import build_nemo_rl_loss, read_metrics
from nemo_geomask.tools.bench.paths.eager_peers import CHUNK
from nemo_geomask.tools.bench.paths.path import Absent, Setting, import_peer
from nemo_geomask.tools.bench.step_cases import HeadLoss, StepBatch

__all__ = ["PATHS", "REFERENCE"]

_LOGPROBS = "get_next_token_logprobs_from_logits"  # what NeMo-RL's workers call


def _nemo_rl(setting: Setting, *, chunk: int | None) -> HeadLoss:
    logprobs = getattr(import_peer("nemo_rl.distributed.model_utils"), _LOGPROBS)
    options = {} if chunk is None else {"chunk_size": chunk}
    if not options.keys() <= inspect.signature(logprobs).parameters.keys():
        raise Absent(f"{_LOGPROBS} of this NeMo-RL has no chunk_size")
    batched_data = import_peer("nemo_rl.distributed.batched_data_dict").BatchedDataDict
    loss_fn, group = build_nemo_rl_loss({}), setting.required_group()

    def loss(hidden: Tensor, weight: Tensor, batch: StepBatch) -> Tensor:
        curr = logprobs(
            input_ids=batch.data["input_ids"],
            next_token_logits=torch.nn.functional.linear(hidden, weight),
            vocab_parallel_rank=0,
            vocab_parallel_group=group,
            **options,
        )
        value: Tensor = loss_fn(
            next_token_logprobs=curr,
            data=batched_data(batch.data),
            global_valid_seqs=batch.valid_seqs,
            global_valid_toks=batch.valid_toks,
        )[0]
        return value

    return loss


def _ours(setting: Setting, *, backend: str) -> HeadLoss:
    """Return the loss that a worker calls under ``logprob_backend``, with logits or with hidden states."""
    import_peer("pydantic")
    from nemo_geomask.hosts.nemo_rl.hidden_states import OutputLayer
    from nemo_geomask.hosts.nemo_rl.logit_backends import LogitLoss
    from nemo_geomask.losses import build_loss

    loss_fn = LogitLoss(build_loss({"logprob_backend": backend, "compile": False}))

    def loss(hidden: Tensor, weight: Tensor, batch: StepBatch) -> Tensor:
        if loss_fn.takes_hidden:
            OutputLayer(weight, sequence_parallel=False, ranks=1).mark(hidden)
            output = hidden
        else:
            output = torch.nn.functional.linear(hidden, weight)
        return read_metrics(loss_fn(output, *batch))

    return loss


def _torch(setting: Setting) -> HeadLoss:
    import_peer("pydantic")
    from nemo_geomask.losses import build_loss

    loss_fn = build_loss({"compile": False})

    def loss(hidden: Tensor, weight: Tensor, batch: StepBatch) -> Tensor:
        logprobs = torch.nn.functional.linear(hidden, weight)[:, :-1].float().log_softmax(-1)
        curr = logprobs.gather(-1, batch.data["input_ids"][:, 1:].unsqueeze(-1)).squeeze(-1)
        return read_metrics(loss_fn(curr, *batch))

    return loss


REFERENCE = "torch log_softmax and gather, our loss"
"""Path that the others must agree with."""

PATHS: dict[str, Callable[[Setting], HeadLoss]] = {
    "nemo_geomask, logprob_backend: geomask_linear": lambda setting: _ours(setting, backend="geomask_linear"),
    "nemo_geomask, logprob_backend: geomask": lambda setting: _ours(setting, backend="geomask"),
    "NeMo-RL, DistributedLogprob": lambda setting: _nemo_rl(setting, chunk=None),
    f"NeMo-RL, ChunkedDistributedLogprob({CHUNK})": lambda setting: _nemo_rl(setting, chunk=CHUNK),
    REFERENCE: _torch,
}
"""Functions that prepare each path, by its name; they raise :class:`Absent` for a path that can't run here."""
