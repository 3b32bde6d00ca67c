"""The Triton kernels: in the interpreter against loops in float64, compiled for what they move, and their dispatch."""

import os
import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from nemo_geomask.errors import ArgumentError
from nemo_geomask.kernels import choose, gpu
from nemo_geomask.parallel import vocab_parallel_logprobs
from nemo_geomask.parallel.local_processes import run_ranks
from tests.helpers.from_logits import CONFIGS, check_from_logits
from tests.helpers.logprobs import case, check, check_digits, loops, ours, shifted

pytestmark = [
    pytest.mark.slow,  # an interpreter's
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels"),
    # Arithmetic on -inf, which the kernels mean to do.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.mark.parametrize(
    ("rows", "width", "valid", "temperature"),
    [
        pytest.param(13, 37, None, 1.0, marks=pytest.mark.quick),
        (3, 4096, None, 0.6),
        (5, 5001, 4100, 1.3),
        (2, 70_001, None, 1.0),
        (3, 1, None, 1.0),
    ],
)
def test_interpreted_equals_loops(rows, width, valid, temperature):
    logits, targets, g, h = case(0, rows=rows, width=width)
    targets = targets.where(targets < (valid or width), torch.tensor(0))
    found = ours(logits, targets, g, h, temperature=temperature, vocab_size=valid, kernel="triton")
    check(found, loops(logits, targets, g, h, temperature=temperature, valid=valid))


def test_digits_of_a_row_in_two_parts():
    inputs = shifted(1, 1e4, rows=2, width=66_000)
    check_digits(ours(*inputs, temperature=0.1, kernel="triton"), loops(*inputs, temperature=0.1), 0.1)


def test_columns_may_lie_anywhere():
    logits, targets, g, h = case(1, rows=6, width=4500)
    expected = loops(logits, targets, g, h)
    wide = torch.zeros(6, 2 * 4500)
    wide[:, ::2] = logits
    for layout in (logits.T.contiguous().T, wide[:, ::2], torch.cat([logits, logits], dim=1)[:, :4500]):
        leaf = layout.detach().requires_grad_()
        logp, entropy = vocab_parallel_logprobs(leaf, targets, entropy=True, kernel="triton")
        ((logp * g).sum() + (entropy * h).sum()).backward()
        check((logp.detach().numpy(), entropy.detach().numpy(), leaf.grad.numpy()), expected)


def test_row_alone_equals_row_in_a_batch_bit_for_bit():
    logits, targets, g, h = case(6, rows=7, width=66_000)
    batch = ours(logits, targets, g, h, kernel="triton")
    for row in (0, 3, 6):
        one = slice(row, row + 1)
        alone = ours(logits[one], targets[one], g[one], h[one], kernel="triton")
        for mine, whole in zip(alone, batch, strict=True):
            assert np.array_equal(mine, whole[one])


def test_splits_depend_on_the_vocabulary_alone():
    assert [gpu.count_splits(width) for width in (1, 65_536, 65_537, 151_936, 1 << 20)] == [1, 1, 2, 2, 2]


# The kernels get one number a row from a loss: of tokens, of sequences, with and without clips and masks.
BY_KERNELS = ("ppo", "gspo", "reinforce", "dppo-corrected", "sequence_ratio-corrected")


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        *((name, "torch") for name in CONFIGS),
        *(pytest.param(name, "triton", marks=() if name == "gspo" else pytest.mark.long) for name in BY_KERNELS),
    ],
)
def test_every_variant_from_logits(name, kernel):
    check_from_logits(name, kernel=kernel)


