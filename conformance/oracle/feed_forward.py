"""Computes gated MLPs, mixtures of experts, and the losses of their routers.

The load-balancing loss of an optimizer step is that of the Switch Transformer (arXiv 2101.03961, equations 4-6):

    X sum_x f_x P_x,  f_x = choices of expert x / N,  P_x = sum of its probabilities / N

for X experts. Sums and N run over all tokens of the step, once for every router, including prompts and documents
without targets, without padding. So the loss does not depend on how a step is cut into ranks and micro-batches (the
global batch of arXiv 2501.11873, equation 3). transformers' ``load_balancing_loss_func`` applies the same formula to
one forward pass, so it depends on that cut; the two are equal if a whole step is one forward pass without padding. f
has no gradient. Once the choices of the step are counted, a document's share of the gradient is that of its P.

The z-loss keeps the routers' logits x small (ST-MoE, arXiv 2202.08906, equation 5). For a step of B tokens it is

    sum over routers of 1/B sum over tokens of (log sum_x exp(x_x))^2

Published folders hold one matrix per expert, ``experts.3.up_proj.weight`` (Mixtral: ``block_sparse_moe`` with w1, w3,
w2 for gate, up and down). Folders that a backend has exported hold stacked matrices, ``experts.gate_up_proj``, as the
model does.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from conformance.models.components import CORRECTION, ClampedMlp, GatedMlp, Grouped, MixtureOfExperts, expert_shapes
from conformance.oracle.primitives import Module, Policy, Weights, linear
from conformance.spec.batch import Document, expert_column


@dataclass
class Routing:
    """Collects what the routers do in a forward pass, in the order of the layers.

    replayed: choices that replace the routers' own, (T, K) for each router; empty if the routers choose.
    weights: for each router (T, X), the factor of each expert's output, 0 where the expert is not chosen.
    counts: (X,), how often any router chose each expert. probabilities: (X,), their sums, with a gradient.
    squares: the sum over tokens and routers for the z-loss, with a gradient.
    loads: for each router its own counts and probabilities.
    """

    replayed: tuple[Tensor, ...] = ()
    weights: list[Tensor] = field(default_factory=list)
    counts: Tensor | None = None
    probabilities: Tensor | None = None
    squares: Tensor | None = None
    loads: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def choose(self, probabilities: Tensor, count: int) -> Tensor:
        """Returns the experts of each token, (T, K). ``probabilities``: (T, X)."""
        if self.replayed:
            return self.replayed[len(self.weights)].to(probabilities.device)
        return probabilities.topk(count, dim=-1).indices

    def note(self, logits: Tensor, probabilities: Tensor, chosen: Tensor, gates: Tensor) -> None:
        """Adds the result of one router.

        ``logits`` and ``probabilities``: (T, X). ``chosen`` experts and the factors ``gates`` of their outputs: (T, K).
        Layers may be on several devices; sums are kept on the device of the first one.
        """
        home = self.weights[0].device if self.weights else probabilities.device
        probabilities, chosen, gates = probabilities.to(home), chosen.to(home), gates.to(home)
        self.weights.append(gates.new_zeros(probabilities.shape).scatter(-1, chosen, gates))
        counts = torch.bincount(chosen.flatten(), minlength=probabilities.shape[-1]).to(gates.dtype)
        sums, squares = probabilities.sum(dim=0), torch.logsumexp(logits, dim=-1).square().sum().to(home)
        self.loads.append((counts, sums))
        self.counts = counts if self.counts is None else self.counts + counts
        self.probabilities = sums if self.probabilities is None else self.probabilities + sums
        self.squares = squares if self.squares is None else self.squares + squares


def routing_of(documents: Sequence[Document], routers: int, count: int, key: str) -> Routing:
    """Returns the routing of a forward pass of documents, with choices if their columns hold any under ``key``."""
    if expert_column(0, 0, key) not in documents[0].columns:
        return Routing()
    replayed = []
    for layer in range(routers):
        names = [expert_column(layer, slot, key) for slot in range(count)]
        of_documents = [torch.tensor([document.columns[name] for name in names]) for document in documents]
        replayed.append(torch.cat(of_documents, dim=1).T.long())
    return Routing(replayed=tuple(replayed))


@dataclass
class Balance:
    """Sums router statistics over the documents of a step.

    counts and probabilities: (X,). choosers: N. squares: the sum for the z-loss.
    """

    counts: Tensor | None = None
    probabilities: Tensor | None = None
    choosers: int = 0
    squares: float = 0.0

    def add(self, routing: Routing) -> None:
        assert routing.counts is not None
        assert routing.probabilities is not None
        assert routing.squares is not None
        self.squares += routing.squares.item()
        found = routing.probabilities.detach()
        self.counts = routing.counts if self.counts is None else self.counts + routing.counts
        self.probabilities = found if self.probabilities is None else self.probabilities + found
        self.choosers += sum(len(weights) for weights in routing.weights)

    def loss(self, probabilities: Tensor) -> Tensor:
        """Returns X sum_x f_x P_x with f of the whole step, for the probability sums of the step or of a document."""
        assert self.counts is not None
        return len(self.counts) * (self.counts @ probabilities) / self.choosers**2

    def terms(self) -> Tensor:
        """Returns the terms that add up to the loss, (X + 1,), by which its tolerance is scaled.

        An expert's term is its excess over the mean count, times its probabilities; the last term is the remainder. The
        errors of tokens cannot serve as terms, because one matrix produces all their logits. The remainder has no
        error, because the probabilities of a token add up to 1.
        """
        assert self.counts is not None
        assert self.probabilities is not None
        mean = self.counts.mean(dtype=self.probabilities.dtype)
        excess = (self.counts - mean) * self.probabilities
        terms = torch.cat([excess, (mean * self.probabilities.sum())[None]])
        return len(self.counts) * terms / self.choosers**2


@dataclass(frozen=True, kw_only=True)
class LoadsOfPart:
    """Holds how often each router chose each expert, (X,), in a part of a step, such as a micro-batch.

    tokens: of those documents whose probabilities the part balances. weight: the factor of the part's loss.
    """

    counts: tuple[Tensor, ...]
    tokens: int
    weight: float

    def loss(self, routing: Routing) -> Tensor:
        """Returns a document's share of the sum over routers of X sum_x f_x P_x, where f is divided by the experts per
        token (arXiv 2101.03961, equations 4 to 6)."""
        pairs = zip(self.counts, (own for _, own in routing.loads), strict=True)
        terms = [len(counts) * (counts @ sums) / (counts.sum() * self.tokens) for counts, sums in pairs]
        return self.weight * torch.stack(terms).sum()


def feed_forward(
    x: Tensor, w: Weights, part: GatedMlp | MixtureOfExperts, policy: Policy, module: Module, routing: Routing
) -> Tensor:
    """Applies an MLP or a mixture of experts; ``x`` and the result are (T, D). ``w``: the layer's own weights."""
    if isinstance(part, GatedMlp):
        return gated_mlp(x, w, part, module)
    return mixture_of_experts(x, w, part, policy, module, routing)


