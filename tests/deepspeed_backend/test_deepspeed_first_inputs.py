"""AutoTP's check of the first inputs gets what is in host memory, once, and sees what it saw before."""

from types import SimpleNamespace
from typing import Any

import torch

from impl.deepspeed.config import compare_in_host_memory


class OnGpu(torch.Tensor):
    """A tensor that is somewhere else, for a machine without a GPU."""

    def cpu(self, *args: Any, **options: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()


def test_the_check_gets_copies_in_host_memory_and_the_model_does_not() -> None:
    engine, seen, forwarded = SimpleNamespace(), list[Any](), list[Any]()

    class Model(torch.nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> None:
            forwarded.append((args, kwargs))

    def check(module: Any, args: Any, kwargs: Any) -> None:
        seen.append((args, kwargs))
        engine.first_dataloader_check.remove()  # as DeepSpeed's own does

    engine.module = Model()
    engine.first_dataloader_check = engine.module.register_forward_pre_hook(check, with_kwargs=True)
    compare_in_host_memory(engine)
    tokens = torch.arange(3).as_subclass(OnGpu)
    for _ in range(2):
        engine.module(tokens, mask=tokens, options={"cache": None, "positions": [tokens]})
    [((first,), kwargs)] = seen
    copies = [first, kwargs["mask"], *kwargs["options"]["positions"]]
    assert all(type(copy) is torch.Tensor and copy.equal(tokens) for copy in copies)
    assert kwargs["options"]["cache"] is None
    assert all(args[0] is tokens and kwargs["mask"] is tokens for args, kwargs in forwarded)
    assert len(forwarded) == 2
