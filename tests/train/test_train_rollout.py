"""Roll-outs: what a response follows from, what its log-probs are, and how responses become rows."""

import dataclasses
import math
from collections import Counter
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from train_runs import training

from conformance.backends.engines import ServedEngine, load_engine
from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.data.tokenizer import load_tokenizer
from conformance.spec.batch import Batch, Document, Row
from conformance.spec.scenario import Scenario
from impl.checkpoints.training_state import DataPosition
from impl.models.loading import load_model
from impl.train import generation
from impl.train.experience import (
    check_resumes,
    check_rollout,
    deal,
    document_of,
    logprob_gap,
    rollout_logprobs,
    rollout_numbers,
)
from impl.train.generation import (
    Choose,
    HfEngine,
    Response,
    Sampling,
    ServedRollouts,
    make_engine,
    seed_of,
    share_of,
)
from impl.train.rewards import REWARDS
from impl.train.setup import end_tokens
from impl.train.text_pipeline import Prompt, load_prompts

EXACT = REWARDS["exact-answer"]
KINDS = ("mean", "max", "min")
LLAMA = FIXTURES / "models" / "llama"
PROMPTS = [(1, 4, 20, 30), (1, 4, 21, 31, 41), (1, 4, 22)]
SEEDS = [[seed_of(0, 0, prompt, sample) for sample in range(3)] for prompt in range(3)]
SAMPLING = Sampling(temperature=0.7, max_new_tokens=5, end=(2,), prompts=2)


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    config = training(tmp_path_factory.mktemp("rollout"), "grpo", precision="fp32", data={"max_len": 64})
    return config.scenario


@pytest.fixture(scope="module")
def engine(scenario: Scenario) -> HfEngine:
    return HfEngine(LLAMA, scenario.tier.compute.dtype, SAMPLING, "cpu")


@pytest.mark.parametrize("model", ["llama", "gemma3", "mixtral"])
def test_response_follows_from_its_seed_in_any_batch(scenario: Scenario, model: str) -> None:
    engine = HfEngine(FIXTURES / "models" / model, scenario.tier.compute.dtype, SAMPLING, "cpu")
    together = engine.generate(PROMPTS, SEEDS, greedy=False)
    backwards = engine.generate(PROMPTS[::-1], SEEDS[::-1], greedy=False)[::-1]
    torch.manual_seed(1)
    alone = [engine.generate([prompt], [seeds], greedy=False)[0] for prompt, seeds in zip(PROMPTS, SEEDS, strict=True)]
    responses = list(chain.from_iterable(together))
    for others in (backwards, alone):
        for one, other in zip(responses, chain.from_iterable(others), strict=True):
            assert one.tokens == other.tokens
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert len({response.tokens for response in responses}) == 9


def test_batches_are_the_same_on_any_number_of_ranks() -> None:
    prompts = [[0] * length for length in (7, 2, 9, 4, 4, 1, 8)]

    def batches(ranks: int) -> list[list[int]]:
        shares = [share_of(prompts, 2, rank=rank, ranks=ranks) for rank in range(ranks)]
        return sorted(share[start : start + 2] for share in shares for start in range(0, len(share), 2))

    assert batches(1) == batches(2) == batches(3) == batches(5) == [[0, 6], [2], [3, 4], [5, 1]]


def test_responses_to_other_roll_outs_prompts_and_samples_are_others() -> None:
    seeds = {seed_of(*numbers) for numbers in [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]}
    assert len(seeds) == 5


@pytest.mark.parametrize("greedy", [True, False])
def test_the_engines_logprobs_are_those_of_a_forward_pass_over_the_whole_response(
    engine: HfEngine, greedy: bool
) -> None:
    model = load_model(LLAMA, dtype=torch.float32, attention="eager").eval()
    for prompt, group in zip(PROMPTS, engine.generate(PROMPTS, SEEDS, greedy=greedy), strict=True):
        for response in group:
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *response.tokens]])).logits[0, len(prompt) - 1 : -1]
            every = (logits / SAMPLING.temperature).log_softmax(dim=-1)
            wanted = every.gather(-1, torch.tensor(response.tokens)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(response.logprobs), wanted, rtol=0, atol=1e-5)
            if greedy:
                assert response.tokens == tuple(every.argmax(dim=-1).tolist())


