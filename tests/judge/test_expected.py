"""An expected difference hides nothing: a cell has to agree with the oracle that has the defect, in all stages.

Records made by hand: the defect makes the loss of the first step and a gradient larger by a known factor.
"""

import math
from pathlib import Path
from typing import Any

import pytest
from judge_sample import EQUAL, OBSERVABLES, STEPS, Change, Tensors, Values, both, scale, unchanged, write

from conformance.judge.expected_differences import judge_cell
from conformance.results.verdict import Verdict
from conformance.spec.conventions import RoundedMasters
from conformance.spec.known_defects import DividedGradients, Known, Unmodelled

CELL = "x/m/b/dp2.tp2/exact"
DEFECT = (DividedGradients(by=2),)
KNOWN = Known(reason="a bug", link="docs/bug.md", defects=DEFECT)


def with_defect(step: int, values: Values, tensors: Tensors) -> None:
    scale("loss", 1.01)(step, values, tensors)
    scale("logprob/0", 1.01)(step, values, tensors)


def verdict_of(
    folder: Path, change: Change, *known: Known, defects: object = DEFECT, oracle: Change = unchanged
) -> Verdict:
    """Of a cell, by an oracle as it should be and one with the defect, whose header names ``defects``."""
    write(folder / "cell", change)
    write(folder / "oracle" / "float64", oracle, oracle="float64")
    write(folder / "defective" / "float64", with_defect, oracle="float64", defects=defects)  # type: ignore[arg-type]
    return judge_cell(
        CELL,
        [folder / "cell"],
        known=known,
        conventions=(),
        oracles=lambda defects: folder / ("defective" if defects else "oracle"),
        observables=OBSERVABLES,
    )


def test_a_cell_that_has_the_defect_and_nothing_else_differs_as_expected(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, with_defect, KNOWN)
    assert verdict.state == "expected_difference"
    assert verdict.reason.startswith("a bug (docs/bug.md); with that, ")
    assert "quantities agree with the reference" in verdict.reason
    assert verdict.first_stage == "log-probs", "what is told is the difference from the oracle as it should be"


def test_a_cell_that_agrees_with_the_oracle_has_a_stale_expectation(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, unchanged, KNOWN)
    assert verdict.state == "differs"
    assert "expected to differ (a bug (docs/bug.md)), but: " in verdict.reason
    assert "remove the expectation" in verdict.reason


@pytest.mark.parametrize(
    ("lie", "stage"),
    [
        (scale("lr", 2.0), "clipped update"),
        (scale("weight/a", 1.001), "clipped update"),
        (scale("weight/a", 1.001, at=-1), "weights"),
        (scale("token_count", 2), "loss"),
        (scale("gradient/a", 2.0), "gradients"),
        (scale("gradient/a", 1.001, at=STEPS - 1), "gradients"),
        (scale("grad_norm", 1.001), "gradient norm"),
        (scale("loss", 1 / 1.01), "loss"),  # half of the defect
    ],
)
def test_whatever_else_is_wrong_is_told_where_it_begins(tmp_path: Path, lie: Change, stage: str) -> None:
    verdict = verdict_of(tmp_path, both(with_defect, lie), KNOWN)
    assert (verdict.state, verdict.first_stage) == ("differs", stage)
    assert "expected to differ (a bug (docs/bug.md)), but not like this: " in verdict.reason


def test_records_of_the_oracle_are_believed_only_with_the_defects_that_they_name(tmp_path: Path) -> None:
    for number, defects in enumerate(((), (RoundedMasters(precision="bf16"),), DEFECT * 2)):
        verdict = verdict_of(tmp_path / str(number), with_defect, KNOWN, defects=defects)
        assert verdict.state == "infrastructure"
        assert (
            "should be the oracle's record with [{'kind': 'divided-gradients', 'by': 2, 'loss': False}]"
            in verdict.reason
        )
    write(tmp_path / "honest" / "cell", with_defect)
    write(tmp_path / "honest" / "oracle" / "float64", with_defect, oracle="float64", defects=DEFECT)
    phases = [tmp_path / "honest" / "cell"]
    options: Any = {"oracles": lambda _: tmp_path / "honest" / "oracle", "observables": OBSERVABLES}
    verdict = judge_cell(CELL, phases, known=(), conventions=(), **options)
    assert verdict.state == "infrastructure"
    assert "should be the oracle's record with no defect" in verdict.reason


# --- what the oracle cannot have -------------------------------------------------------------------------------------


def unmodelled(stage: str, *tensors: str, onward: bool = False) -> Known:
    return Known(reason="a bug", link="x", unmodelled=Unmodelled(stage=stage, tensors=tensors, onward=onward))


def test_findings_of_what_cannot_be_modelled_are_those_that_are_named(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, scale("loss", 1.01), unmodelled("loss", "lo*"))
    assert verdict.state == "expected_difference"
    assert verdict.reason == "a bug (x); nothing else differs"


