"""A worker that NeMo-RL's ``RayWorkerGroup`` can start, and that computes the loss it is sent."""

import ray


@ray.remote
class Worker:
    def __init__(self, config, **kwargs):
        pass

    def is_alive(self):
        return True

    def train(self, loss_fn):
        import torch

        data = {name: torch.zeros(1, 3) for name in ("advantages", "prev_logprobs", "generation_logprobs")}
        data |= {"token_mask": torch.ones(1, 3), "sample_mask": torch.ones(1)}
        curr = torch.full((1, 2), -0.1, requires_grad=True)
        loss, metrics = loss_fn(
            next_token_logprobs=curr, data=data, global_valid_seqs=torch.tensor(1), global_valid_toks=torch.tensor(2)
        )
        loss.backward()
        return type(loss_fn).__name__, metrics["probs_ratio"], self.is_prepared()

    def is_prepared(self):
        """Whether the packing wrappers of this process are replaced."""
        from nemo_rl.algorithms.loss import wrapper

        return hasattr(wrapper.SequencePackingLossWrapper.__call__, "__wrapped__")
