"""Faults that are planted in NeMo-RL's own workers, for the jobs of a probe that ask for them.

The driver runs :func:`score` in place of the probe's own function. ``faults`` of a job, or of the environment variable
:data:`VARIABLE`, names what is planted before its scores and taken away after them; the probe's own code scores.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from types import MethodType

from nemo_geomask.hosts.nemo_rl import patch
from nemo_geomask.tools.probe import scoring_job

FUNCTION = "planted_workers:score"
"""Name of :func:`score` for a driver that finds this folder in its path."""
VARIABLE = "PLANTED_FAULTS"
"""Environment variable with the faults of all jobs, as JSON."""


def score(**arguments):
    patch.attribute(scoring_job.Session, "answer", _with_faults).apply()
    scoring_job.score(**arguments)


def _with_faults(answer):
    def answer_with_faults(session, job):
        faults = job.get("faults") or json.loads(os.environ.get(VARIABLE, "{}"))
        with contextlib.ExitStack() as stack:
            for name, value in faults.items():
                stack.enter_context(FAULTS[name](session, value))
            return answer(session, job)

    return answer_with_faults


def _call_all(workers, function, *arguments):
    ray = importlib.import_module("ray")
    return ray.get([worker.__ray_call__.remote(function, *arguments) for worker in workers])


@contextlib.contextmanager
def _in_trainers(session, plant, undo, value):
    workers = session.policy.worker_group.workers
    _call_all(workers, plant, value)
    try:
        yield
    finally:
        _call_all(workers, undo, value)


# Functions that are replaced in a trainer's process.

_patches = []


def _replace(owner, name, make):
    _patches.append(patch.attribute(owner, name, make))
    _patches[-1].apply()


def _put_back(actor, value):
    while _patches:
        _patches.pop().undo()


# Sampling parameters that the trainer applies to its logits.

_sampling = []


def _set_sampling(actor, values):
    _sampling.append({name: getattr(actor.sampling_params, name) for name in values})
    for name, value in values.items():
        setattr(actor.sampling_params, name, value)


def _restore_sampling(actor, values):
    for name, value in _sampling.pop().items():
        setattr(actor.sampling_params, name, value)


def trainer_sampling(session, values):
    return _in_trainers(session, _set_sampling, _restore_sampling, values)


# Log-probs of the trainer that belong to the token before.


@contextlib.contextmanager
def shifted_tokens(session, places):
    policy = session.policy
    original = policy.get_logprobs

    def shifted(data, *args, **kwargs):
        result = original(data, *args, **kwargs)
        result["logprobs"] = result["logprobs"].roll(places, dims=1)
        return result

    policy.get_logprobs = shifted
    try:
        yield
    finally:
        del policy.get_logprobs


# Dropout of the trainer's attention that is on while it scores.


def _leave_dropout_on(actor, share):
    for module in actor.model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = share
    actor.model.train()
    actor.model.eval = MethodType(lambda model: model, actor.model)


def _switch_dropout_off(actor, share):
    del actor.model.eval
    actor.model.eval()
    for module in actor.model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0


def dropout(session, share):
    return _in_trainers(session, _leave_dropout_on, _switch_dropout_off, share)


# An adapter that a refit does not merge into the weights that it sends.


def _leave_adapters_out(actor, value):
    module = importlib.import_module("nemo_rl.models.policy.workers.dtensor_policy_worker_v2")
    _replace(module, "_maybe_merge_lora_weight", lambda original: lambda module_map, name, tensor: tensor)


def lost_adapter(session, value):
    return _in_trainers(session, _leave_adapters_out, _put_back, value)


# A layer that a refit does not deliver: the engine keeps the weights from before the trainer's last step.

_weights_before = []


def _change_layer(actor, change):
    torch = importlib.import_module("torch")
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in actor.model.named_parameters():
            if f"layers.{change['layer']}." in name and parameter.dim() > 1:
                _weights_before.append((parameter, parameter.clone()))
                noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                parameter.add_(change["size"] * parameter.std() * noise)


def _change_layer_back(actor, change):
    torch = importlib.import_module("torch")
    with torch.no_grad():
        for parameter, before in _weights_before:
            parameter.copy_(before)
    _weights_before.clear()


@contextlib.contextmanager
def _refit_as(make):
    """Replace the refit, which also comes first after a restart of the engine, by what ``make`` makes of it."""
    planted = patch.attribute(scoring_job, "refit", make)
    planted.apply()
    try:
        yield
    finally:
        planted.undo()


@contextlib.contextmanager
def stale_layer(session, change):
    workers = session.policy.worker_group.workers

    def make(original):
        def refit(session):
            original(session)
            _call_all(session.actors, _skip_layer, change["layer"])
            _call_all(workers, _change_layer, change)
            original(session)
            _call_all(session.actors, _skip_nothing)

        return refit

    with _refit_as(make):
        try:
            yield
        finally:
            _call_all(workers, _change_layer_back, change)


def _loader_of(worker):
    return worker.model_runner.model


def _skip_layer(actor, layer):
    actor.llm.collective_rpc(_skip_layer_in_engine, args=(layer,))


def _skip_layer_in_engine(worker, layer):
    model = _loader_of(worker)
    original = model.load_weights

    def load_weights(weights):
        return original((name, tensor) for name, tensor in weights if f"layers.{layer}." not in name)

    model.load_weights = load_weights


def _skip_nothing(actor):
    actor.llm.collective_rpc(_skip_nothing_in_engine)


def _skip_nothing_in_engine(worker):
    del _loader_of(worker).load_weights


# A head of the engine that computes in bfloat16 as soon as it has two rows: a kernel that depends on the batch's size.


def batch_variant_head(session, value):
    def make(original):
        def refit(session):
            original(session)
            _call_all(session.actors, _plant_in_head)

        return refit

    return _refit_as(make)


def _plant_in_head(actor):
    actor.llm.collective_rpc(_round_batches)


def _round_batches(worker):
    model = worker.model_runner.model
    if "compute_logits" in vars(model):
        return
    original = model.compute_logits

    def compute_logits(hidden_states, *args, **kwargs):
        return original(_rounded(hidden_states) if len(hidden_states) > 1 else hidden_states, *args, **kwargs)

    model.compute_logits = compute_logits


# Megatron functions that compute in bfloat16 where a model in bfloat16, or a fused kernel, does.


def _rounded(tensor):
    torch = importlib.import_module("torch")
    return tensor.to(torch.bfloat16).to(tensor.dtype) if tensor.is_floating_point() else tensor


def _round_sums(actor, value):
    mappings = importlib.import_module("megatron.core.tensor_parallel.mappings")

    def make(original):
        return lambda input_, group: original(_rounded(input_) if group.size() > 1 else input_, group)

    _replace(mappings, "_reduce", make)


def rounded_sums(session, value):
    """Each rank's part of a sum over tensor-parallel ranks is rounded to bfloat16."""
    return _in_trainers(session, _round_sums, _put_back, value)


