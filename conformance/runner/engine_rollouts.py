"""Samples with a rollout engine and judges it: what its log-probs are of, how often tokens come, where responses end.

``on_policy`` closes the circle of reinforcement learning: a training backend makes a step of GRPO with the engine's
responses and log-probs, and the cell is judged by an oracle that has the same tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from conformance.backends.engines import GREEDY, Decoding, NotSupported, Reported, Sampled, ServedEngine
from conformance.judge.engines import Check
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

NEW_TOKENS, DRAWS = 12, 10_000
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
        responses = engine.generate(self.prompts, decoding)
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
        yield judge_frequencies(f"frequencies of {DRAWS} draws, {name}", drawn, scores, one)
    together = engine.generate(asked.prompts, SAMPLED)
    alone = [engine.generate([one], SAMPLED, [seed])[0] for seed, one in enumerate(asked.prompts)]
    yield judge_sampled_again("sampled alone and in a batch", together, alone, allowed=asked.allowed)


def judge_ends(engine: ServedEngine, asked: Asked, greedy: Sequence[Sampled]) -> Check:
    """Judges where greedy responses end. greedy: those without a stop token."""
    stop = greedy[0].tokens[len(greedy[0].tokens) // 2]
    stopped = engine.generate(asked.prompts, replace(GREEDY, max_new_tokens=NEW_TOKENS, stop=(stop,)))
    return judge_stop(greedy, stopped, stop, NEW_TOKENS)


def judge_version(engine: ServedEngine, name: str, now: Asked, before: Asked) -> Check:
    """Judges whether the engine's responses are of the weights that it was given last."""
    rollout = now.rollout(engine, replace(SAMPLED, temperature=1.0))
    return judge_versions(name, {engine.version: rollout, engine.version - 1: replace(rollout, policy=before.policy)})
