"""Backends side by side: who agrees with whom is worked out from the records, and a report says so in words."""

import json
import math
import os
import re
import shutil
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from judge_sample import both
from side_sample import (
    GROUP,
    MEMBERS,
    NAMES,
    SCENARIO,
    STEPS,
    Change,
    Tensors,
    Values,
    cell_id,
    declare,
    scaled,
    write_run,
    wrong_loss,
)

from conformance.cli import main as cli
from conformance.judge import side_by_side
from conformance.judge.side_by_side import write_side_by_side
from conformance.judge.tensor_views import floor_of_tensors, movement
from conformance.judge.tolerance import EXACT
from conformance.records.step_tensors import read_record
from conformance.results.output_folders import slim
from conformance.results.run_results import read_run
from conformance.spec.conventions import DecaysAll
from conformance.spec.objectives import all_observables
from conformance.spec.observables import columns
from reports.side_by_side import to_markdown

COLUMNS = columns(all_observables(SCENARIO.objective))
DEEPSPEED, FSDP2, FSDP2_TP, MEGATRON = MEMBERS
GRADIENT = f"gradient/{NAMES[1]}"
WRONG = scaled(GRADIENT, 1.01)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four members that agree. Never written to by a test, but for the reports."""
    return write_run(tmp_path_factory.mktemp("side") / "out")


def group_of(out: Path) -> dict[str, Any]:
    (group,) = json.loads((out / "side_by_side.json").read_text())["groups"]
    assert isinstance(group, dict)
    return group


def pair_of(group: dict[str, Any], one: str, other: str) -> dict[str, Any]:
    cells = [member["cell"] for member in group["members"]]
    numbers = sorted((cells.index(cell_id(one)), cells.index(cell_id(other))))
    (pair,) = (pair["columns"] for pair in group["pairs"] if pair["members"] == numbers)
    assert isinstance(pair, dict)
    return pair


# Who agrees with whom


def test_members_that_agree_are_one_family_with_the_oracle(sample: Path) -> None:
    group = group_of(sample)
    assert (group["group"], group["state"]) == (GROUP, "conforms")
    assert group["families"] == {column: [["oracle", *map(cell_id, MEMBERS)]] for column in COLUMNS}
    assert group["text"].startswith("All 4 agree with the reference and with each other. Furthest apart are ")
    assert len(group["pairs"]) == 6
    for pair in group["pairs"]:
        assert list(pair["columns"]) == ["loss", "gradient norm", "gradients", "update"]
        assert 0 < pair["columns"]["gradients"]["observed"] < 1e-14
        assert pair["columns"]["gradients"]["allowed"] == 2 * EXACT


@pytest.mark.parametrize("cached", [5, side_by_side.CACHED])
def test_pair_difference_is_relative_to_oracle_norm(sample: Path, monkeypatch: pytest.MonkeyPatch, cached: int) -> None:
    monkeypatch.setattr(side_by_side, "CACHED", cached)
    write_side_by_side(sample)
    oracle = read_record(sample / "oracle/tiny/float64").steps
    records = [read_record(sample / f"cells/0{number}/legs/0/record").steps for number in (1, 2)]
    worst = 0.0
    for step in range(STEPS):
        reference = {n: t for n, t in oracle[step].tensors().items() if n.startswith("gradient/")}
        one, other = (record[step].tensors() for record in records)
        for name, ref in reference.items():
            unit = max(ref.norm().item(), floor_of_tensors(reference))
            worst = max(worst, (one[name] - other[name]).norm().item() / unit)
    assert pair_of(group_of(sample), DEEPSPEED, FSDP2)["gradients"]["observed"] == pytest.approx(
        worst, rel=1e-12, abs=0
    )


def test_one_wrong_member_is_named_as_the_outlier(tmp_path: Path) -> None:
    group = group_of(write_run(tmp_path / "out", {DEEPSPEED: WRONG}))
    assert group["state"] == "differs"
    assert group["families"]["gradients"] == [
        ["oracle", *map(cell_id, (FSDP2, FSDP2_TP, MEGATRON))],
        [cell_id(DEEPSPEED)],
    ]
    assert group["text"] == (
        "All agree in loss, gradient norm and update. In gradients, fsdp2 (dp2, dp2.tp2) and megatron tp2 agree with "
        "each other and with the reference. deepspeed dp2 stands alone: gradients 1.0e-02 from the reference; look "
        "first at deepspeed dp2."
    )
    for member in (FSDP2, FSDP2_TP, MEGATRON):
        worst = pair_of(group, DEEPSPEED, member)["gradients"]
        assert worst["observed"] == pytest.approx(0.01)
        assert (worst["tensor"], worst["step"]) == (NAMES[1], 0)


def test_layouts_of_one_backend_that_are_wrong_alike_point_at_the_backend(tmp_path: Path) -> None:
    group = group_of(write_run(tmp_path / "out", {FSDP2: WRONG, FSDP2_TP: WRONG}))
    assert re.search(
        r"fsdp2 \(dp2, dp2\.tp2\) agree with each other and not with the reference: gradients \S+e-15 apart, 1\.0e-02 "
        r"from it; look first at fsdp2\.",
        group["text"],
    )


def test_backends_that_are_wrong_alike_point_at_what_they_share(tmp_path: Path) -> None:
    group = group_of(write_run(tmp_path / "out", {FSDP2: WRONG, DEEPSPEED: WRONG}))
    assert "deepspeed dp2 and fsdp2 dp2 agree with each other and not with the reference" in group["text"]
    assert "look first at what only they share, and not fsdp2 dp2.tp2 and megatron tp2." in group["text"]


def test_side_by_side_agreement_against_oracle_suspects_oracle(tmp_path: Path) -> None:
    group = group_of(write_run(tmp_path / "out", dict.fromkeys(MEMBERS, WRONG)))
    assert group["state"] == "differs"
    assert group["families"]["gradients"] == [["oracle"], list(map(cell_id, MEMBERS))]
    assert re.search(r"gradients \S+e-15 apart, 1\.0e-02 from it; look first at the reference, the scen", group["text"])
    for one, other in combinations(MEMBERS, 2):
        assert pair_of(group, one, other)["gradients"]["ratio"] < 0.01


def test_every_column_has_families_of_its_own(tmp_path: Path) -> None:
    def change(step: int, values: Values, tensors: Tensors) -> None:
        WRONG(step, values, tensors)
        if step == 0:
            values["loss"] *= 1.001

    text = group_of(write_run(tmp_path / "out", {DEEPSPEED: change, FSDP2: WRONG}))["text"]
    assert text.startswith(
        "All agree in gradient norm and update. In loss, fsdp2 (dp2, dp2.tp2) and megatron tp2 agree"
    )
    assert "deepspeed dp2 stands alone: loss 1.0e-03 from the reference; look first at deepspeed dp2." in text
    assert (
        "In gradients, fsdp2 dp2.tp2 and megatron tp2 agree with each other and with the reference. deepspeed dp2 and f"
        in text
    )


def test_when_no_two_agree_that_is_said(tmp_path: Path) -> None:
    changes = {member: scaled(GRADIENT, 1 + 0.01 * n) for n, member in enumerate(MEMBERS, start=1)}
    group = group_of(write_run(tmp_path / "out", changes))
    assert (
        "In gradients, none agrees with the reference. deepspeed dp2 stands alone: gradients 1.0e-02" in group["text"]
    )
    assert (
        "fsdp2 (dp2, dp2.tp2) stand alone, each of them: gradients 3.0e-02 from the reference; look first at fsdp2."
        in (group["text"])
    )
    assert len(group["families"]["gradients"]) == 5


def test_two_that_agree_through_others_only_are_said_to_be_too_far_apart(tmp_path: Path) -> None:
    changes = {DEEPSPEED: scaled(GRADIENT, 1 + 1.5 * EXACT), MEGATRON: scaled(GRADIENT, 1 - 0.9 * EXACT)}
    group = group_of(write_run(tmp_path / "out", changes))
    assert (len(group["families"]["gradients"]), group["state"]) == (1, "differs")
    everybody = "deepspeed dp2, fsdp2 (dp2, dp2.tp2) and megatron tp2"
    assert f"In gradients, {everybody} agree in part with each other and with the reference. Yet " in group["text"]
    assert "Yet deepspeed dp2 and the reference are further apart than they may be: gradients 1.5e-11" in group["text"]


def test_a_pair_of_conforming_cells_is_within_what_the_two_may_show(tmp_path: Path) -> None:
    def off(by: float) -> Change:
        """The first gradient is off by a factor, and so are all weights that follow from it."""
        moved = torch.zeros(4, 3, dtype=torch.float64)

        def change(step: int, values: Values, tensors: Tensors) -> None:
            if step == 0:
                moved.copy_(0.1 * by * tensors[GRADIENT])
                tensors[GRADIENT] *= 1 + by
            if step >= 0:
                tensors[f"weight/{NAMES[1]}"] -= moved

        return change

    changes = {DEEPSPEED: off(0.95 * EXACT), FSDP2: off(-0.95 * EXACT)}
    group = group_of(write_run(tmp_path / "out", changes))
    assert group["state"] == "conforms"
    assert pair_of(group, DEEPSPEED, FSDP2)["gradients"]["ratio"] == pytest.approx(0.95, rel=1e-3)


@pytest.mark.parametrize("at", [0, STEPS - 1])
def test_updates_are_compared_at_every_step(tmp_path: Path, at: int) -> None:
    group = group_of(write_run(tmp_path / "out", {MEGATRON: scaled(f"weight/{NAMES[2]}", 1.01, at=at)}))
    assert "megatron tp2 stands alone: update" in group["text"]
    assert pair_of(group, MEGATRON, FSDP2)["update"]["step"] == at


def test_an_update_is_how_far_a_weight_moved_and_not_where_it_is(tmp_path: Path) -> None:
    def change(step: int, values: Values, tensors: Tensors) -> None:
        tensors[f"weight/{NAMES[0]}"] += 0.01  # as loaded, and ever after

    group = group_of(write_run(tmp_path / "out", {MEGATRON: change}))
    assert pair_of(group, MEGATRON, FSDP2)["update"]["ratio"] < 0.01
    assert "megatron tp2 differs from the reference at a stage without a column: weights." in group["text"]


def test_what_differs_first_is_told_first(tmp_path: Path) -> None:
    def change(step: int, values: Values, tensors: Tensors) -> None:
        WRONG(step, values, tensors)
        if step > 0:
            values["loss"] *= 1.5

    group = group_of(write_run(tmp_path / "out", {MEGATRON: change}))
    text = group["text"]
    assert [pair_of(group, MEGATRON, FSDP2)[column]["since"] for column in COLUMNS] == [1, 0, None, None]
    assert "In gradients and loss (from step 1), deepspeed dp2" in text
    assert "megatron tp2 stands alone: gradients 1.0e-02 from the reference" in text


@pytest.mark.parametrize(("key", "column"), [("loss", "loss"), ("grad_norm", "gradient norm")])
def test_loss_and_norm_are_compared(tmp_path: Path, key: str, column: str) -> None:
    def change(step: int, values: Values, tensors: Tensors) -> None:
        if step == 1:
            values[key] *= 1.01

    group = group_of(write_run(tmp_path / "out", {DEEPSPEED: change}))
    assert f"deepspeed dp2 stands alone: {column} 1.0e-02 from the reference" in group["text"]
    assert pair_of(group, DEEPSPEED, MEGATRON)[column]["step"] == 1


def _without_gradient(step: int, values: Values, tensors: Tensors) -> None:
    tensors.pop(GRADIENT, None)


def _not_a_number(step: int, values: Values, tensors: Tensors) -> None:
    if step == 0:
        tensors[GRADIENT][0, 0] = math.nan


def _other_shape(step: int, values: Values, tensors: Tensors) -> None:
    if step >= 0:
        tensors[GRADIENT] = tensors[GRADIENT][:2].clone()


@pytest.mark.parametrize("change", [_without_gradient, _not_a_number, _other_shape])
def test_what_is_missing_misshapen_or_no_number_is_infinitely_far(tmp_path: Path, change: Change) -> None:
    group = group_of(write_run(tmp_path / "out", {FSDP2_TP: change}))
    assert pair_of(group, FSDP2, FSDP2_TP)["gradients"]["observed"] == "inf"
    assert "fsdp2 dp2.tp2 stands alone: gradients inf from the reference" in group["text"]


@pytest.mark.parametrize("shape", [(2, 4), (1, 3)])
def test_weight_that_changed_its_shape_moved_by_nan(shape: tuple[int, ...]) -> None:
    assert movement({"a": torch.ones(2, 3)}, {"a": torch.ones(shape)})["a"].isnan().all()


def test_a_backend_without_a_norm_of_its_own_is_not_compared_in_it(tmp_path: Path) -> None:
    def change(step: int, values: Values, tensors: Tensors) -> None:
        if step >= 0:
            del values["grad_norm"]

    group = group_of(write_run(tmp_path / "out", {DEEPSPEED: change}))
    assert group["state"] == "conforms"
    assert "gradient norm" not in pair_of(group, DEEPSPEED, FSDP2)
    assert "gradient norm" in pair_of(group, FSDP2_TP, FSDP2)


def test_a_member_that_differs_elsewhere_is_not_passed_over(tmp_path: Path) -> None:
    def change(step: int, values: Values, tensors: Tensors) -> None:
        if step == 0:
            values["token_count"] = 6

    group = group_of(write_run(tmp_path / "out", {FSDP2: change}))
    assert group["state"] == "differs"
    assert "fsdp2 dp2 differs from the reference at a stage without a column: loss." in group["text"]


# Conventions


@pytest.fixture(scope="module")
def convention(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two members declare a convention, and a third one has it. Never written to by a test."""
    out = write_run(tmp_path_factory.mktemp("convention") / "out", dict.fromkeys((DEEPSPEED, MEGATRON), wrong_loss))
    declare(out, (DEEPSPEED, MEGATRON), DecaysAll(), wrong_loss)
    return out


