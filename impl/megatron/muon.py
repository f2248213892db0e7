"""Trains matrices with megatron-core's Muon, of the package emerging-optimizers, and reads its optimizers' states.

megatron-core chains two optimizers: Muon has the matrices of layers, AdamW all else. With the layer-wise distributed
optimizer, the ZeRO-1 of Muon, a rank has the optimizers' states of whole parameters, and not of others.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig as MegatronOptimizerConfig

from conformance.backends.on_cpu import replaced
from conformance.spec.scenario import OptimizerConfig
from impl.megatron.model_config import ModelShape, Stages
from impl.megatron.tensors import ModelTensors

_SCALES = {"original": "shape_scaling", "match_rms_adamw": "spectral", "spectral": "spectral"}


def set_muon(settings: MegatronOptimizerConfig, optimizer: OptimizerConfig, shape: ModelShape, shipped: bool) -> None:
    """Sets Muon beside AdamW in megatron-core's ``settings``, which are AdamW's.

    shipped: each tensor-parallel rank orthogonalizes its own part of a matrix, as by default.
    """
    nesterov = "muon_nesterov" if hasattr(MegatronOptimizerConfig, "muon_nesterov") else "muon_use_nesterov"  # 0.17
    muon = {
        "optimizer": "muon",
        "muon_momentum": optimizer.momentum,
        nesterov: bool(optimizer.nesterov),
        "muon_split_qkv": not shape.fused and "qkv_proj" not in optimizer.fused_matrices,
        "muon_scale_mode": _SCALES[optimizer.adjust_lr or "original"],
        "muon_extra_scale_factor": 0.2 if optimizer.adjust_lr == "match_rms_adamw" else 1.0,
        "muon_coefficient_type": optimizer.ns_coefficients,
        "muon_num_ns_steps": optimizer.ns_steps,
        "muon_tp_mode": "blockwise" if shipped else "duplicated",
    }
    for name, value in muon.items():
        setattr(settings, name, value)


def muon_optimizer(settings: MegatronOptimizerConfig, chunks: Sequence[Any], *, layer_wise: bool) -> Any:
    """Returns megatron-core's chain of Muon and AdamW."""
    chain = _library_optimizer(settings, chunks, layer_wise=layer_wise)
    if layer_wise:
        chain.allgather_params = partial(gather_owned, chain.allgather_params)
    return chain


def gather_owned(gather: Callable[[], None]) -> None:
    """Gathers parameters that other ranks have updated, by ``gather`` of the layer-wise optimizer.

    It gathers pieces of different lengths, which gloo cannot: on a CPU, pieces are padded to the longest.
    """
    all_gather = dist.all_gather

    def padded(pieces: Sequence[torch.Tensor], own: torch.Tensor, group: Any) -> None:
        if own.is_cuda:
            all_gather([*pieces], own, group=group)
            return
        most = max(len(piece) for piece in pieces)
        rows = [own.new_zeros(most) for _ in pieces]
        all_gather(rows, torch.cat([own, own.new_zeros(most - len(own))]), group=group)
        for piece, row in zip(pieces, rows, strict=True):
            piece.copy_(row[: len(piece)])

    with replaced(dist, {"all_gather": padded}):
        gather()


def _library_optimizer(settings: MegatronOptimizerConfig, chunks: Sequence[Any], *, layer_wise: bool) -> Any:
    if not hasattr(MegatronOptimizerConfig, "use_layer_wise_distributed_optimizer"):  # 0.17
        from megatron.core.optimizer.muon import get_megatron_muon_optimizer

        return get_megatron_muon_optimizer(settings, chunks, layer_wise_distributed_optimizer=layer_wise)
    settings.use_layer_wise_distributed_optimizer = layer_wise
    chain = get_megatron_optimizer(settings, chunks)
    if layer_wise and not settings.bf16:
        # From 0.18 on the layer-wise optimizer wraps optimizers for bf16 alone, and cannot step bare ones.
        chain.chained_optimizers = [FP32Optimizer(one, settings, lambda *_: None) for one in chain.chained_optimizers]
        chain.config = settings
    return chain


class MuonTensors(ModelTensors):
    """Reads and writes the tensors of a model that Muon and AdamW train.

    chain: as ``muon_optimizer`` returned it. The other parameters are those of ModelTensors.
    """

    def __init__(
        self,
        chunks: list[Any],
        optimizers: Sequence[Any],
        shape: ModelShape,
        stages: Stages,
        *,
        trained: Sequence[str],
        chain: Any,
    ) -> None:
        super().__init__(chunks, optimizers, shape, stages, trained=trained)
        self._holders = {
            id(inner): one for one in optimizers for group in one.optimizer.param_groups for inner in group["params"]
        }
        of_ranks = getattr(chain, "dp_cp_params_list", None) or ()
        self._owners = {id(parameter): rank for rank, own in enumerate(of_ranks) for parameter in own}

    def _master(self, parameter: Any) -> torch.Tensor:
        main = getattr(parameter, "main_param", None)
        half = parameter.dtype != torch.get_default_dtype()
        return self._whole(parameter, main) if half else parameter

    def _gradient(self, parameter: Any) -> torch.Tensor:
        return self._unscaled(parameter.main_grad)

    def _whole(self, parameter: Any, own: torch.Tensor | None) -> torch.Tensor:
        """Returns a tensor that the rank which owns the parameter has; collective."""
        if not self._owners:
            return super()._whole(parameter, own)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        owner = self._owners[id(parameter)]
        full = torch.empty(parameter.shape, dtype=torch.get_default_dtype(), device=parameter.device)
        if group.rank() == owner:
            assert own is not None
            full.copy_(own)
        dist.broadcast(full, src=dist.get_global_rank(group, owner), group=group)
        return full

    def _inner(self, parameter: Any) -> torch.Tensor | None:
        inner = super()._inner(parameter)
        return inner if id(inner) in self._holders else None

    def _optimizer(self, parameter: Any) -> Any:
        return self._holders[id(super()._inner(parameter))]

    def _keeps(self, parameter: Any, kind: str) -> bool:
        is_adamw = isinstance(self._optimizer(parameter).optimizer, torch.optim.AdamW)
        return (kind == "momentum_buffer") != is_adamw
