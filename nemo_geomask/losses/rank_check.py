"""``loss_fn.compare_ranks``: check that the ranks that share sequences have the same settings and the same rows."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nemo_geomask.errors import RanksDisagreeError
from nemo_geomask.segments import PackedSegments
from nemo_geomask.segments.rank_comparison import PackedShape, compare_packings, copy_to_host, list_differences


class _RankCall(NamedTuple):
    """A rank's call, as the int64 numbers that it sends to the other ranks.

    Attributes:
        sequences, tokens, lengths_checksum, shard: fields of :class:`PackedShape`.
        tensors: bit i is set if the batch has the i-th of the tensors that the loss reads.
        settings_checksum: of the settings as text.
        settings_bytes: length of that text.
    """

    sequences: int
    tokens: int
    lengths_checksum: int
    shard: int
    tensors: int
    settings_checksum: int
    settings_bytes: int

    @property
    def packing(self) -> PackedShape:
        return PackedShape(self.sequences, self.tokens, self.lengths_checksum, self.shard)


class RankCheck:
    """Comparison of settings and packed rows among the ranks that share sequences.

    Each call makes one all-gather of 56 bytes a rank in each group. It is unconditional: if a rank left it out because
    its own shapes had not changed, while those of another had, the other would wait forever. It comes before the
    statistics' all-gather, since gloo brings down the process if the ranks' sizes differ there.

    On a GPU the host waits for the outcome at the first call and for each number of sequences that is new. Otherwise it
    reads the outcome at the next call, when it is on the host.

    Args:
        settings: values by name that must be the same on all ranks, for ``json``.
        tensor_keys: keys of the batch's tensors that the loss reads.
    """

    def __init__(self, settings: Mapping[str, Any], tensor_keys: Sequence[str]) -> None:
        self._settings, self._tensor_keys = settings, tensor_keys
        self._text = json.dumps(settings, sort_keys=True, default=str).encode()
        self._checksum = zlib.crc32(self._text)
        self._known_shapes: set[tuple[Any, ...]] = set()
        self._unread: Callable[[], Tensor] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # What one process has compared says nothing about the ranks of another.
        return RankCheck, (self._settings, self._tensor_keys)

    def __call__(self, segments: PackedSegments, data: Mapping[str, Any], device: torch.device) -> None:
        """Compare this call with those of the other ranks; every rank of the segments' groups must call this together.

        Raises: RanksDisagreeError: settings, the tensors in the batch or the packed rows differ; on all ranks, if they
        all wait for the outcome. LostRankError: a rank does not take part.
        """
        tensors = sum(1 << bit for bit, key in enumerate(self._tensor_keys) if data.get(key) is not None)
        call = _RankCall(*segments.packing, tensors, self._checksum, len(self._text))
        row = torch.tensor([call], dtype=torch.int64, device="cpu")
        if device.type == "cuda":
            row = row.pin_memory()
        read = copy_to_host(segments.gather_rows(row.to(device, non_blocking=True)))
        shape = (segments.groups, call.sequences, tensors)
        previous, self._unread = self._unread, read
        if previous is not None:
            self._raise_difference(previous(), segments, device)
        if device.type == "cpu" or shape not in self._known_shapes:
            self._unread = None
            self._raise_difference(read(), segments, device)
            self._known_shapes.add(shape)

    def _raise_difference(self, rows: Tensor, segments: PackedSegments, device: torch.device) -> None:
        """Raise the first difference between the ranks' calls, [W, 7]; return if there is none."""
        calls = [_RankCall(*row) for row in rows.tolist()]
        compare_packings([call.packing for call in calls])
        if any(call.settings_checksum != calls[0].settings_checksum for call in calls):
            # All ranks get here together, since a loss keeps its settings and all ranks wait at their first call.
            width = max(call.settings_bytes for call in calls)
            text = torch.tensor([[*self._text.ljust(width)]], dtype=torch.uint8, device=device)
            settings = [json.loads(bytes(row)) for row in segments.gather_rows(text).tolist()]
            names = sorted(set().union(*settings))
            by_rank = {name: [values.get(name, "unknown") for values in settings] for name in names}
            raise RanksDisagreeError(
                f"the ranks that share sequences have different settings: by rank, {list_differences(by_rank)}; build "
                "the loss from the same loss_fn, with the same version of nemo_geomask, on all ranks"
            )
        # The same settings read the same tensors, so that the bits have the same meaning on all ranks.
        presence = {
            f"data['{key}']": ["present" if call.tensors >> bit & 1 else "missing" for call in calls]
            for bit, key in enumerate(self._tensor_keys)
        }
        if differences := list_differences(presence):
            raise RanksDisagreeError(
                f"the ranks that share sequences have other tensors in their batches: by rank, {differences}; give all "
                "of them the same keys"
            )