def _round_dispatch(actor, value):
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")

    def make(original):
        def all_to_all(group, input_, *args, **kwargs):
            return original(group, _rounded(input_) if group.size() > 1 else input_, *args, **kwargs)

        return all_to_all

    _replace(dispatcher, "all_to_all", make)


def rounded_dispatch(session, value):
    """Tokens are rounded to bfloat16 on their way between expert-parallel ranks."""
    return _in_trainers(session, _round_dispatch, _put_back, value)


def _round_router(actor, value):
    router = importlib.import_module("megatron.core.transformer.moe.router")

    def make(original):
        def gating(self, input):
            if self.config.moe_router_dtype is not None:
                return original(self, input)
            torch = importlib.import_module("torch")
            low = router.router_gating_linear(input.to(torch.bfloat16), self.weight, self.bias, torch.bfloat16)
            return low.to(input.dtype)

        return gating

    _replace(router.Router, "gating", make)


def rounded_router(session, value):
    """A router without ``moe_router_dtype`` computes in bfloat16, as it does in a model in bfloat16."""
    return _in_trainers(session, _round_router, _put_back, value)


FAULTS = {
    each.__name__: each
    for each in (
        *(trainer_sampling, shifted_tokens, dropout, lost_adapter, stale_layer),
        *(batch_variant_head, rounded_sums, rounded_dispatch, rounded_router),
    )
}
