"""Stand-ins are put up when their module is imported, in a process of their own: they are for its whole life."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nemo_geomask.rehearsal.standins.imports import STAND_INS

pytestmark = pytest.mark.slow

REGISTER = "import nemo_geomask.rehearsal.standins as standins; standins.register()\n"


def in_a_process(code):
    done = subprocess.run([sys.executable, "-c", REGISTER + code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_registering_imports_nothing_heavy():
    assert in_a_process("import sys; print('torch' in sys.modules)") == ["False"]


def test_cuda_means_the_cpu():
    code = """
import torch
print(torch.zeros(2, device="cuda").device, torch.ones(2).to("cuda:0").device, torch.ones(2).cuda().device)
print(torch.tensor([1.0], device=torch.cuda.current_device(), pin_memory=True).device)
print(torch.nn.Linear(2, 2).to(torch.device("cuda")).weight.device, torch.ones(2).new_zeros(2, device="cuda").device)
with torch.autocast(device_type="cuda", dtype=torch.bfloat16), torch.cuda.stream(torch.cuda.Stream()):
    print(torch.ones(2, 2).matmul(torch.ones(2, 2)).dtype)
torch.cuda.synchronize(); torch.cuda.Event().record(); print(torch.cuda.memory_allocated())
print(torch.ones(2).to(torch.float16).dtype)
"""
    assert in_a_process(code) == [*["cpu"] * 6, "torch.bfloat16", "0", "torch.float16"]


def test_nccl_means_gloo():
    code = """
import torch.distributed as dist
dist.init_process_group(backend="nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=None)
print(dist.get_backend(), dist.get_backend(dist.new_group([0], backend="nccl")))
mesh = dist.init_device_mesh("cuda", (1,))
print(mesh.device_type); dist.barrier(device_ids=[0])
"""
    assert in_a_process(code) == ["gloo", "gloo", "cpu"]


def test_they_are_patches_with_a_way_back():
    code = """
import torch
from nemo_geomask.integrations.nemo_rl import patch
patch.undo_all()
print(torch.zeros.__module__, type(torch.zeros).__name__)
try:
    torch.zeros(1, device="cuda")
except (AssertionError, RuntimeError):
    print("refused")
"""
    assert in_a_process(code)[-1] == "refused"


def test_without_them_modules_that_are_there_are_python_s_own():
    code = """
import importlib, sys
import nccl.core.communicator
print(nccl.core.communicator.Communicator.__name__, "json" in sys.modules or importlib.import_module("json").__name__)
import modelopt.torch.quantization as mtq
print(mtq.quantize(1))
try:
    import no_such_module
except ModuleNotFoundError:
    print("missing")
"""
    assert in_a_process(code)[-1] == "missing"


@pytest.mark.parametrize("place", sorted(set(STAND_INS.values())))
def test_every_stand_in_names_who_needs_it(place):
    import importlib

    home, _, name = place.partition(":")
    function = getattr(importlib.import_module(f"nemo_geomask.rehearsal.standins.{home}"), name)
    documented = function.__doc__ or ""
    assert documented
