"""``bench loss``: our losses and NeMo-RL's with their backward passes, on a padded and on the same packed batch."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nemo_geomask.data_keys import GENERATION_LOGPROBS, PREV_LOGPROBS, REFERENCE_POLICY_LOGPROBS, TOKEN_MASK
from nemo_geomask.segments import PackedSegments
from nemo_geomask.tools.bench.meters import count_work, metered
from nemo_geomask.tools.bench.peers import Setting, import_peer, lazily
from nemo_geomask.tools.bench.results import TIMES, figure, format_rows
from nemo_geomask.tools.bench.timing import Clock, Lap, compare

_WEIGHTS = {"use_importance_sampling_correction": True}
_CORRECTED = {**_WEIGHTS, "is_correction_level": "sequence_mean"}
_GEOMETRIC = {"masks": [{"preset": "geometric", "min": 0.99, "max": 1.01}]}


def _truncated(truncation: str, low: float | None, high: float) -> dict[str, Any]:
    key = "truncated_importance_sampling"
    return {**_WEIGHTS, f"{key}_type": truncation, f"{key}_ratio_min": low, f"{key}_ratio": high}


# Settings that our clipped_pg and NeMo-RL's class share, with the same meaning.
_SHARED_SETTINGS: dict[str, dict[str, Any]] = {
    "clipped_pg": {},
    "clipped_pg, no KL": {"reference_policy_kl_penalty": 0.0},
    "clipped_pg, dual clip": {"ratio_clip_c": 3.0},
    "clipped_pg, token weights": _WEIGHTS,
    "clipped_pg, tis": _truncated("tis", None, 2.0),
    "clipped_pg, icepop": _truncated("icepop", 0.5, 5.0),
    "clipped_pg, seq-mask-tis": _truncated("seq-mask-tis", 0.999, 1.002),
    "clipped_pg, by sequences": {"token_level_loss": False},
    "clipped_pg, use_cispo": {"use_cispo": True},
    "clipped_pg, disable_ppo_ratio": {"disable_ppo_ratio": True},
    "clipped_pg, force_on_policy_ratio": {"force_on_policy_ratio": True},
}
# For each loss, the settings of ours and those of NeMo-RL's class; None if NeMo-RL's class can't compute the loss.
LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    **{name: (config, config) for name, config in _SHARED_SETTINGS.items()},
    "gspo": ({"name": "gspo"}, {"sequence_level_importance_ratios": True, "token_level_loss": False}),
    "gspo, sequence_mean weights, geometric mask": ({"name": "gspo", **_CORRECTED, **_GEOMETRIC}, None),
    "gspo_token": ({"name": "gspo_token"}, None),
    "gmpo": ({"name": "gmpo"}, None),
    "cispo": ({"name": "cispo"}, None),
    "sapo": ({"name": "sapo"}, None),
    # What a guard costs is the difference to clipped_pg, in operations.
    "clipped_pg, nonfinite: drop_token": ({"nonfinite": "drop_token"}, None),
    "clipped_pg, drop_filtered_tokens": ({"drop_filtered_tokens": True}, None),
    "clipped_pg, masks_only": ({**_WEIGHTS, "is_correction_level": "masks_only", **_GEOMETRIC}, None),
}
_COMPILED = ("clipped_pg", "clipped_pg, token weights", "gspo", "gspo, sequence_mean weights, geometric mask")
_GRAPHS = 64  # of all compiled losses; one process compiles more than torch keeps of a function by default
_TOKEN_KEYS = ("advantages", PREV_LOGPROBS, GENERATION_LOGPROBS, REFERENCE_POLICY_LOGPROBS, TOKEN_MASK)
NEMO_RL = "NeMo-RL, padded"
"""Layout of NeMo-RL's own class."""
COLUMNS = (
    ("loss", lambda row: row["loss"]),
    ("layout", lambda row: row["how"]),
    *TIMES[:2],
    figure("operations", "launches"),
    figure("syncs", "host_syncs"),
)

Data = Mapping[str, Tensor]


