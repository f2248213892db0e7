"""Roll-outs: from responses in a file to frozen mini-batches, what of a file is refused, and what the fixtures hold."""

import dataclasses
import importlib.util
import json
import math
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import transformers
from cells import exhaustive

from conformance.backends.protocol import BackendEntry
from conformance.cli import main as cli
from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.data.inputs import batches_of, build_batches
from conformance.data.rollouts import build_rollouts, read_groups
from conformance.matrix.cell import Cell, Phase
from conformance.matrix.options import Selection
from conformance.matrix.profile import select_cells
from conformance.models.folder_checks import runs_code
from conformance.models.folders import prepare_model
from conformance.runner.coverage import measure_coverage
from conformance.spec.batch import Batch, Document, read_batches, write_batches
from conformance.spec.layout import Layout
from conformance.spec.observables import Role
from conformance.spec.scenario import Scenario, load_scenario, parse_scenario

LLAMA = FIXTURES / "models" / "llama"
MODELS = ("pangu", "llama", "qwen3", "gemma3")
SCENARIOS = ("grpo", "grpo-half", "grpo-off-policy", "gspo", "ppo", "ppo-half")


def shipped(name: str, model: str = "llama", **overrides: Any) -> Scenario:
    file = FIXTURES / "scenarios" / f"{name}.toml"
    return load_scenario(file, model=f"models/{model}", precision="exact", **overrides)


@cache
def batches_of_shipped(name: str) -> list[Batch]:
    return build_rollouts(shipped(name), LLAMA)


def line(group: int = 0, length: int = 2, **changes: Any) -> dict[str, Any]:
    known = {"group": group, "prompt_ids": [1, 4], "completion_ids": [7] * length, "logprobs": [-1.5] * length}
    return {**known, "reward": 0.5} | changes


def written(folder: Path, lines: list[Any]) -> str:
    file = folder / "mine.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return str(file)


def scenario_of(
    path: str, *, rows: int = 4, packed: bool = False, max_len: int = 96, steps: int = 4, **objective: Any
) -> Scenario:
    data = {"path": path, "rows": rows, "packed": packed, "max_len": max_len}
    values = {"name": "mine", "model": str(LLAMA), "precision": "exact", "optimizer": {"name": "sgd", "lr": 0.1}}
    return parse_scenario({**values, "data": data, "steps": steps, "objective": {"kind": "grpo", **objective}})


def groups_of(documents: list[Document]) -> Counter[float]:
    found: Counter[float] = Counter()
    for document in documents:
        group = document.columns["group"]
        assert isinstance(group, float)
        found[group] += 1
    return found


# --- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_roll_out_holds_whole_groups_which_lie_in_several_rows(name: str) -> None:
    begun = [batch for batch in batches_of_shipped(name) if batch.rollout]
    assert begun
    for batch in begun:
        documents = [document for mini_batch in batch.rollout for document in mini_batch.documents]
        counts = groups_of(documents)
        assert set(counts.values()) == {4}
        rows = [row for mini_batch in batch.rollout for row in mini_batch.rows]
        spread = Counter(group for row in rows for group in groups_of(list(row.documents)))
        assert sum(count > 1 for count in spread.values()) > len(spread) * 0.9
        if len(batch.rollout) > 1:
            parts = Counter(group for mini_batch in batch.rollout for group in groups_of(mini_batch.documents))
            assert sum(count > 1 for count in parts.values()) > len(parts) * 0.7


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_the_second_epoch_is_the_first_once_more_and_the_next_roll_out_is_another(name: str) -> None:
    scenario, batches = shipped(name), batches_of_shipped(name)
    assert [len(batch.rollout) for batch in batches] == [2, 0, 0, 0, 2, 0]
    assert scenario.steps == 5  # of the second roll-out the first epoch is made as a whole
    assert [batch.step for batch in batches] == list(range(6))
    assert [batch.rows for batch in batches[:2]] == [batch.rows for batch in batches[2:4]]
    assert batches[0].rollout == tuple(dataclasses.replace(batch, rollout=()) for batch in batches[:2])
    assert batches[4].rows != batches[0].rows
    assert {len(batch.rows) for batch in batches} == {scenario.data.rows}
    assert all([row.index for row in batch.rows] == list(range(scenario.data.rows)) for batch in batches)
    assert all(row.length <= scenario.data.max_len for batch in batches for row in batch.rows)
    assert all(len(row.documents) > 1 for batch in batches for row in batch.rows)


