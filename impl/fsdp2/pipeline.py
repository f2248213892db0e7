"""Runs a stage of a Hugging Face model by torch's pipelines (torch.distributed.pipelining).

A rank keeps its own layers; the first stage also keeps the embedding, the last one the norm and the head. Layers of
other stages are replaced by modules that pass their input on, so that names stay those of the folder. torch's stages
send activations of one shape, so the micro-batches of a step are padded to one shape.
"""

import inspect
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F

from conformance.backends.protocol import NamedTensors
from impl.interface.micro_batches import MicroBatch

AT_ONCE = 16  # tensors that a stage names to the others


class Elsewhere(torch.nn.Module):
    """Passes on what a module of another stage would compute from."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden


class Pipeline:
    """Holds the place of this rank in a group of pipeline stages, one stage a rank."""

    def __init__(self, group: dist.ProcessGroup, device: str) -> None:
        self.group, self.device = group, torch.device(device)
        self.index, self.size = group.rank(), group.size()

    @property
    def is_last(self) -> bool:
        return self.index == self.size - 1

    def keep_stage(self, model: transformers.PreTrainedModel) -> None:
        """Removes what other stages hold from a model without numbers, and lets it take and give hidden states."""
        base, head = model.base_model, _head_of(model)
        for number in range(count := len(base.layers)):
            if number * self.size // count != self.index:
                base.layers[number] = Elsewhere()
        if not self.is_last:
            base.norm = Elsewhere()
            setattr(model, head, Elsewhere())
        if self.index:
            base.embed_tokens = None
        forward, name = model.forward, "inputs_embeds" if self.index else "input_ids"

        def of_stage(own: Tensor, position_ids: Tensor) -> Tensor:
            result: Tensor = forward(**{name: own}, position_ids=position_ids, use_cache=False).logits
            return result

        model.forward = of_stage

    def run(
        self,
        model: transformers.PreTrainedModel,
        inputs: Sequence[MicroBatch],
        finish: Callable[[int, Tensor], Tensor],
        *,
        compute: torch.dtype,
        trains: bool,
    ) -> None:
        """Runs all micro-batches of a step through all stages, and with ``trains`` backward; collective.

        ``finish(index, result)`` gets the head's results for ``inputs[index]`` on the last stage, and returns the loss.
        """
        rows, length = (max(one.tokens.shape[axis] for one in inputs) for axis in (0, 1))
        tokens = torch.cat([_padded(one.tokens, rows, length) for one in inputs])
        positions = torch.cat([_padded(one.positions, rows, length) for one in inputs])
        size = model.config.hidden_size
        width = getattr(model, _head_of(model)).out_features if self.is_last else size
        hidden = torch.empty(rows, length, size, dtype=compute, device="meta", requires_grad=trains)
        stage = PipelineStage(
            model,
            self.index,
            self.size,
            self.device,
            input_args=hidden if self.index else tokens[:rows].to("meta"),
            output_args=hidden.new_empty(rows, length, width, requires_grad=trains),
            group=self.group,
        )

        def loss(result: Tensor, index: Tensor) -> Tensor:
            height, width = inputs[int(index)].tokens.shape
            return finish(int(index), result[:height, :width])

        schedule = schedule_of(stage, len(inputs), loss)
        options: dict[str, Any] = {"target": torch.arange(len(inputs))} if self.is_last else {}
        own = () if self.index else (tokens,)
        (schedule.step if trains else schedule.eval)(*own, **options, **_NO_RESULT, position_ids=positions)

    def of_all(self, tensors: NamedTensors) -> NamedTensors:
        """Yields the whole tensors of all stages, stage by stage, from those of this stage; collective."""
        for stage in range(self.size):
            own = iter(tensors) if stage == self.index else iter(())
            while found := self._next(stage, dict(islice(own, AT_ONCE))):
                yield from found.items()

    def _next(self, stage: int, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the next tensors of a stage on all stages, which are ``own`` on its own; none after the last."""
        about = [{name: (tensor.shape, tensor.dtype) for name, tensor in own.items()}]
        dist.broadcast_object_list(about, group=self.group, group_src=stage)
        found = {}
        for name, (shape, dtype) in about[0].items():
            tensor = own[name] if stage == self.index else torch.empty(shape, dtype=dtype)
            found[name] = tensor.to(self.device)
            dist.broadcast(found[name], group=self.group, group_src=stage)
        return found

    def norm_of_all(self, norm: Tensor) -> Tensor:
        """Returns the norm of the gradients of all stages; collective."""
        total = norm.square()
        dist.all_reduce(total, group=self.group)
        return total.sqrt()


def _head_of(model: transformers.PreTrainedModel) -> str:
    return "score" if hasattr(model, "score") else "lm_head"


def schedule_of(stage: PipelineStage, count: int, loss: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """Returns the schedule of a step of ``count`` micro-batches, whose losses add up: gradients are not divided."""
    kind = Schedule1F1B if count >= stage.num_stages else ScheduleGPipe
    return kind(stage, count, loss_fn=loss, scale_grads=False)


# Otherwise the last stage would join the logits of all micro-batches.
_NO_RESULT = {"return_outputs": False} if "return_outputs" in inspect.signature(ScheduleGPipe.step).parameters else {}


def _padded(numbers: Tensor, rows: int, length: int) -> Tensor:
    """Pads tokens or positions by zeros, each of which is a document of its own, at the right and below."""
    height, width = numbers.shape
    return F.pad(numbers, (0, length - width, 0, rows - height))
