"""Stand-ins are put up when their module is imported, in a process of their own: they are for its whole life."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from nemo_geomask.tools.rehearse.cpu_shims.nemo_rl_shim import IDENTITY, ports

pytestmark = pytest.mark.slow

REGISTER = "import nemo_geomask.tools.rehearse.cpu_shims as standins; standins.register()\n"


def in_a_process(code, *, path=None):
    environment = dict(os.environ)
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(path), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", REGISTER + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
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


def test_a_device_in_force_is_still_in_force():
    """Where it is not, transformers' from_pretrained leaves rotary frequencies as the allocator has them: gen_kl_error
    of 0.44 to 0.75 under Automodel, which keeps that model."""
    code = """
import torch
with torch.device("meta"):
    print(torch.zeros(2).device, torch.zeros(2, device="cpu").device)
with torch.device("cuda"):
    print(torch.arange(2).device)
"""
    assert in_a_process(code) == ["meta", "cpu", "cpu"]


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
from nemo_geomask.hosts.nemo_rl import patch
patch.undo_all()
print(torch.zeros.__module__, type(torch.zeros).__name__)
try:
    torch.zeros(1, device="cuda")
except (AssertionError, RuntimeError):
    print("refused")
"""
    assert in_a_process(code)[-1] == "refused"


@pytest.mark.parametrize("is_installed", [False, True])
def test_modules_that_can_t_be_there_are_empty_and_no_others(tmp_path, is_installed):
    """Transformers' image processors can't where torchvision is not installed."""
    if is_installed:
        (tmp_path / "nccl.py").write_text("real = True", encoding="utf-8")
        (tmp_path / "torchvision.py").touch()
    code = """
import importlib.util, nccl
print("real" if nccl.real is True else importlib.import_module("nccl.core.communicator").Communicator().__module__)
from nemo_geomask.tools.rehearse.cpu_shims.import_hook import AbsentModules
print(AbsentModules().find_spec("transformers.models.qwen2_vl.image_processing_qwen2_vl", None) is None)
print(importlib.util.find_spec("no_such_module") is None)
"""
    has_torchvision = is_installed or importlib.util.find_spec("torchvision") is not None
    module = "real" if is_installed else "nccl.core.communicator"
    assert in_a_process(code, path=tmp_path) == [module, str(has_torchvision), "True"]


@pytest.mark.parametrize(("source", "found"), [("import transformer_engine.pytorch as te", "empty"), ("LoRA = 1", "1")])
def test_an_old_version_of_a_module_is_absent_and_a_later_one_is_not(tmp_path, source, found):
    folder = tmp_path / "megatron" / "bridge" / "peft"
    folder.mkdir(parents=True)
    for place in (folder, folder.parent, folder.parent.parent):
        (place / "__init__.py").touch()
    (folder / "lora.py").write_text(f"import math\n{source}\n", encoding="utf-8")
    code = "from megatron.bridge.peft.lora import LoRA; print('empty' if isinstance(LoRA, type) else LoRA)"
    assert in_a_process(code, path=tmp_path) == [found]


def test_a_stand_in_comes_after_its_module_and_leaves_its_loader(tmp_path):
    (tmp_path / "host.py").write_text("value = 1", encoding="utf-8")
    (tmp_path / "our").mkdir()
    (tmp_path / "our" / "standins.py").write_text(
        "from nemo_geomask.hosts.nemo_rl.patch import attribute\n"
        "def host(module):\n    yield attribute(module, 'value', lambda original: original + 1)\n",
        encoding="utf-8",
    )
    code = """
import sys
from nemo_geomask.tools.rehearse.cpu_shims.import_hook import AfterImport
sys.meta_path.insert(0, AfterImport({"host": "our.standins:host"}))
import host
print(host.value, type(host.__loader__).__name__, type(host.__spec__.loader).__name__)
"""
    assert in_a_process(code, path=tmp_path) == ["2", "SourceFileLoader", "SourceFileLoader"]


def test_engines_of_two_rehearsals_look_for_ports_in_two_places(monkeypatch):
    found = set()
    for identity in ("0123456789ab", "0123456789ac"):
        monkeypatch.setenv(IDENTITY, identity)
        module = SimpleNamespace(DEFAULT_VLLM_PORT_RANGE_LOW=7000)
        (patch,) = ports(module)
        patch.apply()
        # Four engines, a hundred ports each, below what NeMo-RL keeps for others.
        assert 7000 <= module.DEFAULT_VLLM_PORT_RANGE_LOW < 8600 - 4 * 100
        found.add(module.DEFAULT_VLLM_PORT_RANGE_LOW)
        patch.undo()
        assert module.DEFAULT_VLLM_PORT_RANGE_LOW == 7000
    assert len(found) == 2
    assert list(ports(SimpleNamespace())) == []