def _sharded(rank, world):
    import torch.distributed as dist

    logits, targets, g, h = case(11)
    sizes = [37 // world + (r < 37 % world) for r in range(world)]
    start = sum(sizes[:rank])
    shard = logits[:, start : start + sizes[rank]]
    return ours(shard, targets, g, h, group=dist.group.WORLD, shard_sizes=sizes, temperature=0.5, kernel="triton")


@pytest.mark.slow
def test_sharded_equals_loops():
    logits, targets, g, h = case(11)
    logp, entropy, grad = loops(logits, targets, g, h, temperature=0.5)
    parts = run_ranks(2, _sharded)
    for mine in parts:
        check(mine[:2], (logp, entropy))
    check([np.concatenate([mine[2] for mine in parts], axis=1)], [grad])


def test_dispatch_says_what_it_chose_and_why():
    logits = torch.zeros(1, 2)
    assert choose(logits)[:2] == ("torch", "the logits are on cpu")
    assert choose(logits, "triton")[:2] == ("triton", "kernel='triton' was passed")
    with pytest.raises(ArgumentError, match="kernel must be one of auto, triton, torch, but it is 'cuda'"):
        choose(logits, "cuda")


def test_triton_on_a_cpu_needs_its_interpreter(monkeypatch):
    monkeypatch.setattr(gpu, "INTERPRETED", False)
    with pytest.raises(ArgumentError, match="TRITON_INTERPRET=1"):
        choose(torch.zeros(1, 2), "triton")


# Compiles for an H100/H200 without one, in a process of its own since the interpreter is on in this one.
_COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from nemo_geomask.kernels import gpu, triton_kernels
from nemo_geomask.kernels.cpu import NUM_STATISTICS

def ptx(kernel, constants):
    pointers = {"logits": "*bf16", "out": "*bf16", "targets": "*i64"}
    floats = ("scale", "base2_scale")
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants
        else pointers.get(name, "*fp32") if name in POINTERS
        else "fp32" if name in floats else "i32"
        for name in names
    }
    # What a call with V = 151936 and contiguous rows specialises on.
    aligned = [n for n in names if n in POINTERS or n in ("width", "valid", "columns", "stride_row", "out_row")]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, values, attributes)
    return compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": gpu.WARPS}).asm["ptx"]

POINTERS = (
    "logits", "targets", "out", "statistics", "max_logits", "sums_exp", "grads_logprob", "entropies", "grads_entropy"
)
shape = {"DEPTH": gpu.DEPTH, "LANES": gpu.LANES, "VECTOR": gpu.VECTOR}
for entropy in (False, True):
    print("=====", "forward", entropy)
    constants = {"stride_column": 1, "ENTROPY": entropy, "NUM_STATISTICS": NUM_STATISTICS, **shape}
    print(ptx(triton_kernels.row_statistics_kernel, constants))
    print("=====", "backward", entropy)
    tile = {"STRIPE": gpu.STRIPE, "TILE": gpu.TILE}
    constants = {"stride_column": 1, "out_column": 1, "ENTROPY": entropy, **tile}
    print(ptx(triton_kernels.row_gradients_kernel, constants))
"""


def test_compiled_kernels_move_six_bytes_an_element():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(_COMPILE)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    kernels = re.split(r"^===== (\w+ \w+)$", done.stdout, flags=re.M)[1:]
    assert len(kernels) == 8
    for name, ptx in zip(kernels[::2], kernels[1::2], strict=True):
        loops_ = _loops(ptx)
        reading = [body for body in loops_ if "ld.global" in body]
        assert len(reading) == 1, name
        read, written = _bytes(reading[0], "ld.global"), _bytes(reading[0], "st.global")
        # Of one thread in one turn, for its share of the tile's columns.
        columns = gpu.TILE / (32 * gpu.WARPS)
        assert read / columns == 2, name
        assert written / columns == (2 if name.startswith("backward") else 0), name
        # Nothing in a turn waits for another thread, and a row that does not train is only written.
        assert "bar.sync" not in reading[0]
        assert "atom" not in ptx
        assert "red.global" not in ptx
        if name.startswith("backward"):
            silent = [body for body in loops_ if "st.global" in body and "ld.global" not in body]
            assert [_bytes(body, "st.global") / columns for body in silent] == [2], name


def _loops(ptx):
    """Bodies of the innermost loops: from a label to a branch back to it, without another label between."""
    found, label, body = [], None, []
    for line in ptx.splitlines():
        name = re.match(r"\s*(\$L__BB\w+):", line)
        if name:
            label, body = name[1], []
        elif label is not None:
            body.append(line)
            if re.search(rf"bra(\.uni)?\s+{re.escape(label)};", line):
                found.append("\n".join(body))
    return found


def _bytes(body, instruction):
    """Bytes a thread moves by ``instruction`` (``ld.global`` or ``st.global``) in one run through ``body``."""
    total = 0
    for kind in re.findall(rf"{re.escape(instruction)}(\S*)", body):
        vector = re.search(r"\.v(\d)", kind)
        total += int(re.search(r"\.b(\d+)$", kind)[1]) // 8 * (int(vector[1]) if vector else 1)
    return total
