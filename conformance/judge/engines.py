"""Judges the log-probs, distributions and greedy tokens of a rollout engine, alone, in batches and against trainers.

Log-probs are compared with the oracle's float64 as those of a training: the bound is that of the engine's precision,
measured by single-process runs on the same tokens (conformance.judge.tolerance).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from conformance.backends.engines import Sampled
from conformance.judge.tensor_views import tensor_off
from conformance.judge.tolerance import NOISE_FACTOR, TOO_EXACT, Measurement, allowed_errors, noisiest
from conformance.oracle.scoring import Scores
from conformance.results.verdict import State
from conformance.spec.precision import PRECISIONS, PrecisionName

STAGE, ROUTED = "log-probs", "routed experts"
TRUNCATED = 2.0  # the usual threshold of importance weights
MOST_POINTS = 2000


@dataclass(frozen=True, kw_only=True)
class Check:
    """Holds the result of one check of an engine. error, bound: relative, where numbers were compared.

    points: of tokens: position, and the log-probs of trainer and engine, for the page.
    """

    name: str
    state: State
    text: str
    error: float | None = None
    bound: float | None = None
    points: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Bounds log-probs by the errors of single-process runs in the engine's precision on the same tokens.

    noise: by run, the tensors that belong to those of ``reference``.
    """

    precision: PrecisionName
    reference: Sequence[Tensor]
    noise: Sequence[Sequence[Tensor]]

    def measured(self, observed: Sequence[Tensor]) -> Measurement:
        """Compares all tokens as one vector."""
        off = tensor_off(STAGE, STAGE, 0, torch.cat([*observed]), torch.cat([*self.reference]), floor=0.0)
        return replace(off, scalar=True)

    def error(self, observed: Sequence[Tensor]) -> float:
        return self.measured(observed).error

    @property
    def bound(self) -> float:
        """Returns the largest allowed error. Raises RecordError if the precision is too noisy to judge by."""
        runs = [[self.measured(run)] for run in self.noise]
        nothing = frozenset[str]()
        noise = noisiest(runs, precision=self.precision, gradients=nothing, amplified=frozenset())
        of = runs[0][0]
        bounds = allowed_errors([of], precision=self.precision, noise=noise, gradients=nothing, amplified={}, drift={})
        return bounds[of.key]

    @property
    def absolute(self) -> float:
        """Returns how far a single log-prob may be off."""
        return NOISE_FACTOR * max(self.measured(run).max_abs for run in self.noise)

    def judge(self, name: str, observed: Sequence[Tensor], *, why: Callable[[], str] = str, more: str = "") -> Check:
        """Judges log-probs. why: explains a difference."""
        found, bound = self.measured(observed), self.bound
        text = f"worst token {found.max_abs:.1e}{more}"
        half, noise = PRECISIONS[self.precision].is_half, bound / NOISE_FACTOR
        if found.error > bound:
            state: State = "differs"
            text = f"{why() or 'not explained'}; {text}"
        elif half and found.error < TOO_EXACT * noise:
            state, text = "differs", f"too exact: it did not compute in {self.precision}; {text}"
        else:
            state = "conforms"
        return Check(name=name, state=state, text=text, error=found.error, bound=bound)


def divergence(observed: Tensor, reference: Tensor) -> float:
    """Returns the largest KL(reference || observed) of distributions (positions, vocabulary) of log-probs."""
    terms = reference.exp() * (reference - observed)
    return float(terms.nan_to_num(nan=0.0).sum(-1).max())


def judge_greedy(responses: Sequence[Sampled], scores: Sequence[Scores], *, allowed: float) -> Check:
    """Judges whether each token is the reference's likeliest, or nearly so: within what both log-probs may be off.

    scores: of each prompt with its response. allowed: how far a single log-prob may be off.
    """
    first, worst, name = "", 0.0, "greedy tokens"
    for number, (response, one) in enumerate(zip(responses, scores, strict=True)):
        count = len(response.tokens)
        margins = (one.best - one.chosen)[-count:]
        worst = max(worst, margins.max().item())
        if not first and margins.max() > 0:
            place = int((margins > 0).nonzero()[0])
            first = f"first difference at prompt {number}, token {place}: {margins[place]:.1e} less likely"
    total = sum(len(response.tokens) for response in responses)
    if worst <= 2 * allowed:
        explained = f"; {first}, which rounding explains" if first else ""
        return Check(name=name, state="conforms", text=f"{total} tokens are the likeliest{explained}")
    return Check(
        name=name, state="differs", text=f"{first}; the worst {worst:.1e}, rounding explains {2 * allowed:.1e}"
    )


