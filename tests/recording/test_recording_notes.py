"""What a comparison of two records tells beside numbers: what it did not compare, and what only one side has."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import parity
from parity.compare import compare_records
from parity.differences import Names
from parity.record_files import read_run


def two_steps(
    out: Path, *, optimizer: Optimizer | None = None, model: nn.Module | None = None, handed: Sequence[Any] = ({}, {}),
    names: Names | None = None,
) -> Path:  # fmt: skip
    """Two steps of a matrix, with what is handed to ``step`` at each."""
    if model is None:
        model = nn.Linear(4, 4)
        nn.init.ones_(model.weight)
        nn.init.ones_(model.bias)
    if optimizer is None:
        optimizer = AdamW(model.parameters(), lr=0.1)
    else:
        optimizer.add_param_group({"params": list(model.parameters())})
    with parity.record(model, optimizer, out=out, names=names) as recorder:
        for given in handed:
            for weight in model.parameters():
                weight.grad = torch.ones_like(weight)
            optimizer.step()
            recorder.step(**given)
    return out


ROWS = [[1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("handed", "said"),
    [
        (
            [{"loss": 1.0, "tokens": 3, "batch": ROWS}, {"loss": 1.0, "batch": ROWS}],
            ["tokens, which B (in 1 of 2 steps) did not record"],
        ),
        ([{"tokens": 3}, {"tokens": 3}], ["batch, which B did not record", "loss, which B did not record"]),
        ([{"loss": 1.0, "batch": ROWS}] * 2, ["tokens, which B did not record"]),
        ([{"loss": 1.0, "tokens": 3, "batch": ROWS}] * 2, []),
    ],
)
def test_what_one_record_was_handed_and_the_other_was_not_is_told(
    handed: list[Any], said: list[str], tmp_path: Path
) -> None:
    a = two_steps(tmp_path / "a", handed=[{"loss": 1.0, "tokens": 3, "batch": ROWS}] * 2)
    b = two_steps(tmp_path / "b", handed=handed)
    expected = [f"Not compared: {one.replace('B', str(b))}." for one in said]
    for folders in ([a, b], [b, a]):
        compared = compare_records(folders, threshold=None)
        notes = compared.to_json()["pairs"][0]["notes"]
        assert [note for note in notes if "did not record" in note] == expected
        assert all(note in compared.text() for note in expected)


def test_no_tokens_are_another_thing_than_none_counted(tmp_path: Path) -> None:
    run = read_run(two_steps(tmp_path / "a", handed=[{"tokens": 0}, {}]))
    assert [line["tokens"] for line in run.steps] == [0, None]
    other = two_steps(tmp_path / "b", handed=[{"tokens": 4}, {}])
    divergence = compare_records([tmp_path / "a", other], threshold=None).pairs[0].divergence
    assert divergence is not None
    assert (divergence.name, divergence.different[0].what) == ("batch", "tokens")


def test_rows_that_names_leave_out_are_told(tmp_path: Path) -> None:
    a = two_steps(tmp_path / "a", names=lambda name: {name: slice(0, 3)})
    b = two_steps(tmp_path / "b", names=lambda name: {"weight": slice(0, 3)} if name == "weight" else {})
    assert read_run(a).header["left_out"] == {"weight": "1 of 4 rows", "bias": "1 of 4 rows"}
    assert read_run(b).header["left_out"] == {"weight": "1 of 4 rows", "bias": "4 of 4 rows"}
    assert (
        f"Not compared: 4 of 4 rows of bias, which names= leaves out in {b}."
        in compare_records([a, b], threshold=None).text()
    )


def test_twice_the_rate_is_no_mean_over_micro_batches(tmp_path: Path) -> None:
    twice = AdamW([nn.Parameter(torch.zeros(1))], lr=0.2)
    a, b = two_steps(tmp_path / "a"), two_steps(tmp_path / "b", optimizer=twice)
    found = compare_records([a, b], threshold=None)
    divergence = found.pairs[0].divergence
    assert divergence is not None
    assert divergence.name == "optimizer"
    assert "A 0.1, B 0.2; times 2" in found.text()
    assert "micro-batches" not in found.text()


def test_the_class_of_an_optimizer_is_told_and_is_no_difference(tmp_path: Path) -> None:
    class FusedAdam(AdamW):
        """As Apex's: the same step under another name, with a setting of its own."""

    fused = FusedAdam([nn.Parameter(torch.zeros(1))], lr=0.1)
    fused.defaults["bias_correction"] = True
    a, b = two_steps(tmp_path / "a"), two_steps(tmp_path / "b", optimizer=fused)
    compared = compare_records([a, b], threshold=None)
    assert not compared.differs, compared.text()
    text = compared.text()
    assert f"{a} steps with AdamW and {b} with FusedAdam; compared is what both are set to." in text
    assert f"Not compared: bias_correction of FusedAdam, which only {b} is set to." in text
    assert f"Not recorded: 1 parameters of the optimizers of {b}, which are not the model's." in text


def test_a_parameter_that_one_side_alone_steps_is_a_difference(tmp_path: Path) -> None:
    for name in ("a", "b"):
        model = nn.ParameterList([torch.ones(3), torch.ones(3)])
        optimizers = [SGD([weight], lr=0.1) for weight in model]
        with parity.record(model, optimizers, out=tmp_path / name) as recorder:
            for optimizer in optimizers if name == "a" else optimizers[:1]:
                optimizer.step()
            recorder.step()
    divergence = compare_records([tmp_path / "a", tmp_path / "b"], threshold=None).pairs[0].divergence
    assert divergence is not None
    assert (divergence.name, [quantity.what for quantity in divergence.different]) == ("optimizer", ["1"])


class Heads(nn.Module):
    """An embedding and a head, tied or not, in either order."""

    def __init__(self, *names: str, tied: bool) -> None:
        super().__init__()
        weight = torch.ones(3, 2)
        for name in names:
            self.register_module(name, nn.Linear(2, 3, bias=False))
            self.get_submodule(name).weight = nn.Parameter(weight.clone())
        if tied:
            self.get_submodule(names[1]).weight = self.get_submodule(names[0]).weight


def parameters_of(folders: Sequence[Path]) -> dict[str, str]:
    divergence = compare_records(folders, threshold=None).pairs[0].divergence
    assert divergence is not None
    assert divergence.name == "parameters"
    return {quantity.what: quantity.description for quantity in divergence.different}


def test_a_head_of_its_own_beside_one_that_is_tied_is_told_from_either_side(tmp_path: Path) -> None:
    own = two_steps(tmp_path / "own", model=Heads("embed", "head", tied=False))
    tied = two_steps(tmp_path / "tied", model=Heads("embed", "head", tied=True))
    said = {"head.weight": f"not in {tied}, which ties it to embed.weight"}
    assert parameters_of([own, tied]) == parameters_of([tied, own]) == said


def test_the_same_tied_weights_under_another_of_their_names_are_told_as_that(tmp_path: Path) -> None:
    a = two_steps(tmp_path / "a", model=Heads("embed", "head", tied=True))
    b = two_steps(tmp_path / "b", model=Heads("head", "embed", tied=True))
    advice = "record it under one name, by names="
    assert parameters_of([a, b]) == {"embed.weight": f"is called head.weight in {b}; {advice}"}
    assert parameters_of([b, a]) == {"head.weight": f"is called embed.weight in {a}; {advice}"}
    named = two_steps(tmp_path / "c", model=Heads("head", "embed", tied=True), names=lambda name: "embed.weight")
    assert read_run(named).header["tied"] == {}
    compared = compare_records([a, named], threshold=None)
    assert not compared.differs, compared.text()