def test_scores_that_a_model_caps_are_capped_in_the_engine(scenario: Scenario) -> None:
    gemma = FIXTURES / "models" / "gemma2"
    model = load_model(gemma, dtype=torch.float32, attention="eager").eval()
    engine = HfEngine(gemma, scenario.tier.compute.dtype, SAMPLING, "cpu")
    tokens = torch.tensor([PROMPTS[0] * 4])
    with torch.no_grad():
        torch.testing.assert_close(engine.model(tokens).logits, model(tokens).logits)


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    scores = torch.tensor([[0.0, -torch.inf, 1.0, -2.0, 0.5]])
    drawn = torch.rand(40_000, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    chosen = Choose(drawn, temperature=0.5)(torch.empty(40_000, 0), scores.repeat(40_000, 1)).argmax(dim=-1)
    counts = Counter(chosen.tolist())
    for token, probability in enumerate((scores[0] / 0.5).softmax(dim=-1).tolist()):
        assert counts[token] / 40_000 == pytest.approx(probability, abs=0.01)
    assert counts[1] == 0


@pytest.mark.parametrize(("number", "token"), [(0.0, 1), (1 - 2**-53, 2)])
def test_no_number_that_can_be_drawn_gives_a_token_that_cannot_come(number: float, token: int) -> None:
    scores = torch.tensor([[-torch.inf, 0.3, 0.1, -torch.inf]])
    chosen = Choose(torch.tensor([[number]], dtype=torch.float64), 1.0)(torch.empty(1, 0), scores)
    assert chosen.argmax().item() == token


def test_a_response_ends_with_its_first_end_token_or_is_cut(engine: HfEngine, scenario: Scenario) -> None:
    (whole,) = engine.generate(PROMPTS[:1], SEEDS[:1], greedy=False)
    assert not any(response.ended for response in whole)
    end = whole[0].tokens[1]  # the other two go on without it
    ending = dataclasses.replace(SAMPLING, end=(2, end))
    (cut,) = HfEngine(LLAMA, scenario.tier.compute.dtype, ending, "cpu").generate(PROMPTS[:1], SEEDS[:1], greedy=False)
    length = whole[0].tokens.index(end) + 1
    assert cut[0] == Response(whole[0].tokens[:length], whole[0].logprobs[:length], ended=True)
    assert cut[1:] == whole[1:]
    assert {len(response.tokens) for response in whole} == {SAMPLING.max_new_tokens}


def test_an_engine_samples_with_the_weights_that_it_was_given(scenario: Scenario) -> None:
    engine = HfEngine(LLAMA, scenario.tier.compute.dtype, SAMPLING, "cpu")
    before = engine.generate(PROMPTS, SEEDS, greedy=True)
    weights = [(name, -weight.clone()) for name, weight in engine.model.named_parameters()]
    engine.load(iter(weights))
    assert engine.generate(PROMPTS, SEEDS, greedy=True) != before
    with pytest.raises(AssertionError, match=r"no weights model\.norm\.weight"):
        engine.load(iter([pair for pair in weights if pair[0] != "model.norm.weight"]))


def served(scenario: Scenario, sampling: Sampling = SAMPLING) -> ServedRollouts:
    """Serves the model by transformers' engine, in this process."""
    return ServedRollouts(ServedEngine(load_engine("transformers")()), LLAMA, scenario, sampling)


def test_served_engine_samples_as_a_replica(scenario: Scenario, engine: HfEngine) -> None:
    """The engine in another process gets prompts, seeds, stop tokens and weights."""
    (whole,) = engine.generate(PROMPTS[:1], SEEDS[:1], greedy=False)
    sampling = dataclasses.replace(SAMPLING, end=(2, whole[0].tokens[1]))
    replica = HfEngine(LLAMA, scenario.tier.compute.dtype, sampling, "cpu")
    other = served(scenario, sampling)
    before = replica.generate(PROMPTS, SEEDS, greedy=False)
    weights = [(name, -weight.clone()) for name, weight in replica.model.named_parameters()]
    for _ in range(2):
        for group, expected in zip(
            other.generate(PROMPTS, SEEDS, greedy=False), replica.generate(PROMPTS, SEEDS, greedy=False), strict=True
        ):
            assert [(one.tokens, one.ended) for one in group] == [(one.tokens, one.ended) for one in expected]
            for one, right in zip(group, expected, strict=True):
                assert one.logprobs == pytest.approx(right.logprobs, abs=1e-5)
        replica.load(iter(weights))
        other.load(iter(weights))
    assert replica.generate(PROMPTS, SEEDS, greedy=False) != before
    assert other.generate([], [], greedy=True) == []


@pytest.mark.parametrize(
    ("kind", "words"), [("vlm", "did you mean 'vllm'"), ("transformers", "computes in fp32, bf16, fp16, not in exact")]
)
def test_unusable_engine_is_a_usage_error(
    scenario: Scenario, kind: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "EngineProcess", lambda name, **_: ServedEngine(load_engine(name)()))
    with pytest.raises(UsageError, match=words):
        make_engine(kind, LLAMA, dataclasses.replace(scenario, precision="exact"), SAMPLING, "cpu")


def test_gap_has_the_numbers_of_verl_and_slime() -> None:
    """Two responses in one row: slime's mean is over responses, the others' over tokens."""
    policy = torch.tensor([-0.1, -0.9, -0.6, -0.2], dtype=torch.float64)
    found = logprob_gap(OneRank(), Batch(0, 8, (Row(0, tuple(documents_of(2, 4))),)), {0: policy})  # type: ignore[arg-type]
    engine = torch.full((4,), -0.5, dtype=torch.float64)
    difference, apart = policy - engine, (policy.exp() - engine.exp()).abs()
    wanted = {
        "sampling/sampling_logp_difference/mean": difference.abs().mean(),
        "sampling/sampling_logp_difference/max": difference.abs().max(),
        "sampling/importance_sampling_ratio/mean": difference.exp().mean(),
        "training/rollout_probs_diff_mean": apart.mean(),
        "training/rollout_probs_diff_max": apart.max(),
        "training/rollout_probs_diff_std": apart.std(),
        "rollout_corr/kl": -difference.mean(),
        "rollout_corr/k3_kl": (difference.exp() - difference - 1).mean(),
        "train/train_rollout_logprob_abs_diff": (difference[0].abs() + difference[1:].abs().mean()) / 2,
    }
    assert math.isnan(found.pop("training/rollout_actor_probs_pearson_corr"))  # the engine's are all the same
    assert found == pytest.approx({name: float(number) for name, number in wanted.items()})


class OneRank:
    def all_reduce(self, value: float) -> float:
        return value

    def all_gather(self, value: Any) -> list[Any]:
        return [value]


def test_what_ends_a_response_is_said_by_tokenizer_and_generation_settings(tmp_path: Path) -> None:
    assert end_tokens(LLAMA, 2) == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    assert end_tokens(tmp_path, 2) == (2, 5, 7)
    with pytest.raises(UsageError, match="no end-of-sequence token"):
        end_tokens(LLAMA, None)
    for content, words in (
        ("5", "must hold a JSON object"),
        ('{"eos_token_id": 0.5}', "must be a token"),
        ("{", "not JSON"),
    ):
        (tmp_path / "generation_config.json").write_text(content)
        with pytest.raises(UsageError, match=words):
            end_tokens(tmp_path, 2)


def test_a_document_has_the_columns_of_a_frozen_roll_out() -> None:
    document = document_of(Prompt((1, 2), Decimal(3)), Response((4, 5), (-0.5, -1.5), True), group=7, reward=0.25)
    assert document.tokens == (1, 2, 4, 5)
    assert document.targets == (False, False, True, True)
    assert document.columns == {"group": 7.0, "reward": 0.25, "rollout_logprob": (0.0, 0.0, -0.5, -1.5)}


def documents_of(*lengths: int) -> list[Document]:
    return [Document((9,) * n, (False, *[True] * (n - 1)), {"rollout_logprob": (-0.5,) * n}) for n in lengths]


def test_responses_are_dealt_into_rows_the_longest_first() -> None:
    documents = documents_of(3, 9, 5, 7, 4)
    assert deal(documents, 5) == [(document,) for document in documents]
    assert [[len(d.tokens) for d in row] for row in deal(documents, 2)] == [[9, 5, 3], [7, 4]]


def test_the_numbers_of_a_roll_out() -> None:
    groups = [[Response((1, 2), (0.0, 0.0), True), Response((1, 2, 3, 4), (0.0,) * 4, False)]]
    told = rollout_numbers(groups, [[1.0, 0.5]], kl_coef=0.1)
    assert told == {
        **{"critic/score/mean": 0.75, "critic/score/max": 1.0, "critic/score/min": 0.5, "critic/score/std": 0.25},
        **{"response_length/mean": 3.0, "response_length/max": 4.0, "response_length/min": 2.0},
        "completions/clipped_ratio": 0.5,
    }
    free = rollout_numbers(groups, [[1.0, 0.5]], kl_coef=0.0)
    assert free.items() - told.items() == {(f"critic/rewards/{kind}", told[f"critic/score/{kind}"]) for kind in KINDS}


@pytest.mark.parametrize(
    ("changes", "rollout", "said"),
    [
        ({"steps": 3, "objective": {"mini_batches": 2}}, {}, "not a whole number of rollouts"),
        ({}, {"greedy": True}, "are all the same; use n_samples_per_prompt=1"),
        ({}, {"prompts": 3}, "3 prompts x 4 samples = 12 responses do not fill 1 mini-batches of 8 rows = 8"),
        ({"data": {"packed": True, "rows": 8}}, {"prompts": 1}, "or use more responses than rows"),
        ({"data": {"packed": True, "rows": 2}}, {}, "a row of 4 prompts and responses has up to 4 x 9 tokens"),
    ],
)
def test_a_roll_out_that_does_not_fill_its_rows_is_refused(
    tmp_path: Path, changes: dict[str, Any], rollout: dict[str, Any], said: str
) -> None:
    config = training(tmp_path, "grpo", **changes)
    assert config.rollout
    with pytest.raises(UsageError, match=said):
        check_rollout(
            config.scenario, dataclasses.replace(config.rollout, **rollout), [Prompt((1, 2, 3, 4, 5), Decimal(0))]
        )


@pytest.mark.parametrize(
    ("step", "consumed", "rollout", "objective"),
    [
        (2, 4, {"prompts": 4}, {}),  # roll-outs of twice as many prompts
        (2, 4, {}, {"ppo_epochs": 2}),
        (2, 2, {}, {}),
        (6, 2, {}, {"ppo_epochs": 4}),  # it would end within a roll-out
    ],
)
def test_a_training_does_not_go_on_with_other_roll_outs(
    tmp_path: Path, step: int, consumed: int, rollout: dict[str, Any], objective: dict[str, Any]
) -> None:
    config = training(tmp_path, "grpo", steps=4, objective=objective)
    assert config.rollout
    own = dataclasses.replace(config.rollout, **rollout)
    with pytest.raises(UsageError, match=f"{step} updates on {consumed} prompts.*resume with the initial"):
        check_resumes(config.scenario, own, step=step, position=DataPosition(seed=0, documents=110, consumed=consumed))
    before = DataPosition(seed=0, documents=110, consumed=2 * config.rollout.prompts)
    check_resumes(training(tmp_path, "grpo").scenario, config.rollout, step=2, position=before)


def test_prompts_of_a_file_are_the_users_turn_with_the_number_of_the_reference(
    tmp_path: Path, scenario: Scenario
) -> None:
    file = tmp_path / "gsm8k.jsonl"
    file.write_text('{"question": "3+4", "answer": "3+4=<<3+4=7>>7\\n#### 7"}\n{"question": "1", "answer": "none"}\n')
    tokenizer = load_tokenizer(LLAMA)
    data = dataclasses.replace(scenario.data, path=str(file))
    with pytest.raises(UsageError, match=r"sample 2 of .*has no number"):
        load_prompts(data, tokenizer, vocabulary=400, max_new_tokens=4, reward=EXACT)
    file.write_text(file.read_text().splitlines()[0])
    (prompt,) = load_prompts(data, tokenizer, vocabulary=400, max_new_tokens=4, reward=EXACT)
    assert tokenizer.decode(prompt.tokens) == "<bos><|user|>3+4<|assistant|>"
    assert prompt.answer == 7
    with pytest.raises(UsageError, match="has no room for a prompt of 6 tokens and max_new_tokens=60"):
        load_prompts(data, tokenizer, vocabulary=400, max_new_tokens=60, reward=EXACT)
    with pytest.raises(UsageError, match="the model's vocabulary has 100"):
        load_prompts(data, tokenizer, vocabulary=100, max_new_tokens=4, reward=EXACT)


def test_sampled_logprobs_of_a_row_are_those_of_its_targets() -> None:
    assert rollout_logprobs(Row(0, tuple(documents_of(3, 2)))) == [-0.5] * 3
