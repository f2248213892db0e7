"""Adds LoRA adapters to the linear layers of megatron-core, which has none of its own.

An adapter is a module of attention or MLP, beside the linear layer to whose output a hook adds scale B A x. It is cut
as the layer is: the rows of B where the layer's rows are, the columns of A where its columns are. The other matrix is
whole on every rank; under sequence parallelism its gradient is of a slice of the sequence, and megatron-core sums up
the gradients of marked parameters. TransformerEngine's layers that contain the preceding norm return its output, which
the adapter reads. Adapters multiply in the dtype of activations, also where layers multiply in float8.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn import functional as F

from conformance.core.io import read_json
from conformance.spec.scenario import CONFIG_FILE
from impl.megatron.hf_mapping import LINEAR, base_part, parts
from impl.megatron.model_config import Adapters, ModelShape
from impl.megatron.spans import Part
from impl.megatron.tensors import tensor_rank


def with_adapters(shape: ModelShape, folder: Path) -> ModelShape:
    """Returns the shape of a model with the adapter in ``folder``, which has peft's format."""
    config = read_json(folder / CONFIG_FILE)
    rank = config["r"]
    scale = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
    return replace(shape, adapters=Adapters(rank=rank, scale=scale, targets=tuple(config["target_modules"])))


def add_adapters(chunk: Any, shape: ModelShape) -> None:
    """Adds adapters without numbers to a GPTModel."""
    assert shape.adapters
    for layer in chunk.decoder.layers:
        contain_norms: dict[str, Any] = {}
        for projection in shape.adapters.of_layer(layer.layer_number - 1):
            owner, _, linear = LINEAR[projection].partition(".")
            parent, prefix = getattr(layer, owner), f"decoder.layers.{layer.layer_number - 1}"
            adapter = Adapter(f"{prefix}.{owner}.adapter_{projection}", shape, chunk.config)
            parent.add_module(f"adapter_{projection}", adapter)
            getattr(parent, linear).register_forward_hook(adapter.add)
            if getattr(getattr(parent, linear), "return_layernorm_output", None) is not None:
                contain_norms[linear] = getattr(parent, linear)
        for module in contain_norms.values():
            module.return_layernorm_output = True
            module.register_forward_hook(_without_norm)


def _without_norm(_: Any, __: tuple[Tensor, ...], output: tuple[tuple[Tensor, Tensor], None]) -> tuple[Tensor, None]:
    """Removes the norm's output from what a layer returns, behind the adapters' hooks."""
    (result, _), bias = output
    return result, bias


def adapter_product(inputs: Tensor, matrix: Tensor) -> Tensor:
    return F.linear(inputs, matrix)


class Adapter(torch.nn.Module):
    """Holds this rank's part of the adapter ``name``. ``rows``: where B's results are added in the layer's output."""

    lora_a: Tensor
    lora_b: Tensor
    rows: Tensor

    def __init__(self, name: str, shape: ModelShape, config: Any) -> None:
        super().__init__()
        assert shape.adapters
        base = base_part(name, shape, tensor_rank())
        self.scale, self.by_rows, self.sequence = shape.adapters.scale, base.dim == 0, config.sequence_parallel
        options = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        for key, cut in (("lora_a", not self.by_rows), ("lora_b", self.by_rows)):
            own = torch.nn.Parameter(torch.empty(_own_size(parts(f"{name}.{key}", shape, tensor_rank())[0]), **options))
            set_tensor_model_parallel_attributes(own, is_parallel=cut, dim=base.dim if cut else -1, stride=1)
            own.sequence_parallel = self.sequence and not cut  # type: ignore[attr-defined]
            self.register_parameter(key, own)
        rows = [torch.arange(span.own, span.own + span.length) for span in base.spans]
        self.register_buffer("rows", torch.cat(rows).to(options["device"]), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = adapter_product(inputs, self.lora_a)
        if self.by_rows:
            spread = gather_from_sequence_parallel_region if self.sequence else copy_to_tensor_model_parallel_region
        else:
            scatter = reduce_scatter_to_sequence_parallel_region
            spread = scatter if self.sequence else reduce_from_tensor_model_parallel_region
        return self.scale * adapter_product(spread(hidden), self.lora_b)

    def add(self, _: Any, inputs: tuple[Tensor, ...], output: tuple[Any, Tensor | None]) -> Any:
        """Returns the output of the layer for ``inputs`` with the adapter's. A layer that contains the norm returns the
        norm's output as well, which is the adapter's input.

        The module is called: where gathers overlap, megatron-core's hook of a module waits for its updated parameters.
        """
        result, bias = output
        result, *normed = result if isinstance(result, tuple) else (result,)
        added = self(*(normed or inputs[:1]))
        result = result.index_add(-1, self.rows, added) if self.by_rows else result + added
        return (result, *normed) if normed else result, bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        axes = {"lora_b": 0} if self.by_rows else {"lora_a": 1}
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            axes,
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )


def _own_size(part: Part) -> list[int]:
    """Returns the size of this rank's part of an adapter's matrix."""
    size = list(part.shape)
    if part.spans:
        size[part.dim] = sum(span.length for span in part.spans)
    return size
