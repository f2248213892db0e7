"""What an engine samples: which distribution its log-probs are of, how often tokens come, by which weights."""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import faulty_engines as faulty
import pytest
import torch
from cells import cell_of

from conformance.backends.engines import Decoding, Engine, Reported, ServedEngine, load_engine
from conformance.core.host import FIXTURES
from conformance.data.inputs import batches_of, prepare_inputs
from conformance.data.rollouts import read_groups
from conformance.judge.sampling import chi_square, judge_frequencies, judge_reported
from conformance.oracle.scoring import Scores, processed
from conformance.runner import engine_rollouts
from conformance.runner.engine_rollouts import (
    DECODINGS,
    Asked,
    describe_step,
    judge_draws,
    judge_sampling,
    on_policy,
    write_rollouts,
)
from conformance.runner.engine_run import Expected, Requests
from conformance.runner.session import Session
from conformance.spec.batch import Batch, Document, Row
from conformance.spec.scenario import load_scenario
from reports.html import write_html

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
    found = judge_frequencies("", drawn.tolist(), scores, Decoding(temperature=0.7), 1e-5)
    assert found.state == ("differs" if cause else "conforms")
    assert cause in found.text


@pytest.mark.parametrize(
    ("logits", "decoding", "words"),
    [
        (LOGITS, Decoding(top_p=0.8), "rounding may change"),
        (LOGITS, Decoding(min_p=0.9), "rounding may change"),
        (LOGITS * 999, Decoding(), "nearly the whole probability"),
        (LOGITS, Decoding(), "has the probability"),
    ],
)
def test_rounded_probabilities_are_no_false_alarm(logits: torch.Tensor, decoding: Decoding, words: str) -> None:
    """The logits of the engine are up to 0.5 off those of the reference."""
    scores = Scores(chosen=LOGITS, best=LOGITS, last=LOGITS, response=logits[None], tokens=(1, 2), start=2)
    generator = torch.Generator().manual_seed(0)
    rounded = logits + (torch.rand(60, generator=generator, dtype=torch.float64) - 0.5)
    drawn = torch.multinomial(rounded.softmax(-1), 10_000, replacement=True, generator=generator)
    found = judge_frequencies("", drawn.tolist(), scores, decoding, 0.5)
    assert found.state == ("conforms" if words == "has the probability" else "unsupported")
    assert words in found.text


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


def test_rollouts_of_an_engine_are_read_as_written(serve: Served, tmp_path: Path) -> None:
    asked = replace(serve.asked, prompts=[prompt for prompt in serve.asked.prompts for _ in range(2)])
    rollout = asked.rollout(serve(load_engine("transformers")), Decoding(max_new_tokens=3))
    file = tmp_path / "rollouts.jsonl"
    write_rollouts(file, asked.prompts, rollout.responses)
    scenario = load_scenario(FIXTURES / "scenarios" / "grpo.toml", model="models/qwen3", precision="fp32")
    scenario = replace(scenario, data=replace(scenario.data, path=str(file)))
    groups = read_groups(scenario, vocabulary=asked.vocab_size)
    documents = [document for group in groups for document in group]
    assert [len(group) for group in groups] == [2, 2, 2]
    for document, prompt, one in zip(documents, asked.prompts, rollout.responses, strict=True):
        assert document.tokens == (*prompt, *one.tokens)
        assert document.columns["rollout_logprob"] == (*[0.0] * len(prompt), *one.logprobs.tolist())


def test_mismatch_of_a_step_is_described() -> None:
    """The engine's log-probs are 0.1 too low at one of two tokens, and the weights turn the gradient by a tenth."""
    document = Document((5, 6, 7), (False, True, True), {"rollout_logprob": (0.0, -1.1, -2.0)})
    batch = Batch(0, 4, (Row(0, (document,)),))
    gradients = [{"gradient/w": torch.tensor([1.0, 0.1])}, {"gradient/w": torch.tensor([1.0, 0.0])}]
    found = describe_step("", "conforms", batch, [torch.tensor([-1.0, -2.0], dtype=torch.float64)], gradients)
    assert found.text.startswith("ratios 1 to 1.10517, k1 -5.0e-02, k3 2.6e-03, 0.0% above 2; ")
    assert found.text.endswith("are 1.0e-01 of the gradient")
    assert found.points == ((1.0, -1.0, -1.1), (2.0, -2.0, -2.0))


@pytest.mark.slow
def test_step_of_grpo_with_an_engines_rollout_conforms(serve: Served, session: Session) -> None:
    engine, cell = serve(load_engine("transformers")), cell_of("fsdp2", "sft-packed", "qwen3", "dp2", "fp32")
    found = [*on_policy(engine, serve.asked, cell.scenario, serve.folder, cell, session)]
    assert [check.state for check in found] == ["conforms", "conforms"]
    assert "0.0% above 2" in found[1].text


def test_page_draws_each_token(tmp_path: Path) -> None:
    points = [[1, -1.0, -1.1], [2, -2.0, -2.0], [2, -3.0, -3.0]]
    check = {"name": "against <fsdp2>", "state": "conforms", "text": "", "error": 0.1, "bound": None, "points": points}
    engine = {"engine": "vllm", "model": "m", "precision": "fp32", "device": "cpu", "state": "conforms"}
    (tmp_path / "engine.json").write_text(json.dumps([engine | {"checks": [check, check | {"points": []}]}]))
    text = write_html(tmp_path).read_text()
    assert "vllm conforms in fp32" in text
    assert "against &lt;fsdp2&gt;" in text
    assert text.count("<svg") == 3
    assert text.count("<circle") == 3 + 2  # tokens, and positions
    assert text.count("<title>1 tokens") == 1
    assert text.count("<title>2 tokens") == 1
    assert ">1.10517092<" in text  # the largest ratio
