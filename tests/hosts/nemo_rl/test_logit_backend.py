"""Our losses under NeMo-RL's own loss code for Megatron and DTensor workers, TP × CP processes over gloo: in a worker
that is prepared against one that is not, by loss, metrics and the gradient of each rank's logits."""

import importlib
import pickle
import sys
import types
import typing
from unittest import mock

import numpy as np
import pytest
import torch
import typing_extensions

from nemo_geomask import build_loss
from nemo_geomask.hosts.nemo_rl import prepare_worker, uninstall
from nemo_geomask.hosts.nemo_rl.current_logprobs import keep_logprobs, merge_kept, take_kept
from nemo_geomask.hosts.nemo_rl.forward_logprobs import forward_logprobs
from nemo_geomask.losses import PolicyLoss
from nemo_geomask.parallel.local_processes import run_ranks
from nemo_geomask.records.flight import CURR_KNOWN_KEY
from tests.helpers.nemo_rl.absent_library import AbsentLibrary

pytest.importorskip("nemo_rl.algorithms.loss.loss_functions", reason="NeMo-RL is not importable here")

pytestmark = pytest.mark.slow

VOCAB, WIDTH = 48, 24
LENGTHS = (24, 9, 17, 2)
KL = {"reference_policy_kl_penalty": 0.02}
CORRECTED = {"use_importance_sampling_correction": True, **KL}
SEQUENCE_RATIO = {"sequence_level_importance_ratios": True}
POSITIVE = {"positive_example_nll_weight": 0.2, "positive_example_nll_normalization": "loss"}
SEQUENCES = {"is_correction_level": "sequence_mean", **CORRECTED}
TIS = {"truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 1.5}
MASKS = [{"preset": "geometric", "min": 0.9, "max": 1.15}, {"preset": "opsm", "delta": 0.05}]
CONFIGS = {
    "default": {"name": "clipped_pg", **KL},
    "dual_clip_tis": {"name": "clipped_pg", "ratio_clip_c": 1.3, **TIS, **CORRECTED},
    "sequence_ratio": {"name": "clipped_pg", "token_level_loss": False, **SEQUENCE_RATIO, **CORRECTED},
    "gspo": {"name": "gspo", "ratio_clip_min": 0.02, "ratio_clip_max": 0.02, "masks": MASKS, **SEQUENCES},
    "filtered": {"name": "gspo", **POSITIVE, **KL},
}
# NeMo-RL's own class knows the flags of these.
OF_NEMO_RL = ("default", "dual_clip_tis", "sequence_ratio")


def worker(module, *without):
    """A module of NeMo-RL's workers, on a CPU: what it imports or moves to a GPU on the way, replaced."""
    if sys.version_info < (3, 12):
        # NeMo-RL asks for Python 3.12 (v0.6.0) and 3.13.
        typing.override = typing_extensions.override
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.Tensor.pin_memory = lambda self, *_, **__: self
    if not hasattr(torch.tensor, "unpinned"):
        tensor = torch.tensor
        torch.tensor = lambda *args, pin_memory=False, **kwargs: tensor(*args, **kwargs)
        torch.tensor.unpinned = True
    for library in without:
        try:
            importlib.import_module(library)
        except ImportError:
            sys.meta_path.append(AbsentLibrary(library, lambda name: mock.MagicMock(name=name)))
    return importlib.import_module(module)


def megatron_worker():
    return worker("nemo_rl.models.megatron.train", "megatron.bridge", "modelopt")


def automodel_worker():
    return worker("nemo_rl.models.automodel.train", "nemo_automodel")


def _skip_unless(importable):
    try:
        importable()
    except ImportError as error:
        pytest.skip(f"NeMo-RL's worker code is not importable here: {error}")


def whole():
    """Rows of uneven length with their logits [B, T, V]; the log-probs of prev and gen lie near the logits' own."""
    draw = torch.Generator().manual_seed(0)
    rows = len(LENGTHS)
    logits = 2 * torch.randn(rows, WIDTH, VOCAB, generator=draw)
    ids = torch.randint(0, VOCAB, (rows, WIDTH), generator=draw)
    curr = torch.zeros(rows, WIDTH)
    own = logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    curr[:, 1:] = own

    def near(other, scale):
        return other + scale * torch.randn(rows, WIDTH, generator=draw)

    prev = near(curr, 0.1)
    mask = (torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]).float()
    mask[:, :2] = 0.0
    mask[3, 1] = 1.0
    data = {
        "input_ids": ids,
        "input_lengths": torch.tensor(LENGTHS),
        "token_mask": mask,
        "sample_mask": torch.tensor([1.0, 1.0, 1.0, 1.0]),
        "advantages": torch.tensor([0.7, -0.4, 0.9, -1.1])[:, None].expand(rows, WIDTH).contiguous(),
        "prev_logprobs": prev,
        "generation_logprobs": near(prev, 0.1),
        "reference_policy_logprobs": near(curr, 0.2),
        "rewards": torch.tensor([1.0, -1.0, 0.5, 0.0]),
    }
    seqs, toks = torch.tensor(float(rows)), (mask[:, 1:] * data["sample_mask"][:, None]).sum()
    return logits, data, seqs, toks


