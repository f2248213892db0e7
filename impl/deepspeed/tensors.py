"""Weights and gradients by Hugging Face name, whole and in pieces, at every ZeRO stage.

``named_tensors`` is collective. Gradients can be asked for after the last backward of a step and before its update, and
at no other time: in between, the ranks that own a piece raise and the others wait for them.
"""

from collections.abc import Iterator

import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_local_fp32_param, safe_get_local_grad
from torch import nn

from conformance.backend import Kind, NamedTensors, Shard


def named_tensors(model: nn.Module, kind: Kind, *, stage: int) -> NamedTensors:
    """Full float32 master weights, or unclipped gradients."""
    for name, parameter in model.named_parameters():
        if stage == 0:
            tensor = parameter if kind == "weight" else parameter.grad
        else:
            tensor = safe_get_full_fp32_param(parameter) if kind == "weight" else safe_get_full_grad(parameter)
        assert tensor is not None, f"{name} has no {kind}"
        yield name, tensor.detach()


def local_shards(model: nn.Module, kind: Kind, *, stage: int, rank: int) -> Iterator[Shard]:
    """This rank's own pieces; ``rank`` is its place among the data-parallel ranks."""
    for name, parameter in model.named_parameters():
        if stage == 3:
            local = safe_get_local_fp32_param(parameter) if kind == "weight" else safe_get_local_grad(parameter)
            yield Shard(name, f"piece {rank}", local)
        elif stage == 0:
            tensor = parameter if kind == "weight" else parameter.grad
            assert tensor is not None, f"{name} has no {kind}"
            yield Shard(name, "full", tensor.detach())
        elif kind == "weight":
            yield Shard(name, "full", parameter.detach())  # every rank computes with a whole copy
        elif parameter._hp_mapping is not None:
            piece = parameter._hp_mapping.lp_fragment_address
            gradient = parameter._hp_mapping.get_lp_grad_fragment(parameter._index_in_param_group)
            yield Shard(name, f"{piece.start}:{piece.start + piece.numel}", gradient.detach())
