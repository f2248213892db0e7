"""Clips gradients, steps SGD, AdamW and Muon, and adjusts the fp16 loss scale, in plain tensor arithmetic.

It uses neither torch.optim, torch.nn.utils nor a library's scaler, so that a bug in how a backend drives those cannot
hide here as well. The conventions (clipping, weight decay, schedule, loss scale) are in conformance/spec/scenario.py.
"""

import math
import zlib
from collections.abc import Sequence

import torch

from conformance.oracle.primitives import HONEST, Policy, Variant, Weights
from conformance.spec.observables import PROGRESS_OF_SCALE, SKIPPED
from conformance.spec.scenario import LossScaleConfig, OptimizerConfig


def global_norm(gradients: Weights) -> float:
    """Returns the 2-norm of all gradients together."""
    return math.sqrt(sum(gradient.square().sum().item() for gradient in gradients.values()))


def clip(gradients: Weights, norm: float, max_norm: float | None) -> Weights:
    """Multiplies gradients by min(1, max_norm / (norm + 1e-6)), torch's formula."""
    factor = clip_factor(norm, max_norm)
    return {name: gradient * factor for name, gradient in gradients.items()}


def clip_factor(norm: float, max_norm: float | None) -> float:
    """Returns min(1, max_norm / (norm + 1e-6)), or 1 if ``max_norm`` is None."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))


LEAST_EXPONENT = -125  # of normal numbers of float32 and bfloat16, as frexp counts it


def spacing(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns the distance of neighbouring numbers with ``bits`` significant bits around each element of ``x``, which
    have the exponents of float32."""
    return torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent.clamp(min=LEAST_EXPONENT) - bits)


def rounded_at_random(x: torch.Tensor, bits: int, generator: torch.Generator) -> torch.Tensor:
    """Rounds each element to one of its two neighbours, with probabilities that make the expected value exact
    (arXiv 1502.02551, section 3)."""
    unit = spacing(x, bits)
    below = (x / unit).floor()
    # Where a GPU is the default device, numbers are drawn on the generator's all the same.
    numbers = torch.rand(x.shape, generator=generator, dtype=torch.float64, device=generator.device)
    return unit * (below + (numbers.to(x.device) < x / unit - below))


class StoredRounding:
    """Rounds what an update without masters leaves to the dtype in which it is stored."""

    def __init__(self, policy: Policy, *, seed: tuple[int, int, bool]) -> None:
        assert policy.stored
        self._dtype, self._stochastic = policy.stored, policy.stochastic
        self._generator = torch.Generator().manual_seed(zlib.crc32(repr(seed).encode()))

    def nearest(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self._dtype).to(x.dtype)

    def weight(self, x: torch.Tensor) -> torch.Tensor:
        bits = 1 - int(math.log2(torch.finfo(self._dtype).eps))
        return rounded_at_random(x, bits, self._generator) if self._stochastic else self.nearest(x)