def draw_batch(lengths: Tensor, width: int, device: torch.device, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Draw a padded batch: a prompt token and a response of ``lengths`` [B]; return ``curr`` [B, T-1] and the data."""
    rows, draw = len(lengths), torch.Generator().manual_seed(seed)

    def normal(size: float, *shape: int) -> Tensor:
        return size * torch.randn(*shape, dtype=torch.float32, generator=draw)

    gen = -2 * torch.rand(rows, width, dtype=torch.float32, generator=draw)
    prev = gen + normal(0.02, rows, width)
    curr = prev + normal(0.02, rows, width)
    mask = (torch.arange(width) <= lengths.unsqueeze(1)).to(torch.float32)
    mask[:, 0] = 0.0
    data = {
        "advantages": normal(1.0, rows, 1).expand(rows, width).contiguous(),
        PREV_LOGPROBS: prev,
        GENERATION_LOGPROBS: gen,
        REFERENCE_POLICY_LOGPROBS: prev + normal(0.1, rows, width),
        TOKEN_MASK: mask,
        "sample_mask": torch.ones(rows, dtype=torch.float32),
        "input_ids": torch.zeros(rows, width, dtype=torch.int64),
    }
    return curr[:, 1:].contiguous().to(device), {key: value.to(device) for key, value in data.items()}


def global_counts(data: Data) -> tuple[Tensor, Tensor]:
    """Return the numbers of valid sequences and tokens, by which a loss is normalised."""
    return data["sample_mask"].sum(), (data[TOKEN_MASK][:, 1:] * data["sample_mask"].unsqueeze(1)).sum()


def loss_gradient(values: Tensor, loss: Callable[[Tensor], Tensor]) -> Tensor:
    """Run a loss forward and backward; return the gradient of the log-probs ``values``."""
    leaf = values.detach().requires_grad_()
    return torch.autograd.grad(loss(leaf), leaf)[0]


def read_metrics(outputs: tuple[Tensor, Mapping[str, float]]) -> Tensor:
    """Return the loss after copying the metrics to the host, as NeMo-RL's loss does in every call."""
    loss, metrics = outputs
    metrics["loss"]
    return loss


def build_nemo_rl_loss(settings: Mapping[str, Any]) -> Any:
    """Build NeMo-RL's ``ClippedPGLossFn`` from settings that differ from its defaults.

    Raises:
        Absent: NeMo-RL can't be imported.
    """
    from nemo_geomask.hosts.nemo_rl.facts import LOSS_MODULE, build_loss_config

    losses = import_peer(LOSS_MODULE)
    return losses.ClippedPGLossFn(build_loss_config(losses.ClippedPGLossConfig, settings))


def _padded_step(loss_fn: Any, curr: Tensor, data: Data, counts: tuple[Tensor, Tensor]) -> Callable[[], Tensor]:
    return lambda: loss_gradient(curr, lambda x: read_metrics(loss_fn(x, data, *counts)))


def _packed_step(
    loss_fn: Any, curr: Tensor, data: Data, lengths: Sequence[int], counts: tuple[Tensor, Tensor]
) -> Callable[[], Tensor]:
    """Return a step on the batch packed without padding; like training, it builds the segments for every call."""

    def without_padding(values: Tensor) -> Tensor:
        return torch.cat([row[:length] for row, length in zip(values, lengths, strict=True)])

    packed = {key: without_padding(data[key][:, 1:]) for key in _TOKEN_KEYS} | {"sample_mask": data["sample_mask"]}
    flat, offsets = without_padding(curr), [0, *torch.tensor(lengths).cumsum(0).tolist()]

    def on_packed(x: Tensor) -> Tensor:
        return read_metrics(loss_fn.packed(x, packed, PackedSegments(offsets, device=x.device), *counts))

    return lambda: loss_gradient(flat, on_packed)


def _nemo_rl_step(
    config: dict[str, Any], curr: Tensor, data: Data, counts: tuple[Tensor, Tensor]
) -> Callable[[], Tensor]:
    loss_fn = build_nemo_rl_loss(config)
    batch = import_peer("nemo_rl.distributed.batched_data_dict").BatchedDataDict(data)
    options = {"data": batch, "global_valid_seqs": counts[0], "global_valid_toks": counts[1]}
    return lambda: loss_gradient(curr, lambda x: loss_fn(next_token_logprobs=x, **options)[0])


def _lap(clock: Clock, step: Callable[[], Tensor], turn: int) -> Lap:
    return clock.lap(step)


def benchmark(
    setting: Setting, *, rows: int, length: int, compiled: bool, repeats: int, seed: int = 0
) -> dict[str, Any]:
    """Measure every loss on the log-probs of a padded batch, and of the same batch packed; NeMo-RL's on the former.

    Args:
        setting: the device.
        rows: number of sequences in the batch.
        length: length of the longest sequence; they are at least half as long.
        compiled: also measure some of the losses compiled.
        repeats: number of measured rounds.
        seed: seed of the inputs.
    """
    from nemo_geomask.losses import build_loss

    if compiled:
        torch._dynamo.config.recompile_limit = max(_GRAPHS, torch._dynamo.config.recompile_limit)
    lengths = torch.randint(length // 2, length, (rows,), generator=torch.Generator().manual_seed(seed))
    curr, data = draw_batch(lengths, length, setting.device, seed)
    counts = global_counts(data)
    steps: dict[tuple[str, str], Callable[[], Tensor]] = {}
    for name, (config, nemo_rl_config) in LOSSES.items():
        for suffix, is_compiled in {"": False, ", compiled": True}.items():
            if is_compiled and not (compiled and name in _COMPILED):
                continue
            loss_fn = build_loss({**config, "compile": is_compiled})
            steps[name, f"padded{suffix}"] = _padded_step(loss_fn, curr, data, counts)
            steps[name, f"packed{suffix}"] = _packed_step(loss_fn, curr, data, lengths.tolist(), counts)
            if nemo_rl_config is not None:
                same_metrics = build_loss({**config, "compile": is_compiled, "metrics": "nemo_rl"})
                steps[name, f"padded{suffix}, metrics: nemo_rl"] = _padded_step(same_metrics, curr, data, counts)
        if nemo_rl_config is not None:
            steps[name, NEMO_RL] = lazily(partial(_nemo_rl_step, nemo_rl_config, curr, data, counts))
    clock = Clock(setting.device)
    times = compare({key: partial(_lap, clock, step) for key, step in steps.items()}, repeats, warmup=2)
    on_logprobs = [{"loss": name, "how": how, **row} for (name, how), row in times.items()]
    for row in on_logprobs:
        if row["status"] == "measured":
            row |= metered(partial(count_work, steps[row["loss"], row["how"]], setting.device))
    return {"rows": rows, "length": length, "on_logprobs": on_logprobs}


def run(options: argparse.Namespace, setting: Setting) -> dict[str, Any]:
    """Measure what the options ask for, and print the table."""
    rows, length = options.batch
    result = benchmark(
        setting, rows=rows, length=length, compiled=options.compile, repeats=options.repeats, seed=options.seed
    )
    title = f"{rows} sequences of up to {length} tokens, forward and backward"
    print(format_rows(title, COLUMNS, result["on_logprobs"]), flush=True)
    return result