def gated_mlp(x: Tensor, w: Weights, mlp: GatedMlp, module: Module, name: str = "mlp") -> Tensor:
    """Computes down(act(gate(x)) * up(x)) (arXiv 2002.05202 eq. 6), with silu or tanh gelu (1606.08415 section 2)."""
    if mlp.fused:
        gate_TF, up_TF = linear(x, w, f"{name}.gate_up_proj", module).chunk(2, dim=-1)
    else:
        gate_TF, up_TF = (linear(x, w, f"{name}.{part}_proj", module) for part in ("gate", "up"))
    return linear(activated(gate_TF, mlp) * up_TF, w, f"{name}.down_proj", module)


def mixture_of_experts(
    x: Tensor, w: Weights, moe: MixtureOfExperts, policy: Policy, module: Module, routing: Routing
) -> Tensor:
    """Computes sum_i g_i(x) E_i(x) over chosen experts (arXiv 1701.06538 eq. 1), plus a shared one (2401.06066 eq. 9).

    g is a softmax over all experts of x W^T (2101.03961 eq. 1-2) whose largest values are kept. With ``normalised``
    they are divided by their sum, which equals a softmax over the chosen experts (2401.04088 section 2.1). The softmax
    is in the stable dtype. Experts have no capacity limit: every token reaches all experts that it chose. DeepSeek-V3
    uses sigmoids (arXiv 2412.19437 eq. 15) and adds a balancing bias for the choice only (eq. 16). A factor multiplies
    the gates.
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
        own = {name: w[f"mlp.experts.{name}"][number] for name, _ in expert_shapes(moe.expert, x.shape[1])}
        y = y.index_add(0, token, _expert(x[token], own, moe.expert) * gates_TK[token, place, None])
    if moe.shared is None:
        return y
    run = partial(gated_mlp, w=w, mlp=moe.shared, module=module, name=moe.shared_name)
    if not moe.shared_gate:
        return y + module(moe.shared_name, run, x)
    share_T1 = torch.sigmoid(linear(x, w, "mlp.shared_expert_gate", module))
    return y + share_T1 * module(moe.shared_name, run, x)


def _of_best_groups(scores: Tensor, grouped: Grouped) -> Tensor:
    """Returns the scores (T, X) with -inf for experts outside the best groups of the token.

    DeepSeek-V2 ranks groups by their highest score (arXiv 2405.04434 section 2.2.2, one group per device), DeepSeek-V3
    by the sum of the two highest scores (2412.19437 section 2.1.2).
    """
    scores_TGX = scores.unflatten(-1, (grouped.groups, -1))
    best_TG = scores_TGX.topk(grouped.best, dim=-1).values.sum(dim=-1).topk(grouped.chosen, dim=-1).indices
    excluded_TG = torch.ones_like(scores_TGX[..., 0], dtype=torch.bool).scatter(-1, best_TG, value=False)
    preferred: Tensor = scores_TGX.masked_fill(excluded_TG[..., None], -torch.inf)
    return preferred.flatten(-2)


def _expert(x: Tensor, w: Weights, expert: GatedMlp | ClampedMlp) -> Tensor:
    """Computes one expert. gate_up_proj: (2F, D), the rows of gate before those of up. down_proj: (D, F)."""
    if isinstance(expert, ClampedMlp):
        return _clamped(x, w, expert)
    gate_TF, up_TF = F.linear(x, w["gate_up_proj"]).chunk(2, dim=-1)
    return F.linear(activated(gate_TF, expert) * up_TF, w["down_proj"])


def _clamped(x: Tensor, w: Weights, expert: ClampedMlp) -> Tensor:
    """Computes the clamped SwiGLU with a residual connection of gpt-oss (arXiv 2508.10925 section 2.3).

    gate_up_proj: (D, 2F). down_proj: (F, D).
    """
    both = x @ w["gate_up_proj"] + w["gate_up_proj_bias"]
    gate_TF, up_TF = both[:, ::2].clamp(max=expert.limit), both[:, 1::2].clamp(-expert.limit, expert.limit)
    mixed_TF = (up_TF + 1) * gate_TF * torch.sigmoid(expert.alpha * gate_TF)
    return mixed_TF @ w["down_proj"] + w["down_proj_bias"]


def activated(x: Tensor, mlp: GatedMlp) -> Tensor:
    return F.silu(x) if mlp.activation == "silu" else F.gelu(x, approximate="tanh")


_MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


def in_memory(name: str) -> str:
    """Translates the published name of a tensor to the module names of current transformers."""
    if ".block_sparse_moe." not in name:
        return name
    name = name.replace(".block_sparse_moe.", ".mlp.")
    return re.sub(r"\.(w[123])\.weight$", lambda found: f".{_MIXTRAL[found[1]]}.weight", name)


def stacked(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stacks the matrices of experts in layers that have all of them in one shape; other tensors stay as they are."""
    found = {in_memory(name): tensor for name, tensor in found.items()}
    plain = {name: tensor for name, tensor in found.items() if not _EXPERT.fullmatch(name)}
    parts: dict[str, dict[str, dict[int, Tensor]]] = {}
    for name, tensor in found.items():
        if match := _EXPERT.fullmatch(name):
            of_layer = parts.setdefault(match[1], {"gate_proj": {}, "up_proj": {}, "down_proj": {}})
            of_layer[match[3]][int(match[2])] = tensor
    for prefix, of_layer in parts.items():
        whole = {part: _stack(matrices) for part, matrices in of_layer.items()}
        gate, up, down = whole["gate_proj"], whole["up_proj"], whole["down_proj"]
        if gate is not None and up is not None and down is not None and gate.shape == up.shape:
            plain |= {f"{prefix}.gate_up_proj": torch.cat([gate, up], dim=1), f"{prefix}.down_proj": down}
    return plain  # check_shapes reports what is missing


def published(weights: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Returns weights under these names of a folder, which may hold experts one by one, and a head that is tied."""
    found = {}
    for name in names:
        own = in_memory(name)
        if own in weights:
            found[name] = weights[own]
        elif match := _EXPERT.fullmatch(own):
            prefix, number, part = match[1], int(match[2]), match[3]
            whole = weights[f"{prefix}.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}"][number]
            found[name] = whole if part == "down_proj" else whole.chunk(2)[part == "up_proj"]
        else:
            assert name == "lm_head.weight", name
            found[name] = weights["model.embed_tokens.weight"]
    return found


def _stack(matrices: Mapping[int, Tensor]) -> Tensor | None:
    """Stacks the matrices of experts 0, 1, ...; returns None if one is missing or their shapes differ."""
    same = len({matrix.shape for matrix in matrices.values()}) == 1
    whole = same and sorted(matrices) == list(range(len(matrices)))
    return torch.stack([matrices[number] for number in range(len(matrices))]) if whole else None


def stacked_shapes(found: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Applies ``stacked`` to shapes."""
    tensors = {name: torch.empty(shape, device="meta") for name, shape in found.items()}
    return {name: tuple(tensor.shape) for name, tensor in stacked(tensors).items()}
