"""``linear``: as ``bench logprobs``, with every peer that computes log-probs from hidden states."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

from nemo_geomask.tools.bench.logprob_paths import FUSED_CHUNK as CHUNK
from nemo_geomask.tools.bench.logprob_paths import IGNORE, LogprobCase, LogprobSample, Outputs, Path, refuse_entropy
from nemo_geomask.tools.bench.logprob_paths import PATHS as METHODS
from nemo_geomask.tools.bench.logprobs import format_case, measure
from nemo_geomask.tools.bench.peers import Setting, import_peer, select
from nemo_geomask.tools.bench.timing import measure_cases
from tests.benchmarks.collectives import count_path_collectives
from tests.benchmarks.logit_paths import on_gpu


def _torch(sample: LogprobSample, case: LogprobCase, setting: Setting) -> Outputs:
    refuse_entropy(case)
    loss = torch.nn.functional.cross_entropy(sample.logits(case), sample.targets, reduction="none", ignore_index=IGNORE)
    return -loss, None


def _torch_in_chunks(sample: LogprobSample, case: LogprobCase, setting: Setting) -> Outputs:
    def chunk(hidden: Tensor, weight: Tensor, targets: Tensor) -> Outputs:
        logp = torch.nn.functional.linear(hidden, weight).float().log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1) if case.entropy else None
        return logp.gather(1, targets.unsqueeze(1)).squeeze(1), entropy

    parts = [
        torch.utils.checkpoint.checkpoint(chunk, hidden, sample.weight, targets, use_reentrant=False)
        for hidden, targets in zip(sample.hidden.split(CHUNK), sample.labels.split(CHUNK), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies) if case.entropy else None


def _skyrl(sample: LogprobSample, case: LogprobCase, setting: Setting) -> Outputs:
    refuse_entropy(case)
    module = import_peer("skyrl.backends.skyrl_train.distributed.megatron.model_utils")
    shard = (0, case.width, CHUNK, setting.required_group(), False)
    function = module.FusedLinearChunkedDistributedLogprob
    return function.apply(sample.hidden[None], sample.weight, sample.labels[None], *shard).squeeze(0), None


def _verl(sample: LogprobSample, case: LogprobCase, setting: Setting) -> Outputs:
    function = import_peer("verl.utils.experimental.torch_functional").FusedLinearForPPO(chunk_size=CHUNK)
    logprobs, entropy = function(sample.hidden, sample.weight, sample.labels)
    return logprobs, entropy if case.entropy else None


def _verl_kernels(sample: LogprobSample, case: LogprobCase, setting: Setting) -> Outputs:
    function = import_peer("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
    logprobs, entropy = function(sample.hidden, sample.weight, sample.labels, 1.0, "none", None)
    return logprobs, entropy if case.entropy else None


def _liger(sample: LogprobSample, case: LogprobCase, setting: Setting) -> Outputs:
    function = import_peer("liger_kernel.ops.fused_linear_cross_entropy").LigerFusedLinearCrossEntropyFunction
    options = (None, None, IGNORE, 0.0, 0.0, "none", None, False, torch.float32)
    loss = function.apply(sample.hidden, sample.weight, sample.targets, *options)
    return -(loss[0] if isinstance(loss, tuple) else loss), None


def _cut_cross_entropy(sample: LogprobSample, case: LogprobCase, setting: Setting) -> Outputs:
    function = import_peer("cut_cross_entropy").linear_cross_entropy
    return -function(sample.hidden, sample.weight, sample.targets, reduction="none", filter_eps=None), None


PATHS: dict[str, Path] = {
    "nemo_geomask linear_logprobs": METHODS["geomask_linear"],
    "nemo_geomask with logits": METHODS["geomask"],
    "torch F.linear, F.cross_entropy": _torch,
    f"torch in chunks of {CHUNK}, recomputed": _torch_in_chunks,
    f"NeMo-RL fused linear ({CHUNK})": METHODS["NeMo-RL, fused"],
    f"SkyRL fused linear ({CHUNK})": _skyrl,
    f"verl FusedLinearForPPO ({CHUNK})": _verl,
    "verl linear_cross_entropy kernels": on_gpu(_verl_kernels, has_entropy=True),
    "Liger fused linear CE": on_gpu(_liger),
    "cut-cross-entropy": on_gpu(_cut_cross_entropy),
}
TENSOR_PARALLEL = [name for name in PATHS if not name.startswith(("torch", "verl FusedLinear"))]


def cases_on(device: torch.device) -> list[LogprobCase]:
    """Return the cases that are measured on a device."""
    first = LogprobCase(8192, 4096, 151_936) if device.type == "cuda" else LogprobCase(2048, 1024, 151_936)
    changes: list[dict[str, Any]] = [{}, {"fraction": 0.2}]
    changes += [{"fraction": 0.5}, {"entropy": True}, {"tp": 8}] if device.type == "cuda" else []
    return [first._replace(**change) for change in changes]


def run(options: argparse.Namespace, setting: Setting) -> dict[str, Any]:
    # With bf16 logits, a CPU without matrix units takes half an hour for one step.
    paths = select(PATHS, options.paths or ("linear_logprobs" if setting.device.type == "cpu" else None))
    results = measure_cases(
        options.cases or cases_on(setting.device),
        lambda case: measure(case, setting, paths, options.repeats, options.seed),
        format_case,
    )
    collectives = count_path_collectives("linear", [name for name in paths if name in TENSOR_PARALLEL])
    return {"cases": results, "collectives": collectives}
