"""Preferences and labelled answers: what files hold them, that pairs stay together, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.data.forms import read_labelled, read_preferences, read_steps
from conformance.data.inputs import build_batches, samples_in_turn
from conformance.data.samples import reads_of
from conformance.data.tokenizer import load_tokenizer
from conformance.spec.batch import Batch, Document
from conformance.spec.offline import LABEL, MARGIN, PAIR, SIDE
from conformance.spec.scenario import DataConfig, Scenario, load_scenario, parse_scenario

LLAMA = FIXTURES / "models" / "llama"
ASKED = {"role": "user", "content": "2 + 3?"}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def written(folder: Path, *records: dict[str, Any]) -> Path:
    file = folder / "mine.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def shipped(name: str, **overrides: Any) -> Scenario:
    return load_scenario(FIXTURES / "scenarios" / f"{name}.toml", model="models/llama", precision="exact", **overrides)


def batches_of(scenario: Scenario) -> list[Batch]:
    return scenario.objective.annotate(build_batches(scenario, LLAMA))


def answers(documents: list[Document]) -> list[tuple[Any, Any]]:
    return [(document.columns[PAIR], document.columns[SIDE]) for document in documents]


@pytest.mark.parametrize("name", ["dpo", "ipo", "reward", "kto"])
def test_micro_batches_hold_whole_pairs(name: str) -> None:
    scenario = shipped(name)
    counts = set()
    for batch in batches_of(scenario):
        for rank in range(2):
            for rows in batch.micro_batches(dp_rank=rank, dp_size=2, accumulation=scenario.accumulation):
                documents = [document for row in rows for document in row.documents]
                assert answers(documents[1::2]) == [(pair, -1.0) for pair, _ in answers(documents[::2])]
                counts.add(len(documents) // 2)
    assert name == "ipo" or len(counts) > 1, "a mean of means would be the mean"


def test_a_mismatched_answer_is_that_of_the_next_sample() -> None:
    documents = [document for batch in batches_of(shipped("kto")) for document in batch.documents]

    def part(document: Document, trained: bool) -> list[int]:
        return [t for t, target in zip(document.tokens, document.targets, strict=True) if target == trained]

    own, mismatched = documents[::2], documents[1::2]
    assert [part(one, False) for one in own] == [part(one, False) for one in mismatched]
    follows = [part(one, True) == part(two, True) for one, two in zip(mismatched, own[1:], strict=False)]
    assert sum(follows) > len(own) / 2  # packing takes some samples out of their order
    assert {one.columns[LABEL] for one in own} == {0.0, 1.0}


@pytest.mark.parametrize(
    ("prompts", "mismatched"),
    [("AABB", "3311"), ("ABAB", "2341"), ("ABBA", "2442"), ("AABA", "3343")],  # numbers of answers, from 1
)
def test_a_mismatched_answer_is_to_another_prompt(prompts: str, mismatched: str, tmp_path: Path) -> None:
    records = [
        {"prompt": prompt, "completion": str(number), "label": number % 2}
        for number, prompt in enumerate(prompts, start=1)
    ]
    data = DataConfig(path=str(written(tmp_path, *records)))
    samples = [sample for _, sample in samples_in_turn(data, "labelled answers")]
    assert [(one.prompt[0]["content"], one.answer) for one in samples[::2]] == [
        (prompt, str(number)) for number, prompt in enumerate(prompts, start=1)
    ]
    assert [(one.prompt[0]["content"], one.answer) for one in samples[1::2]] == [*zip(prompts, mismatched, strict=True)]


@pytest.mark.parametrize("count", [1, 3])
def test_answers_to_one_prompt_are_refused(count: int, tmp_path: Path) -> None:
    file = written(tmp_path, *[{"prompt": "2 + 3?", "completion": str(n), "label": 1} for n in range(count)])
    with pytest.raises(UsageError, match=r"have the same prompt.*give samples of two prompts or more"):
        samples_in_turn(DataConfig(path=str(file)), "labelled answers")


def test_a_layout_that_would_cut_pairs_is_refused() -> None:
    with pytest.raises(UsageError, match=r"accumulation=2 pairs of rows; use data.rows=8"):
        shipped("ipo", accumulation=2, data={"path": "data/preferences.jsonl", "rows": 6})


@pytest.mark.parametrize(
    ("record", "chosen"),
    [
        ({"prompt": "2 + 3?", "chosen": "5", "rejected": "6"}, ["5"]),
        ({"question": "2 + 3?", "chosen": "5", "rejected": "6"}, ["5"]),
        ({"prompt": [ASKED], "chosen": [said("5")], "rejected": [said("6")]}, ["5"]),
        ({"chosen": [ASKED, said("5")], "rejected": [ASKED, said("6")]}, ["5"]),
        (
            {"chosen": [ASKED, said("yes"), ASKED, said("5")], "rejected": [ASKED, said("yes"), ASKED, said("6")]},
            ["5"],
        ),
    ],
)
def test_forms_of_preferences(record: dict[str, Any], chosen: list[str], tmp_path: Path) -> None:
    file = written(tmp_path, record)
    assert reads_of(file) == "preferences"
    ((good, bad),) = read_preferences(DataConfig(path=str(file)))
    assert [good.messages[turn]["content"] for turn in good.trained] == chosen
    assert [bad.messages[turn]["content"] for turn in bad.trained] == ["6"]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"prompt": "2 + 3?", "chosen": "5"}, "line 1: no column 'rejected'"),
        ({"prompt": "2 + 3?", "chosen": "5", "rejected": ""}, "line 1: 'rejected' must be a non-empty text"),
        ({"prompt": "2 + 3?", "chosen": "5", "rejected": "5"}, "line 1: 'chosen' and 'rejected' are the same"),
        ({"chosen": "5", "rejected": "6"}, "line 1: 'chosen' must be a list of messages"),
        (
            {"prompt": "2 + 3?", "chosen": "5", "rejected": "6", "margin": "1"},
            "line 1: 'margin' must be a finite number",
        ),
        ({"prompt": "2 + 3?", "chosen": "5", "rejected": "6", "margin": True}, "line 1: 'margin' must be a finite"),
        ({"prompt": "2 + 3?", "chosen": "5", "rejected": "6", "margin": 10**400}, "line 1: 'margin' must be a finite"),
        (
            {"chosen": [ASKED, said("5")], "rejected": [{**ASKED, "content": "2 + 4?"}, said("6")]},
            "line 1: 'chosen' and 'rejected' must be answers of an assistant to one prompt",
        ),
        (
            {"chosen": [ASKED, said("5"), ASKED], "rejected": [ASKED, said("5"), ASKED, said("6")]},
            "line 1: 'chosen' and 'rejected' must be answers of an assistant to one prompt",
        ),
    ],
)
def test_wrong_preferences_are_named(record: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        read_preferences(DataConfig(path=str(written(tmp_path, record))))


def test_all_preferences_have_a_margin_or_none(tmp_path: Path) -> None:
    pair = {"prompt": "2 + 3?", "chosen": "5", "rejected": "6"}
    file = str(written(tmp_path, pair | {"margin": 2}, pair | {"margin": 0.5}))
    margins = [chosen.columns[MARGIN] for chosen, _ in read_preferences(DataConfig(path=file))]
    assert margins == [2.0, 0.5]
    with pytest.raises(UsageError, match="line 1: no column 'margin', which other samples have"):
        read_preferences(DataConfig(path=str(written(tmp_path, pair, pair | {"margin": 1}))))


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"label": 2}, "line 2: 'label' must be 1 .true. for a desired answer or 0 .false., got 2"),
        ({"label": "yes"}, "line 2: 'label' must be 1"),
        ({"label": None}, "line 2: 'label' must be 1"),
        ({"completion": ""}, "line 2: 'completion' must be a non-empty text"),
    ],
)
def test_wrong_labelled_answers_are_named(record: dict[str, Any], words: str, tmp_path: Path) -> None:
    right = {"prompt": "2 + 3?", "completion": "5", "label": True}
    with pytest.raises(UsageError, match=words):
        read_labelled(DataConfig(path=str(written(tmp_path, right, right | record))))
    with pytest.raises(UsageError, match="line 1: no column 'label'"):
        read_labelled(DataConfig(path=str(written(tmp_path, {"prompt": "2 + 3?", "completion": "5"}))))


STEPWISE = {"prompt": "2 + 3?", "completions": ["2 + 2 = 4", "4 + 1 = 6"], "labels": [True, 0.25]}


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"labels": [True]}, "line 2: 'completions' and 'labels' must be lists of the same length"),
        ({"completions": [], "labels": []}, "line 2: 'completions' and 'labels' must be lists"),
        ({"labels": [1, 2]}, "line 2: each of 'labels' must be 1 .true. .*, got 2"),
        ({"labels": [1, "no"]}, "line 2: each of 'labels' must be .*, got 'no'"),
        ({"completions": ["4", ""]}, "line 2: 'completions' must be a non-empty text"),
    ],
)
def test_wrong_steps_are_named(record: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        read_steps(DataConfig(path=str(written(tmp_path, STEPWISE, STEPWISE | record))))
    with pytest.raises(UsageError, match="line 1: no column 'completions'"):
        read_steps(DataConfig(path=str(written(tmp_path, {"prompt": "2 + 3?", "labels": [1]}))))


def test_each_step_has_its_label_at_its_line_break(tmp_path: Path) -> None:
    other = {**STEPWISE, "prompt": "1 + 3?", "completions": ["1 + 3 = 4"], "labels": [False]}
    file = written(tmp_path, STEPWISE, other)
    assert reads_of(file) == "labelled steps"
    documents = batches_of(shipped("prm", data={"path": str(file), "rows": 6, "max_len": 64}))[2].documents
    tokenizer = load_tokenizer(LLAMA)
    seen = {
        tuple((tokenizer.decode(d.tokens[i]), d.columns[LABEL][i]) for i, target in enumerate(d.targets) if target)  # type: ignore[index]
        for d in documents
    }
    assert seen == {(("\n", 1.0), ("\n", 0.25)), (("\n", 0.0),)}


@pytest.mark.parametrize(("name", "trained"), [("reward", "none"), ("mtp", "modules without adapters")])
def test_adapters_need_a_policy(name: str, trained: str) -> None:
    with pytest.raises(UsageError, match=f"lora adapts a policy, and '{name}' trains {trained}"):
        shipped(name, lora={"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]})


def test_leaving_out_all_pairs_is_not_advised(tmp_path: Path) -> None:
    """A pair is left out with either of its answers."""
    pairs = [{"prompt": f"{n} + 3?", "chosen": str(n + 3), "rejected": "6 " * 90} for n in range(9)]
    data = {"path": str(written(tmp_path, *pairs)), "packed": False, "rows": 6, "max_len": 60, "too_long": "error"}
    with pytest.raises(UsageError, match=r"use --max-len \d+ or more, or --too-long truncate$"):
        batches_of(shipped("dpo", data=data))
    assert batches_of(shipped("dpo", data={**data, "too_long": "truncate"}))


def test_a_pair_that_fits_into_no_packed_row_is_named_or_left_out(tmp_path: Path) -> None:
    long = {"prompt": "2 + 3?", "chosen": "5 " * 90, "rejected": "6 " * 90}
    short = [{"prompt": f"{n} + 3?", "chosen": str(n + 3), "rejected": "6" * (n + 1)} for n in range(4)]
    data = {"path": str(written(tmp_path, *[long] * 4, *short)), "packed": True, "rows": 2, "max_len": 160}
    with pytest.raises(UsageError, match=r"two answers to a prompt of .* tokens together"):
        batches_of(shipped("simpo", steps=3, data=data))
    dropped = batches_of(shipped("simpo", steps=3, data={**data, "too_long": "drop"}))
    assert max(len(document.tokens) for batch in dropped for document in batch.documents) < 80


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loss_type": "ipo", "label_smoothing": 0.1}, "ipo has no label_smoothing"),
        ({"loss_type": "robust"}, "robust corrects for label_smoothing, which is 0"),
        ({"loss_type": "odds_ratio"}, "odds_ratio has no reference and means"),
        ({"loss_type": "dpo"}, "loss_type"),
        ({"label_smoothing": 0.5}, "label_smoothing"),
    ],
)
def test_objectives_that_contradict_themselves_are_refused(settings: dict[str, Any], words: str) -> None:
    values = {"name": "mine", "model": "models/llama", "precision": "exact", "optimizer": {"name": "sgd", "lr": 0.1}}
    with pytest.raises(UsageError, match=words):
        parse_scenario({**values, "objective": {"kind": "dpo", **settings}})
