"""Modes of torch: the suite's own computations go past them, the backend's and those of tensor subclasses do not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from conformance.numerics.float64_tier import LeakWatch, exact_tier
from conformance.numerics.sketch import kept, without_modes
from conformance.worker.evidence import Watch
from conformance.worker.rank_state import digest_of


class Below(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **kwargs or {})


class InPython(TorchFunctionMode):
    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("above", [10, 1000], ids=["sketched", "whole"])
def test_what_a_record_keeps_is_computed_past_all_modes_and_is_the_same(above: float) -> None:
    tensor = torch.nn.Parameter(torch.randn(20, 30, dtype=torch.float64))
    expected = kept([("gradient/w", tensor)], above=above)
    with InPython() as in_python, Below() as below:
        found = kept([("gradient/w", tensor)], above=above)
    assert (in_python.count, below.count) == (1, 1)  # it is detached, by which a watch sees its dtype
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_modes_are_back_after_the_block_also_after_an_error() -> None:
    tensor = torch.ones(3)
    with InPython() as in_python, Below() as below:
        with pytest.raises(RuntimeError), without_modes(tensor) as plain:
            plain + torch.ones(4)
        assert (in_python.count, below.count) == (1, 1)
        tensor + tensor
    assert (in_python.count, below.count) == (2, 2)


def test_modes_go_on_for_a_subclass_whose_operators_go_the_same_way() -> None:
    tensor = TwoTensor(torch.ones(8), torch.ones(8))
    with Below() as below, without_modes(tensor) as same:
        before = below.count
        doubled = same + same
    assert isinstance(doubled, TwoTensor)
    assert torch.equal(doubled.a, torch.full((8,), 2.0))
    assert below.count > before


def test_digests_are_computed_past_all_modes() -> None:
    tensor = torch.randn(4, 5)
    expected = digest_of(tensor)
    with InPython() as in_python, Below() as below:
        found = digest_of(tensor)
    assert (in_python.count, below.count) == (1, 1)
    assert found == expected


@pytest.mark.parametrize(
    "read", [digest_of, lambda tensor: kept([("gradient/w", tensor)], above=10)], ids=["digest", "record"]
)
def test_a_tensor_of_a_lower_precision_that_no_operator_returned_is_still_a_leak(read: Callable[..., Any]) -> None:
    """A kernel that writes into a buffer returns nothing, so nothing tells of its dtype before the suite reads it."""
    buffer = torch.empty(20, 30)
    with exact_tier(), LeakWatch() as leaks:
        torch._foreach_copy_([buffer], [torch.ones(20, 30, dtype=torch.float64)])
        assert not leaks.leaks
        read(buffer)
    assert [leak.op for leak in leaks.leaks] == ["aten.detach.default"]


@pytest.mark.parametrize("restored", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_watch_follows_masks_of_dropout(restored: bool, reentrant: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
    inputs = torch.ones(3, 4, requires_grad=True)
    with (watch := Watch()).step():
        out = checkpoint(model, inputs, use_reentrant=reentrant, preserve_rng_state=restored)
        out.sum().backward()
    masks = {where: (activations, mask) for where, activations, mask in watch.drawn}
    assert [*masks] == ["forward", "recomputed"]
    assert masks["recomputed"][0] in (masks["forward"][0], "")
    assert (masks["recomputed"][1] == masks["forward"][1]) == restored
