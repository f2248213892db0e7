"""The feed-forward of a layer: gated, or a mixture of experts."""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from conformance.oracle.linear import linear
from conformance.oracle.parts import ClampedMlp, GatedMlp, Grouped, MixtureOfExperts
from conformance.oracle.policy import Policy
from conformance.oracle.routing import Routing
from conformance.oracle.tap import Module
from conformance.oracle.variant import Weights

CORRECTION = "e_score_correction_bias"  # the one buffer of a model, which is loaded and not trained


def feed_forward_shapes(part: GatedMlp | MixtureOfExperts, hidden: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters; a Linear's weight is (out, in), and experts are stacked."""
    if isinstance(part, GatedMlp):
        return _gated_shapes(part, hidden, "mlp")
    shapes: dict[str, tuple[int, ...]] = {f"mlp.{part.router}.weight": (part.experts, hidden)}
    if part.corrected:
        shapes[f"mlp.{part.router}.{CORRECTION}"] = (part.experts,)
    if part.router_bias:
        shapes[f"mlp.{part.router}.bias"] = (part.experts,)
    shapes |= {f"mlp.experts.{name}": (part.experts, *size) for name, size in _expert_shapes(part.expert, hidden)}
    if part.shared:
        shapes |= _gated_shapes(part.shared, hidden, part.shared_name)
        if part.shared_gate:
            shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
    return shapes


def _expert_shapes(expert: GatedMlp | ClampedMlp, hidden: int) -> list[tuple[str, tuple[int, ...]]]:
    into, size = 2 * expert.size, expert.size
    if isinstance(expert, GatedMlp):
        return [("gate_up_proj", (into, hidden)), ("down_proj", (hidden, size))]
    biases: list[tuple[str, tuple[int, ...]]] = [("gate_up_proj_bias", (into,)), ("down_proj_bias", (hidden,))]
    return [("gate_up_proj", (hidden, into)), ("down_proj", (size, hidden)), *biases]


def _gated_shapes(mlp: GatedMlp, hidden: int, name: str) -> dict[str, tuple[int, ...]]:
    into = {"gate_up_proj": 2 * mlp.size} if mlp.fused else {"gate_proj": mlp.size, "up_proj": mlp.size}
    sizes = {**{part: (rows, hidden) for part, rows in into.items()}, "down_proj": (hidden, mlp.size)}
    shapes: dict[str, tuple[int, ...]] = {}
    for part, size in sizes.items():
        shapes[f"{name}.{part}.weight"] = size
        if mlp.bias:
            shapes[f"{name}.{part}.bias"] = size[:1]
    return shapes


def feed_forward(
    x: Tensor, w: Weights, part: GatedMlp | MixtureOfExperts, policy: Policy, module: Module, routing: Routing
) -> Tensor:
    """``x`` and the result: (T, D). ``w``: the layer's own weights."""
    if isinstance(part, GatedMlp):
        return gated_mlp(x, w, part, module)
    return mixture_of_experts(x, w, part, policy, module, routing)


def gated_mlp(x: Tensor, w: Weights, mlp: GatedMlp, module: Module, name: str = "mlp") -> Tensor:
    """down(act(gate(x)) * up(x)) (arXiv 2002.05202 eq. 6); silu, or gelu in its tanh form (1606.08415 section 2)."""
    if mlp.fused:
        gate_TF, up_TF = linear(x, w, f"{name}.gate_up_proj", module).chunk(2, dim=-1)
    else:
        gate_TF, up_TF = (linear(x, w, f"{name}.{part}_proj", module) for part in ("gate", "up"))
    return linear(activated(gate_TF, mlp) * up_TF, w, f"{name}.down_proj", module)


def mixture_of_experts(
    x: Tensor, w: Weights, moe: MixtureOfExperts, policy: Policy, module: Module, routing: Routing
) -> Tensor:
    """sum over the chosen experts i of g_i(x) E_i(x) (arXiv 1701.06538 eq. 1), and a shared expert (2401.06066 eq. 9).

    g is a softmax over all experts of x W^T (2101.03961 eq. 1-2), of which the largest are kept; with ``normalised``
    they are divided by their sum, which is a softmax over the chosen ones (2401.04088 section 2.1). The softmax is in
    the stable dtype. No expert is full: every token goes to all that it has chosen. DeepSeek-V3 has sigmoids (arXiv
    2412.19437 eq. 15) and chooses by these with a bias that balances experts (eq. 16). A factor multiplies the gates.
    """
    weight, bias = w[f"mlp.{moe.router}.weight"], w.get(f"mlp.{moe.router}.bias")
    if moe.router_stable:
        logits_TX = F.linear(x.to(policy.stable), weight.to(policy.stable))
    else:
        logits_TX = F.linear(x, weight, bias).to(policy.stable)
    probabilities_TX = torch.sigmoid(logits_TX) if moe.corrected else torch.softmax(logits_TX, dim=-1)
    preferred_TX = probabilities_TX.detach()
    if moe.corrected:
        preferred_TX = preferred_TX + w[f"mlp.{moe.router}.{CORRECTION}"]
    if moe.grouped:
        preferred_TX = _of_best_groups(preferred_TX, moe.grouped)
    chosen_TK = routing.choose(preferred_TX, moe.chosen)
    gates_TK = probabilities_TX.gather(-1, chosen_TK)
    if moe.normalised:
        gates_TK = gates_TK / gates_TK.sum(dim=-1, keepdim=True)
    gates_TK = gates_TK * moe.factor
    routing.note(logits_TX, probabilities_TX, chosen_TK, gates_TK)
    gates_TK = gates_TK.to(policy.compute)
    y = torch.zeros_like(x)
    for number in range(moe.experts):
        token, place = torch.where(chosen_TK == number)
        own = {name: w[f"mlp.experts.{name}"][number] for name, _ in _expert_shapes(moe.expert, x.shape[1])}
        y = y.index_add(0, token, _expert(x[token], own, moe.expert) * gates_TK[token, place, None])
    if moe.shared is None:
        return y
    run = partial(gated_mlp, w=w, mlp=moe.shared, module=module, name=moe.shared_name)
    if not moe.shared_gate:
        return y + module(moe.shared_name, run, x)
    share_T1 = torch.sigmoid(linear(x, w, "mlp.shared_expert_gate", module))
    return y + share_T1 * module(moe.shared_name, run, x)


def _of_best_groups(scores: Tensor, grouped: Grouped) -> Tensor:
    """By what experts are chosen, (T, X): their scores, in the groups that are best for the token, and no others.

    Groups are limited in DeepSeek-V2 by their highest score (arXiv 2405.04434 section 2.2.2, of a group per device), in
    DeepSeek-V3 by the sum of the two highest (2412.19437 section 2.1.2).
    """
    scores_TGX = scores.unflatten(-1, (grouped.groups, -1))
    best_TG = scores_TGX.topk(grouped.best, dim=-1).values.sum(dim=-1).topk(grouped.chosen, dim=-1).indices
    others_TG = torch.ones_like(scores_TGX[..., 0], dtype=torch.bool).scatter(-1, best_TG, value=False)
    preferred: Tensor = scores_TGX.masked_fill(others_TG[..., None], -torch.inf)
    return preferred.flatten(-2)


def _expert(x: Tensor, w: Weights, expert: GatedMlp | ClampedMlp) -> Tensor:
    """A gated MLP; rows of gate_up_proj (2F, D) are those of the gate, then of up. down_proj: (D, F)."""
    if isinstance(expert, ClampedMlp):
        return _clamped(x, w, expert)
    gate_TF, up_TF = F.linear(x, w["gate_up_proj"]).chunk(2, dim=-1)
    return F.linear(activated(gate_TF, expert) * up_TF, w["down_proj"])


def _clamped(x: Tensor, w: Weights, expert: ClampedMlp) -> Tensor:
    """The clamped SwiGLU with a residual connection of gpt-oss (arXiv 2508.10925 section 2.3).

    gate_up_proj: (D, 2F). down_proj: (F, D).
    """
    both = x @ w["gate_up_proj"] + w["gate_up_proj_bias"]
    gate_TF, up_TF = both[:, ::2].clamp(max=expert.limit), both[:, 1::2].clamp(-expert.limit, expert.limit)
    mixed_TF = (up_TF + 1) * gate_TF * torch.sigmoid(expert.alpha * gate_TF)
    return mixed_TF @ w["down_proj"] + w["down_proj_bias"]


def activated(x: Tensor, mlp: GatedMlp) -> Tensor:
    return F.silu(x) if mlp.activation == "silu" else F.gelu(x, approximate="tanh")
