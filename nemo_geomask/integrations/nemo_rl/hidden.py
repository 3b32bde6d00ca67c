"""``logprob_backend: geomask_linear``: NeMo-RL's Megatron workers hand over what the output layer is given, no logits.

Megatron's model is run with an output layer that passes its input on, so that whatever belongs to the layer's call (the
gathering of its parameters, under ``overlap_param_gather``) still happens. What takes the place of the logits on their
way through NeMo-RL is the hidden states [B, S, H], which know their head. NeMo-RL divides them by the temperature as it
would the logits, which is the same. In a process that was prepared for it, the forward passes for ``prev_logprobs`` and
the reference policy's go the same way.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_geomask.errors import ConfigError, Problem
from nemo_geomask.integrations.nemo_rl import patch
from nemo_geomask.integrations.nemo_rl.worker import filtering
from nemo_geomask.integrations.nemo_rl.workers import WorkerError
from nemo_geomask.integrations.packing import IGNORE
from nemo_geomask.parallel import linear_logprobs
from nemo_geomask.segments import PackedSegments

__all__ = ["Hidden", "patches"]

_KEY = "loss_fn.logprob_backend"
_NAME = "logprob_backend: geomask_linear"
_ATTRIBUTE = "_nemo_geomask_head"
_wanted: contextvars.ContextVar[bool] = contextvars.ContextVar("nemo_geomask_hidden_states_wanted", default=False)


class _OutputLayer(NamedTuple):
    weight: Tensor
    sequence_parallel: bool
    ranks: int  # that hold a part of the vocabulary


class Hidden:
    """Hidden states in the place of logits.

    Args:
        states: [B, S, H], under sequence parallelism [B, S/TP, H].
        layer: what would make logits of them.
        length: how many of the S positions count; None: all.

    Attributes:
        shape: of the logits that they stand for.
        device: where they are.
    """

    def __init__(self, states: Tensor, layer: _OutputLayer, length: int | None = None) -> None:
        self._states = states
        self._layer = layer
        self._whole = states.shape[1] * (layer.ranks if layer.sequence_parallel else 1)
        self.shape = (len(states), self._whole if length is None else length, len(layer.weight))
        self.device = states.device

    @classmethod
    def of(cls, output: Any) -> Hidden | None:
        """The hidden states that a prepared worker's model put out; None for logits."""
        layer = getattr(output, _ATTRIBUTE, None)
        return None if layer is None else cls(output, layer)

    @classmethod
    def required_of(cls, output: Any) -> Hidden:
        """As :meth:`of`.

        Raises:
            WorkerError: they are logits.
        """
        found = cls.of(output)
        if found is None:
            raise WorkerError(
                f"loss_fn.{_NAME} needs the hidden states of a Megatron worker that is prepared for it, but the loss "
                "was given logits; start with nemo-geomask run, or set logprob_backend: geomask"
            )
        return found

    def first(self, length: int) -> Hidden:
        """Those of the first ``length`` positions."""
        return Hidden(self._states, self._layer, length)

    def logprobs(
        self,
        targets: Tensor,
        *,
        group: dist.ProcessGroup | None,
        ignore_index: int,
        validate: bool = True,
        entropy: bool = False,
    ) -> Any:
        """[B, S] float32 of ``targets`` [B, S] int64, or with ``entropy`` the pair, see
        :func:`nemo_geomask.parallel.linear_logprobs`."""
        width = targets.shape[1]
        goals = torch.nn.functional.pad(targets, (0, self._whole - width), value=ignore_index)
        # Megatron's order, positions first: sequence parallelism shares them out.
        found: Any = linear_logprobs(
            self._states.transpose(0, 1),
            self._layer.weight,
            goals.T.contiguous(),
            group=group,
            sequence_parallel=self._layer.sequence_parallel and self._layer.ranks > 1,
            ignore_index=ignore_index,
            validate=validate,
            entropy=entropy,  # type: ignore[call-overload]
        )
        return tuple(one.T[:, :width] for one in found) if entropy else found.T[:, :width]


def patches(train: Any, takes_hidden: Callable[[Any], bool]) -> list[patch.Patch]:
    """What lets Megatron's forward passes put out hidden states.

    Args:
        train: NeMo-RL's module ``models.megatron.train``.
        takes_hidden: whether a loss is one that takes them.
    """
    return [
        patch.attribute(train, "forward_with_post_processing_fn", functools.partial(_choosing, train, takes_hidden)),
        patch.attribute(train, "model_forward", _passing_on),
        patch.attribute(train.LogprobsPostProcessor, "__call__", _scoring),
    ]


