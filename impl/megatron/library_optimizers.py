"""Makes optimizers of megatron-core that are not torch's, and reads their states: Muon, and TransformerEngine's AdamW.

Muon is of the package emerging-optimizers. megatron-core chains two optimizers: Muon has the matrices of layers, AdamW
all else. With the layer-wise distributed optimizer, the ZeRO-1 of Muon, a rank has the optimizers' states of whole
parameters, and not of others.

TransformerEngine's FusedAdam can keep a float32 master in two halves, for the layout option ``remainders``. The
parameter, in bf16, is the upper half. The *remainder*, the lower half as a signed integer, is a state of the optimizer.
The parameter is rounded to the nearest number, of two the one away from zero: where the remainder is negative, the
upper half is one less than the parameter. Updates compute with the whole master.
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
from conformance.core.errors import UsageError
from conformance.spec.scenario import OptimizerConfig
from impl.interface.sharded_safetensors import SliceReader
from impl.interface.trainable import WrittenKind
from impl.megatron.model_config import ModelShape, Stages
from impl.megatron.tensors import REMAINDER, ModelTensors

HALF = 16  # bits of a float32 number
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


def with_remainders(parameter: torch.Tensor, remainders: torch.Tensor) -> torch.Tensor:
    """Returns the float32 masters of a bf16 parameter and its remainders."""
    upper = parameter.view(torch.int16).int() - (remainders < 0).int()
    return (upper << HALF | remainders.int() & 0xFFFF).view(torch.float32)


def halves(masters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the bf16 parameter and the remainders of float32 masters."""
    bits = masters.view(torch.int32)
    remainders = bits.to(torch.int16)  # the lower half
    upper = (bits >> HALF) + (remainders < 0).int()
    return upper.to(torch.int16).view(torch.bfloat16), remainders


class RemainderTensors(ModelTensors):
    """Reads and writes the tensors of a model whose masters are bf16 parameters and remainders.

    The distributed optimizer has them, so a rank has the remainders of its own stretch of each parameter. An optimizer
    counts its updates once for each of its groups.
    """

    def _master(self, parameter: Any) -> torch.Tensor:
        if not parameter.requires_grad:
            return super()._master(parameter)
        if (inner := self._inner(parameter)) is None:
            return self._whole(parameter, None)
        remainders = self._state(parameter).get(REMAINDER)  # as shipped, there are none before the first update
        return self._whole(parameter, inner if remainders is None else with_remainders(inner, remainders))

    def _set_master(self, parameter: Any, full: torch.Tensor) -> None:
        if not parameter.requires_grad:  # frozen, or a router's correction bias, a float32 buffer
            super()._set_master(parameter, full)
            return
        upper, remainders = halves(full)
        parameter.data.copy_(upper)
        if (inner := self._inner(parameter)) is not None:
            optimizer = self._optimizer(parameter).optimizer
            if not self._state(parameter):
                optimizer.initialize_state(inner, store_param_remainders=True)
            optimizer.set_scaled_state(inner, REMAINDER, self._part_of(parameter, remainders))

    def _state(self, parameter: Any) -> dict[str, Any]:
        """Returns the state of the optimizer, with the count of its group as the parameter's own."""
        state = super()._state(parameter)
        group = self._group(parameter) if state else {}
        return {**state, "step": group["step"]} if "step" in group else state

    def write_optimizer_state(self, kind: WrittenKind, read: SliceReader) -> None:
        if kind != "step":
            super().write_optimizer_state(kind, read)
            return
        counts: dict[int, int] = {}
        for own in self.own_parameters():
            if own.parameter.requires_grad and self._inner(own.parameter) is not None:
                group, step = self._group(own.parameter), int(self._read_step(own.name, read))
                if counts.setdefault(id(group), step) != step:
                    raise UsageError(
                        "TransformerEngine's AdamW counts the updates of many parameters together, but the optimizer "
                        "state counts different numbers for them; resume without remainders"
                    )
                group["step"] = step

    def _group(self, parameter: Any) -> dict[str, Any]:
        optimizer = self._optimizer(parameter)
        group: dict[str, Any] = optimizer.optimizer.param_groups[optimizer.model_param_group_index_map[parameter][0]]
        return group
