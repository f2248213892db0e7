"""What an engine samples: which distribution its log-probs are of, how often tokens come, by which weights."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import faulty_engines as faulty
import pytest
import torch

from conformance.backends.engines import Decoding, Engine, Reported, ServedEngine, load_engine
from conformance.core.host import FIXTURES
from conformance.data.prepare import batches_of, prepare_inputs
from conformance.judge.sampling import chi_square, judge_frequencies, judge_reported
from conformance.oracle.scoring import Scores, processed
from conformance.runner import engine_rollouts
from conformance.runner.engine_rollouts import DECODINGS, Asked, judge_draws, judge_sampling
from conformance.runner.engine_run import Expected, Requests
from conformance.spec.scenario import load_scenario

LOGPROBS = "{} log-probs of sampled tokens, {}".format
BY_SAMPLING = [
    (faulty.rescored(lambda one: Decoding()), "processed", "temperature", "raw, and declared as processed"),
    (faulty.ProcessedAsRaw, "raw", "temperature", "processed, and declared as raw"),
    (
        faulty.rescored(lambda one: replace(one, temperature=one.temperature**2)),
        "processed",
        "temperature",
        "the temperature 0.7 is applied twice",
    ),
    (faulty.rescored(lambda one: replace(one, top_p=1.0)), "processed", "top-p", "not renormalized over the tokens"),
    (faulty.decoding_as(lambda one: replace(one, top_k=0)), "processed", "top-k", "without top_k"),
    (faulty.decoding_as(lambda one: replace(one, min_p=0.0)), "processed", "min-p", "without min_p"),
    (
        faulty.decoding_as(lambda one: replace(one, repetition_penalty=1.0)),
        "processed",
        "repetition penalty",
        "without repetition_penalty",
    ),
    (faulty.Shifted, "processed", "temperature", "those of the token before"),
    (faulty.ForNeighbour, "processed", "temperature", "prompt 0 got the response to prompt 1"),
    (faulty.SpecialsDropped, "processed", "temperature", "the special token 1 is missing before token 1"),
]


@dataclass(frozen=True)
class Served:
    """Holds a folder, what is asked of its engines, and what is expected there."""

    folder: Path
    asked: Asked
    expected: Expected

    def __call__(self, engine: type[Engine]) -> ServedEngine:
        served = ServedEngine(engine())
        served.start(self.folder, "fp32", {})
        return served


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Served:
    scenario = load_scenario(FIXTURES / "scenarios" / "sft-packed.toml", model="models/qwen3", precision="fp32")
    folder = prepare_inputs(scenario, tmp_path_factory.mktemp("inputs")).models["policy"]
    batch = batches_of(scenario, folder)[0]
    expected = Expected(scenario, folder, Requests.of(batch, [faulty.SPECIAL]))
    return Served(folder, replace(expected.asked, prompts=expected.requests.prompts[:3]), expected)


@pytest.mark.parametrize("name", ["transformers"])
def test_honest_engine_samples_as_defined(serve: Served, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_rollouts, "DRAWS", 640)
    engine = serve(load_engine("impl.engines.transformers_engine:TransformersEngine"))
    found = {check.name: check for check in judge_sampling(engine, serve.asked, "processed")}
    assert found.pop(LOGPROBS("processed", "penalties")).state == "unsupported"
    found |= {check.name: check for check in judge_draws(engine, serve.asked)}
    assert {check.state for check in found.values()} == {"conforms"}, found


@pytest.mark.parametrize(("engine", "kind", "name", "cause"), BY_SAMPLING, ids=[cause for *_, cause in BY_SAMPLING])
def test_wrong_logprobs_of_sampled_tokens_are_named(
    serve: Served, engine: type[Engine], kind: Reported, name: str, cause: str
) -> None:
    rollout = serve.asked.rollout(serve(engine), DECODINGS[name])
    found = judge_reported(name, rollout, kind, serve.asked.specials)
    assert found.state == "differs"
    assert cause in found.text


LOGITS = torch.linspace(0, 4, 60, dtype=torch.float64)


@pytest.mark.parametrize(
    ("logits", "cause"),
    [
        (LOGITS / 0.7, ""),
        (LOGITS / 0.49, "drawn the temperature 0.7 is applied twice"),
        (LOGITS, "drawn raw"),
        (LOGITS * 9, "not explained"),
        (LOGITS * 999, "every seed gives the same token"),
    ],
)
def test_wrong_frequencies_are_named(logits: torch.Tensor, cause: str) -> None:
    scores = Scores(chosen=LOGITS, best=LOGITS, last=LOGITS, response=LOGITS[None], tokens=(1, 2), start=2)
    drawn = torch.multinomial(logits.softmax(-1), 10_000, replacement=True, generator=torch.Generator().manual_seed(0))
    found = judge_frequencies("", drawn.tolist(), scores, Decoding(temperature=0.7))
    assert found.state == ("differs" if cause else "conforms")
    assert cause in found.text


def test_chi_square_has_its_false_alarms() -> None:
    """Draws of the right distribution have a uniform probability."""
    scores, generator = LOGITS.log_softmax(-1), torch.Generator().manual_seed(0)
    drawn = torch.multinomial(LOGITS.softmax(-1).expand(400, -1), 2000, replacement=True, generator=generator)
    chances = torch.tensor([chi_square(torch.bincount(row, minlength=60).double(), scores)[0] for row in drawn])
    assert abs(float(chances.mean()) - 0.5) < 0.06
    assert 5 <= int((chances < 0.05).sum()) <= 40


def test_penalties_and_filters_follow_their_definitions() -> None:
    logits = torch.tensor([2.0, 1.0, -1.0, 0.5], dtype=torch.float64)

    def of(**settings: Any) -> list[float]:
        return processed(logits, (0, 2, 1), 1, Decoding(**settings)).exp().tolist()

    def softmax(*numbers: float) -> Any:
        return pytest.approx(torch.tensor(numbers, dtype=torch.float64).softmax(-1).tolist())

    none = -math.inf
    assert of(repetition_penalty=2.0) == softmax(1.0, 0.5, -2.0, 0.5)
    assert of(presence_penalty=0.5, frequency_penalty=0.25) == softmax(2.0, 0.25, -1.75, 0.5)
    assert of(temperature=0.5) == softmax(4.0, 2.0, -2.0, 1.0)
    assert of(top_k=2) == softmax(2.0, 1.0, none, none)
    assert of(min_p=0.3) == softmax(2.0, 1.0, none, none)
    assert of(top_p=0.7) == softmax(2.0, 1.0, none, none)
    assert of(top_p=0.6) == softmax(2.0, none, none, none)