def test_projections_of_latent_experts_need_no_transformer_engine():
    pytest.importorskip("megatron.core.transformer.moe.moe_layer")
    code = """
import torch
from types import SimpleNamespace
from megatron.core.transformer.moe import moe_layer
config = SimpleNamespace(params_dtype=torch.float32, sequence_parallel=True)
layer = moe_layer.TELinear(4, 2, config=config, init_method=torch.nn.init.ones_, bias=False, parallel_mode="duplicated")
output, bias = layer(torch.ones(3, 4))
print(moe_layer.HAVE_TE, output.tolist() == [[4.0, 4.0]] * 3, bias, layer.parallel_mode, layer.weight.sequence_parallel)
"""
    assert in_a_process(code) == ["True", "True", "None", "duplicated", "True"]


def test_bridges_own_fusions_are_cleared():
    """llama_bridge.py sets apply_rope_fusion itself, whatever the recipe has."""
    from nemo_geomask.tools.rehearse.cpu_shims.megatron_shim import fusions

    class TransformerConfig:
        apply_rope_fusion = persist_layer_norm = True

        def finalize(self):
            assert not self.apply_rope_fusion
            assert not hasattr(self, "moe_permute_fusion")

    module = SimpleNamespace(TransformerConfig=TransformerConfig)
    for patch in fusions(module):
        patch.apply()
    config = TransformerConfig()
    config.finalize()
    assert config.persist_layer_norm is False


def test_recomputed_activations_have_gradients():
    """As under activation_checkpointing, which stores the states of CUDA's generators."""
    pytest.importorskip("megatron.core.tensor_parallel.random")
    code = """
import torch
from megatron.core.tensor_parallel import random
x = torch.ones(3, requires_grad=True)
random.CheckpointFunction.apply(lambda value: value.square(), False, x).sum().backward()
print(x.grad.tolist() == [2.0] * 3)
"""
    assert in_a_process(code) == ["True"]


def test_norms_around_zero_multiply_by_one_more_than_their_weight():
    pytest.importorskip("megatron.core.transformer.torch_norm")
    code = """
import torch
from types import SimpleNamespace
from megatron.core.transformer.torch_norm import WrappedTorchNorm
off = dict.fromkeys(("persist_layer_norm", "sequence_parallel", "memory_efficient_layer_norm"), False)
config = SimpleNamespace(**off, normalization="RMSNorm", layernorm_zero_centered_gamma=True)
norm = WrappedTorchNorm(config, 3, eps=1e-6)
x = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16)
print(type(norm).__name__, norm.weight.tolist() == [0.0] * 3)
norm.weight.data.fill_(0.5)
wide = x.double()
expected = 1.5 * wide / (wide.square().mean() + 1e-6).sqrt()
print(torch.allclose(norm(x).double(), expected, rtol=0.01), norm(x).dtype)
config.normalization = "LayerNorm"
try:
    WrappedTorchNorm(config, 3)
except AssertionError:
    print("refused")
"""
    assert in_a_process(code) == ["RMSNorm", "True", "True", "torch.bfloat16", "refused"]


def test_experts_have_their_published_names_on_the_way_to_the_engine():
    """As vLLM reads them; the weights of other models, and those of an adapter, stay as they are."""
    code = """
import types, torch
from nemo_geomask.hosts.nemo_rl import patch
from nemo_geomask.tools.rehearse.cpu_shims import nemo_rl_shim
worker = types.SimpleNamespace(_maybe_adapt_tensor_to_hf=lambda model, name, tensor: [(name, tensor)])
patch.apply_all(nemo_rl_shim.stacked_experts(worker))
stacked = torch.arange(12.0).reshape(2, 3, 2)
name = "backbone.layers.1.mixer.experts.up_proj"
answer = worker._maybe_adapt_tensor_to_hf(None, name, stacked)
print([key for key, _ in answer] == [f"backbone.layers.1.mixer.experts.{n}.up_proj.weight" for n in range(2)])
print(torch.equal(torch.stack([weight for _, weight in answer]), stacked))
for model, key in ((None, "model.layers.1.mlp.experts.up_proj"), (types.SimpleNamespace(state_dict_adapter=1), name)):
    print([each for each, _ in worker._maybe_adapt_tensor_to_hf(model, key, stacked)] == [key])
"""
    assert in_a_process(code) == ["True"] * 4


def test_the_bias_of_an_expert_can_be_added_in_place():
    """As mlp.py does for the experts of gpt-oss."""
    pytest.importorskip("megatron.core.tensor_parallel.layers")
    code = """
import torch
from megatron.core.tensor_parallel import layers
torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
group = torch.distributed.group.WORLD
x = torch.ones(3, requires_grad=True)
output = layers.reduce_from_tensor_model_parallel_region(2 * x, group=group)
output += 1
output.sum().backward()
print(output.tolist() == [3.0] * 3, x.grad.tolist() == [2.0] * 3)
"""
    assert in_a_process(code) == ["True", "True"]