def _layouts(cp_rank, cp_size):
    """Padded rows and the packed row: where this rank's logits lie in the whole [B, T, V]."""
    from nemo_geomask.segments import PackedSegments

    multiple = 2 * cp_size
    whole_rows = -(-WIDTH // multiple) * multiple
    lengths = [-(-length // multiple) * multiple for length in LENGTHS]
    for name, padded in (("padded", [whole_rows] * len(LENGTHS)), ("packed", lengths)):
        starts = [sum(padded[:row]) for row in range(len(padded) + 1)]
        index = PackedSegments(starts, cp_rank=cp_rank, cp_size=cp_size).token_index
        row = torch.bucketize(index, torch.tensor(starts[1:]), right=True)
        column = (index - torch.tensor(starts)[row]).clamp(max=WIDTH - 1)
        yield name, starts, row, column


def _on_rank(rank, world, tp, cp):
    train = megatron_worker()
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    parallel_state.initialize_model_parallel(tp, context_parallel_size=cp)
    tp_rank, cp_rank = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_context_parallel_rank()
    logits, data, seqs, toks = whole()
    width = VOCAB // tp
    found = {}
    for layout, starts, row, column in _layouts(cp_rank, cp):
        share = logits[row, column, tp_rank * width : (tp_rank + 1) * width]
        share = share.reshape(len(LENGTHS), -1, width) if layout == "padded" else share.unsqueeze(0)
        packing = None
        if layout == "packed":
            lengths = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            packing = PackedSeqParams(
                qkv_format="thd", cu_seqlens_q=lengths, cu_seqlens_q_padded=torch.tensor(starts, dtype=torch.int32)
            )
        for name, config in CONFIGS.items():
            for fused in (False, True) if layout == "packed" else (False,):
                for kind, loss in _losses(name, config, "geomask", "mcore"):
                    leaf = share.clone().requires_grad_()
                    process = train.LossPostProcessor(
                        loss,
                        {"sequence_packing": {"enabled": packing is not None, "fuse_loss": fused}},
                        sampling_params=_sampling(name),
                    )
                    value, metrics = process(BatchedDataDict(data), packing, seqs, toks)(leaf)
                    value.backward()
                    numbers = {key: float(metric) for key, metric in metrics.items()}
                    calls = CALLS.pop(kind, None), take_kept(None, STEP)
                    found[layout, fused, name, kind] = float(value), numbers, leaf.grad.numpy(), *calls
    return found


def _scored_on_rank(rank, world, tp, cp):
    """Log-probs of the forward passes of Megatron's and Automodel's workers, by NeMo-RL and in a prepared worker."""
    train = megatron_worker()
    from megatron.core import parallel_state
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.distributed.model_utils import dtensor_from_parallel_logits_to_logprobs

    parallel_state.initialize_model_parallel(tp, context_parallel_size=cp)
    tp_rank, cp_rank = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_context_parallel_rank()
    group = parallel_state.get_tensor_model_parallel_group()
    logits, data, *_ = whole()
    columns = slice(tp_rank * VOCAB // tp, (tp_rank + 1) * VOCAB // tp)

    def score(chunk):
        found = {}
        for layout, starts, row, column in _layouts(cp_rank, cp):
            share = logits[row, column, columns]
            if layout == "packed":
                ids = torch.zeros(1, starts[-1], dtype=torch.int64)
                for own, start, length in zip(data["input_ids"], starts, LENGTHS, strict=False):
                    ids[0, start : start + length] = own[:length]
                share = share.unsqueeze(0)
            elif cp > 1:
                continue  # NeMo-RL can't
            else:
                ids, share = data["input_ids"], share.reshape(len(LENGTHS), -1, columns.stop - columns.start)
            given = {"sequence_packing": {"enabled": layout == "packed"}, "logprob_chunk_size": chunk}
            process = train.LogprobsPostProcessor(given, None)
            found[layout] = process(BatchedDataDict(data), ids, torch.tensor(starts))(share)[1]["logprobs"].numpy()
        if cp == 1:
            given = (data["input_ids"], columns.start, columns.stop, group)
            found["dtensor"] = dtensor_from_parallel_logits_to_logprobs(
                logits[..., columns], *given, inference_only=True, chunk_size=chunk
            ).numpy()
        return found

    with torch.no_grad():
        for chunk in (None, 7):
            uninstall()
            theirs = score(chunk)
            assert prepare_worker()
            with mock.patch(
                "nemo_geomask.hosts.nemo_rl.forward_logprobs.forward_logprobs", wraps=forward_logprobs
            ) as ours:
                mine = score(chunk)
            assert ours.call_count == len(mine) == len(theirs)
            for layout, expected in theirs.items():
                assert np.abs(expected).max() > 1
                np.testing.assert_allclose(mine[layout], expected, rtol=1e-5, atol=2e-6, err_msg=layout)


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 2)])
def test_forward_passes_take_our_kernels(tp, cp):
    _skip_unless(megatron_worker)
    run_ranks(tp * cp, _scored_on_rank, tp, cp)


def _sampling(name):
    """As NeMo-RL's; log-probs are then those of what is left after filtering, and the KL term's those before."""
    return types.SimpleNamespace(top_k=None, top_p=0.9, temperature=1.0) if name == "filtered" else None


CALLS = {}
STEP = 7


class _Counted(PolicyLoss):
    """Counts its calls under its kind."""

    def __init__(self, loss, kind):
        self.__dict__.update(loss.__dict__)
        self.kind = kind

    def __call__(self, *args, **kwargs):
        CALLS[self.kind] = CALLS.get(self.kind, 0) + 1
        return super().__call__(*args, **kwargs)

    def packed(self, *args, **kwargs):
        CALLS[self.kind] = CALLS.get(self.kind, 0) + 1
        return super().packed(*args, **kwargs)


def _losses(name, config, *backends):
    """Of one objective: NeMo-RL's own path; in a prepared worker, NeMo-RL's log-probs and one call, and our log-probs;
    and NeMo-RL's own class where it knows the settings."""
    from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn
    from pydantic import BaseModel

    from nemo_geomask.hosts.nemo_rl.logit_backends import LogitLoss

    uninstall()
    yield "nemo_rl", _Counted(build_loss(config), "nemo_rl")
    assert prepare_worker()
    yield "once", _Counted(build_loss(config), "once")
    for backend in backends if name != "filtered" else ():
        yield backend, pickle.loads(pickle.dumps(LogitLoss(build_loss({**config, "logprob_backend": backend}))))
    for backend in ("nemo_rl", "geomask") if name == "gspo" else ():
        record = {"dir": "/nowhere", "entropy": backend == "geomask"}
        loss = build_loss({**config, "logprob_backend": backend, "record": record})
        yield f"{backend}, kept", keep_logprobs(loss if backend == "nemo_rl" else LogitLoss(loss), STEP)
    if name in OF_NEMO_RL and issubclass(ClippedPGLossConfig, BaseModel):
        yield "own", ClippedPGLossFn(ClippedPGLossConfig(**{key: config[key] for key in config if key != "name"}))


def _compare(results):
    _compare_kept(results)
    for found in results:
        for (*where, name, kind), (value, metrics, grad, calls, _) in found.items():
            other, others, expected, *_ = found[*where, name, "nemo_rl"]
            one_a_sequence = kind == "nemo_rl" and "packed" in where and True not in where
            assert kind not in ("nemo_rl", "once") or calls == (len(LENGTHS) if one_a_sequence else 1)
            where = f"{where}, {name}, {kind}"
            assert np.abs(expected).max() > 1e-4
            assert value == pytest.approx(other, rel=2e-5, abs=1e-7), where
            np.testing.assert_allclose(grad, expected, rtol=2e-4, atol=2e-7, err_msg=where)
            for key in metrics.keys() & others.keys():
                if (name, kind, key) == ("sequence_ratio", "own", "sampling_importance_ratio"):
                    continue  # NeMo-RL multiplies [B, 1] by [B] there, see docs/reference/loss_reference.md
                if "packed" in where and key.startswith("geomask/") and key.endswith("_max"):
                    continue  # of one call a sequence, NeMo-RL's wrapper has the sum
                assert metrics[key] == pytest.approx(others[key], rel=1e-4, abs=1e-6), (where, key)
            assert kind == "own" or metrics.keys() == others.keys()


def _compare_kept(results):
    """What all ranks keep of a step for its records is what the whole logits say, where a token trains."""
    logits, data, *_ = whole()
    logits = logits[:, :-1].log_softmax(-1)
    trains = data["token_mask"][:, 1:] != 0
    truth = {
        "curr_logprobs": logits.gather(-1, data["input_ids"][:, 1:, None]).squeeze(-1),
        "entropy": -(logits.exp() * logits).sum(-1),
    }
    for where in results[0]:
        with torch.device("meta"):  # the default device plays no part
            kept = merge_kept([found[where][-1] for found in results], data["input_ids"], data["input_lengths"])
        trained = kept.pop(CURR_KNOWN_KEY, None)
        assert trained is None or trained[:, 1:].equal(trains)
        assert len(kept) == {"nemo_rl, kept": 1, "geomask, kept": 2}.get(where[-1], 0), where
        for key, values in kept.items():
            assert values[:, 0].isnan().all()
            assert values[:, 1:].isnan().equal(~trains), (where, key)
            torch.testing.assert_close(values[:, 1:][trains], truth[key][trains], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_megatron_equals_nemo_rls_own_path(tp, cp):
    _skip_unless(megatron_worker)
    _compare(run_ranks(tp * cp, _on_rank, tp, cp))


def _automodel_on_rank(rank, world, tp, cp):
    train = automodel_worker()
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.models.automodel.data import ProcessedInputs
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (cp, tp), mesh_dim_names=("cp", "tp"))
    logits, data, seqs, toks = whole()
    columns = slice(rank % tp * VOCAB // tp, (rank % tp + 1) * VOCAB // tp)
    # Head and tail chunks, as torch's context parallelism deals them out.
    order = torch.arange(WIDTH).chunk(2 * cp)
    mine = torch.cat([order[rank // tp], order[2 * cp - 1 - rank // tp]])
    found = {}
    for layout in ("padded", "packed") if cp == 1 else ("padded",):
        inputs = ProcessedInputs(input_ids=data["input_ids"], seq_len=WIDTH)
        share = logits[:, mine, columns]
        if layout == "packed":
            offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
            inputs.flash_attn_kwargs = types.SimpleNamespace(cu_seqlens_q=offsets)
            share = torch.cat([row[:length] for row, length in zip(share, LENGTHS, strict=True)]).unsqueeze(0)
            # NeMo-RL fills a short row up to a minimal length.
            share = torch.nn.functional.pad(share, (0, 0, 0, 4))
        for name, config in CONFIGS.items():
            if name == "filtered" and (layout == "padded" or tp > 1):
                # NeMo-RL can't: it takes a view of rows without their last column, and wants lengths that TP divides.
                continue
            for kind, loss in _losses(name, config, "geomask"):
                leaf = share.clone().requires_grad_()
                sharded = DTensor.from_local(leaf, mesh["tp"], [Shard(-1)]) if tp > 1 else leaf
                batch = BatchedDataDict(data)
                if cp > 1:
                    # What torch shards in place, by NeMo-RL's list of buffers.
                    batch["input_ids"] = data["input_ids"][:, mine]
                    inputs.seq_index = mine.unsqueeze(0)
                    inputs.cp_buffers = [batch["input_ids"], inputs.seq_index]
                process = train.LossPostProcessor(
                    *(loss, {}, mesh, mesh["cp"], mesh["tp"], cp, 1),
                    enable_seq_packing=layout == "packed",
                    sampling_params=_sampling(name),
                )
                value, metrics = process(sharded, batch, inputs, seqs, toks)
                value.backward()
                numbers = {key: float(metric) for key, metric in metrics.items()}
                calls = CALLS.pop(kind, None), take_kept(None, STEP)
                found[layout, name, kind] = float(value), numbers, leaf.grad.numpy(), *calls
    return found


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_automodel_equals_nemo_rls_own_path(tp, cp):
    _skip_unless(automodel_worker)
    _compare(run_ranks(tp * cp, _automodel_on_rank, tp, cp))
