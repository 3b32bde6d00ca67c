"""The decoder of ``bench step``, the sequence that it trains on, and the paths from hidden states to the loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nemo_geomask.data_keys import GENERATION_LOGPROBS, PREV_LOGPROBS, REFERENCE_POLICY_LOGPROBS
from nemo_geomask.parallel import linear_logprobs
from nemo_geomask.tools.bench.loss import Data, build_nemo_rl_loss, draw_batch, global_counts, read_metrics
from nemo_geomask.tools.bench.peers import CHUNK, Absent, Setting, import_peer

_LOGIT_SPREAD = 3.0  # standard deviation of the logits: neither nearly equal nor dominated by one
_LOGPROBS = "get_next_token_logprobs_from_logits"  # what NeMo-RL's workers call


class StepCase(NamedTuple):
    """One measured shape."""

    tokens: int  # length of the sequence, T
    vocab: int  # size of the vocabulary, V
    layers: int  # number of the decoder's layers
    hidden: int  # size of a hidden state, H; a multiple of ``heads``
    heads: int  # number of attention heads
    dtype: torch.dtype  # type of the weights and activations

    @property
    def logits_bytes(self) -> int:
        """Size of the logits in bytes."""
        return self.tokens * self.vocab * self.dtype.itemsize

    def describe(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {**self._asdict(), "dtype": str(self.dtype).removeprefix("torch.")}

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        layers = "1 layer" if self.layers == 1 else f"{self.layers} layers"
        return f"T={self.tokens}, {layers}, H={self.hidden}, V={self.vocab}, {dtype}"


class _DecoderLayer(nn.Module):
    """Causal self-attention and an MLP of four times the width, each behind a norm and beside a residual connection."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(hidden)
        self.query_key_value = nn.Linear(hidden, 3 * hidden, bias=False)
        self.attention_output = nn.Linear(hidden, hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(hidden)
        self.mlp_up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.mlp_down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """Return the next hidden states [B, T, H]."""
        projected = self.query_key_value(self.attention_norm(states)).unflatten(-1, (3, self.heads, -1))
        query, key, value = projected.transpose(1, 3).unbind(2)  # each [B, heads, T, H/heads]
        attention = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        states = states + self.attention_output(attention.transpose(1, 2).flatten(2))
        output: Tensor = states + self.mlp_down(nn.functional.silu(self.mlp_up(self.mlp_norm(states))))
        return output


class StepDecoder(nn.Module):
    """A decoder with pre-norm layers, whose output layer is applied by the measured path.

    It has no positional encoding, which costs next to nothing.

    Args:
        case: the sizes.

    Attributes:
        head: the output layer, with weight [V, H] and without bias.
    """

    def __init__(self, case: StepCase) -> None:
        super().__init__()
        self.embedding = nn.Embedding(case.vocab, case.hidden)
        self.layers = nn.ModuleList(_DecoderLayer(case.hidden, case.heads) for _ in range(case.layers))
        self.norm = nn.RMSNorm(case.hidden)
        self.head = nn.Linear(case.hidden, case.vocab, bias=False)
        nn.init.normal_(self.head.weight, std=_LOGIT_SPREAD * case.hidden**-0.5)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the hidden states [B, T, H] in front of the output layer, of token ids [B, T]."""
        states = self.embedding(input_ids)
        for layer in self.layers:
            states = layer(states)
        output: Tensor = self.norm(states)
        return output


def build_decoder(case: StepCase, device: torch.device, seed: int) -> StepDecoder:
    """Build a randomly initialised decoder; the same seed gives the same weights."""
    with torch.random.fork_rng(), device:
        torch.manual_seed(seed)
        return StepDecoder(case).to(case.dtype)


class StepBatch(NamedTuple):
    """One sequence, of which all tokens but the first train."""

    data: Data  # the batch as NeMo-RL passes it to a loss, of shapes [1, T] and [1]
    valid_seqs: Tensor  # number of valid sequences, by which a loss is normalised
    valid_toks: Tensor  # number of valid tokens, by which a loss is normalised


def draw_step_batch(decoder: StepDecoder, tokens: int, seed: int) -> StepBatch:
    """Draw a sequence whose earlier log-probs are close to those of the decoder, as a trainer's are.

    Args:
        decoder: the decoder that will train on it.
        tokens: length of the sequence, at least 2.
        seed: seed of token ids, advantage and differences between log-probs.
    """
    weight = decoder.head.weight
    curr, data = draw_batch(torch.tensor([tokens - 1]), tokens, weight.device, seed)
    source = torch.Generator().manual_seed(seed)
    data["input_ids"] = torch.randint(0, len(weight), (1, tokens), generator=source).to(weight.device)
    with torch.no_grad():
        logprobs = linear_logprobs(decoder(data["input_ids"])[:, :-1], weight, data["input_ids"][:, 1:].contiguous())
    for key in (PREV_LOGPROBS, GENERATION_LOGPROBS, REFERENCE_POLICY_LOGPROBS):
        data[key][:, 1:] += logprobs - curr
    return StepBatch(data, *global_counts(data))


HeadLoss = Callable[[Tensor, Tensor, StepBatch], Tensor]
"""Function from hidden states [1, T, H], the output weight [V, H] and the batch to the loss, a scalar."""


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
            next_token_logits=nn.functional.linear(hidden, weight),
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


def _ours(backend: str) -> HeadLoss:
    """Return the loss that a worker calls under ``logprob_backend``, with logits or with hidden states."""
    from nemo_geomask.hosts.nemo_rl.hidden_states import OutputLayer
    from nemo_geomask.hosts.nemo_rl.logit_backends import LogitLoss
    from nemo_geomask.losses import build_loss

    loss_fn = LogitLoss(build_loss({"logprob_backend": backend, "compile": False}))

    def loss(hidden: Tensor, weight: Tensor, batch: StepBatch) -> Tensor:
        if loss_fn.takes_hidden:
            OutputLayer(weight, sequence_parallel=False, ranks=1).mark(hidden)
            output = hidden
        else:
            output = nn.functional.linear(hidden, weight)
        return read_metrics(loss_fn(output, *batch))

    return loss


def _torch() -> HeadLoss:
    from nemo_geomask.losses import build_loss

    loss_fn = build_loss({"compile": False})

    def loss(hidden: Tensor, weight: Tensor, batch: StepBatch) -> Tensor:
        logprobs = nn.functional.linear(hidden, weight)[:, :-1].float().log_softmax(-1)
        curr = logprobs.gather(-1, batch.data["input_ids"][:, 1:].unsqueeze(-1)).squeeze(-1)
        return read_metrics(loss_fn(curr, *batch))

    return loss


REFERENCE = "torch log_softmax and gather, our loss"
"""Path that the others must agree with."""

PATHS: dict[str, Callable[[Setting], HeadLoss]] = {
    "nemo_geomask, logprob_backend: geomask_linear": lambda setting: _ours("geomask_linear"),
    "nemo_geomask, logprob_backend: geomask": lambda setting: _ours("geomask"),
    "NeMo-RL, DistributedLogprob": lambda setting: _nemo_rl(setting, chunk=None),
    f"NeMo-RL, ChunkedDistributedLogprob({CHUNK})": lambda setting: _nemo_rl(setting, chunk=CHUNK),
    REFERENCE: lambda setting: _torch(),
}
"""Functions that prepare each path, by its name; they raise :class:`Absent` for a path that can't run here."""
