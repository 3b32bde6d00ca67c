"""Side by side with an importable NeMo-RL: v0.6.0, v0.7.0 or main. Skipped where there is none."""

from __future__ import annotations

import base64
import os
import pickle
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch

from nemo_geomask import build_loss
from tests.helpers import batches, golden

pytest.importorskip("nemo_rl.algorithms.loss.interfaces", reason="NeMo-RL is not importable here")
pytest.importorskip("nemo_rl.algorithms.loss.loss_functions", reason="NeMo-RL's requirements are not importable here")

from nemo_rl.algorithms.loss import interfaces
from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from pydantic import BaseModel

pytestmark = pytest.mark.slow

# v0.6.0 takes a dict, has no default, no CISPO and no positive NLL, no lower TIS bound, and differentiates the plain
# estimator of the KL, without the score-function term that v0.7.0 brought, and weights it after the output clamp.
OLD = not issubclass(ClippedPGLossConfig, BaseModel)
NOT_IN_OLD = ("use_cispo", "positive_example_nll_weight", "use_kl_in_reward")
CONFIGS = {
    case.removeprefix("small-"): entry["config"] for case, entry in golden.index().items() if case.startswith("small-")
}
if OLD:
    CONFIGS = {
        name: config
        for name, config in CONFIGS.items()
        if not any(key in config for key in NOT_IN_OLD) and name not in ("tis_min", "kl_on_policy_approx")
    }


def ours(config: dict[str, Any]) -> Any:
    kl = config.get("reference_policy_kl_penalty", 0.01)
    if OLD and kl:
        config = {**config, "reference_policy_kl_gradient": config.get("reference_policy_kl_type", "k3")}
    return build_loss(config)


def theirs(config: dict[str, Any]) -> Any:
    if not OLD:
        return ClippedPGLossFn(ClippedPGLossConfig(**config))
    fields = ClippedPGLossConfig.__annotations__
    defaults = build_loss({}).config.model_dump()
    return ClippedPGLossFn({**{key: defaults[key] for key in fields if key in defaults}, **config})


def evaluate(loss_fn: Any, batch: batches.Batch) -> batches.Result:
    curr = batch.curr.clone().requires_grad_()
    loss, metrics = loss_fn(
        next_token_logprobs=curr,
        data=BatchedDataDict(batch.data),
        global_valid_seqs=torch.tensor(batch.seqs),
        global_valid_toks=torch.tensor(batch.toks),
    )
    loss.backward()
    return batches.Result(loss.detach(), curr.grad, metrics)


def compare(result: batches.Result, reference: batches.Result, *, skip: tuple[str, ...] = ()) -> None:
    torch.testing.assert_close(result.loss, reference.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(result.grad, reference.grad, rtol=1e-5, atol=1e-6)
    assert (result.grad - reference.grad).abs().max() <= 2e-5 * reference.grad.abs().max()
    for name, value in reference.metrics.items():
        if name not in skip:
            assert result.metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def skipped(config: dict[str, Any], batch: batches.Batch) -> tuple[str, ...]:
    names = []
    if config.get("sequence_level_importance_ratios") and len(batch.curr) > 1:
        names.append("sampling_importance_ratio")  # [B, 1] times [B]
    if OLD:
        names.append("is_oob_ratio")  # one minus the kept share of a microbatch: not additive
        if config.get("force_on_policy_ratio"):
            # v0.6.0 leaves prev as it is in the mismatch metrics; later versions take it to be curr.
            names += ["token_mult_prob_error", "gen_kl_error", "policy_kl_error", "js_divergence_error"]
            names.append("sampling_importance_ratio")
    return tuple(names)


def large(width: int = 4096) -> batches.Batch:
    """[8, width], mostly valid; sums of a thousand mismatches stay finite."""
    offsets = (0.0004, -0.0004, 0.0002, -0.0002, 0.0, 0.0)
    return batches.rollouts(11, width=width, offsets=offsets, mismatch=0.02, staleness=0.15)


@pytest.mark.parametrize("seed", [0, 1, 2, "long rows"])
@pytest.mark.parametrize("name", CONFIGS)
def test_equals_nemo_rl(name, seed):
    mismatch = {} if seed == "long rows" else {"mismatch": 0.03 + 0.1 * seed, "staleness": 0.1 + 0.3 * seed}
    batch, config = batches.rollouts(seed, **mismatch) if mismatch else large(), CONFIGS[name]
    compare(evaluate(ours(config), batch), evaluate(theirs(config), batch), skip=skipped(config, batch))


@pytest.mark.skipif(OLD, reason="v0.6.0 has another KL gradient")
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("importance", [False, True])
def test_unfiltered_log_probs_as_in_nemo_rl(kind, importance):
    config = {"reference_policy_kl_type": kind, "use_on_policy_kl_approximation": importance}
    config["reference_policy_kl_penalty"] = 0.5
    batch = batches.rollouts(2)
    grads = []
    for loss_fn in (build_loss(config), theirs(config)):
        other = (batch.curr - 0.2).requires_grad_()
        evaluate(loss_fn, batch.with_data(curr_logprobs_unfiltered=other))
        grads.append(other.grad)
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-7)


@pytest.mark.skipif(OLD, reason="v0.6.0's configuration is a dict")
@pytest.mark.parametrize("name", CONFIGS)
def test_nemo_rls_own_config_object_builds_the_same_loss(name):
    config = CONFIGS[name]
    assert build_loss(ClippedPGLossConfig(**config)).config == build_loss(config).config