@pytest.mark.parametrize("keep", ["all", "lines"])
def test_a_convention_is_why_members_stand_alone(convention: Path, tmp_path: Path, keep: str) -> None:
    out = Path(shutil.copytree(convention, tmp_path / "out"))
    if keep == "lines":
        slim(out)
        assert not [*out.glob("cells/*/legs/0/record/*.safetensors")]
        write_side_by_side(out)
    group = group_of(out)
    assert group["state"] == "expected_difference"
    assert re.search(
        r"In loss, fsdp2 \(dp2, dp2\.tp2\) agree with each other and with the reference\. deepspeed dp2 and megatron "
        r"tp2 agree with each other and not with the reference because of the convention DecaysAll: loss \S+e-1\d "
        r"apart, 1\.0e-02 from it\.$",
        group["text"],
    )
    assert group["families"]["loss"] == [
        ["oracle", cell_id(FSDP2), cell_id(FSDP2_TP)],
        [cell_id(DEEPSPEED), cell_id(MEGATRON)],
    ]
    assert [member["conventions"] for member in group["members"]] == [["DecaysAll"], [], [], ["DecaysAll"]]


def test_one_member_with_a_convention_is_not_where_to_look(tmp_path: Path) -> None:
    out = write_run(tmp_path / "out", {DEEPSPEED: wrong_loss})
    declare(out, (DEEPSPEED,), DecaysAll(), wrong_loss)
    text = group_of(out)["text"]
    assert "deepspeed dp2 stands alone because of the convention DecaysAll: loss 1.0e-02 from the reference." in text
    assert "look first" not in text