def _choosing(train: Any, takes_hidden: Callable[[Any], bool], original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward_with_post_processing_fn(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        post = given["post_processing_fn"]
        trains = takes_hidden(getattr(post, "loss_fn", None))
        _refuse_if(trains and given.get("draft_model") is not None and "a draft model, which learns from the logits")
        token = _wanted.set(trains or isinstance(post, train.LogprobsPostProcessor))
        try:
            return original(*args, **kwargs)
        finally:
            _wanted.reset(token)

    return forward_with_post_processing_fn


def _passing_on(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def model_forward(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        core = given.arguments["model"]
        while hasattr(core, "module"):
            core = core.module
        if not _wanted.get() or not getattr(core, "post_process", True):
            return original(*args, **kwargs)
        layer = _checked_layer(core)
        seen: list[_OutputLayer] = []
        if "output_processor" in inspect.signature(core.forward).parameters:
            processor = functools.partial(_processed, seen)
            given.arguments["model"] = functools.partial(given.arguments["model"], output_processor=processor)
            output = original(*given.args, **given.kwargs)
        else:
            mtp = getattr(core.config, "mtp_num_layers", None)
            _refuse_if(mtp and "multi-token prediction in a Megatron without output_processor")
            with _handing_on(layer, seen):
                output = original(*args, **kwargs)
        _refuse_if(not seen and "a model that does not call its output layer, as with NeMo-RL's fused linear log-probs")
        setattr(output, _ATTRIBUTE, seen[-1])
        return output

    return model_forward


def _processed(
    seen: list[_OutputLayer],
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    scale_logits: Callable[[Tensor], Tensor],
    **_: Any,
) -> Tensor:
    """Megatron's ``output_processor``: [B, S, H] from [S, B, H]."""
    with _handing_on(output_layer, seen):
        states, _bias = output_layer(hidden_states, weight=output_weight)
    return scale_logits(states).transpose(0, 1).contiguous()


@contextlib.contextmanager
def _handing_on(layer: Any, seen: list[_OutputLayer]) -> Iterator[None]:
    """The layer's call runs its hooks and returns its input; what it would have multiplied with goes into ``seen``."""

    def forward(input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
        group = getattr(layer, "tp_group", None)
        ranks = dist.get_world_size(group) if group is not None else int(layer.world_size)
        weight = layer.weight if weight is None else weight
        seen.append(_OutputLayer(weight, bool(layer.sequence_parallel), ranks))
        # NeMo-RL divides by the temperature in place, and the norm before the layer may keep its output.
        return input_.clone(), None

    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward


def _checked_layer(core: Any) -> Any:
    layer: Any = getattr(core, "output_layer", None)
    config = core.config
    known = importlib.import_module("megatron.core.tensor_parallel.layers").ColumnParallelLinear
    _refuse_if(type(layer) is not known and f"an output layer of type {type(layer).__name__}")
    _refuse_if("forward" in vars(layer) and "an output layer whose forward somebody else has replaced")
    # A bias would not be divided by the temperature as the hidden states are.
    _refuse_if(layer.bias is not None and "an output layer with a bias")
    _refuse_if(layer.gather_output and "an output layer that gathers its output")
    _refuse_if(getattr(layer, "output_dtype", None) and f"logits in {getattr(layer, 'output_dtype', None)}")
    _refuse_if(getattr(config, "defer_embedding_wgrad_compute", False) and "defer_embedding_wgrad_compute")
    _refuse_if((getattr(layer, "gtp_remat_size", None) or 1) > 1 and "generalized tensor parallelism")
    # The layer's other use marks the weight as summed up already, and its gradient from here would be left out.
    mtp = getattr(config, "mtp_num_layers", None) and getattr(config, "gradient_accumulation_fusion", False)
    _refuse_if(mtp and "multi-token prediction with gradient_accumulation_fusion; turn that off")
    return layer


def _refuse_if(found: Any) -> None:
    if found:
        message = f"{_NAME} does not go with {found}; set logprob_backend: geomask"
        raise ConfigError(Problem((_KEY,), message))


def _scoring(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        process = original(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs).arguments

        def processor(output: Any) -> Any:
            hidden = Hidden.of(output)
            if hidden is None:
                return process(output)
            filters = filtering(self.sampling_params)
            _refuse_if(filters and f"sampling with {filters}")
            packed = self.cfg["sequence_packing"]["enabled"]
            offsets = given["cu_seqlens_padded"] if packed else None
            rows = _rows(hidden, given["data_dict"]["input_ids"], given["input_ids"], offsets)
            found = torch.nn.functional.pad(rows, (1, 0))  # the first token has no log-prob
            return torch.zeros((), dtype=torch.float32, device=found.device), {"logprobs": found}

        return processor

    return call


def _rows(hidden: Hidden, ids: Tensor, row: Tensor, offsets: Tensor | None) -> Tensor:
    """Log-probs [B, T-1] of all tokens of ``ids`` [B, T] but the first, on every rank; NaN outside the vocabulary.

    Args:
        hidden: of the rows, or of this rank's context-parallel share of the packed row.
        ids: the rows.
        row: [1, N], packed.
        offsets: [B+1], of the sequences in it; None: nothing is packed.
    """
    state = importlib.import_module("megatron.core.parallel_state")
    # Not validated: an error on the ranks of one share would leave those of the others waiting below.
    options: Any = {"group": state.get_tensor_model_parallel_group(), "ignore_index": IGNORE, "validate": False}
    width = ids.shape[1]
    found: Tensor
    if offsets is None:
        targets = torch.full(hidden.shape[:2], IGNORE, dtype=torch.int64, device=hidden.device)
        targets[:, : width - 1] = ids[:, 1:]
        found = hidden.logprobs(targets, **options)[:, : width - 1]
        return found
    context = state.get_context_parallel_group()
    size = dist.get_world_size(context)
    offsets = offsets.cpu()
    segments = PackedSegments(offsets, device=hidden.device, cp_rank=dist.get_rank(context), cp_size=size)
    # Of each position, the end of its sequence: the last predicts nothing.
    starts, ends = segments.cu_seqlens[:-1], segments.cu_seqlens[1:]
    place = segments.token_index
    predicts = place + 1 < ends[segments.spread(torch.arange(segments.count, device=hidden.device))]
    following = row.reshape(-1)[torch.where(predicts, place + 1, 0)].to(torch.int64)
    targets = torch.where(predicts, following, IGNORE).view(1, -1)
    found = hidden.first(targets.shape[1]).logprobs(targets, **options).reshape(-1)
    whole = found.new_zeros(int(offsets[-1])).index_copy_(0, place, found)
    if size > 1:
        dist.all_reduce(whole, group=context)
    columns = starts.unsqueeze(1) + torch.arange(width - 1, device=hidden.device)
    inside = columns < ends.unsqueeze(1) - 1
    return torch.where(inside, whole[torch.where(inside, columns, 0)], 0.0)