def test_a_roll_out_is_written_and_read_as_it_is(tmp_path: Path) -> None:
    batches = batches_of_shipped("grpo")
    write_batches(tmp_path / "batches.safetensors", batches)
    read = read_batches(tmp_path / "batches.safetensors")
    assert read == batches
    assert [len(batch.rollout) for batch in read] == [2, 0, 0, 0, 2, 0]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ["grpo", "grpo-off-policy", "gspo", "ppo"])
def test_a_roll_out_has_a_group_of_equal_rewards(name: str, model: str) -> None:
    """Its advantages are 0, or what a division by a deviation of 0 makes of them."""
    batches, rewards = build_rollouts(shipped(name, model), FIXTURES / "models" / model), dict[Any, set[Any]]()
    rollouts = [mini_batch for batch in batches for mini_batch in batch.rollout]  # hold whole groups
    for document in (document for mini_batch in rollouts for document in mini_batch.documents):
        rewards.setdefault(document.columns["group"], set()).add(document.columns["reward"])
    assert min(map(len, rewards.values())) == 1


def test_a_seed_shuffles_groups() -> None:
    assert build_rollouts(shipped("gspo", seed=1), LLAMA) != batches_of_shipped("gspo")
    assert build_rollouts(shipped("gspo"), LLAMA) == batches_of_shipped("gspo")


def test_columns_stand_where_the_response_stands(tmp_path: Path) -> None:
    path = written(tmp_path, [line(length=3, logprobs=[-1, -2.5, 0.0]), line(length=0)])
    ((first, empty),) = read_groups(scenario_of(path), vocabulary=400)
    assert first.tokens == (1, 4, 7, 7, 7)
    assert first.targets == (False, False, True, True, True)
    assert first.columns == {"group": 0.0, "reward": 0.5, "rollout_logprob": (0.0, 0.0, -1.0, -2.5, 0.0)}
    assert (empty.tokens, empty.targets) == ((1, 4), (False, False))
    assert empty.columns["rollout_logprob"] == (0.0, 0.0)


@pytest.mark.parametrize("packed", [False, True])
def test_an_empty_response_is_part_of_its_group(packed: bool, tmp_path: Path) -> None:
    path = written(tmp_path, [line(group, length) for group in range(4) for length in (0, 2)])
    batch, *_ = build_rollouts(scenario_of(path, steps=1, rows=4, packed=packed, max_len=8), LLAMA)
    assert set(groups_of(batch.documents).values()) == {2}
    assert sum(not any(document.targets) for document in batch.documents) == len(batch.documents) / 2