def judge_invariance(name: str, observed: Sequence[Tensor], alone: Sequence[Tensor], *, allowed: float) -> Check:
    """Compares the log-probs of the same requests served in two ways, bit by bit. allowed: of one log-prob."""
    pairs = list(zip(observed, alone, strict=True))
    apart = max(float((x - y).abs().max()) if len(x) else 0.0 for x, y in pairs)
    if all(torch.equal(x, y) for x, y in pairs):
        return Check(name=name, state="conforms", text="equal bit by bit")
    share = sum(int((x != y).sum()) for x, y in pairs) / sum(x.numel() for x, _ in pairs)
    text = f"{share:.0%} of log-probs are not equal bit by bit, at most {apart:.1e} apart"
    within = apart <= 2 * allowed
    return Check(name=name, state="conforms" if within else "differs", text=text, error=apart, bound=2 * allowed)


def judge_experts(observed: Sequence[Tensor], reference: Sequence[Tensor], noise: Sequence[Sequence[Tensor]]) -> Check:
    """Compares the experts that routers choose, (tokens, routers, K) of each request, with those of the reference.

    noise: those of single-process runs. Rounding changes a choice between experts of nearly the same probability.
    """

    def wrong(found: Sequence[Tensor], expected: Sequence[Tensor] = reference) -> float:
        pairs = zip(found, expected, strict=True)
        return (
            1
            - torch.cat([(x[..., None] == y[..., None, :]).any(-1).flatten() for x, y in pairs]).double().mean().item()
        )

    name, share, allowed = ROUTED, wrong(observed), NOISE_FACTOR * max(map(wrong, noise))
    count = sum(map(Tensor.numel, observed))
    text = f"{share:.1%} of {count} choices are not the reference's; rounding explains {allowed:.1%}"
    if share <= allowed:
        return Check(name=name, state="conforms", text=text)
    tried = {
        "those of the token before": wrong([x[1:] for x in observed], [ref[:-1] for ref in reference]),
        "those of the token after": wrong([x[:-1] for x in observed], [ref[1:] for ref in reference]),
        "those of the next router": wrong(observed, [ref.roll(-1, 1) for ref in reference]),
        "expert i + 1 is called expert i": wrong([x + 1 for x in observed]),
    }
    why = next((why for why, off in tried.items() if off <= allowed), "not explained")
    return Check(name=name, state="differs", text=f"{why}; {text}")


def judge_pair(
    trainer: str,
    of_trainer: Sequence[Tensor],
    of_engine: Sequence[Tensor],
    reference: Sequence[Tensor],
    positions: Sequence[Tensor],
    *,
    bound: float,
) -> Check:
    """Compares engine and trainer at the same tokens: their importance ratios, and the distance of both from float64.

    bound: of each of them from the reference, relative. positions: of the tokens in their documents.
    """
    x, y, ref, at = (torch.cat([*of]).double() for of in (of_trainer, of_engine, reference, positions))
    error, norm = float((x - y).norm() / ref.norm()), float(ref.norm())
    text = (
        f"{mismatch(x, y)}; from float64: trainer {float((x - ref).norm()) / norm:.1e}, engine "
        f"{float((y - ref).norm()) / norm:.1e}"
    )
    state: State = "conforms" if error <= 2 * bound else "differs"
    points = tuple(map(tuple, torch.stack((at, x, y), dim=1)[:MOST_POINTS].tolist()))
    return Check(name=f"against {trainer}", state=state, text=text, error=error, bound=2 * bound, points=points)


def mismatch(trainer: Tensor, engine: Tensor) -> str:
    """Describes the mismatch of log-probs. Ratios are trainer / engine, as in the loss of GRPO."""
    log_ratio = trainer - engine
    return (
        f"ratios {math.exp(float(log_ratio.min())):.6g} to {math.exp(float(log_ratio.max())):.6g}, "
        f"k1 {-float(log_ratio.mean()):.1e}, k3 {float((log_ratio.exp() - 1 - log_ratio).mean()):.1e}, "
        f"{float((log_ratio > math.log(TRUNCATED)).double().mean()):.1%} above {TRUNCATED:g}"
    )
