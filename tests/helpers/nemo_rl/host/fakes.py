"""A cluster, a policy, a generation engine and an environment for NeMo-RL's real loop, on a CPU and in one process.

The policy is a bigram table. The engine samples from a copy of it with rounded logits, so there is a mismatch.
"""

import json
import os
import re
import types

import ray
import torch
from nemo_rl.algorithms.loss import interfaces
from nemo_rl.algorithms.loss.utils import prepare_loss_input
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.interfaces import EnvironmentReturn
from nemo_rl.models.policy import lm_policy
from nemo_rl.utils import logger

# NeMo-RL moves token ids to the GPU by hand on the way from logits to log-probs.
torch.Tensor.cuda = torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *args, **kwargs: None

OUT = os.environ["HOST_OUT"]
VOCABULARY = 32
PAD = 0


def record(kind, /, **values):
    with open(os.path.join(OUT, f"{kind}.jsonl"), "a", encoding="utf-8") as file:
        file.write(json.dumps(values, default=float) + "\n")


def nothing(*args, **kwargs):
    return None


log_metrics = logger.Logger.log_metrics


def _recorded(self, metrics, step, prefix="", **kwargs):
    record("logged", prefix=prefix, step=step, metrics={k: v for k, v in metrics.items() if isinstance(v, float)})
    return log_metrics(self, metrics, step, prefix=prefix, **kwargs)


logger.Logger.log_metrics = _recorded


class Cluster:
    def __init__(self, *args, **kwargs):
        pass

    def world_size(self):
        return 1

    def get_master_address_and_port(self):
        return "127.0.0.1", 1


class Idle:
    """What NeMo-RL asks of a policy besides log-probs and training."""

    print_node_ip_and_gpu_id = prepare_refit_info = shutdown = start_gpu_profiling = stop_gpu_profiling = nothing
    prepare_for_lp_inference = finish_inference = prepare_for_training = finish_training = nothing
    offload_before_refit = offload_after_refit = offload_to_cpu = nothing
    router_replay_enabled = False
    worker_group = types.SimpleNamespace(workers=[])  # it trains in this process

    def get_free_memory_bytes(self):
        return 1 << 30

    def stream_weights_via_ipc_zmq(self, **kwargs):
        return [ray.put(True)]

    def init_collective(self, *args, **kwargs):
        return [ray.put(True)]

    def broadcast_weights_for_collective(self, **kwargs):
        return [ray.put(True)]

    def save_checkpoint(self, *args, **kwargs):
        raise AssertionError("checkpointing is off")

    def __del__(self):
        pass


class Bigrams:
    """The model, its reference and its optimiser: what a worker of NeMo-RL's holds."""

    def __init__(self, config):
        torch.manual_seed(0)
        self.config = config
        self.table = torch.nn.Parameter(torch.randn(VOCABULARY, VOCABULARY))
        self.reference = self.table.detach().clone()
        self.optimizer = torch.optim.SGD([self.table], lr=1.0)
        self.begin(None)

    @staticmethod
    def of(table, ids):
        token = table[ids[:, :-1]].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        return torch.nn.functional.pad(token, (1, 0)).detach()

    def train(self, data, loss_fn):
        size = self.config["train_global_batch_size"]
        metrics, losses = {}, []
        for start in range(0, data["input_ids"].shape[0], size):
            step = data.slice(start, start + size)
            mask = step["token_mask"][:, 1:] * step["sample_mask"].unsqueeze(-1)
            self.begin(loss_fn)
            self.backward(step, step["sample_mask"].sum(), mask.sum())
            result = self.finish(divide=False)
            losses.append(result["loss"])
            for key, values in result["all_mb_metrics"].items():
                metrics.setdefault(key, []).extend(values)
        return {**result, "loss": torch.stack(losses).sum(), "all_mb_metrics": metrics}

    def begin(self, loss_fn):
        self.loss_fn = loss_fn
        self.losses, self.metrics = [], []
        self.seqs = self.toks = torch.zeros(())
        self.optimizer.zero_grad()

    def backward(self, data, seqs, toks):
        mask = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)
        self.seqs, self.toks = self.seqs + data["sample_mask"].sum(), self.toks + mask.sum()
        rows, micro = data["input_ids"].shape[0], self.config["train_micro_batch_size"]
        for first in range(0, rows, micro):
            batch = data.slice(first, min(first + micro, rows))
            prepared = prepare_loss_input(self.table[batch["input_ids"]], batch, self.loss_fn)
            # v0.6.0 returns the data too.
            inputs, batch = prepared if isinstance(prepared, tuple) else (prepared, batch)
            loss, metrics = self.loss_fn(data=batch, global_valid_seqs=seqs, global_valid_toks=toks, **inputs)
            loss.backward()
            self.losses.append(loss.detach())
            self.metrics.append(metrics)

    def finish(self, *, divide):
        """The optimiser's step; ``divide``: losses so far were sums, as in NeMo-RL's streamed steps."""
        by_token = self.loss_fn.loss_type is interfaces.LossType.TOKEN_LEVEL
        count = self.toks if by_token else self.seqs
        scale = 1 / count if divide else torch.ones(())
        self.table.grad *= scale
        norm = self.table.grad.norm()
        self.optimizer.step()
        collected = {}
        for metrics in self.metrics:
            added = {"lr": 1.0, "wd": 0.0, "global_valid_seqs": float(self.seqs), "global_valid_toks": float(self.toks)}
            for key, value in (self._divided(metrics) if divide else metrics).items():
                collected.setdefault(key, []).append(value)
            for key, value in added.items():
                collected.setdefault(key, []).append(value)
        loss = torch.stack(self.losses).sum() * scale
        record(
            "train",
            loss_class=f"{type(self.loss_fn).__module__}.{type(self.loss_fn).__name__}",
            own_enum=self.loss_fn.loss_type in interfaces.LossType
            and self.loss_fn.input_type in interfaces.LossInputType,
            loss=loss,
            grad_norm=norm,
            sequences=self.seqs,
            metrics=sorted(collected),
        )
        return {"loss": loss, "grad_norm": norm, "all_mb_metrics": collected}

    def _divided(self, metrics):
        kinds = interfaces.MetricNormalizer
        divisors = {kinds.TOKENS: float(self.toks), kinds.SEQUENCES: float(self.seqs), kinds.NONE: 1.0}
        return {key: value / divisors[self.loss_fn.metric_normalizations[key]] for key, value in metrics.items()}


