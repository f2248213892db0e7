"""Samples with a rollout engine and judges it: what its log-probs are of, how often tokens come, where responses end.

``on_policy`` closes the circle of reinforcement learning: a training backend makes a step of GRPO with the engine's
responses and log-probs, and the cell is judged by an oracle that has the same tokens.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from conformance.backends.engines import GREEDY, Decoding, NotSupported, Reported, Sampled, ServedEngine
from conformance.data.inputs import batches_of
from conformance.judge.engines import MOST_POINTS, TRUNCATED, Check, mismatch
from conformance.judge.sampling import (
    Policy,
    Rollout,
    judge_distributions,
    judge_frequencies,
    judge_reported,
    judge_sampled_again,
    judge_stop,
    judge_versions,
)
from conformance.matrix.cell import Cell
from conformance.records.step_tensors import read_record
from conformance.results.verdict import State
from conformance.runner.session import Session
from conformance.spec.batch import Batch
from conformance.spec.objectives import Grpo
from conformance.spec.scenario import Scenario

NEW_TOKENS, DRAWS = 12, 10_000
SAMPLES = 4  # responses to each prompt of a step of GRPO
SAMPLED = Decoding(temperature=0.7, max_new_tokens=NEW_TOKENS)  # at 1 raw and processed log-probs are the same
DECODINGS = {
    "temperature": SAMPLED,
    "top-p": replace(SAMPLED, top_p=0.8),
    "top-k": replace(SAMPLED, top_k=12),
    "min-p": replace(SAMPLED, min_p=0.1),
    "repetition penalty": replace(SAMPLED, repetition_penalty=1.3),
    "penalties": replace(SAMPLED, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3),
}
DRAWN = ("temperature", "top-p")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Holds what an engine samples from: prompts, and the policy at its weights.

    allowed: how far a single log-prob may be off. specials: tokens that a text may lose.
    """

    prompts: Sequence[Sequence[int]]
    policy: Policy
    allowed: float
    vocab_size: int
    specials: Sequence[int] = ()

    def rollout(self, engine: ServedEngine, decoding: Decoding) -> Rollout:
        return self.of(engine.generate(self.prompts, decoding), decoding)

    def of(self, responses: Sequence[Sampled], decoding: Decoding) -> Rollout:
        given = {"prompts": self.prompts, "policy": self.policy, "allowed": self.allowed}
        return Rollout(responses=responses, decoding=decoding, **given)  # type: ignore[arg-type]


def judge_sampling(engine: ServedEngine, asked: Asked, kind: Reported) -> Iterator[Check]:
    """Yields the checks of an engine that was started to report ``kind``."""
    for name, decoding in DECODINGS.items():
        full = f"{kind} log-probs of sampled tokens, {name}"
        try:
            yield judge_reported(full, asked.rollout(engine, decoding), kind, asked.specials)
            if kind == "processed":
                yield _distributions(engine, asked, name, decoding)
        except NotSupported as error:
            yield Check(name=full, state="unsupported", text=str(error))


def _distributions(engine: ServedEngine, asked: Asked, name: str, decoding: Decoding) -> Check:
    observed = engine.next_token(asked.prompts, asked.vocab_size, decoding)
    full, allowed = f"processed distributions, {name}", asked.allowed
    return judge_distributions(full, [*observed], asked.prompts, decoding, asked.policy, allowed)


def judge_draws(engine: ServedEngine, asked: Asked) -> Iterator[Check]:
    """Yields checks of the frequencies of tokens after one prompt, and of responses that are sampled again, alone."""
    prompt = asked.prompts[0]
    (scores,) = asked.policy.score([prompt], [len(prompt)])
    for name in DRAWN:
        one = replace(DECODINGS[name], max_new_tokens=1)
        drawn = [response.tokens[0] for response in engine.generate([prompt] * DRAWS, one)]
        yield judge_frequencies(f"frequencies of {DRAWS} draws, {name}", drawn, scores, one, asked.allowed)
    together = engine.generate(asked.prompts, SAMPLED)
    alone = [engine.generate([one], SAMPLED, [seed])[0] for seed, one in enumerate(asked.prompts)]
    yield judge_sampled_again("sampled alone and in a batch", together, alone, allowed=asked.allowed)


