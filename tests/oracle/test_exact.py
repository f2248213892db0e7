"""Checks the exact tier: casts to a lower precision in a float64 computation give float64, nothing else changes, and
LeakWatch finds the remaining ones."""

import ast
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load, load_file, save_file
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

from conformance.numerics.float64_tier import LeakWatch, _LiftBelowAutograd, _LiftInPython, exact_tier
from conformance.worker.evidence import Watch

THIRD = 1 / 3  # has no exact float32
X = torch.tensor([THIRD, -2 * THIRD, 5 * THIRD], dtype=torch.float64)
FLOAT_TENSOR: Any = torch.FloatTensor  # as with "from torch import FloatTensor": the tier cannot replace this name
LOW_PRECISION = torch.zeros(1, dtype=torch.float32)

# Each asks for X, or for THIRD, in a lower precision.
DOWNCASTS: dict[str, Callable[[], Tensor]] = {
    ".float()": lambda: X.float(),
    ".half()": lambda: X.half(),
    ".bfloat16()": lambda: X.bfloat16(),
    ".to(dtype)": lambda: X.to(torch.float32),
    ".to(dtype=)": lambda: X.to(dtype=torch.bfloat16),
    ".to(device, dtype)": lambda: X.to("cpu", torch.float32),
    ".to(other)": lambda: X.to(LOW_PRECISION),
    ".type(dtype)": lambda: X.type(torch.float32),
    ".type(constructor)": lambda: X.type(FLOAT_TENSOR),
    ".type(name)": lambda: X.type("torch.HalfTensor"),
    ".type_as(other)": lambda: X.type_as(LOW_PRECISION),
    "torch.tensor(tensor, dtype=)": lambda: torch.as_tensor(X, dtype=torch.float32),
    "sum(dtype=)": lambda: torch.stack([x.sum(dtype=torch.float32) for x in X]),
    "softmax(dtype=)": lambda: F.softmax(X, dim=0, dtype=torch.float32).log() + X.logsumexp(0),
    "softmax(dim, dtype)": lambda: torch.softmax(X, 0, torch.float32).log() + X.logsumexp(0),
    "Module.float()": lambda: _parameter_module().float().weight.detach(),
    "Module.to(dtype)": lambda: _parameter_module().to(torch.bfloat16).weight.detach(),
}
NAMED_OTHERWISE = {".to(other)", ".type(constructor)", ".type(name)", ".type_as(other)"}  # than by a dtype
NOT_COMPILED = NAMED_OTHERWISE | {"Module.float()", "Module.to(dtype)"}  # these make a module
FACTORIES: dict[str, Callable[[], Tensor]] = {
    "torch.tensor(number)": lambda: torch.tensor(THIRD),
    "torch.tensor(dtype=)": lambda: torch.tensor([THIRD], dtype=torch.float32),
    "new_tensor(dtype=)": lambda: X.new_tensor([THIRD], dtype=torch.float16),
    "torch.FloatTensor(list)": lambda: torch.FloatTensor([THIRD]),
    "torch.full(dtype=)": lambda: torch.full((2,), THIRD, dtype=torch.bfloat16),
    "zeros(dtype=)": lambda: torch.zeros(2, dtype=torch.float32) + THIRD,
    "zeros_like(dtype=)": lambda: torch.zeros_like(X, dtype=torch.float32) + THIRD,
    "new_zeros(dtype=)": lambda: X.new_zeros(2, dtype=torch.float32) + THIRD,
    "empty().copy_()": lambda: torch.empty(3, dtype=torch.float32).copy_(X)[:1],
    "out=": lambda: torch.add(X, 0, out=torch.empty(3, dtype=torch.float32))[:1],
    "torch.zeros(2)": lambda: torch.zeros(2) + THIRD,
}
INTEGERS: dict[str, Callable[[Tensor], Tensor]] = {
    "positions.float()": lambda i: i.float(),
    "positions.to(dtype)": lambda i: i.to(torch.float32),
    "arange(dtype=)": lambda i: torch.arange(0, 3, dtype=torch.float32),
    "positions.type(constructor)": lambda i: i.type(FLOAT_TENSOR),
    "mask.float()": lambda i: (i > 0).float(),
}


def _parameter_module() -> Any:
    module = nn.Module()
    module.weight = nn.Parameter(X.clone())
    return module


