"""Clipping and optimizers of the oracle, in plain tensor arithmetic.

Serves claims 1, 2 and 4: uses neither torch.optim nor torch.nn.utils, so that a bug in how a backend drives those
cannot hide here as well. The conventions (clipping, weight decay, schedule) are in scenario.py.
"""

import math

import torch

from conformance.oracle.forward import Weights
from conformance.scenario import OptimizerConfig


def global_norm(gradients: Weights) -> float:
    """2-norm of all gradients together."""
    return math.sqrt(sum(gradient.square().sum().item() for gradient in gradients.values()))


def clip(gradients: Weights, norm: float, max_norm: float | None) -> Weights:
    """Gradients times min(1, max_norm / (norm + 1e-6)), torch's formula."""
    factor = clip_factor(norm, max_norm)
    return {name: gradient * factor for name, gradient in gradients.items()}


def clip_factor(norm: float, max_norm: float | None) -> float:
    """min(1, max_norm / (norm + 1e-6)); 1 where ``max_norm`` is None."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))


class Sgd:
    """w <- w - lr b, b <- momentum b + g, and b = g at the first step, as torch has it (no dampening, no decay).

    ``step`` gives the new weights of what has gradients.
    """

    def __init__(self, config: OptimizerConfig) -> None:
        self._momentum = config.momentum
        self._velocity: Weights = {}

    def step(self, weights: Weights, gradients: Weights, lr: float) -> Weights:
        for name, gradient in gradients.items():
            before = self._velocity.get(name)
            self._velocity[name] = gradient if before is None else self._momentum * before + gradient
        return {name: weights[name] - lr * velocity for name, velocity in self._velocity.items()}


class AdamW:
    """Adam (arXiv 1412.6980, Algorithm 1) with decoupled decay (arXiv 1711.05101, Algorithm 2, line 12).

    The schedule multiplies lr, and decay is lr * weight_decay * w, as in torch. Parameters with one dimension (biases,
    norm weights) are not decayed. ``step`` gives the new weights of what has gradients.
    """

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config
        self._first: Weights = {}
        self._second: Weights = {}
        self._steps = 0

    def step(self, weights: Weights, gradients: Weights, lr: float) -> Weights:
        beta1, beta2 = self._config.betas
        self._steps += 1
        updated = {}
        for name, g in gradients.items():
            weight = weights[name]
            m = beta1 * self._first.get(name, torch.zeros_like(g)) + (1 - beta1) * g
            v = beta2 * self._second.get(name, torch.zeros_like(g)) + (1 - beta2) * g.square()
            self._first[name], self._second[name] = m, v
            m_hat = m / (1 - beta1**self._steps)
            v_hat = v / (1 - beta2**self._steps)
            decay = self._config.weight_decay if weight.ndim >= 2 else 0.0
            updated[name] = weight - lr * (m_hat / (v_hat.sqrt() + self._config.eps) + decay * weight)
        return updated


def make_optimizer(config: OptimizerConfig) -> Sgd | AdamW:
    return Sgd(config) if config.name == "sgd" else AdamW(config)
