"""NeMo-RL's ``TQPolicy`` over its real data plane, its workers replaced by one that computes on the CPU."""

import types

import fakes
import ray
from nemo_rl.data_plane import build_data_plane_client
from nemo_rl.data_plane.adapters import transfer_queue
from nemo_rl.data_plane.worker_mixin import TQWorkerMixin
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.policy import tq_policy

# NeMo-RL would have Ray install TransferQueue in an environment of its own, as NeMo-RL's metadata pins it.
transfer_queue._patch_tq_actor_runtime_env = fakes.nothing


@ray.remote(num_cpus=0)
class Worker(TQWorkerMixin):
    def __init__(self, config):
        self.cfg = config
        self.model = fakes.Bigrams(config)

    def _local_coords(self):
        return {"tensor_parallel": 0, "context_parallel": 0, "pipeline_parallel": 0, "data_parallel": 0}

    def get_logprobs(self, data, micro_batch_size=None):
        fakes.record("scored", rows=data["input_ids"].shape[0])
        return BatchedDataDict({"logprobs": fakes.Bigrams.of(self.model.table, data["input_ids"])})

    def get_reference_policy_logprobs(self, data, micro_batch_size=None):
        return BatchedDataDict({"reference_logprobs": fakes.Bigrams.of(self.model.reference, data["input_ids"])})

    def train(self, data, loss_fn, eval_mode=False, gbs=None, mbs=None):
        return self._result(self.model.train(data, loss_fn))

    def begin_train_step(self, loss_fn, gbs, mbs):
        self.model.begin(loss_fn)

    def train_microbatch(self, data):
        self.model.backward(data, 1.0, 1.0)

    def finish_train_step(self):
        return self._result(self.model.finish(divide=True))

    def abort_train_step(self):
        fakes.record("aborted")
        self.model.begin(None)

    @staticmethod
    def _result(result):
        return {**result, "global_loss": result["loss"]}


class WorkerGroup:
    """The part of NeMo-RL's ``RayWorkerGroup`` that ``TQPolicy`` uses, with one worker."""

    def __init__(self, worker):
        self.worker = worker
        self.workers = [worker]
        self.cluster = fakes.Cluster()

    def run_all_workers_sharded_data(self, method, meta, common_kwargs=None, **layout):
        (share,) = meta
        return self.run_all_workers_single_data(method, meta=share, **(common_kwargs or {}))

    def run_all_workers_single_data(self, method, **kwargs):
        return [getattr(self.worker, method).remote(**kwargs)]

    def get_all_worker_results(self, futures):
        return ray.get(futures)


def _one(axis):
    return 1


def _init(self, config, dp_cfg, **kwargs):
    self.cfg = config
    self.dp_cfg = dp_cfg
    self.dp_client = build_data_plane_client(dp_cfg, bootstrap=True)
    self.tq_partition_id = "train"
    self._router_replay_enabled = False
    self.flops_tracker = None
    self.use_dynamic_batches = self.use_sequence_packing = False
    self.sharding_annotations = types.SimpleNamespace(get_axis_size=_one)
    self.worker_group = WorkerGroup(Worker.remote(config))
    ray.get(self.worker_group.run_all_workers_single_data("setup_data_plane", cfg=dp_cfg))


# In the class itself, in every process that opens one: what wraps its other methods wraps those of NeMo-RL.
tq_policy.TQPolicy.__init__ = _init
for name, method in vars(fakes.Idle).items():
    if name == "__del__" or not name.startswith("__"):
        setattr(tq_policy.TQPolicy, name, method)