@pytest.mark.parametrize("more", [scale("token_count", 2), scale("grad_norm", 1.1), scale("gradient/a", 1.1, at=2)])
def test_all_findings_have_to_be_named_and_not_only_the_first(tmp_path: Path, more: Change) -> None:
    verdict = verdict_of(tmp_path, both(scale("loss", 1.01), more), unmodelled("loss", "loss"))
    assert verdict.state == "differs"
    assert "but not like this: " in verdict.reason


def test_one_of_two_expectations_that_shows_nothing_is_stale(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, with_defect, KNOWN, unmodelled("gradients", "a"))
    assert verdict.state == "differs"
    assert "expected to differ at gradients in a (" in verdict.reason
    assert "and does not; correct or remove the expectation" in verdict.reason


def test_defects_with_and_without_a_model_may_meet_in_a_cell(tmp_path: Path) -> None:
    change = both(with_defect, scale("grad_norm", 1 + 1e-7, at=1))
    verdict = verdict_of(tmp_path, change, KNOWN, unmodelled("gradient norm", "grad_norm*"))
    assert verdict.state == "expected_difference"
    assert verdict.reason == "a bug (docs/bug.md); a bug (x); nothing else differs"


def trained(*changes: Change, unnamed: float = 0.0) -> Change:
    """Gradients are changed, and norm and weights follow from them as they should. ``unnamed``: a norm beside them."""
    held: Tensors = {}

    def change(step: int, values: Values, tensors: Tensors) -> None:
        if step < 0:
            held.update({name: tensors[f"weight/{name}"].clone() for name in ("a", "b")})
            return
        both(*changes)(step, values, tensors)
        gradients = {name: tensors[f"gradient/{name}"] for name in held}
        values["grad_norm"] = norm = math.hypot(unnamed, *(g.norm().item() for g in gradients.values()))
        if unnamed:
            values["unnamed_grad_norm"] = unnamed
        for name, gradient in gradients.items():
            held[name] = held[name] - 0.1 * (min(1.0, 1 / (norm + 1e-6)) * gradient)
            tensors[f"weight/{name}"] = held[name].clone()

    return change


WRONG = scale("gradient/a", 1.5)
ONWARD = unmodelled("gradients", "a", onward=True)


def test_expected_wrong_gradient_allows_consequences(tmp_path: Path) -> None:
    assert verdict_of(tmp_path / "1", trained(WRONG), ONWARD).state == "expected_difference"
    later = trained(WRONG, scale("loss", 1.01, at=1), scale("gradient/b", 1.01, at=1))
    assert verdict_of(tmp_path / "2", later, ONWARD).state == "expected_difference"
    verdict = verdict_of(tmp_path / "3", trained(WRONG), unmodelled("gradients", "a"))
    assert verdict.state == "differs", "a defect from which nothing follows"


def other_replicas(step: int, values: Values, tensors: Tensors) -> None:
    if step == 2:
        entry = {"name": "a", "region": "full", "ranks": [0, 1], "relative": 1e-5}
        values["replicas"] = {**values["replicas"], "weight": {**EQUAL, "differing": [entry]}}


def without_a_gradient(step: int, values: Values, tensors: Tensors) -> None:
    if step == 2:
        del tensors["gradient/b"]


@pytest.mark.parametrize(
    "change",
    [
        trained(WRONG, scale("loss", 1.01)),
        trained(WRONG, scale("logprob/0", 1.01)),
        trained(WRONG, scale("gradient/b", 1.01)),
        trained(WRONG, scale("lr", 2.0, at=2)),
        trained(WRONG, scale("token_count", 2, at=2)),
        trained(WRONG, other_replicas),
        both(trained(WRONG), scale("weight/b", 1.01, at=2)),
        both(trained(WRONG), scale("grad_norm", 1.01, at=2)),
        both(trained(WRONG), scale("weight/a", 1.01, at=-1)),
        both(trained(WRONG), without_a_gradient),
    ],
)
def test_nothing_is_allowed_that_does_not_follow_from_it(tmp_path: Path, change: Change) -> None:
    assert verdict_of(tmp_path, change, ONWARD).state == "differs"


def test_what_is_trained_without_a_name_is_part_of_the_norm_and_of_clipping(tmp_path: Path) -> None:
    """As padding of a vocabulary is: its gradients are in no record, and the oracle says how large they are."""
    known = Known(reason="a bug", link="x", defects=DEFECT)

    def verdict(folder: Path, cell: float, oracle: float) -> Verdict:
        write(folder / "cell", trained(unnamed=cell))
        write(folder / "honest" / "float64", oracle="float64")
        write(folder / "defective" / "float64", trained(unnamed=oracle), oracle="float64", defects=DEFECT)
        return judge_cell(
            CELL,
            [folder / "cell"],
            known=(known,),
            conventions=(),
            oracles=lambda defects: folder / ("defective" if defects else "honest"),
            observables=OBSERVABLES,
        )

    assert verdict(tmp_path / "1", 0.5, 0.5).state == "expected_difference"
    differs = verdict(tmp_path / "2", 0.5, 0.5001)
    assert (differs.state, differs.first_stage) == ("differs", "gradient norm")
    names = {finding.tensor for finding in differs.findings}
    assert {"grad_norm", "grad_norm against rebuilt", "a", "a against rebuilt"} <= names