def test_a_bug_beside_a_convention_is_where_to_look(tmp_path: Path) -> None:
    out = write_run(tmp_path / "out", {DEEPSPEED: both(wrong_loss, WRONG)})
    declare(out, (DEEPSPEED,), DecaysAll(), wrong_loss)
    group = group_of(out)
    assert group["state"] == "differs"
    assert group["text"].endswith("; look first at deepspeed dp2, judged with the convention DecaysAll.")


# What is not there


def test_one_that_is_left_is_not_called_an_outlier(tmp_path: Path) -> None:
    out = write_run(tmp_path / "out", {DEEPSPEED: WRONG}, members=(DEEPSPEED, FSDP2))
    shutil.rmtree(out / "cells" / "02" / "legs/0/record")
    write_side_by_side(out)
    text = group_of(out)["text"]
    assert (
        "deepspeed dp2 stands alone: gradients 1.0e-02 from the reference; there is nobody to compare it with." in text
    )
    assert "Not compared: fsdp2 dp2" in text


def test_where_tensors_are_missing_that_is_said_and_nothing_is_guessed(out: Path) -> None:
    for file in (out / "cells" / "01" / "legs/0/record").glob("*.safetensors"):
        file.unlink()
    write_side_by_side(out)
    group = group_of(out)
    assert group["state"] == "infrastructure"
    assert (
        "Not compared: deepspeed dp2, only its scalars were compared, because its tensors cannot be read"
        in (group["text"])
    )
    assert list(pair_of(group, DEEPSPEED, FSDP2)) == ["loss", "gradient norm"]
    assert list(pair_of(group, FSDP2_TP, FSDP2)) == ["loss", "gradient norm", "gradients", "update"]
    assert group["families"]["gradients"] == [["oracle", *map(cell_id, (FSDP2, FSDP2_TP, MEGATRON))]]


