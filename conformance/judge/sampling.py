"""Judges what a rollout engine samples: what its log-probs are of, how often it draws each token, where it stops.

The log-probs of a rollout are held against the policy at its weights. Which decoding explains them is found by trying
mistakes: each setting left out, the temperature applied twice, another token's, another prompt's, other weights.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from conformance.backends.engines import Decoding, Reported, Sampled
from conformance.judge.engines import Check, Tolerance, judge_invariance
from conformance.oracle.scoring import Scores, processed
from conformance.spec.precision import PrecisionName

Score = Callable[[Sequence[Sequence[int]], Sequence[int]], list[Scores]]  # scores requests, by where responses start

RAW = Decoding()
FILTERS = ("min_p", "top_k", "top_p")
MOST_PAIRS = 8  # responses that are tried as each other's
FALSE_ALARM = 1e-6  # probability that frequencies of a right sampler are called wrong
LEAST_EXPECTED = 20.0  # draws; rarer tokens are counted together


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Scores by the reference, and by the noise runs, at some weights."""

    precision: PrecisionName
    score: Score
    noise: Sequence[Score]


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Holds the responses to some prompts, and the policy that should have sampled them.

    allowed: how far a single log-prob may be off.
    """

    prompts: Sequence[Sequence[int]]
    responses: Sequence[Sampled]
    decoding: Decoding
    policy: Policy
    allowed: float

    @cached_property
    def scores(self) -> list[list[Scores]]:
        """Returns the scores by the reference and by each noise run."""
        requests = [(*prompt, *one.tokens) for prompt, one in zip(self.prompts, self.responses, strict=True)]
        return [run(requests, [*map(len, self.prompts)]) for run in (self.policy.score, *self.policy.noise)]

    @cached_property
    def sharp(self) -> list[Tensor]:
        """Tells at which tokens of each response rounding cannot change the set of tokens that filters leave."""
        return [torch.tensor([self._is_sharp(s, row) for row in range(len(s.response) - 1)]) for s in self.scores[0]]

    def _is_sharp(self, scores: Scores, row: int) -> bool:
        before = scores.tokens[: scores.start + row]
        return is_sharp(scores.response[row], before, scores.start, self.decoding, self.allowed)

    def at(self, decoding: Decoding) -> Tolerance:
        """Bounds the log-probs of the sampled tokens, if they are those of ``decoding``."""

        def chosen(scores: Scores, sharp: Tensor) -> Tensor:
            tokens = torch.tensor(scores.tokens[scores.start :])[:, None]
            return scores.processed(decoding)[:-1].gather(-1, tokens)[sharp, 0]

        runs = [[*map(chosen, run, self.sharp)] for run in self.scores]
        return Tolerance(precision=self.policy.precision, reference=runs[0], noise=runs[1:])

    @property
    def reported(self) -> list[Tensor]:
        return [one.logprobs[sharp] for one, sharp in zip(self.responses, self.sharp, strict=True)]

    def fits(self, decoding: Decoding) -> bool:
        return _fits(self.at(decoding), self.reported)


def is_sharp(logits: Tensor, before: Sequence[int], start: int, decoding: Decoding, allowed: float) -> bool:
    """Tells whether log-probs that are ``allowed`` off leave the same tokens after all filters."""
    if not any(getattr(decoding, name) != getattr(RAW, name) for name in FILTERS):
        return True
    unfiltered = replace(decoding, **{name: getattr(RAW, name) for name in FILTERS})
    every, off = processed(logits, before, start, unfiltered), 4 * allowed / (decoding.temperature or 1.0)
    if off >= 1:
        return False  # a probability may be twice as large, or none at all
    moved = [
        replace(
            decoding,
            min_p=min(1.0, decoding.min_p * scale),
            top_p=min(1.0, decoding.top_p * scale) if decoding.top_p < 1 else 1.0,
        )
        for scale in (1 - off, 1.0, 1 + off)
    ]
    left = [processed(logits, before, start, one).isfinite() for one in moved]
    if not all(torch.equal(one, left[0]) for one in left):
        return False
    return bool(left[0].all()) or float(every[left[0]].min() - every[~left[0]].max()) > off


def _is_possible(tolerance: Tolerance) -> bool:
    """Tells whether no token has the probability 0, in any run."""
    return all(bool(one.isfinite().all()) for run in (tolerance.reference, *tolerance.noise) for one in run)


def _fits(tolerance: Tolerance, observed: Sequence[Tensor]) -> bool:
    return _is_possible(tolerance) and tolerance.error(observed) <= tolerance.bound


def mistaken(decoding: Decoding) -> Iterator[tuple[str, Decoding]]:
    """Yields ways to apply the settings of a decoding wrongly."""
    for field in fields(Decoding):
        if field.name not in ("stop", "max_new_tokens") and getattr(decoding, field.name) != field.default:
            changed: dict[str, Any] = {field.name: field.default}
            yield f"without {field.name}", replace(decoding, **changed)
    if decoding.temperature not in (0, 1):
        text = f"the temperature {decoding.temperature} is applied twice"
        yield text, replace(decoding, temperature=decoding.temperature**2)


def judge_reported(name: str, rollout: Rollout, kind: Reported, specials: Sequence[int]) -> Check:
    """Proves which log-probs the engine reports for the tokens that it has sampled. kind: what it declares.

    specials: tokens that a text may lose.
    """
    kinds: dict[Reported, Decoding] = {"raw": RAW, "processed": rollout.decoding}
    count = int(sum(one.sum() for one in rollout.sharp))
    if not count:
        return Check(name=name, state="unsupported", text="at every token rounding may change what the filters leave")
    possible = rollout.at(rollout.decoding).reference
    outside = sum(int(one.isneginf().sum()) for one in possible)
    own, reported = rollout.at(kinds[kind]), rollout.reported
    if outside or not _fits(own, reported):
        why = _explained(rollout, kinds, kind, outside, specials) or "not explained"
        text = why + (f"; {outside} of {count} tokens have the probability 0" if outside else "")
        error, bound = (own.error(reported), own.bound) if _is_possible(own) else (None, None)
        return Check(name=name, state="differs", text=text, error=error, bound=bound)
    others = [other for other in kinds if other != kind and kinds[other] != kinds[kind] and rollout.fits(kinds[other])]
    proven = f"could also be {others[0]}" if others else f"proven to be {kind}"
    return own.judge(name, reported, more=f" of {count}; {proven}")


def _explained(
    rollout: Rollout, kinds: Mapping[Reported, Decoding], kind: Reported, outside: int, specials: Sequence[int]
) -> str:
    """Names the mistake that explains log-probs; empty if none does."""
    for other, decoding in kinds.items():
        if other != kind and rollout.fits(decoding):
            return f"{other}, and declared as {kind}"
    for other, decoding in kinds.items():
        tolerance = rollout.at(decoding)
        if _is_possible(tolerance) and (shift := shift_of(rollout.reported, tolerance)):
            return f"those of the token {shift} ({other})"
    for text, decoding in mistaken(rollout.decoding):
        if rollout.fits(decoding):
            left = next((name for name in FILTERS if f"without {name}" == text), "")
            return f"not renormalized over the tokens that {left} leaves" if left and not outside else text
    return _neighbours(rollout, kinds[kind]) or _dropped(rollout, kinds[kind], specials)


def shift_of(reported: Sequence[Tensor], tolerance: Tolerance) -> str:
    """Names the token whose log-probs were reported instead: ``before`` or ``after``; empty if neither fits."""
    pairs = [(x, ref) for x, ref in zip(reported, tolerance.reference, strict=True) if len(x) > 2]
    shifts = {"before": [(x[1:], ref[:-1]) for x, ref in pairs], "after": [(x[:-1], ref[1:]) for x, ref in pairs]}
    for name, shifted in shifts.items():
        x, ref = (
            (torch.cat([*part]) for part in zip(*shifted, strict=True)) if shifted else (torch.ones(1), torch.zeros(1))
        )
        if (x - ref).norm() <= tolerance.bound * ref.norm():
            return name
    return ""


def _neighbours(rollout: Rollout, decoding: Decoding) -> str:
    """Names responses that belong to another prompt of the batch; empty if there are none."""
    numbers = range(min(len(rollout.prompts), MOST_PAIRS))
    return "; ".join(
        f"prompt {i} got the response to prompt {j}"
        for i, j in itertools.permutations(numbers, 2)
        if replace(rollout, prompts=[rollout.prompts[j]], responses=[rollout.responses[i]]).fits(decoding)
    )


def _dropped(rollout: Rollout, decoding: Decoding, specials: Sequence[int]) -> str:
    """Names a special token that was sampled and is missing in the first response that does not fit."""
    for number, (prompt, response) in enumerate(zip(rollout.prompts, rollout.responses, strict=True)):
        one = replace(rollout, prompts=[prompt], responses=[response])
        if one.fits(decoding):
            continue
        for at, special in itertools.product(range(len(response.tokens)), specials):
            tokens = (*response.tokens[:at], special, *response.tokens[at:])
            kept = torch.arange(len(tokens)) != at
            logprobs = torch.zeros(len(tokens), dtype=torch.float64).masked_scatter(kept, response.logprobs)
            whole = replace(one, responses=[Sampled(tokens=tokens, logprobs=logprobs)])
            whole.__dict__["sharp"] = [whole.sharp[0] & kept]
            if whole.fits(decoding):
                return f"the special token {special} is missing before token {at} of the response to prompt {number}"
        return ""
    return ""


def judge_distributions(
    name: str,
    observed: Sequence[Tensor],
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    policy: Policy,
    allowed: float,
) -> Check:
    """Judges the processed distribution of all tokens after each prompt: those that are left, and their log-probs."""
    runs = [run(prompts, [*map(len, prompts)]) for run in (policy.score, *policy.noise)]
    sharp = [i for i, s in enumerate(runs[0]) if is_sharp(s.response[0], s.tokens, s.start, decoding, allowed)]
    if not sharp:
        return Check(
            name=name, state="unsupported", text="after each prompt rounding may change what the filters leave"
        )

    def judged(tried: Decoding, name: str, *, why: Callable[[], str] = str) -> Check:
        rows = [[run[i].processed(tried)[0] for i in sharp] for run in runs]
        left = [row.isfinite() for row in rows[0]]
        kept = [[row[one] for row, one in zip(run, left, strict=True)] for run in rows]
        own = [observed[i] for i in sharp]
        tolerance = Tolerance(precision=policy.precision, reference=kept[0], noise=kept[1:])
        apart = sum(int((row.isfinite() != one).sum()) for row, one in zip(own, left, strict=True))
        if apart:
            text = f"{why() or 'not explained'}; {apart} tokens are left, or left out, that should not be"
            return Check(name=name, state="differs", text=text)
        counts = ", ".join(str(int(one.sum())) for one in left)
        values = [row[one] for row, one in zip(own, left, strict=True)]
        return tolerance.judge(name, values, why=why, more=f"; {counts} of {len(left[0])} tokens are left")

    def why() -> str:
        tried = [("raw", RAW), *mistaken(decoding)]
        return next((text for text, one in tried if judged(one, name).state == "conforms"), "")

    return judged(decoding, name, why=why)


def judge_frequencies(name: str, drawn: Sequence[int], scores: Scores, decoding: Decoding, allowed: float) -> Check:
    """Compares how often tokens were drawn with their probabilities, by Pearson's chi-square.

    scores: of the prompt. allowed: how far a single log-prob may be off; rounding makes other probabilities. The text
    states the probability of such counts, and at which a right sampler is called wrong.
    """
    own, off = scores.processed(decoding)[0], allowed / (decoding.temperature or 1.0)
    counts = torch.bincount(torch.tensor(drawn), minlength=len(own)).double()
    if not is_sharp(scores.response[0], scores.tokens, scores.start, decoding, allowed):
        return Check(name=name, state="unsupported", text="rounding may change what the filters leave")
    chance, freedom = chi_square(counts, own, off)
    if not freedom and not counts[own.isneginf()].any():
        return Check(name=name, state="unsupported", text="one token has nearly the whole probability")
    text = f"chi-square of {freedom} degrees of freedom has the probability {chance:.2g}, false alarm {FALSE_ALARM:g}"
    if chance >= FALSE_ALARM:
        return Check(name=name, state="conforms", text=text)
    tried = [("raw", RAW), *mistaken(decoding)]
    found = [why for why, one in tried if chi_square(counts, scores.processed(one)[0], off)[0] >= FALSE_ALARM]
    same = "every seed gives the same token" if counts.max() == len(drawn) else "not explained"
    return Check(name=name, state="differs", text=f"drawn {found[0]}; {text}" if found else f"{same}; {text}")


def chi_square(counts: Tensor, logprobs: Tensor, off: float = 0.0) -> tuple[float, int]:
    """Returns the probability of a chi-square as large as that of ``counts``, and its degrees of freedom.

    off: of the log-probs. Probabilities that are off by it make the distribution noncentral, here as approximated by
    Patnaik (Biometrika 36, 1949).
    """
    if counts[logprobs.isneginf()].any():
        return 0.0, 0
    expected, order = (logprobs.exp() * counts.sum()).sort(descending=True)
    groups = ((expected.cumsum(0) - expected) / LEAST_EXPECTED).floor().unique_consecutive(return_inverse=True)[1]
    bins = [torch.zeros_like(x).index_add(0, groups, x)[: groups[-1] + 1] for x in (counts[order], expected)]
    if len(bins[1]) > 1 and bins[1][-1] < LEAST_EXPECTED:
        bins = [torch.cat((x[:-2], x[-2:].sum()[None])) for x in bins]
    square = ((bins[0] - bins[1]) ** 2 / bins[1]).sum()
    freedom, shift = len(bins[0]) - 1, float(counts.sum()) * off**2
    if not freedom:
        return 1.0, 0
    scale = (freedom + 2 * shift) / (freedom + shift)
    half = torch.tensor((freedom + shift) / scale / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, square / scale / 2)), freedom


def judge_stop(free: Sequence[Sampled], stopped: Sequence[Sampled], stop: int, longest: int) -> Check:
    """Judges where responses end: after ``longest`` tokens, or with the first ``stop``, which they keep.

    free: responses without a stop token. stopped: those with it.
    """
    wrong = [f"prompt {n}: {len(o.tokens)} of {longest} tokens" for n, o in enumerate(free) if len(o.tokens) != longest]
    ends = 0
    for number, one in enumerate(stopped):
        length, at = len(one.tokens), one.tokens.index(stop) + 1 if stop in one.tokens else 0
        ends += at > 0
        if at and length > at:
            wrong.append(f"prompt {number}: goes on for {length - at} tokens after the stop token {stop}")
        elif not at and length != longest:
            wrong.append(f"prompt {number}: ends after {length} of {longest} tokens without the stop token {stop}")
    if not ends and not wrong:
        wrong.append(f"the stop token {stop} was the likeliest, and no response has it any more")
    text = "; ".join(wrong) or f"{longest} tokens, or fewer with a stop token, which {ends} responses keep"
    return Check(name="stop and length", state="differs" if wrong else "conforms", text=text)


def judge_versions(name: str, rollouts: Mapping[int, Rollout]) -> Check:
    """Judges by which weights the responses were sampled. rollouts: the same responses, by version of the weights."""
    decoding = next(iter(rollouts.values())).decoding
    labelled = next(iter(rollouts.values())).responses[0].version
    made = [version for version, one in rollouts.items() if one.fits(decoding) or one.fits(RAW)]
    if labelled in made:
        return Check(name=name, state="conforms", text=f"the rollout is of version {labelled}, as labelled")
    by = f"was sampled by version {made[0]}" if made else "is of no version"
    text = f"the rollout is labelled with version {labelled} and {by}"
    return Check(name=name, state="differs", text=text)


def judge_sampled_again(name: str, observed: Sequence[Sampled], alone: Sequence[Sampled], *, allowed: float) -> Check:
    """Compares responses of the same seeds, sampled in two ways, bit by bit up to the first other token."""
    pairs, changed = [], 0
    for x, y in zip(observed, alone, strict=True):
        same = [*itertools.takewhile(lambda pair: pair[0] == pair[1], zip(x.tokens, y.tokens, strict=False))]
        pairs.append((x.logprobs[: len(same)], y.logprobs[: len(same)]))
        changed += x.tokens != y.tokens
    check = judge_invariance(name, *zip(*pairs, strict=True), allowed=allowed)
    text = check.text if any(len(x) for x, _ in pairs) else "no token to compare"
    return replace(check, text=f"{text}; {changed} of {len(pairs)} responses have other tokens" if changed else text)