def test_parquet_holds_the_same(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    lines = [line(group, length) for group in range(2) for length in (0, 2)]
    pd.DataFrame(lines).to_parquet(tmp_path / "mine.parquet")
    of_parquet = scenario_of(str(tmp_path / "mine.parquet"))
    assert build_rollouts(of_parquet, LLAMA) == build_rollouts(scenario_of(written(tmp_path, lines)), LLAMA)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_ids": []}, "'prompt_ids' is empty; a response needs at least one token to follow"),
        ({"prompt_ids": None}, "'prompt_ids' must be a list of tokens, got None"),
        ({"completion_ids": "7 7"}, "'completion_ids' must be a list of tokens, got '7 7'"),
        (
            {"completion_ids": [7, 400]},
            "'completion_ids' holds 400, which is not a token of a vocabulary of 400; sample",
        ),
        ({"completion_ids": [7, -1]}, "'completion_ids' holds -1, which is not a token"),
        ({"completion_ids": [7, 1.0]}, r"'completion_ids' holds 1\.0, which is not a token"),
        ({"prompt_ids": [True]}, "'prompt_ids' holds True, which is not a token"),
        ({"prompt_ids": [1] * 95}, r"have 97 tokens, and --max-len \(data\.max_len\) is 96; raise it"),
        ({"logprobs": [-1.0]}, "'logprobs' must be a list of 2 numbers from -1e4 to 0, one for each"),
        ({"logprobs": [-1.0, 0.5]}, "'logprobs' must be a list of 2 numbers"),
        ({"logprobs": [-1.0, math.nan]}, "'logprobs' must be a list of 2 .*; that of token 1 is nan"),
        ({"logprobs": [-1.0, -math.inf]}, "'logprobs' must be a list of 2 numbers|not JSON"),
        ({"logprobs": [-1.0, True]}, "'logprobs' must be a list of 2 numbers"),
        ({"logprobs": [-1.0, -(10**400)]}, "'logprobs' must be a list of 2 numbers"),
        ({"logprobs": None}, "'logprobs' must be a list of 2 numbers"),
        ({"group": -1}, "'group' must be an integer from 0 to .*, got -1"),
        ({"group": 1.5}, "'group' must be an integer from 0 to .*, got 1.5"),
        ({"group": True}, "'group' must be an integer from 0 to .*, got True"),
        ({"group": 2**53}, "'group' must be an integer from 0 to "),
        ({"reward": "1"}, "'reward' must be a number between -1e6 and 1e6, got '1'"),
        ({"reward": True}, "'reward' must be a number"),
        ({"reward": 2e6}, "'reward' must be a number"),
        ({"reward": 10**400}, "'reward' must be a number"),
        ({"reward": None}, "'reward' must be a number"),
    ],
    ids=str,
)
def test_a_line_that_cannot_be_used_is_named_by_its_number(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = written(tmp_path, [line(), line() | changes, line()])
    with pytest.raises(UsageError, match=rf"mine.jsonl, line 2.*({message})") as error:
        build_rollouts(scenario_of(path), LLAMA)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("lines", "settings", "message"),
    [
        ([line(0), line(1), line(0)], {}, "mine.jsonl: the lines of one group must be consecutive; sort the file"),
        (
            [line(group) for group in (0, 0, 0, 1, 1, 1)],
            {},
            "a rollout of 4 rows .* cuts a group of .*mine.jsonl; choose data.rows so that whole groups fill",
        ),
        (
            [line(group, 20) for group in range(12)],
            {"packed": True, "max_len": 22},
            r"--max-len 22 \(data\.max_len\) does not pack whole groups of .*mine.jsonl into 4 rows with at least two",
        ),
        ([line(0, 0)] * 4, {}, "mini-batch 1 of a rollout of .*mine.jsonl has 0 tokens in its responses, but means"),
        ([line(0, 0)] * 3 + [line(0, 1)], {}, "mini-batch 1 of a rollout of .*mine.jsonl has 1 tokens"),
        ([], {}, "mine.jsonl is empty"),
    ],
    ids=["scattered", "cut", "wide", "none", "one", "empty"],
)
def test_a_file_that_makes_no_roll_out_is_refused_with_advice(
    lines: list[Any], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        build_rollouts(scenario_of(written(tmp_path, lines), **settings), LLAMA)


def test_a_group_that_comes_again_is_another_group(tmp_path: Path) -> None:
    """Compared with its own copies, its spread would be another."""
    batch, *_ = build_rollouts(scenario_of(written(tmp_path, [line(), line(reward=1.0)]), rows=6), LLAMA)
    assert set(groups_of(batch.documents).values()) == {2}


def test_every_mini_batch_needs_tokens(tmp_path: Path) -> None:
    """The whole roll-out has enough, and its second half has none."""
    path = written(tmp_path, [line(0, length) for length in (4, 0, 0, 0)])
    with pytest.raises(UsageError, match=r"mini-batch [12] of a rollout of .* has 0 tokens"):
        build_rollouts(scenario_of(path, rows=2, mini_batches=2), LLAMA)


@pytest.mark.parametrize("rewards", [(0.5, 0.5, 0.0, 1.0), (0.5, 0.5, 1.0, 1.0)])
def test_filtered_groups_leave_each_step_a_target(tmp_path: Path, rewards: tuple[float, ...]) -> None:
    path = written(tmp_path, [line(number // 2, reward=reward) for number, reward in enumerate(rewards)])
    build_rollouts(scenario_of(path), LLAMA)
    build_rollouts(scenario_of(path, filter_groups=len({*rewards}) > 2), LLAMA)
    with pytest.raises(UsageError, match=r"mine.jsonl: step [01] has no target token, because objective.filter_groups"):
        build_rollouts(scenario_of(path, rows=2, filter_groups=True), LLAMA)


@pytest.mark.parametrize(
    ("lines", "objective", "message"),
    [
        (
            [line(0, advantages=[1.0, 1.0], old_log_probs=[0.0, 0.0], id=7), line(0)],
            {},
            "columns that are not used: advantages, old_log_probs, id; advantages and old_log_probs: such numbers are "
            "computed from rewards and models, not read",
        ),
        ([line(0, data_source="x", completion_mask=[1, 1]), line(0)], {}, "columns that are not used: data_source"),
        (
            [line(0), line(1), line(1), line(1, prompt_ids=[1, 5])],
            {"adv_estimator": "rloo"},
            "1 of 2 groups have one response (line 1), whose advantage follows from its own reward alone; give several "
            "responses to each prompt the same 'group'",
        ),
        (
            [line(0), line(1), line(1), line(1, prompt_ids=[1, 5])],
            {"adv_estimator": "reinforce_plus_plus"},
            "group 1 has responses to different prompts (line 2, line 4), but compares them as responses to one; "
            "correct 'group'",
        ),
        (
            [line(0, completion_mask=[0, 0]), line(0, 0), line(0), line(0)],
            {},
            "1 of 4 responses have no token that is trained on (line 1), because masks or turns take all away",
        ),
        ([line(0), line(0, 0), line(1), line(1)], {}, ""),
    ],
)
def test_what_is_probably_a_mistake_is_named(
    lines: list[Any], objective: dict[str, Any], message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path, lines)
    read_groups(scenario_of(path, **objective), vocabulary=400)
    read_groups(scenario_of(path, **objective), vocabulary=400)
    messages = [text.removeprefix(f"{path}: ") for text in caplog.messages]
    assert message in messages if message else not messages
    assert len({*messages}) == len(messages)


def test_samples_are_no_roll_outs_and_roll_outs_no_samples(tmp_path: Path) -> None:
    wanted = "line 1: not a rollout, but the objective 'grpo' reads rollouts; found .*; give --data .*'sft'"
    with pytest.raises(UsageError, match=wanted) as error:
        build_rollouts(scenario_of("data/word_problems.jsonl"), LLAMA)
    assert "'question', 'answer'" in str(error.value)
    sft = dataclasses.replace(shipped("sft-sgd"), data=scenario_of("data/rollouts/llama.jsonl", rows=6).data)
    with pytest.raises(
        UsageError, match=r"llama.jsonl, line 1: this is a rollout, but the objective reads pairs.*'grpo'"
    ):
        build_batches(sft, LLAMA)


@pytest.mark.parametrize("name", ["assistant_masks", "completion_mask", "loss_mask", "response_mask", "tool_mask"])
@pytest.mark.parametrize("whole", [False, True])
def test_masked_tokens_are_context_and_no_targets(name: str, whole: bool, tmp_path: Path) -> None:
    record = line(0, 3)
    record[name] = [0] * (len(record["prompt_ids"]) if whole else 0) + [1, 0, 1]
    record["logprobs"][1] = None  # the inference engine did not sample it
    ((document,),) = read_groups(scenario_of(written(tmp_path, [record])), vocabulary=99)
    assert document.tokens == (*record["prompt_ids"], *record["completion_ids"])
    assert document.targets[-4:] == (False, True, False, True)


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ({"completion_mask": [1, 0]}, "'completion_mask' has 2 numbers, but the response has 3 tokens"),
        ({"response_mask": [1, 2, 1]}, r"'response_mask' must be a list of 0 and 1, got \[1, 2, 1\]"),
        ({"loss_mask": 1}, "'loss_mask' must be a list of 0 and 1, got 1"),
        ({"attention_mask": [1, 1, 0]}, "'attention_mask' marks padding; leave the padded tokens out"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(column: dict[str, Any], words: str, tmp_path: Path) -> None:
    record = line(0, 3, **column)
    with pytest.raises(UsageError, match=f"line 1: {words}"):
        read_groups(scenario_of(written(tmp_path, [record])), vocabulary=99)


def test_a_phase_begins_with_a_roll_out() -> None:
    """Two mini-batches, gone through twice: the next roll-out begins at step 4."""
    scenario = shipped("grpo")
    entry, layout = BackendEntry(name="plain", target="plain_backend:Plain"), Layout.parse("dp1")

    def cell_of(first: int) -> Cell:
        phases = (
            Phase(backend=entry, layout=layout, steps=first, save="export"),
            Phase(backend=entry, layout=layout, steps=scenario.steps - first),
        )
        return Cell(scenario=scenario, phases=phases, program="resume")

    assert cell_of(4).first_steps == (0, 4)
    with pytest.raises(UsageError, match=r"phase 2 of program 'resume' begins at step 2 of .* in the middle .* of 4, "):
        cell_of(2)


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.fixture
def profile(tmp_path: Path) -> str:
    file = tmp_path / "rl.toml"
    table = 'models = ["llama"]\nlayouts = ["dp1", "dp2"]\nprecisions = ["exact"]\n'
    file.write_text(f'description = "roll-outs"\n[[cells]]\nscenarios = ["grpo", "ppo", "grpo-off-policy"]\n{table}')
    return str(file)


def test_a_file_of_the_users_own(profile: str, tmp_path: Path) -> None:
    path = written(tmp_path, [line(group, 3 + number) for group in range(200) for number in range(2)])
    cells = select_cells(Selection(profile=profile, backend=("plain_backend:Plain",), data=path))
    assert len(cells) == 6
    for cell in cells:
        assert cell.scenario.data.path == path
        batch, *_ = batches_of(cell.scenario, LLAMA)
        assert set(groups_of([d for b in batch.rollout for d in b.documents]).values()) == {2}


def test_a_file_of_the_users_own_reaches_the_command_line(
    profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, [line(group, 3 + number) for group in range(200) for number in range(2)])
    known = ["--backend", "plain_backend:Plain", "--profile", profile]
    assert cli.main(["list", *known, "--data", path, "--coverage", "--json"]) == 0
    coverage = json.loads(capsys.readouterr().out)["coverage"]
    assert {reach["longest"] for reach in coverage["documents"]} == {6}
    bad = written(tmp_path, [line(logprobs=[])])
    out = tmp_path / "out"
    for data, words in ((bad, "mine.jsonl, line 1: 'logprobs'"), ("data/word_problems.jsonl", "not a rollout, but")):
        assert cli.main(["run", *known, "--data", data, "--out", str(out)]) == 2
        assert words in capsys.readouterr().err
        assert not out.exists()


def test_coverage_of_roll_outs(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    cells = select_cells(Selection(profile=profile, backend=("plain_backend:Plain",)))
    coverage = measure_coverage(cells)
    assert [(reach.scenario, reach.cut) for reach in coverage.documents] == [
        ("grpo", 0),
        ("grpo-off-policy", 0),
        ("ppo", 0),
    ]
    assert all(reach.targets > 10 for reach in coverage.documents)
    assert {(cut.scenario, cut.dp) for cut in coverage.cuts} == {
        (s, dp) for s in ("grpo", "grpo-off-policy", "ppo") for dp in (1, 2)
    }
    assert cli.main(["list", "--backend", "fsdp2", "--profile", profile, "--coverage"]) == 0
    text = capsys.readouterr().out
    assert "Rows and micro-batches" in text
    assert "grpo-off-policy" in text.partition("Documents")[2]


# --- the fixtures ----------------------------------------------------------------------------------------------------


def maker() -> Any:
    spec = importlib.util.spec_from_file_location("make_rollouts", FIXTURES / "make_rollouts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def records_of(model: str) -> list[dict[str, Any]]:
    text = (FIXTURES / "data" / "rollouts" / f"{model}.jsonl").read_text(encoding="utf-8")
    return [json.loads(each) for each in text.splitlines()]


@pytest.mark.parametrize("model", MODELS)
def test_the_fixtures_hold_what_they_promise(model: str) -> None:
    made, records = maker(), records_of(model)
    assert [record["group"] for record in records] == [g for g in range(made.GROUPS) for _ in range(made.RESPONSES)]
    groups = [records[start : start + made.RESPONSES] for start in range(0, len(records), made.RESPONSES)]
    assert all(len({tuple(record["prompt_ids"]) for record in group}) == 1 for group in groups)
    (group, number), (other, place) = made.EMPTY, made.SINGLE
    assert groups[group][number]["completion_ids"] == []
    assert len(groups[other][place]["completion_ids"]) == 1
    assert len({record["reward"] for record in groups[made.EQUAL]}) == 1
    assert sum(len({record["reward"] for record in group}) > 1 for group in groups) > made.GROUPS / 2
    folder = FIXTURES / "models" / model
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=runs_code(folder, trusted=True))
    ended = [r["completion_ids"][-1] == tokenizer.eos_token_id for r in records if r["completion_ids"]]
    assert 0 < sum(ended) < len(ended)
    for (_, answer), group in zip(made.problems(), groups, strict=True):
        for record in group:
            text = tokenizer.decode(record["completion_ids"], skip_special_tokens=True)
            assert record["reward"] == made.reward(answer, text)


@pytest.mark.parametrize("model", ["llama", *(exhaustive(model) for model in MODELS if model != "llama")])
@torch.no_grad()
def test_log_probs_of_the_fixtures_are_those_of_the_sampler(model: str, tmp_path: Path) -> None:
    made, records = maker(), records_of(model)
    sampler = Role(name="sampler", trained=False)
    folder = prepare_model(shipped("sft-sgd", model), sampler, tmp_path / "model")
    code = runs_code(folder, trusted=True)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=code, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    for record in records:
        prompt, completion = record["prompt_ids"], record["completion_ids"]
        logits = loaded(torch.tensor([prompt + completion])).logits[0] / made.TEMPERATURE
        every = torch.log_softmax(logits, dim=-1)
        found = [every[len(prompt) - 1 + i, token].item() for i, token in enumerate(completion)]
        assert record["logprobs"] == pytest.approx(found, rel=0, abs=2e-6)


@pytest.mark.parametrize(("group", "number"), [("grpo", 0.8), ("ppo", 0.8), ("gspo", 0.8), ("grpo-off-policy", 0.8)])
def test_scenarios_have_the_temperature_of_their_roll_outs(group: str, number: float) -> None:
    objective: Any = shipped(group).objective
    assert objective.temperature == number == maker().TEMPERATURE
