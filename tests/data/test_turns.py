"""Rollouts of several turns: what is trained on and earned, trees of branches, and what of a file is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.data.rollouts import build_rollouts, read_groups
from conformance.spec.batch import GIVEN, Document
from conformance.spec.scenario import load_scenario

LLAMA = FIXTURES / "models" / "llama"
ASSISTANT, TOOL = {"role": "assistant", "start": 0, "end": 2}, {"role": "tool", "start": 2, "end": 3}
LAST = {"role": "assistant", "start": 3, "end": 5}


def line(**changes: Any) -> dict[str, Any]:
    known = {"group": 0, "prompt_ids": [1, 4], "completion_ids": [7, 8, 9, 10, 11], "logprobs": [-1.5] * 5, "reward": 1}
    return {name: value for name, value in (known | changes).items() if value is not None}


def read(folder: Path, *lines: dict[str, Any]) -> list[Document]:
    (folder / "mine.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    file = FIXTURES / "scenarios" / "ppo-turns.toml"
    changed = {"data": {"path": str(folder / "mine.jsonl"), "max_len": 96, "rows": 12}}
    scenario = load_scenario(file, model="models/llama", precision="exact", **changed)
    return [document for group in read_groups(scenario, vocabulary=400) for document in group]


def test_only_turns_of_the_assistant_are_trained_on(tmp_path: Path) -> None:
    turns = [{**ASSISTANT, "reward": 0.25}, {"role": "tool", "start": 2, "end": 3}, {**LAST, "reward": -0.5}]
    first, second = read(tmp_path, line(turns=turns, completion_mask=[1, 1, 1, 1, 0]), line())
    assert first.targets == (False, False, True, True, False, True, False)
    assert first.columns[GIVEN] == (0, 0, 0, 0.25, 0, -0.5, 0)
    assert second.targets == (False, False, *[True] * 5)
    assert second.columns[GIVEN] == (0.0,) * 7


def test_tokens_earn_rewards(tmp_path: Path) -> None:
    (document,) = read(tmp_path, line(token_rewards=[0, 0.5, 0, 0, 1], turns=[ASSISTANT, TOOL, {**LAST, "reward": 2}]))
    assert document.columns[GIVEN] == (0, 0, 0, 0.5, 0, 0, 3)


def test_branches_become_paths(tmp_path: Path) -> None:
    leaves = [
        {"completion_ids": [8], "logprobs": [-1], "reward": 1},
        {"completion_ids": [], "logprobs": [], "reward": 0},
    ]
    tree = [{"completion_ids": [7], "logprobs": [-2], "branches": leaves}, leaves[0]]
    found = read(tmp_path, line(branches=tree, completion_ids=None, logprobs=None, reward=None))
    assert [one.tokens for one in found] == [(1, 4, 7, 8), (1, 4, 7), (1, 4, 8)]
    assert [one.columns["reward"] for one in found] == [1, 0, 1]
    assert found[0].columns["rollout_logprob"] == (0, 0, -2, -1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"turns": [ASSISTANT, {**TOOL, "end": 2}]}, "turn 2 of 'turns': the turn is empty"),
        ({"turns": [ASSISTANT, {**TOOL, "start": 1}]}, "turn 2 of 'turns': it starts at token 1 and overlaps"),
        ({"turns": [ASSISTANT, {**TOOL, "start": 3, "end": 4}]}, "turn 2 of 'turns': .* leaves out tokens"),
        ({"turns": [ASSISTANT, TOOL]}, "the turns end at token 3, and 'completion_ids' has 5"),
        ({"turns": [{**ASSISTANT, "role": "robot"}]}, "turn 1 of 'turns': the role must be one of"),
        ({"turns": [{**ASSISTANT, "end": "2"}]}, "'start' and 'end' must be numbers of tokens"),
        ({"turns": "all"}, "'turns' must be a list of objects"),
        ({"turns": [ASSISTANT, {**TOOL, "reward": 1}, LAST]}, "turn 2 of 'turns': it earns a reward, but none"),
        ({"turns": [{**ASSISTANT, "reward": "much"}, TOOL, LAST]}, "'reward' must be a number between"),
        ({"token_rewards": [1, 2]}, "'token_rewards' must be a list of 5 numbers"),
        (
            {"token_rewards": [0, 0, 1, 0, 0], "turns": [ASSISTANT, TOOL, LAST]},
            "token 2 has a number in 'token_rewards'",
        ),
        ({"completion_mask": [1, 1]}, "'completion_mask' has 2 numbers, but the response has 5 tokens"),
        ({"branches": []}, "'branches' must be a list of objects"),
        ({"branches": [{"completion_ids": [7], "logprobs": [-1]}]}, "branch 1: give 'reward' to the last branch"),
        ({"branches": [{"logprobs": [-1], "reward": 1}]}, "branch 1: 'completion_ids' must be a list"),
    ],
)
def test_bad_turns_name_file_line_and_key(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    if "branches" in changes:
        changes = {"completion_ids": None, "logprobs": None, "reward": None} | changes
    with pytest.raises(UsageError, match=rf"mine.jsonl, line 2.*{message}"):
        read(tmp_path, line(), line(**changes))


@pytest.mark.parametrize("name", ["grpo-turns", "ppo-turns"])
def test_fixture_has_every_branch(name: str) -> None:
    scenario = load_scenario(FIXTURES / "scenarios" / f"{name}.toml", model="models/llama", precision="exact")
    documents = [document for batch in build_rollouts(scenario, LLAMA)[:2] for document in batch.documents]
    masks = ["".join("01"[one] for one in document.targets).strip("0") for document in documents]
    assert any("0" in mask for mask in masks)  # gaps
    assert any("0" not in mask for mask in masks)
    assert any(not document.targets[-1] and any(document.targets) for document in documents)  # a tool has the last word
    assert any(sum(map(bool, document.columns[GIVEN])) > 1 for document in documents)  # type: ignore[arg-type]
    starts = [document.tokens[:14] for document in documents]
    assert len(set(starts)) < len(starts)  # a common prefix