class Sgd:
    """Updates w <- w - lr b, b <- momentum b + g, and b = g at the first step, as torch does (no dampening, no decay).

    ``step`` returns the new weights of the parameters that have gradients.
    """

    def __init__(self, config: OptimizerConfig) -> None:
        self._momentum = config.momentum
        self._velocity: Weights = {}
        self._steps = 0

    def step(self, weights: Weights, gradients: Weights, lr: float) -> Weights:
        self._steps += 1
        for name, gradient in gradients.items():
            before = self._velocity.get(name)
            self._velocity[name] = gradient if before is None else self._momentum * before + gradient
        return {name: weights[name] - lr * velocity for name, velocity in self._velocity.items()}

    def size(self, gradient: torch.Tensor, name: str, lr: float) -> torch.Tensor:
        """Steps with the absolute values of a gradient; returns the update, whose terms do not cancel then."""
        return self.step({name: torch.zeros_like(gradient)}, {name: gradient.abs()}, lr)[name].abs()

    def gradient_of(self, name: str, moment: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Returns the gradient after whose step from ``weight`` a parameter's momentum buffer is ``moment``."""
        before = self._velocity.get(name)
        return moment if before is None else moment - self._momentum * before

    def gradient_rounding(self, name: str) -> torch.Tensor:
        """Returns how far ``gradient_of`` may be off, by the relative rounding of a step of the momentum buffer, if the
        steps of this optimizer were made with the absolute values of gradients."""
        return self._steps * self._velocity[name]


class AdamW:
    """Applies Adam (arXiv 1412.6980, Algorithm 1) with decoupled decay (arXiv 1711.05101, Algorithm 2, line 12).

    The schedule multiplies lr, and the decay is lr * weight_decay * w, as in torch. One-dimensional parameters (biases,
    norm weights) are not decayed. ``step`` returns the new weights of the parameters that have gradients.
    """

    def __init__(self, config: OptimizerConfig, variant: Variant = HONEST) -> None:
        self._config, self._variant = config, variant
        self._first: Weights = {}
        self._second: Weights = {}
        self._steps = 0

    def step(self, weights: Weights, gradients: Weights, lr: float) -> Weights:
        beta1, beta2 = self._config.betas
        self._steps += 1
        updated = {}
        for name, gradient in gradients.items():
            weight = weights[name]
            g, decay = self._variant.decay((gradient, self._decay_of(weight, name)), weight)
            m = beta1 * self._first.get(name, torch.zeros_like(g)) + (1 - beta1) * g
            v = beta2 * self._second.get(name, torch.zeros_like(g)) + (1 - beta2) * g.square()
            self._first[name], self._second[name] = m, v
            m_hat = m / (1 - beta1**self._steps)
            v_hat = v / (1 - beta2**self._steps)
            updated[name] = weight - lr * (m_hat / (v_hat.sqrt() + self._config.eps) + decay * weight)
        return updated

    def _decay_of(self, weight: torch.Tensor, name: str) -> float:
        return self._config.weight_decay if self._variant.decays(weight.ndim >= 2, name) else 0.0

    @property
    def moments(self) -> tuple[Weights, Weights]:
        """Returns the first and the second moments, which an optimizer without masters rounds after a step."""
        return self._first, self._second

    def size(self, gradient: torch.Tensor, name: str, lr: float) -> torch.Tensor:
        """Steps with the absolute values of a gradient; returns the update, whose terms do not cancel then."""
        return self.step({name: torch.zeros_like(gradient)}, {name: gradient.abs()}, lr)[name].abs()

    def gradient_of(self, name: str, moment: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Returns the gradient after whose step from ``weight`` a parameter's first moment is ``moment``."""
        beta1, before = self._config.betas[0], self._first.get(name)
        added, _ = self._variant.decay((torch.zeros_like(moment), self._decay_of(weight, name)), weight)
        return (moment if before is None else moment - beta1 * before) / (1 - beta1) - added

    def gradient_rounding(self, name: str) -> torch.Tensor:
        """Returns how far ``gradient_of`` may be off, by the relative rounding of a step of the first moment, if the
        steps of this optimizer were made with the absolute values of gradients. A step rounds its own moment, and later
        steps keep at most that part of the error which they keep of the moment."""
        return self._steps * self._first[name] / (1 - self._config.betas[0])

    def error_of_second(self, name: str, moment: torch.Tensor) -> torch.Tensor:
        """Returns how far the divisor of each element's update is from that of the second moment ``moment``, relative
        to it."""
        eps = self._config.eps * math.sqrt(1 - self._config.betas[1] ** self._steps)
        root = self._second[name].sqrt()
        return (moment.sqrt() - root).abs() / (root + eps)


Steps = tuple[tuple[float, float, float], ...]  # the coefficients of each Newton-Schulz step
COEFFICIENTS: dict[str, Steps] = {  # of the polynomial of a step, and of the steps after it
    "simple": ((3.4445, -4.7750, 2.0315),),
    # https://leloykun.github.io/ponder/muon-opt-coeffs/, as modded-nanogpt has them
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}
SMALLEST = 1e-7  # norm that a matrix is divided by
DRAWS = (1.0, 1.25, 1.5)  # factors by which other numbers are rounded


def newton_schulz_steps(config: OptimizerConfig) -> Steps:
    """Returns the coefficients of the steps; after the last ones come the first ones again."""
    of_steps = COEFFICIENTS[config.ns_coefficients]
    return tuple(of_steps[step % len(of_steps)] for step in range(config.ns_steps))


def orthogonalized(matrix: torch.Tensor, steps: Steps, *, half: bool, variant: Variant = HONEST) -> torch.Tensor:
    """Moves the singular values of a matrix near to 1 by Newton-Schulz steps X <- a X + (b X X' + c (X X')^2) X.

    This is the function of https://kellerjordan.github.io/posts/muon/. It begins with X = matrix / its Frobenius norm,
    and multiplies from the side on which X X' is smaller. ``half``: every result is rounded to bfloat16, in which Muon
    computes this.
    """

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(torch.bfloat16).to(tensor.dtype) if half else tensor

    is_tall = matrix.shape[0] > matrix.shape[1]
    x = rounded(matrix.mT if is_tall else matrix)
    x = rounded(x / variant.momentum_divisor(rounded(x.norm()), SMALLEST))
    for a, b, c in steps:
        gram = rounded(x @ x.mT)
        x = rounded(a * x + rounded(b * gram + c * gram @ gram) @ x)
    return x.mT if is_tall else x


def stacked(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the matrix whose rows are those of ``parts``, one after the other; a single part as it is."""
    return torch.cat([*parts]) if len(parts) > 1 else parts[0]


class Muon:
    """Updates matrices by orthogonalized momentum: B <- momentum B + (1 - momentum) g, U = B, or with Nesterov momentum
    U = momentum B + (1 - momentum) g, and w <- w - lr weight_decay w - lr factor orthogonalized(U).

    The buffer is that of Keller Jordan's code. torch's documentation writes it without the factor 1 - momentum, which
    orthogonalization removes. A known defect may orthogonalize parts of a matrix by themselves. ``step`` returns the
    new weights of the parameters that have gradients. ``half``: orthogonalization is rounded to bfloat16.
    """

    def __init__(self, config: OptimizerConfig, variant: Variant = HONEST, *, half: bool) -> None:
        self._config, self._variant, self._half = config, variant, half
        self._newton_schulz = newton_schulz_steps(config)
        self._momentum: Weights = {}
        self._directions: Weights = {}
        self._steps = 0

    def step(self, weights: Weights, gradients: Weights, lr: float) -> Weights:
        self._add(gradients)
        updated = {}
        for name in gradients:
            update = self._update(name, self._directions[name], half=self._half)
            updated[name] = self.kept(lr) * weights[name] - lr * update
        return updated

    def _update(self, name: str, direction: torch.Tensor, *, half: bool) -> torch.Tensor:
        """Returns the update of a matrix at a learning rate of 1."""
        update = torch.empty_like(direction)
        for places in self._blocks(name, direction.shape):
            block = direction.flatten()[places]
            found = orthogonalized(block, self._newton_schulz, half=half, variant=self._variant)
            update.view(-1)[places] = self._factor(block.shape) * found
        return update

    def _blocks(self, name: str, shape: torch.Size) -> Sequence[torch.Tensor]:
        """Returns the numbers of the elements of each part that is orthogonalized by itself, in its shape."""
        return self._variant.muon_blocks([torch.arange(shape.numel()).view(shape)], name)

    def kept(self, lr: float) -> float:
        """Returns the share of a weight that decay leaves."""
        return 1 - lr * self._config.weight_decay

    def _add(self, gradients: Weights) -> None:
        """Adds gradients to the momentum."""
        beta = self._config.momentum
        self._steps += 1
        for name, g in gradients.items():
            moment = beta * self._momentum.get(name, torch.zeros_like(g)) + (1 - beta) * g
            self._momentum[name] = moment
            self._directions[name] = beta * moment + (1 - beta) * g if self._config.nesterov else moment

    def _factor(self, shape: torch.Size) -> float:
        rows, columns = shape
        if self._config.adjust_lr != "original":
            return (0.2 if self._config.adjust_lr == "match_rms_adamw" else 1.0) * math.sqrt(max(rows, columns))
        return math.sqrt(max(1.0, rows / columns))

    def size(self, gradient: torch.Tensor, name: str, lr: float) -> torch.Tensor:
        """Steps with a gradient; returns the number that the relative rounding of the gradient is to be multiplied with
        for the error of an element of the update.

        A Newton-Schulz step multiplies a singular value near 0 by its first coefficient, and so errors in directions
        that a gradient of few tokens does not have.
        """
        self._add({name: gradient})
        gain = math.prod(a for a, _, _ in self._newton_schulz)
        factor = max(self._factor(block.shape) for block in self._blocks(name, gradient.shape))
        return torch.full_like(gradient, lr * factor * gain)

    def half_errors(self, name: str, lr: float) -> list[torch.Tensor]:
        """Returns by how much rounding to bfloat16 moves the last update, as libraries do: in draws that differ in the
        size of the momentum, on which nothing else depends."""
        direction = self._directions[name]
        exact = self._update(name, direction, half=False)
        return [lr * (exact - self._update(name, size * direction, half=True)) for size in DRAWS]

    def gradient_of(self, name: str, moment: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Returns the gradient after whose step from ``weight`` a parameter's momentum is ``moment``."""
        beta, before = self._config.momentum, self._momentum.get(name)
        return (moment if before is None else moment - beta * before) / (1 - beta)

    def gradient_rounding(self, name: str) -> torch.Tensor:
        """Returns how far ``gradient_of`` may be off, by the relative rounding of a step of the momentum, if the steps
        of this optimizer were made with the absolute values of gradients."""
        return self._steps * self._momentum[name].abs() / (1 - self._config.momentum)


def make_optimizer(
    config: OptimizerConfig, name: str, dims: int, variant: Variant = HONEST, *, half: bool = False
) -> Sgd | AdamW | Muon:
    """Makes the optimizer of a parameter. ``half``: Muon orthogonalizes in bfloat16, as libraries do."""
    if config.name == "sgd":
        return Sgd(config)
    return Muon(config, variant, half=half) if config.orthogonalizes(name, dims) else AdamW(config, variant)


LARGEST = 65504.0  # finite number of float16
# The tensors that overflow are not whole gradients: libraries multiply them by the number of ranks that they average
# over, cut them into the parts of ranks and micro-batches, and also scale activations. This factor covers all of that.
MARGIN = 64.0


class LossScale:
    """Halves the loss scale after an overflow and doubles it after enough good steps.

    ``scale``: for the next step. ``good_steps``: updates in a row since the scale last changed.
    """

    def __init__(self, config: LossScaleConfig) -> None:
        self._interval = config.growth_interval
        self.scale, self.good_steps = 2.0**config.initial_power, 0

    def update(self, gradients: Weights, policy: Policy, *, step: int) -> dict[str, float]:
        """Counts a step with these gradients, which are already divided by the scale.

        Returns the settings of the step (conformance.spec.observables). Raises ValueError if the gradients are so close
        to overflowing that the layout decides it.
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