def test_without_the_oracles_tensors_no_gradients_are_compared(out: Path) -> None:
    for file in (out / "oracle").rglob("*.safetensors"):
        file.unlink()
    write_side_by_side(out)
    group = group_of(out)
    assert group["state"] == "infrastructure"
    assert "agree" not in group["text"]
    assert list(pair_of(group, DEEPSPEED, FSDP2)) == ["loss", "gradient norm"]


def test_a_member_without_an_answer_is_listed_with_the_reason(out: Path) -> None:
    record = out / "cells" / "04" / "legs/0/record" / "record.jsonl"
    record.write_text("".join(record.read_text().splitlines(keepends=True)[:-1]))
    assert cli.main(["judge", str(out)]) == 3
    group = group_of(out)
    assert group["state"] == "infrastructure"
    assert re.search(r"Not compared: megatron tp2, \S+ has no footer", group["text"])
    assert cli.main(["compare", str(out)]) == 3


# The command


def test_the_command_prints_the_table_and_its_exit_code_says_whether_all_agree(
    sample: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compare", str(sample)]) == 0
    assert capsys.readouterr().out == to_markdown(sample) + "\n"
    assert cli.main(["compare", str(sample), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["groups"] == [group_of(sample)]
    assert cli.main(["compare", str(write_run(tmp_path / "out", {DEEPSPEED: WRONG}))]) == 1


@pytest.mark.parametrize("work", ["PER_FORK", "BYTES_PER_FORK"])
def test_forks_compare_groups_as_one_process_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: str) -> None:
    """The longest group is compared first, and the file keeps the order of the run."""
    out = write_run(tmp_path / "out")
    run, entries = read_run(out)
    shorter = [replace(entry, scenario="shorter") for entry in entries if entry.cell != cell_id(FSDP2_TP)]
    monkeypatch.setattr(side_by_side, "read_run", lambda _: (run, [*shorter, *entries]))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    found, begun, fork = [], list[int](), os.fork

    def counted() -> int:
        begun.append(fork())
        return begun[-1]

    monkeypatch.setattr(os, "fork", counted)
    for least in (2**29, 1):
        monkeypatch.setattr(side_by_side, work, least)
        write_side_by_side(out)
        found.append((out / "side_by_side.json").read_text())
    assert found[0] == found[1]
    assert len(begun) == 2
    assert [group["group"].split("/")[0] for group in json.loads(found[1])["groups"]] == ["shorter", "sft-tiny"]


def test_a_reference_that_is_lent_is_told_with_who_agrees(tmp_path: Path) -> None:
    out = write_run(tmp_path / "out")
    for file in out.glob("cells/*/verdict.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"second_class": "transformers' own Phi"}))
    write_side_by_side(out)
    told = "The reference is transformers' own Phi: errors that transformers itself makes are not seen."
    assert json.loads((out / "side_by_side.json").read_text())["groups"][0]["text"].endswith(told)
    assert told in to_markdown(out).replace("\\", "")
