"""Common bugs are named in words, by an oracle that has them; what differs otherwise gets no such name."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cells import slow
from conftest import make_cell
from oracle_cells import OracleRuns, as_cell

from conformance.backends.protocol import BackendEntry
from conformance.judge import cells as judging
from conformance.judge.expected_differences import explained, judge_cell
from conformance.matrix.cell import Cell
from conformance.oracle.optimizer import clip, global_norm
from conformance.results.verdict import Verdict
from conformance.runner.session import Session
from conformance.spec.known_defects import (
    AdvantagesOfAll,
    Bug,
    ClippedBeforeReduction,
    LostMicroBatches,
    MeanOfMeans,
    bugs,
)
from conformance.spec.layout import Layout


def cell_of(scenario: str, layout: str, target: str = "Adam", **size: Any) -> Cell:
    """A cell whose gradients are clipped, and whose matrices decay."""
    backend = BackendEntry(name=target.lower(), target=f"buggy_trainers:{target}")
    cell = make_cell(scenario, "llama", layout, "exact", backend=backend, **size)
    optimizer = replace(cell.scenario.optimizer, max_grad_norm=0.1, weight_decay=0.1)
    return replace(cell, scenario=replace(cell.scenario, optimizer=optimizer))


SFT: dict[str, Any] = {"steps": 2, "rows": 12, "accumulation": 3}
GRPO: dict[str, Any] = {"steps": 1, "rows": 8, "accumulation": 1}


@pytest.fixture(scope="module")
def sft(tmp_path_factory: pytest.TempPathFactory) -> OracleRuns:
    return OracleRuns(cell_of("core-sft-decay", "dp1", **SFT), tmp_path_factory.mktemp("sft"))


@pytest.fixture(scope="module")
def grpo(tmp_path_factory: pytest.TempPathFactory) -> OracleRuns:
    return OracleRuns(cell_of("core-grpo-std", "dp1", **GRPO), tmp_path_factory.mktemp("grpo"))


SFT_BUGS = bugs(cell_of("core-sft-decay", "dp1", **SFT).scenario, Layout.parse("dp2"))
GRPO_BUGS = bugs(cell_of("core-grpo-std", "dp1", **GRPO).scenario, Layout())


def judged(runs: OracleRuns, path: Path, bug: Bug, tried: tuple[Bug, ...], **changes: Any) -> Verdict:
    """Judges a record with the numbers of the oracle that has the bug, and ``changes`` of them."""
    as_cell(runs.record((bug,)), path, runs.cell, **changes)
    options: Any = {"oracles": runs.folder, "observables": runs.record().observables, "conventions": ()}
    verdict = judge_cell(str(runs.cell), [path], known=(), **options)
    return explained(verdict, str(runs.cell), [path], candidates=(), means=(), bugs=tried, **options)


def test_bugs_are_tried_only_where_they_can_change_numbers() -> None:
    assert {one.kind for one in SFT_BUGS} == {
        *("lost-micro-batches", "trained-prompts", "clipped-before-reduction", "l2-decay", "lost-decay")
    }
    assert {one.kind for one in GRPO_BUGS} == {"advantages-of-all", "l2-decay", "lost-decay"}
    assert bugs(make_cell("sft-sgd", "llama", "dp1", "exact", accumulation=1).scenario, Layout())[0].kind == (
        "trained-prompts"
    )


@pytest.mark.parametrize("bug", SFT_BUGS + GRPO_BUGS[:2], ids=lambda one: one.words)
def test_a_bug_is_told_from_all_others(tmp_path: Path, sft: OracleRuns, grpo: OracleRuns, bug: Bug) -> None:
    runs, tried = (sft, SFT_BUGS) if bug in SFT_BUGS else (grpo, GRPO_BUGS)
    verdict = judged(runs, tmp_path / "cell", bug, tried)
    assert verdict.state == "differs"
    assert verdict.findings[0].hint == f"agrees in all stages with {bug.words}"
    assert verdict.reason.count(bug.words) == 1


@pytest.mark.parametrize("bug", [SFT_BUGS[0], SFT_BUGS[-1]], ids=lambda one: one.words)
@pytest.mark.parametrize("key", ["gradient", "weight"])
def test_other_numbers_beside_a_bug_are_not_explained_by_it(
    tmp_path: Path, sft: OracleRuns, bug: Bug, key: str
) -> None:
    verdict = judged(sft, tmp_path / "cell", bug, SFT_BUGS, scaled={key: 1 + 1e-9})
    assert verdict.state == "differs"
    assert not any(one.words in verdict.reason for one in SFT_BUGS)


def test_a_bug_is_named_where_its_norm_is_that_of_one_rank(tmp_path: Path, sft: OracleRuns) -> None:
    bug = next(one for one in SFT_BUGS if isinstance(one, ClippedBeforeReduction))
    verdict = judged(sft, tmp_path / "cell", bug, SFT_BUGS, scaled={"grad_norm": 3.0})
    assert verdict.findings[0].hint == f"agrees in all stages but gradient norm with {bug.words}"


def test_a_bug_that_changes_nothing_is_not_named(tmp_path: Path) -> None:
    """The last of six rows, which is the last micro-batch, has no targets in the first step."""
    runs = OracleRuns(cell_of("core-sft-decay", "dp1", steps=1, rows=6, accumulation=6), tmp_path)
    lost = tuple(one for one in bugs(runs.cell.scenario, Layout()) if isinstance(one, LostMicroBatches))
    as_cell(runs.record(), tmp_path / "cell", runs.cell, scaled={"logprob": 1 + 1e-6})
    options: Any = {"oracles": runs.folder, "observables": runs.record().observables, "conventions": ()}
    verdict = judge_cell(str(runs.cell), [tmp_path / "cell"], known=(), **options)
    assert {q.stage for q in verdict.findings} == {"log-probs"}
    verdict = explained(verdict, str(runs.cell), [tmp_path / "cell"], candidates=(), means=(), bugs=lost, **options)
    assert "agrees in all stages" not in verdict.reason


def test_of_two_bugs_that_give_the_same_numbers_the_smaller_one_is_named(tmp_path: Path) -> None:
    """Where the means of all groups are equal, no record tells whether the mean of the rollout was subtracted."""
    runs = OracleRuns(cell_of("core-grpo-std", "dp1", **GRPO), tmp_path)
    left = {0.0: [0.0, 0.0, 1.0, 1.0], 1.0: [0.25, 0.25, 0.75, 0.75]}
    rows = []
    for row in runs.batches[0].rows:
        (document,) = row.documents
        reward = left[float(str(document.columns["group"]))].pop()
        rows.append(replace(row, documents=(replace(document, columns={**document.columns, "reward": reward}),)))
    batch = replace(runs.batches[0], rows=tuple(rows))
    runs.batches = [replace(batch, rollout=(batch,))]
    verdict = judged(runs, tmp_path / "cell", AdvantagesOfAll(centred=True), GRPO_BUGS)
    assert verdict.findings[0].hint == f"agrees in all stages with {AdvantagesOfAll(centred=False).words}"


def test_a_cell_that_is_judged_again_is_compared_with_the_same_bugs() -> None:
    variants = [SimpleNamespace(defects=(one,)) for one in (MeanOfMeans(parts=2, of=("ranks",)), *SFT_BUGS)]
    entry: Any = SimpleNamespace(cell="a/llama/b/dp1/exact", expected=(), conventions=(), variants=variants)
    assert tuple(judging._candidates(entry)["bugs"]) == SFT_BUGS


# --- the oracle with a bug, by formulas of its own --------------------------------------------------------------------


def test_lost_micro_batches_are_the_difference_of_all_and_the_last(sft: OracleRuns) -> None:
    def gradients(*defects: Bug) -> dict[str, torch.Tensor]:
        found = sft.record(defects).steps[0].tensors()
        return {name: tensor for name, tensor in found.items() if name.startswith("gradient/")}

    rows: Any = {"of": "gradients", "data_ranks": 2, "micro_batches": 3}
    but_last = gradients(LostMicroBatches(lost="the last micro-batch", **rows))
    last = gradients(LostMicroBatches(lost="all micro-batches but the last", **rows))
    assert but_last.keys() == last.keys()
    for name, gradient in gradients().items():
        torch.testing.assert_close(but_last[name] + last[name], gradient, rtol=1e-11, atol=1e-13)
        assert not torch.equal(but_last[name], gradient)


def test_gradients_of_ranks_are_clipped_by_their_own_norms(sft: OracleRuns) -> None:
    """The last of two micro-batches of one rank are the rows of the second of two ranks."""
    halves: Any = {"of": "gradients", "data_ranks": 1, "micro_batches": 2}
    found = []
    for lost in ("the last micro-batch", "all micro-batches but the last"):
        tensors = sft.record((LostMicroBatches(lost=lost, **halves),)).steps[0].tensors()
        found.append({n: 2 * t for n, t in tensors.items() if n.startswith("gradient/")})
    clipped = [clip(one, global_norm(one), 0.1) for one in found]
    defect = ClippedBeforeReduction(ranks=2, averaged=True, max_norm=0.1)
    own = sft.record((defect,)).steps[0].tensors()
    for name in clipped[0]:
        torch.testing.assert_close(own[name], (clipped[0][name] + clipped[1][name]) / 2, rtol=1e-11, atol=1e-13)


# --- real trainers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "scenario", "layout", "words"),
    [
        ("ClipsBeforeReduction", "core-sft-decay", "dp2", "each data-parallel rank clips by their own norm before"),
        ("AddsL2", "core-sft-decay", "dp1", "weight decay added to gradients (Adam with L2) instead of decoupled"),
        slow("DecaysNoEmbedding", "core-sft-decay", "dp1", "no weight decay of the embedding"),
        slow(
            "DropsLastMicroBatch", "core-sft-decay", "dp2", "gradients without the last micro-batch of an accumulation"
        ),
        ("TrainsPrompts", "core-sft-decay", "dp1", "training on all tokens, prompts as well as answers"),
        slow("NormalisesOverRollout", "core-grpo-std", "dp1", "the mean and the standard deviation of all responses"),
    ],
)
def test_the_bug_of_a_trainer_is_named(session: Session, target: str, scenario: str, layout: str, words: str) -> None:
    verdict = session.run(cell_of(scenario, layout, target, **(GRPO if "grpo" in scenario else SFT))).verdict
    assert verdict.state == "differs", verdict.reason
    but = " but configuration" if verdict.first_stage == "configuration" else ""
    assert f"agrees in all stages{but} with " in verdict.reason, verdict.reason
    assert words in verdict.reason, verdict.reason


@pytest.mark.parametrize(
    ("target", "scenario", "layout"),
    [
        slow("ClipsTensors", "core-sft-decay", "dp2"),
        ("DecaysNoProjection", "core-sft-decay", "dp1"),
        slow("DropsSecondMicroBatch", "core-sft-decay", "dp1"),
        slow("TrainsHalfOfPrompts", "core-sft-decay", "dp1"),
        slow("SubtractsTheMedian", "core-grpo-std", "dp1"),
    ],
)
def test_a_trainer_with_another_bug_is_not_given_the_name(
    session: Session, target: str, scenario: str, layout: str
) -> None:
    cell = cell_of(scenario, layout, target, **(GRPO if "grpo" in scenario else SFT))
    verdict = session.run(cell).verdict
    assert verdict.state == "differs", verdict.reason
    tried = bugs(cell.scenario, Layout.parse(layout))
    assert not [one for one in tried if any(one.words in q.hint for q in verdict.findings)], verdict.reason
    assert not [one for one in tried if one.words in verdict.reason], verdict.reason


@pytest.mark.slow
def test_an_honest_trainer_agrees(session: Session) -> None:
    for scenario, layout in (("core-sft-decay", "dp2"), ("core-grpo-std", "dp1")):
        verdict = session.run(cell_of(scenario, layout, **(GRPO if "grpo" in scenario else SFT))).verdict
        assert verdict.state == "conforms", verdict.reason