@pytest.mark.parametrize("name", DOWNCASTS)
def test_a_downcast_of_float64_data_keeps_every_digit(name: str) -> None:
    assert not torch.allclose(DOWNCASTS[name]().double(), X, rtol=1e-12), "without the tier digits are lost"
    with exact_tier():
        lifted = DOWNCASTS[name]()
    assert lifted.dtype == torch.float64
    torch.testing.assert_close(lifted, X, rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_asked_for_a_lower_precision_makes_float64(name: str) -> None:
    assert FACTORIES[name]().dtype != torch.float64
    with exact_tier():
        made = FACTORIES[name]()
    assert made.dtype == torch.float64
    assert set(made.flatten().tolist()) == {THIRD}


@pytest.mark.parametrize("name", INTEGERS)
def test_floats_made_from_integers_are_float64(name: str) -> None:
    positions = torch.tensor([0, 1, 2])
    with exact_tier():
        made = INTEGERS[name](positions)
    assert made.dtype == torch.float64
    assert made.tolist() == INTEGERS[name](positions).tolist()


def test_integer_and_bool_results_are_untouched() -> None:
    with exact_tier():
        assert X.to(torch.int64).dtype == torch.int64
        assert X.bool().dtype == torch.bool
        assert torch.tensor([1, 2]).dtype == torch.int64
        assert (X > 0).sum(dtype=torch.int32).dtype == torch.int32
        assert torch.tensor([True]).to(torch.uint8).dtype == torch.uint8


def test_inference_mode_is_lifted_too() -> None:
    with exact_tier(), torch.inference_mode():
        assert torch.equal(X.float(), X)
        assert torch.softmax(X, 0, torch.float32).dtype == torch.float64


def test_tensors_that_already_are_float32_are_left_alone() -> None:
    data = torch.ones(3)
    with exact_tier():
        assert data.float() is data
        assert data.to(torch.float32) is data
        assert data.to(torch.bfloat16).dtype == torch.bfloat16
        assert data.sum(dtype=torch.float32).dtype == torch.float32
        assert data.double().dtype == torch.float64


def test_float32_files_are_read_as_they_are(tmp_path: Path) -> None:
    stored = torch.tensor([1.5, -2.0, 0.25])
    torch.save(stored, tmp_path / "x.pt")
    save_file({"x": stored}, tmp_path / "x.safetensors")
    with exact_tier():
        pickled = torch.load(tmp_path / "x.pt")
        mapped = load_file(tmp_path / "x.safetensors")["x"]
        copied = load((tmp_path / "x.safetensors").read_bytes())["x"]
    for read in (pickled, mapped, copied):
        assert read.dtype == torch.float32
        assert torch.equal(read, stored)


def test_reinterpreted_memory_is_not_converted() -> None:
    with exact_tier():
        halves = X.view(torch.float32)
    assert halves.dtype == torch.float32
    assert torch.equal(halves.view(torch.float64), X)


class _NormInFloat32(torch.autograd.Function):
    """Like many fused kernels: both directions go through float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.float().square().to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x: Tensor = ctx.saved_tensors[0]
        scale = torch.tensor(2 * THIRD, dtype=torch.float32) / torch.tensor(THIRD, dtype=torch.float32)
        return (grad.float() * x.float() * scale).to(x.dtype)


def _gradient_through_float32() -> Tensor:
    x = X.clone().requires_grad_()
    (_NormInFloat32.apply(x) * THIRD).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return x.grad


def test_backward_of_a_custom_function_keeps_every_digit() -> None:
    expected = 2 * X * THIRD
    assert not torch.allclose(_gradient_through_float32(), expected, rtol=1e-9)
    with exact_tier():
        lifted = _gradient_through_float32()
    torch.testing.assert_close(lifted, expected, rtol=1e-15, atol=0)


@pytest.mark.parametrize(
    ("mode", "missed"),
    [
        (_LiftInPython, lambda: X.type_as(LOW_PRECISION)),
        (_LiftInPython, _gradient_through_float32),
        (_LiftBelowAutograd, lambda: torch.tensor(2 * X.tolist()[0], dtype=torch.float32)),
    ],
    ids=["python-misses-type_as", "python-misses-backward", "dispatch-misses-torch.tensor"],
)
def test_neither_mode_is_enough_alone(
    mode: Callable[[], AbstractContextManager[None]], missed: Callable[[], Tensor]
) -> None:
    with exact_tier():
        exact = missed()
    with mode():
        alone = missed()
    assert not torch.allclose(alone.double(), exact, rtol=1e-12, atol=0)


def _nest_and_raise() -> None:
    with exact_tier():
        with exact_tier():
            assert X.float().dtype == torch.float64
        assert X.float().dtype == torch.float64
        assert torch.get_default_dtype() == torch.float64
        raise RuntimeError("stop")


def test_everything_is_restored_after_an_exception_and_after_nesting() -> None:
    constructor, engine = torch.FloatTensor, torch.autograd._engine_run_backward
    with pytest.raises(RuntimeError, match="stop"):
        _nest_and_raise()
    assert torch.get_default_dtype() == torch.float32
    assert torch.FloatTensor is constructor
    assert torch.autograd._engine_run_backward is engine
    assert X.float().dtype == torch.float32
    assert torch.zeros(1).dtype == torch.float32


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_dtensors_and_their_local_tensors_agree(one_rank: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    with exact_tier(), LeakWatch() as watch:
        sharded = distribute_tensor(X.clone().requires_grad_(), mesh, [Shard(0)])
        tripled = sharded.float() * 3
        assert isinstance(tripled, DTensor)
        lifted = tripled.redistribute(mesh, [Replicate()])
        lifted.sum().backward()
    assert lifted.dtype == lifted.to_local().dtype == torch.float64
    assert torch.equal(lifted.to_local(), X * 3)
    assert watch.leaks == ()


def test_fsdp2_mixed_precision_is_lifted_in_forward_and_backward(one_rank: None) -> None:
    def gradients(policy: MixedPrecisionPolicy) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)).double()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
        assert isinstance(model, FSDPModule)
        model(X).square().sum().backward()
        return [p.grad.full_tensor() for p in model.parameters() if isinstance(p.grad, DTensor)]

    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with LeakWatch() as plain:
        gradients(mixed)
    with exact_tier(), LeakWatch() as watch:
        pairs = list(zip(gradients(mixed), gradients(MixedPrecisionPolicy()), strict=True))
    assert len(pairs) == 4
    for lifted, exact in pairs:
        torch.testing.assert_close(lifted, exact, rtol=1e-15, atol=1e-15)
    assert watch.leaks == ()
    assert plain.leaks


class _CastsInside(Tensor):
    """A tensor subclass, as DTensor is one, that goes through float32 on its local tensor."""

    local: Tensor

    @staticmethod
    def __new__(cls, local: Tensor) -> "_CastsInside":
        self: _CastsInside = Tensor._make_wrapper_subclass(cls, local.shape, dtype=local.dtype)
        self.local = local
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(torch.ops.aten._to_copy.default(args[0].local, dtype=torch.float32), *args[1:])


def test_what_a_tensor_subclass_does_inside_is_lifted_and_watched() -> None:
    with LeakWatch() as watch:
        _CastsInside(X) * 1
    assert [leak.op for leak in watch.leaks] == ["aten._to_copy.default", "aten.mul.Tensor"]
    # As in backward, where only this mode is active.
    with _LiftBelowAutograd():  # type: ignore[no-untyped-call]
        lifted = _CastsInside(X) * 1
    assert lifted.dtype == torch.float64
    assert torch.equal(lifted, X)


def _in_all_places() -> tuple[Tensor, ...]:
    below = torch.ops.aten._to_copy.default(X, dtype=torch.float16)
    return X.type_as(LOW_PRECISION), _gradient_through_float32(), _CastsInside(X) * 1, below


def test_watching_lifts_the_same_and_takes_the_place_of_the_tiers_mode() -> None:
    with exact_tier():
        tier = _get_current_dispatch_mode()
        unwatched = _in_all_places()
        with (watch := Watch()).step():
            watch.leaks = LeakWatch()
            watched = _in_all_places()
            assert _get_current_dispatch_mode() is watch
            with watch.reading():
                assert torch.equal(X.type_as(LOW_PRECISION), X)
        with pytest.raises(KeyboardInterrupt), Watch().step():
            raise KeyboardInterrupt
        assert _get_current_dispatch_mode() is tier
    assert _get_current_dispatch_mode() is None
    assert not watch.leaks.leaks
    assert all(a.dtype == torch.float64 and torch.equal(a, b) for a, b in zip(watched, unwatched, strict=True))
    with Watch().step():  # in other tiers it changes nothing
        assert X.type_as(LOW_PRECISION).dtype == torch.float32


def test_leak_watch_sees_every_output_of_an_op() -> None:
    data = torch.ones(3)
    with LeakWatch() as watch:
        data.sort()
    assert [leak.op for leak in watch.leaks] == ["aten.sort.default"]


def test_leak_watch_says_which_op_where_and_how_often() -> None:
    with LeakWatch() as watch:
        for _ in range(2):
            X.float()
        X.long()
    assert len(watch.leaks) == 1
    leak = watch.leaks[0]
    assert (leak.op, leak.count) == ("aten._to_copy.default", 2)
    assert "test_exact.py:" in leak.where
    assert leak.where.endswith(" in test_leak_watch_says_which_op_where_and_how_often")


def test_leak_watch_sees_backward_and_points_into_the_custom_function() -> None:
    with LeakWatch() as watch:
        _gradient_through_float32()
    assert any(leak.where.endswith(" in backward") for leak in watch.leaks)


@pytest.mark.parametrize("outside", [True, False], ids=["watch-outside", "watch-inside"])
def test_leak_watch_sees_what_the_tier_cannot_lift(outside: bool) -> None:
    file = torch.ones(2)
    watch = LeakWatch()
    with watch if outside else exact_tier(), exact_tier() if outside else watch:
        X.float()
        assert not watch.leaks
        file * 2
        torch.asarray([THIRD], dtype=torch.float32)
    assert [leak.op for leak in watch.leaks] == ["aten.mul.Tensor", "aten.lift_fresh.default"]


@pytest.fixture
def counter() -> Any:
    from torch._dynamo.testing import CompileCounter  # takes long, and other workers of pytest do not need it

    return CompileCounter()


@pytest.mark.parametrize("asks", [asks for asks in DOWNCASTS if asks not in NOT_COMPILED])
def test_what_torch_compiles_is_compiled_and_stays_in_float64(counter: Any, asks: str) -> None:
    """The modes are no part of it, and do not keep torch from it."""
    compiled = torch.compile(lambda x: DOWNCASTS[asks]() + 0 * x, backend=counter)
    with exact_tier(), LeakWatch() as watch:
        found = compiled(X)
    torch.testing.assert_close(found, X, rtol=1e-15, atol=0)
    assert not watch.leaks
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_compiled_recomputation_reuses_forward_code(counter: Any) -> None:
    """Otherwise torch compiles it anew and not lifted, and what it fuses into kernels no mode reaches."""
    compiled = torch.compile(lambda x: x.float().square().to(x.dtype), backend=counter)
    x = X.clone().requires_grad_()
    with exact_tier():
        checkpoint(compiled, x, use_reentrant=False).sum().backward()
    torch.testing.assert_close(x.grad, 2 * X, rtol=1e-15, atol=0)
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_a_product_into_a_given_tensor_is_not_taken_for_compiled_code() -> None:
    with Watch() as watch:
        torch.mm(torch.ones(2, 2), torch.ones(2, 2), out=torch.empty(2, 2))
    assert watch.linear == {"float32": 1}
    assert watch.compiled == 0


def test_the_class_of_an_argument_is_not_asked_for() -> None:
    """Compiled code of torch 2.11 and 2.12 answers wrongly (docs/findings/compiled-class-of-constants.md), and nothing
    but this shows it with a later one."""
    tree = ast.parse(Path(inspect.getfile(LeakWatch)).read_text(encoding="utf-8"))
    assert "__class__" not in {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


class SeesCounts(TorchDispatchMode):
    """Notes the dtype in which the kernel of a fused optimizer gets its counts of updates."""

    dtypes: set[torch.dtype]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_fused_adam" in str(func):
            self.dtypes = {count.dtype for count in args[5]}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1, dtype=torch.float64)], ids=["number", "tensor"])
def test_fused_optimizer_gets_its_counts_in_float32(kind: type[torch.optim.Adam], rate: float | Tensor) -> None:
    """The kernel of GPUs reads them as that, so with float64 every weight would be NaN."""
    fused, plain = nn.Parameter(X.clone()), nn.Parameter(X.clone())
    with SeesCounts() as seen, exact_tier(), LeakWatch() as watch:  # type: ignore[no-untyped-call]
        optimizers = kind([fused], lr=rate, fused=True), kind([plain], lr=0.1, foreach=False)
        for _ in range(3):
            for parameter, optimizer in zip((fused, plain), optimizers, strict=True):
                parameter.grad = X.clone()
                optimizer.step()
    assert seen.dtypes == {torch.float32}
    assert watch.leaks == ()
    torch.testing.assert_close(fused, plain, rtol=1e-15, atol=0)
