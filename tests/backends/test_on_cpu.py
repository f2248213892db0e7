"""on_cpu: what GPU-only frameworks ask of a machine is answered by the CPU, and nothing is left behind."""

import contextlib
import importlib
import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

import parity
from conformance.backends import on_cpu as module

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on_cpu replaces no device where CUDA is available")
ABSENT = "no_such_framework"


def state() -> list[Any]:
    replaced = [vars(owner).get(name) for owner, names in module._REPLACEMENTS for name in names]
    return [*replaced, importlib.util.find_spec, [*sys.meta_path], _get_current_function_mode_stack()]


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda", 0), 0])
def test_cuda_means_the_cpu(device: Any) -> None:
    with parity.on_cpu():
        layer = torch.nn.Linear(2, 2).to(device).cuda()
        tensors = [torch.zeros(1, device=device), torch.zeros(1).to(device), layer.weight, torch.ones(1).pin_memory()]
        tensors.append(torch.zeros(1, dtype=torch.float16).to(device, torch.float32))
    assert {tensor.device.type for tensor in tensors} == {"cpu"}
    assert tensors[-1].dtype == torch.float32


def test_the_device_answers() -> None:
    with parity.on_cpu():
        cuda = torch.cuda
        cuda.set_device(cuda.current_device())
        assert cuda.memory_allocated() == cuda.max_memory_reserved() == 0
        assert cuda.get_device_properties(0).total_memory > 0
        with cuda.stream(cuda.Stream()):
            cuda.Event(enable_timing=True).record()
        cuda.current_stream().wait_stream(cuda.default_stream())
        cuda.synchronize()
        saved = cuda.get_rng_state()
        first = torch.rand(3, device="cuda")
        cuda.set_rng_state(saved)
        assert torch.equal(first, torch.rand(3))
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
        assert not cuda.is_available()


def test_dynamo_tells_the_names_of_torch_cuda_apart() -> None:
    from torch._dynamo import trace_rules

    with parity.on_cpu():
        assert torch.cuda.synchronize in trace_rules.get_torch_obj_rule_map.__wrapped__()


def test_a_mesh_of_cuda_is_one_of_the_cpu(tmp_path: Any) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        with parity.on_cpu():
            mesh = dist.init_device_mesh("cuda", (1,), mesh_dim_names=("dp",))
            assert dist.tensor.distribute_tensor(torch.ones(2), mesh).to_local().device.type == "cpu"
        assert mesh.device_type == "cpu"
    finally:
        dist.destroy_process_group()


def test_absent_packages_are_imported_as_stand_ins() -> None:
    with parity.on_cpu(stand_ins=(ABSENT, "torch")):
        from no_such_framework.inputs import Prompt  # type: ignore[import-not-found]

        class Own(Prompt):  # type: ignore[misc]
            pass

        assert importlib.util.find_spec(ABSENT) is None  # as other packages ask whether it is installed
        assert importlib.util.find_spec("torch") is not None
        with pytest.raises(ImportError, match=r"no_such_framework\.inputs\.Prompt was called, and no_such_framework"):
            Own()
        with pytest.raises(ImportError, match=r"no_such_framework\.inputs\.ops\.Layer was called"):
            importlib.import_module("no_such_framework.inputs").ops.Layer()  # as in annotations
    assert not [name for name in sys.modules if name.startswith((ABSENT, "flash_attn"))]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(ABSENT)


def test_a_package_that_was_hidden_is_hidden_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """impl.megatron hides TransformerEngine by None; then an import of it fails, unless there is a stand-in."""
    monkeypatch.setitem(sys.modules, "no_such_package", None)
    with parity.on_cpu(stand_ins=("no_such_package",)):
        assert importlib.import_module("no_such_package.inner").__name__ == "no_such_package.inner"
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_package.inner")
    assert sys.modules["no_such_package"] is None


def test_padding_of_flash_attn_works() -> None:
    with parity.on_cpu():
        padding = importlib.import_module("flash_attn.bert_padding")
    rows, mask = torch.arange(12.0).view(2, 3, 2), torch.tensor([[1, 1, 0], [0, 1, 0]])
    tokens, indices, starts, longest, lengths = padding.unpad_input(rows, mask)
    assert torch.equal(tokens, rows[mask.bool()])
    assert torch.equal(padding.index_first_axis(rows.flatten(0, 1), indices), tokens)
    assert (starts.tolist(), starts.dtype, longest, lengths.tolist()) == ([0, 2, 3], torch.int32, 2, [2, 1])
    assert torch.equal(padding.pad_input(tokens, indices, 2, 3), rows * mask[..., None])


def test_nothing_is_left_after_an_error_inside_of_modes() -> None:
    before = state()
    with contextlib.suppress(RuntimeError), parity.on_cpu(stand_ins=(ABSENT,)), parity.on_cpu():
        assert state() != before
        raise RuntimeError
    assert state() == before
    context, other = parity.on_cpu(), TorchFunctionMode()
    context.__enter__()
    other.__enter__()  # entered later, left later
    context.__exit__(None, None, None)
    assert _get_current_function_mode_stack() == [other]
    other.__exit__(None, None, None)
    assert state() == before


def test_with_a_gpu_only_absent_packages_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    replaced = len(state()) - 3  # the last three are of imports and modes
    before = state()
    with parity.on_cpu(stand_ins=(ABSENT,)):
        importlib.import_module(ABSENT)
        assert state()[:replaced] == before[:replaced]
    assert state() == before


class Precision:
    @staticmethod
    def to_dtype(name: str) -> torch.dtype:
        return TABLE[name]


TABLE = {"fp32": torch.float32, "bf16": torch.bfloat16}
FUNCTIONS = SimpleNamespace(to_dtype=lambda name: TABLE[name], TABLE=TABLE)


@pytest.mark.parametrize("owner", [Precision, FUNCTIONS])
def test_float64_is_where_float32_was(owner: Any, request: pytest.FixtureRequest) -> None:
    with parity.float64_for(owner, "to_dtype"):
        assert owner.to_dtype("fp32") == torch.float32  # the default dtype is not float64: another tier
    before = torch.get_default_dtype()
    request.addfinalizer(lambda: torch.set_default_dtype(before))
    torch.set_default_dtype(torch.float64)
    with parity.float64_for(owner, "to_dtype"):
        assert [owner.to_dtype(name) for name in TABLE] == [torch.float64, torch.bfloat16]
    with parity.float64_for(FUNCTIONS, "TABLE"):
        assert TABLE["fp32"] == torch.float64
    assert owner.to_dtype("fp32") == TABLE["fp32"] == torch.float32


def test_optimizers_step_where_torch_is_built_for_cuda_and_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    with module.cuda_is_cpu():
        torch.optim.AdamW([parameter]).step()
    assert (parameter != 1).all()
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
