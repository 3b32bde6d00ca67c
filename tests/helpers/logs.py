"""Logs as NeMo-RL writes them."""

import json

import numpy as np


def log_row(tokens, *, prompt, gen=None, prev=None, width=None, reward=1.0, sample_mask=1.0, advantage=0.5, agent=None):
    """One line's object of train_data_step{N}.jsonl: every value in a list of one, padded at the right.

    ``agent`` is the name of NeMo-Gym's agent; None: the line has none.
    """
    length = len(tokens)
    width = width or length

    def padded(values):
        return [np.concatenate([values, np.zeros(width - length, np.asarray(values).dtype)]).tolist()]

    inside = (np.arange(length) >= prompt).astype(float)
    gen = -0.5 * inside if gen is None else gen
    return {
        **({} if agent is None else {"agent_ref": [{"type": "responses_api_agents", "name": agent}]}),
        "content": [["some [text]"]],
        "rewards": [reward],
        "input_lengths": [length],
        "token_ids": padded(np.asarray(tokens)),
        "token_loss_mask": padded(inside),
        "sample_loss_mask": [sample_mask],
        "advantages": padded(np.full(length, advantage)),
        "generation_logprobs": padded(np.asarray(gen)),
        "prev_logprobs": padded(np.asarray(gen if prev is None else prev)),
    }


def write_log(directory, step, rows):
    """As NeMo-RL's Logger.log_batched_dict_as_jsonl."""
    path = directory / f"train_data_step{step}.jsonl"
    path.write_text("".join(json.dumps({**row, "idx": index}) + "\n" for index, row in enumerate(rows)))
    return path


def log_rows(block):
    """Those of a record's block, padded to its longest sequence."""
    width = int(np.diff(block.offsets).max())
    for index in range(len(block)):
        here = slice(block.offsets[index], block.offsets[index + 1])
        tokens = {name: values[here] for name, values in block.tokens.items()}
        row = log_row(
            tokens["tokens"],
            prompt=int(block.sequences["prompt_length"][index]),
            gen=tokens["gen"],
            prev=tokens["prev"],
            width=width,
            reward=float(block.sequences["reward"][index]),
            advantage=float(tokens["advantages"][tokens["mask"]][0]),
            agent=block.sequences["environment"][index] if "environment" in block.sequences else None,
        )
        row["token_loss_mask"] = [np.pad(tokens["mask"].astype(float), (0, width - len(tokens["mask"]))).tolist()]
        yield row