def judge_ends(engine: ServedEngine, asked: Asked, greedy: Sequence[Sampled]) -> Check:
    """Judges where greedy responses end. greedy: those without a stop token."""
    stop = greedy[0].tokens[len(greedy[0].tokens) // 2]
    try:
        stopped = engine.generate(asked.prompts, replace(GREEDY, max_new_tokens=NEW_TOKENS, stop=(stop,)))
    except NotSupported as error:
        return Check(name="stop and length", state="unsupported", text=str(error))
    return judge_stop(greedy, stopped, stop, NEW_TOKENS)


def judge_version(engine: ServedEngine, name: str, now: Asked, before: Asked) -> Check:
    """Judges whether the engine's responses are of the weights that it was given last."""
    rollout = now.rollout(engine, replace(SAMPLED, temperature=1.0))
    return judge_versions(name, {engine.version: rollout, engine.version - 1: replace(rollout, policy=before.policy)})


def judge_interrupted(engine: ServedEngine, name: str, way: str, folder: Path, now: Asked, before: Asked) -> Check:
    """Judges an update in the middle of requests: each token is of the weights that the engine had when it came.

    The engine is started with the weights of ``before``; ``folder`` has those of ``now``.
    """
    one = replace(SAMPLED, temperature=1.0)
    responses = engine.interrupted(before.prompts, one, after=NEW_TOKENS // 2, way=way, folder=folder)
    counts = [x.before for x in responses]
    if not all(0 < count < len(x.tokens) for count, x in zip(counts, responses, strict=True)):
        return Check(
            name=name, state="unsupported", text=f"the update came after {min(counts)} to {max(counts)} tokens"
        )
    first = [replace(x, tokens=x.tokens[:n], logprobs=x.logprobs[:n]) for x, n in zip(responses, counts, strict=True)]
    rest = [replace(x, tokens=x.tokens[n:], logprobs=x.logprobs[n:]) for x, n in zip(responses, counts, strict=True)]
    longer = [(*prompt, *x.tokens) for prompt, x in zip(before.prompts, first, strict=True)]
    wrong = []
    for when, asked, other, of in (
        ("before the update", before, now, first),
        ("after the update", replace(now, prompts=longer), replace(before, prompts=longer), rest),
    ):
        own = asked.of(of, one)
        if not own.fits(one):
            off = own.at(one).measured(own.reported).max_abs
            neither = f"neither weights, up to {off:.1e} off: keys and values may be of others"
            wrong.append(f"tokens {when} are of {'the other weights' if other.of(of, one).fits(one) else neither}")
    text = "; ".join(wrong) or f"{counts[0]} tokens of the old weights, {len(rest[0].tokens)} of the new ones"
    return Check(name=name, state="differs" if wrong else "conforms", text=text)


def on_policy(
    engine: ServedEngine, asked: Asked, scenario: Scenario, folder: Path, cell: Cell, session: Session
) -> Iterator[Check]:
    """Makes a step of GRPO with the responses and log-probs of a started engine, in the layout of ``cell``.

    The step is judged by an oracle that has the engine's tokens; once with truncated importance weights, and once
    without them, which gives their part of the gradient.
    """
    prompts = [prompt for prompt in asked.prompts for _ in range(SAMPLES)]
    rollout = replace(asked, prompts=prompts).rollout(engine, Decoding(max_new_tokens=NEW_TOKENS))
    name = f"on-policy step by {cell.backend} {cell.layout}"
    yield judge_reported(f"{name}: log-probs of the rollout", rollout, "raw", asked.specials)
    file = session.config.out / "rollouts.jsonl"
    write_rollouts(file, prompts, rollout.responses)
    longest = max(map(len, prompts)) + NEW_TOKENS
    data = replace(scenario.data, path=str(file), packed=False, rows=len(prompts), max_len=longest)
    gradients: list[dict[str, Tensor]] = []
    for threshold in (TRUNCATED, None):
        objective = Grpo(rollout_is_threshold=threshold)
        title = f"on-policy-{threshold:g}" if threshold else "on-policy"
        step = replace(scenario, name=title, objective=objective, data=data, steps=1, accumulation=1)
        made = Cell.single(scenario=step, backend=cell.phases[0].backend, layout=cell.phases[0].layout)
        judged = session.run(made)
        state, reason = judged.verdict.state, judged.verdict.reason.partition("\n")[0]
        if not judged.completed or state == "differs":
            yield Check(name=name, state=state, text=reason)
            return
        tensors = read_record(session.folder(made) / judged.records[0]).steps[0].tensors()
        gradients.append({key: x.double() for key, x in tensors.items() if key.startswith("gradient/")})
        batch = batches_of(step, folder)[0]
        trained = [tensors[f"old_logprob/{row.index}"].double() for row in batch.rows]
    yield describe_step(name, state, batch, trained, gradients)


def describe_step(
    name: str, state: State, batch: Batch, trained: Sequence[Tensor], gradients: Sequence[dict[str, Tensor]]
) -> Check:
    """Describes the ratios of the first step, and what the importance weights do to its gradient."""
    documents = [document for row in batch.rows for document in row.documents]
    targets = [torch.tensor(document.targets) for document in documents]
    columns = [torch.tensor(document.columns["rollout_logprob"], dtype=torch.float64) for document in documents]
    engine = [column[mask] for column, mask in zip(columns, targets, strict=True)]
    x, y = torch.cat([*trained]), torch.cat(engine)
    weighted, plain = gradients
    difference = sum(float((weighted[key] - plain[key]).square().sum()) for key in plain) ** 0.5
    part = difference / sum(float(one.square().sum()) for one in plain.values()) ** 0.5
    text = f"{mismatch(x, y)}; importance weights truncated there are {part:.1e} of the gradient"
    places = torch.cat([mask.nonzero()[:, 0] for mask in targets])
    points = tuple(map(tuple, torch.stack((places.double(), x, y), dim=1)[:MOST_POINTS].tolist()))
    return Check(name=name, state=state, text=text, points=points)


def write_rollouts(file: Path, prompts: Sequence[Sequence[int]], responses: Sequence[Sampled]) -> None:
    """Writes a file of rollouts (conformance.data.rollouts). The reward is the share of even tokens."""
    groups = {tuple(prompt): number for number, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
    lines = [
        {
            "group": groups[tuple(prompt)],
            "prompt_ids": list(prompt),
            "completion_ids": list(one.tokens),
            "logprobs": one.logprobs.tolist(),
            "reward": sum(token % 2 == 0 for token in one.tokens) / len(one.tokens),
        }
        for prompt, one in sorted(zip(prompts, responses, strict=True), key=lambda pair: groups[tuple(pair[0])])
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
