"""The oracle's loss scale of fp16: which updates overflow and are skipped, and how the scale falls and grows.

Serves claim 1: shares no code with the libraries' scalers. The convention is in scenario.py.
"""

import torch

from conformance.observable import PROGRESS_OF_SCALE, SKIPPED
from conformance.oracle.forward import Policy, Weights
from conformance.scenario import LossScaleConfig

LARGEST = 65504.0  # number of float16
# What is scaled and overflows is not the whole gradient: libraries multiply it by the number of ranks that they average
# over, cut it into the parts of ranks and micro-batches, and scale activations. All that is within this factor.
MARGIN = 64.0


class LossScale:
    """``scale`` is what training goes on with, ``good_steps`` the number of updates in a row since it fell or grew."""

    def __init__(self, config: LossScaleConfig) -> None:
        self._interval = config.growth_interval
        self.scale, self.good_steps = 2.0**config.initial_power, 0

    def update(self, gradients: Weights, policy: Policy, *, step: int) -> dict[str, float]:
        """Count a step with these gradients, which were divided by the scale again.

        Returns the settings of the step (conformance.observable). Raises ValueError if it is marginal whether the
        gradients overflow, because then it depends on the layout.
        """
        overflows = self._overflow(gradients, policy, step=step)
        if overflows:
            self.scale, self.good_steps = self.scale / 2, 0
        else:
            self.good_steps += 1
            if self.good_steps == self._interval:
                self.scale, self.good_steps = self.scale * 2, 0
        numbers = (self.scale, float(self.good_steps))
        return {SKIPPED: float(overflows), **dict(zip(PROGRESS_OF_SCALE, numbers, strict=True))}

    def _overflow(self, gradients: Weights, policy: Policy, *, step: int) -> bool:
        if policy.compute == torch.float16:
            return not all(gradient.isfinite().all() for gradient in gradients.values())
        largest = self.scale * max(gradient.abs().max().item() for gradient in gradients.values())
        if LARGEST / MARGIN < largest < LARGEST * MARGIN:
            raise ValueError(
                f"step {step}: the largest scaled gradient is {largest:.3g}, so it is marginal whether it overflows in "
                f"fp16 (beyond {LARGEST:.0f}); choose another loss_scale.initial_power, or other "
                f"objective.document_weights, with which it is below {LARGEST / MARGIN:.3g} or above "
                f"{LARGEST * MARGIN:.3g}"
            )
        return largest > LARGEST
