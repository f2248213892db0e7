"""The *stepped tensors* of DeepSpeed's optimizer, which it updates in place of a model's parameters, and their state.

At ZeRO-0, the stepped tensor of a parameter is the parameter itself or, in half precision, its float32 master in the
optimizer's wrapper. At ZeRO 1 to 3, it is a flat tensor with this rank's pieces of many parameters; the piece of a
parameter may be empty.
"""

from typing import Any

import torch
from deepspeed import DeepSpeedEngine

from impl.deepspeed.place import RankPlace
from impl.optimizers import update_count


class SteppedTensors:
    """The stepped tensors of an engine, for every class of optimizer wrapper that DeepSpeed has."""

    def __init__(self, engine: DeepSpeedEngine, place: RankPlace) -> None:
        self._stage, self._place = engine.zero_optimization_stage(), place
        self._wrapper, self._optimizer = engine.optimizer, engine.basic_optimizer
        self._stepped: dict[torch.nn.Parameter, torch.Tensor] = {}
        if self._stage == 0:
            if hasattr(self._wrapper, "fp32_groups"):
                for half, full in zip(self._wrapper.fp16_groups, self._wrapper.fp32_groups, strict=True):
                    self._stepped |= dict(zip(half, full, strict=True))
        else:
            for group, flat in zip(*self._flat_groups(), strict=True):
                self._stepped |= dict.fromkeys(group, flat)

    def _flat_groups(self) -> tuple[list[list[torch.nn.Parameter]], list[torch.Tensor]]:
        """(groups of parameters, the stepped tensor of each group); three wrapper classes name these differently."""
        wrapper = self._wrapper
        if self._stage == 3:
            return wrapper.fp16_groups, wrapper.fp32_partitioned_groups_flat
        if hasattr(wrapper, "bf16_groups"):  # ZeRO-1 in bf16
            return wrapper.bf16_groups, wrapper.fp32_groups_flat_partition
        return wrapper.bit16_groups, wrapper.single_partition_of_fp32_groups

    def tensor(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """The stepped tensor of a parameter."""
        return self._stepped.get(parameter, parameter)

    def state(self, parameter: torch.nn.Parameter) -> dict[str, Any]:
        """The optimizer state of a parameter's stepped tensor; empty before the first step."""
        state: dict[str, Any] = self._optimizer.state.get(self.tensor(parameter), {})
        return state

    def new_state(self, parameter: torch.nn.Parameter, key: str) -> torch.Tensor:
        """The state ``key`` of a parameter's stepped tensor; it is created, with zeros, if there is none yet."""
        stepped = self.tensor(parameter)
        state: dict[str, torch.Tensor] = self._optimizer.state[stepped]
        if key not in state:
            state[key] = torch.zeros_like(stepped)
        return state[key]

    def set_step(self, parameter: torch.nn.Parameter, count: float) -> None:
        """Set the update count of a parameter's stepped tensor; the parameters of a flat tensor share one count."""
        stepped = self.tensor(parameter)
        # torch's AdamW counts in a tensor, in place, and DeepSpeed's own optimizers in a Python number.
        counts_in_tensor = isinstance(self._optimizer, torch.optim.AdamW)
        step = update_count(torch.tensor(count), self._optimizer, stepped) if counts_in_tensor else int(count)
        self._optimizer.state[stepped]["step"] = step

    def piece(self, parameter: Any, stepped: torch.Tensor) -> tuple[torch.Tensor, int]:
        """(this rank's piece of a parameter, flat and without padding; its start index in the flattened parameter).

        ``stepped``: the stepped tensor of the parameter, or another tensor with its layout, such as a state.
        """
        flat = stepped.view(-1)
        if self._stage == 0:
            return flat, 0
        if self._stage == 3:
            _, at, numel = self._wrapper.grad_position[self._wrapper.get_param_id(parameter)]
            return self._place.unpadded(parameter, flat.narrow(0, at, numel)), self._place.start(parameter)
        mapping = parameter._hp_mapping
        if mapping is None:
            return flat[:0], 0
        at = mapping.hp_fragment_address
        return flat.narrow(0, at.start, at.numel), mapping.lp_fragment_address.start

    def link_state(self) -> None:
        """Make DeepSpeed's access functions find the state of all parameter groups.

        ZeRO-1 and 2 link parameters to their state when only the first group has been stepped, so that the parameters
        of the other groups are linked to no state (docs/findings/deepspeed-optimizer-state.md).
        """
        if self._stage in (1, 2):
            self._wrapper._hp_optimizer_states_linked = False
            self._wrapper._lazy_init_hp_params_optimizer_state()

    def update_parameters(self) -> None:
        """Copy the masters into the parameters that the model computes with, where a rank has all of the masters or
        parts of the same size (ZeRO-0 and 3); collective."""
        if self._stage == 0:
            for parameter, master in self._stepped.items():
                parameter.data.copy_(master.data)
        elif self._stage == 3:
            self._wrapper.checkpoint_event_prologue()  # partitions parameters that a forward pass has left whole
            for number in range(len(self._wrapper.fp16_groups)):
                self._wrapper._reassign_or_swap_out_partitioned_parameters(number)
            self._wrapper.checkpoint_event_epilogue()