class Policy(Idle, lm_policy.Policy):
    """What NeMo-RL's ``Policy`` does over its workers, here in the driver; trained through NeMo-RL's own method."""

    def __init__(self, config, **kwargs):
        self.cfg = config
        self.model = Bigrams(config)
        self.sharding_annotations = types.SimpleNamespace(get_axis_size=lambda axis: 1)

    def get_reference_policy_logprobs(self, data, timer=None, **kwargs):
        return BatchedDataDict({"reference_logprobs": Bigrams.of(self.model.reference, data["input_ids"])})


def _get_logprobs(self, data, timer=None):
    record("scored", rows=data["input_ids"].shape[0])
    return BatchedDataDict({"logprobs": Bigrams.of(self.model.table, data["input_ids"])})


def _train(self, data, loss_fn, eval_mode=False, gbs=None, mbs=None, timer=None, **kwargs):
    # As to a worker: through Ray's serialiser.
    return self.model.train(data, ray.get(ray.put(loss_fn)))


# In the place of the methods that go to the workers, whatever wraps them later.
lm_policy.Policy.train, lm_policy.Policy.get_logprobs = _train, _get_logprobs


class Value:
    """PPO's critic: knows nothing, learns nothing."""

    def __init__(self, **kwargs):
        pass

    prepare_for_inference = finish_inference = prepare_for_training = finish_training = shutdown = nothing

    def get_values(self, data, **kwargs):
        return BatchedDataDict({"values": torch.zeros(*data["input_ids"].shape, 1)})

    def train(self, data, loss_fn, **kwargs):
        return {"loss": torch.zeros(1), "grad_norm": torch.zeros(()), "all_mb_metrics": {"loss": [0.0]}}


class Generation:
    """What ``VllmGeneration`` does over its workers."""

    requires_kv_scale_sync = False
    clear_logger_metrics = prepare_refit_info = shutdown = invalidate_kv_cache = nothing

    def __init__(self, config, **kwargs):
        torch.manual_seed(0)
        # The policy starts from the same table; refits are ignored, so that samples grow stale as well.
        self.table = (4 * torch.randn(VOCABULARY, VOCABULARY)).round() / 4
        self.length = config["max_new_tokens"]
        self.weight_synchronizer = None
        self.cfg = config

    def prepare_for_generation(self, *args, **kwargs):
        return True

    def finish_generation(self, *args, **kwargs):
        return True

    def get_logger_metrics(self):
        return {}

    def snapshot_step_metrics(self):
        return None

    def get_step_metrics(self):
        return {}

    def get_inference_world_size(self):
        return 1

    def get_collective_sender_spec(self):
        return types.SimpleNamespace(nccl_peer=None, buffer_size_bytes=None, num_buffers=None)

    def blocks_training(self, *args, **kwargs):
        return False

    def wake_carries_weight_updates(self, *args, **kwargs):
        return False

    def init_collective(self, *args, **kwargs):
        return [ray.put(True)]

    def update_weights_via_ipc_zmq(self, *args, **kwargs):
        return [ray.put(True)]

    def update_weights_from_collective(self, *args, **kwargs):
        return [ray.put(True)]

    def generate(self, data, greedy=False):
        ids, lengths = data["input_ids"], data["input_lengths"]
        rows, width = ids.shape
        output = torch.full((rows, width + self.length), PAD, dtype=ids.dtype)
        logprobs = torch.zeros(rows, width + self.length)
        for row in range(rows):
            at = int(lengths[row])
            output[row, :at] = ids[row, :at]
            for position in range(at, at + self.length):
                policy = self.table[output[row, position - 1]].log_softmax(-1)
                token = torch.multinomial(policy.exp(), 1)
                output[row, position], logprobs[row, position] = token, policy[token]
        return BatchedDataDict(
            {
                "output_ids": output,
                "logprobs": logprobs,
                "generation_lengths": torch.full((rows,), self.length),
                "unpadded_sequence_lengths": lengths + self.length,
                "truncated": torch.zeros(rows, dtype=torch.bool),
            }
        )

    async def generate_async(self, data, greedy=False):
        yield 0, BatchedDataDict({**self.generate(data, greedy), "gen_leader_worker_idx": [0]})


@ray.remote
class Environment:
    """Rewards responses in which even words prevail."""

    def __init__(self, config):
        pass

    def step(self, message_logs, metadata):
        words = [re.findall(r"w(\d+)", log[-1]["content"]) for log in message_logs]
        rewards = torch.tensor([float(2 * sum(int(word) % 2 == 0 for word in row) > len(row)) for row in words])
        count = len(message_logs)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "w1"}] * count,
            metadata=metadata,
            next_stop_strings=[None] * count,
            rewards=rewards,
            terminateds=torch.ones(count, dtype=torch.bool),
            answers=None,
        )

    def global_post_process_and_metrics(self, batch):
        return batch, {}

    def shutdown(self):
        return True
