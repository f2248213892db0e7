"""Trains an MLP on the next token of a Markov chain for a hundred seeds in a second.

All seeds train at once, as a batch of independent models: parameters have a leading dimension of seeds,
AdamW works element by element, and a loss summed over seeds gives every seed its own gradient.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

VOCAB, WIDTH, HIDDEN, BATCH = 24, 8, 32, 32


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a run is trained. The defaults are right; each of the later fields plants a bug or another choice."""

    steps: int = 200
    lr: float = 1e-2
    accumulation: int = 1
    ranks: int = 1
    dtype: torch.dtype = torch.float32
    undivided: bool = False  # losses of micro-batches are added up instead of averaged, and logged so
    summed: bool = False  # gradients are summed over data-parallel ranks instead of averaged
    lost_at: int | None = None  # a resume after this step forgets the optimizer's state
    restarted_at: int | None = None  # a resume after this step begins the schedule again
    data_seed: int = 0  # added to a run's seed for the order of its data
    weight_decay: float = 0.01


def train(recipe: Recipe, seeds: Sequence[int]) -> list[list[dict[str, float]]]:
    """Train every seed; returns of each its log: a row per step with step, tokens, loss, grad_norm and lr."""
    parameters = _parameters(seeds, recipe.dtype)
    data = torch.stack([_data(seed + recipe.data_seed, recipe.steps) for seed in seeds], dim=1)  # [T, S, B, 3]
    logs: list[list[dict[str, float]]] = [[] for _ in seeds]
    optimizer = _optimizer(parameters, recipe)
    parts = recipe.accumulation * recipe.ranks
    for step in range(1, recipe.steps + 1):
        since = step - (recipe.restarted_at or 0) if step > (recipe.restarted_at or recipe.steps) else step
        lr = _schedule(recipe, since)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        losses = torch.zeros(len(seeds), dtype=recipe.dtype)
        for part in data[step - 1].chunk(parts, dim=1):
            loss = _loss(parameters, part)  # [S]
            divided = loss / (recipe.ranks if recipe.undivided else 1 if recipe.summed else parts)
            (divided / (recipe.accumulation if recipe.summed else 1)).sum().backward()
            losses += loss.detach() / (recipe.ranks if recipe.undivided else parts)
        norms = torch.stack([p.grad.flatten(1).square().sum(1) for p in parameters if p.grad is not None]).sum(0).sqrt()
        optimizer.step()
        if step == recipe.lost_at:
            optimizer = _optimizer(parameters, recipe)
        for log, one, norm in zip(logs, losses.tolist(), norms.tolist(), strict=True):
            log.append({"step": step, "tokens": step * BATCH, "loss": one, "grad_norm": norm, "lr": lr})
    return logs


def write(log: list[dict[str, float]], file: Path, **header: object) -> str:
    """Write a log as our JSON lines; returns its path as an argument."""
    lines = [json.dumps(header), *map(json.dumps, log)] if header else list(map(json.dumps, log))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(file)


def _schedule(recipe: Recipe, step: int) -> float:
    """A warm-up of ten steps, then a cosine to a tenth."""
    if step <= 10:
        return recipe.lr * step / 10
    return recipe.lr * (0.55 + 0.45 * math.cos(math.pi * (step - 10) / max(recipe.steps - 10, 1)))


def _optimizer(parameters: list[torch.Tensor], recipe: Recipe) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=recipe.lr, weight_decay=recipe.weight_decay, betas=(0.9, 0.999))


def _parameters(seeds: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
    shapes = [(VOCAB, WIDTH), (2 * WIDTH, HIDDEN), (HIDDEN, VOCAB)]
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    made = [torch.stack([torch.randn(shape, generator=g) / shape[0] ** 0.5 for g in generators]) for shape in shapes]
    return [one.to(dtype).requires_grad_() for one in made]


def _data(seed: int, steps: int) -> torch.Tensor:
    """Triples of tokens [steps, B, 3] of a Markov chain that is the same for all."""
    chain = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(7)).mul(2.5).softmax(1).cumsum(1)
    generator = torch.Generator().manual_seed(10_000 + seed)
    tokens = [torch.randint(VOCAB, (steps * BATCH,), generator=generator)]
    for _ in range(2):
        drawn = torch.rand(steps * BATCH, 1, generator=generator)
        tokens.append(torch.searchsorted(chain[tokens[-1]], drawn)[:, 0].clamp(max=VOCAB - 1))
    return torch.stack(tokens, dim=1).reshape(steps, BATCH, 3)


def _loss(parameters: list[torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropies [S] of the third token, given two. tokens [S, B, 3]."""
    embedding, inner, outer = parameters
    seeds, rows, _ = tokens.shape
    index = tokens[..., :2].reshape(seeds, -1, 1).expand(-1, -1, WIDTH)
    hidden = embedding.gather(1, index).reshape(seeds, rows, 2 * WIDTH)
    logits = torch.bmm(torch.tanh(torch.bmm(hidden, inner)), outer)  # [S, B, V]
    return (
        F.cross_entropy(logits.flatten(0, 1), tokens[..., 2].flatten(), reduction="none").reshape(seeds, rows).mean(1)
    )
