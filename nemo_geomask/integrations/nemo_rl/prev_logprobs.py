"""``ratio_anchor: gen`` in NeMo-RL: no forward pass for ``prev_logprobs`` that nothing reads.

For them and nothing else, NeMo-RL's trainers call ``Policy.get_logprobs`` (GRPO, asynchronous GRPO, PPO), or
``TQPolicy.get_logprobs_from_meta`` where the batch lies in the data plane (synchronous GRPO, single controller). Both
are wrapped in the driver once a loss without need for them is built, and give NaN: what reads it all the same shows.
The single controller, a process of its own, gets a policy of a subclass, as in :mod:`.before_step`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nemo_geomask.checks.gates import readers_of_prev
from nemo_geomask.errors import ConfigError
from nemo_geomask.integrations.nemo_rl import patch, seams

__all__ = ["follow"]


def follow(loss: Any) -> None:
    """Let NeMo-RL's trainers compute ``prev_logprobs`` if ``loss``, the last one built, or NeMo-RL needs them.

    Args:
        loss: a loss of ours, as NeMo-RL will pass it on.

    Raises:
        SeamError: NeMo-RL's policy is not as known; nothing is changed.
    """
    for mine in _patches:
        mine.undo()
    _patches[:] = () if loss.config.knows_prev else _make()
    patch.apply_all(_patches)


_patches: list[patch.Patch] = []


def _make() -> Iterator[patch.Patch]:
    for uses, target in seams.targets(seams.PREV_LOGPROBS, otherwise="Set loss_fn.ratio_anchor: prev"):
        for name in uses.methods:
            yield patch.attribute(target, name, _WRAP[name])
        if "get_logprobs_from_meta" in uses.methods:
            yield patch.attribute(target, "__reduce_ex__", _sent)


def _get_logprobs(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def get_logprobs(self: Any, *args: Any, **kwargs: Any) -> Any:
        data = signature.bind(self, *args, **kwargs).arguments["data"]
        return type(data)({"logprobs": torch.full(data["input_ids"].shape, torch.nan)})

    return get_logprobs


def _get_logprobs_from_meta(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def get_logprobs_from_meta(self: Any, *args: Any, **kwargs: Any) -> None:
        meta = signature.bind(self, *args, **kwargs).arguments["meta"]
        like = self.read_from_dataplane(meta, select_fields=["generation_logprobs"])["generation_logprobs"]
        self.write_to_dataplane(meta, fields={"prev_logprobs": torch.full(like.shape, torch.nan)})

    return get_logprobs_from_meta


def _mask_by_error(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def mask_by_error(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        threshold = given["seq_logprob_error_threshold"]
        if threshold is not None:  # NaN is within none
            raise ConfigError(*readers_of_prev({"grpo": {"seq_logprob_error_threshold": threshold}}))
        return original(*args, **kwargs)

    return mask_by_error


_WRAP: dict[str, Callable[[Any], Any]] = {
    "get_logprobs": _get_logprobs,
    "get_logprobs_from_meta": _get_logprobs_from_meta,
    "compute_and_apply_seq_logprob_error_masking": _mask_by_error,
}


def _sent(original: Any) -> Any:
    """``__reduce_ex__`` of a policy that the driver may send to another process."""

    @functools.wraps(original)
    def reduce_ex(self: Any, protocol: Any) -> Any:
        make, arguments, *state = original(self, protocol)
        return _arrived, (make, arguments), *state

    return reduce_ex


def _arrived(make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    policy = make(*arguments)
    kind = type(policy)
    method = kind.get_logprobs_from_meta
    if not hasattr(method, "__wrapped__"):
        policy.__class__ = patch.subclass(kind, {"get_logprobs_from_meta": _get_logprobs_from_meta(method)})
    return policy