@pytest.mark.skipif(OLD, reason="v0.6.0's configuration has no defaults")
def test_every_field_has_nemo_rls_name_and_default():
    defaults = build_loss({}).config.model_dump()
    for name, field in ClippedPGLossConfig.model_fields.items():
        assert defaults[name] == field.default, name


@pytest.mark.parametrize(
    "config",
    [{}, {"token_level_loss": False}, {"name": "gspo"}, {"name": "cispo"}, {"loss_normalization": "documents"}],
)
def test_attributes_are_nemo_rls_own_members(config):
    loss_fn = build_loss(config)
    by_token = loss_fn.config.normalization == "tokens"
    kinds = interfaces.LossType
    assert loss_fn.loss_type is (kinds.TOKEN_LEVEL if by_token else kinds.SEQUENCE_LEVEL)
    assert loss_fn.input_type is interfaces.LossInputType.LOGPROB
    own = getattr(interfaces, "MetricNormalizer", None)
    for kind in loss_fn.metric_normalizations.values():
        assert own is None or isinstance(kind, own)


@pytest.mark.skipif(not hasattr(interfaces, "MetricNormalizer"), reason="this NeMo-RL has no MetricNormalizer")
@pytest.mark.parametrize("name", CONFIGS)
def test_metric_normalizations_as_nemo_rl_declares_them(name):
    declared, reference = (loss_fn(CONFIGS[name]).metric_normalizations for loss_fn in (ours, theirs))
    assert {key: declared[key] for key in reference} == reference


WITHOUT = textwrap.dedent(
    """
    import base64, pickle, sys
    sys.modules["nemo_rl"] = None  # any import of it now fails
    import nemo_geomask
    loss = pickle.loads(base64.b64decode(sys.argv[1]))
    print(loss.loss_type.value, loss.input_type.value, type(loss.loss_type).__module__)
    print(*sorted(f"{k}={v.value}" for k, v in loss.metric_normalizations.items()))
    print(base64.b64encode(pickle.dumps(nemo_geomask.build_loss({"name": "gspo"}))).decode())
    """
)


def test_pickles_between_processes_with_and_without_nemo_rl():
    loss_fn = build_loss({"name": "gspo", "use_importance_sampling_correction": True})
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT, base64.b64encode(pickle.dumps(loss_fn)).decode()],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    attributes, normalizations, returned = run.stdout.strip().splitlines()
    assert attributes == "sequence_level logprob nemo_geomask.losses.protocol"
    here = {name: kind.value for name, kind in loss_fn.metric_normalizations.items()}
    assert normalizations.split() == sorted(f"{name}={kind}" for name, kind in here.items())
    # The other way: pickled without NeMo-RL, opened with it.
    opened = pickle.loads(base64.b64decode(returned))
    assert opened.loss_type is interfaces.LossType.SEQUENCE_LEVEL
    assert opened.input_type is interfaces.LossInputType.LOGPROB


class TestPackingWrapper:
    """NeMo-RL's own wrapper hands a loss one packed sequence after the other."""

    @pytest.fixture
    def packed(self, monkeypatch):
        wrapper = pytest.importorskip("nemo_rl.algorithms.loss.wrapper")
        utils = pytest.importorskip("nemo_rl.algorithms.loss.utils")
        # Its log-prob path moves the token ids to the GPU by hand.
        monkeypatch.setattr(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)
        lengths = torch.tensor([14, 9, 12, 6, 14, 11, 7, 8])
        batch = batches.rollouts(4, mismatch=0.1, staleness=0.3)
        inside = torch.arange(14) < lengths.unsqueeze(-1)
        data = dict(batch.data)
        data["token_mask"] = data["token_mask"] * inside
        toks = float((data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)).sum())
        draw = torch.Generator().manual_seed(0)
        logits = torch.randn(8, 14, 50, generator=draw)
        # Log-probs near the logits' own, so that ratios are near 1.
        own = logits.log_softmax(-1)[:, :-1].gather(-1, data["input_ids"][:, 1:, None]).squeeze(-1)
        for key in ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs"):
            noise = 0.2 * torch.randn(8, 13, generator=draw)
            data[key] = torch.cat([torch.zeros(8, 1), own + noise], dim=1)
        starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        flat = torch.cat([logits[row, : lengths[row]] for row in range(8)]).unsqueeze(0)

        def run(loss_fn: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
            leaf = flat.clone().requires_grad_()
            wrapped = wrapper.SequencePackingLossWrapper(loss_fn, utils.prepare_loss_input, cu_seqlens_q=starts)
            counts = torch.tensor(batch.seqs), torch.tensor(toks)
            loss, metrics = wrapped(leaf, BatchedDataDict(data), *counts)
            loss.backward()
            return loss.detach(), leaf.grad, metrics

        return run

    @pytest.mark.parametrize("name", [n for n in CONFIGS if n in ("default", "gspo_is", "seq_mask_tis", "everything")])
    def test_same_as_around_nemo_rls_loss(self, packed, name):
        (loss, grad, metrics), reference = packed(ours(CONFIGS[name])), packed(theirs(CONFIGS[name]))
        torch.testing.assert_close(loss, reference[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(grad, reference[1], rtol=1e-5, atol=1e-6)
        for key, value in reference[2].items():
            if not (OLD and key == "is_oob_ratio"):
                assert metrics[key] == pytest.approx(value, rel=1e-5, abs=1e-6), key
