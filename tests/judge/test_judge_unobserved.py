"""What a cell does not show is in its state, and not in a remark; unless nothing is lost by it."""

from pathlib import Path
from typing import Any

import pytest
from judge_sample import Change, Tensors, Values, clauses, scale, unchanged, verdict_of


def test_a_stage_that_was_not_observed_shows_in_the_state(tmp_path: Path) -> None:
    def change(step: int, values: Values, tensors: Tensors) -> None:
        if step >= 0:
            del tensors["logprob/0"], tensors["logprob/7"]

    verdict = verdict_of(tmp_path, change)
    assert verdict.state == "partly_observed"
    assert clauses(verdict)[1:] == ["not observed: log-probs"]


def test_a_norm_that_is_not_reported_is_no_loss_because_the_update_is_judged(tmp_path: Path) -> None:
    def change(step: int, values: Values, tensors: Tensors) -> None:
        if step >= 0:
            values["grad_norm"] = None

    verdict = verdict_of(tmp_path, change)
    assert verdict.state == "conforms"
    assert clauses(verdict)[1:] == ["grad_norm is not reported, and judged by its effect at clipped update"]


def with_replicas(found: dict[str, Any]) -> Change:
    """What ranks named of their weights and gradients."""

    def change(step: int, values: Values, tensors: Tensors) -> None:
        if step >= 0:
            values["replicas"] = {**values["replicas"], "gradient": found, "weight": found}

    return change


APART = {"offered": 8, "compared": 0, "differing": []}  # eight pieces, no two alike
NONE = {"offered": 0, "compared": 0, "differing": []}


@pytest.mark.parametrize(("found", "layout"), [(APART, "dp2"), (NONE, "dp1")])
def test_replicas_that_the_layout_does_not_have_are_no_loss(tmp_path: Path, found: Values, layout: str) -> None:
    verdict = verdict_of(tmp_path, with_replicas(found), layout=layout)
    assert verdict.state == "conforms"
    assert clauses(verdict)[1:] == ["no two ranks hold the same: gradient replicas, weight replicas"]


def test_several_ranks_that_name_no_piece_are_not_believed_to_hold_none_alike(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, with_replicas(NONE), layout="dp2")
    assert verdict.state == "partly_observed"
    assert clauses(verdict)[1:] == ["not observed: gradient replicas, weight replicas"]


def test_what_differs_differs_whatever_else_was_not_observed(tmp_path: Path) -> None:
    def change(step: int, values: Values, tensors: Tensors) -> None:
        with_replicas(NONE)(step, values, tensors)
        scale("loss", 2.0)(step, values, tensors)

    assert verdict_of(tmp_path, change).state == "differs"


def test_a_step_at_which_nobody_reads_is_no_loss(tmp_path: Path) -> None:
    assert verdict_of(tmp_path, with_replicas(APART), layout="dp2", drawn=1).state == "conforms"


def test_a_step_of_which_nothing_could_be_seen_proves_no_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("judge_sample.evidence", lambda _: {"collectives": [], "products": [], "widths": []})
    verdict = verdict_of(tmp_path, unchanged, layout="dp1")
    assert verdict.state == "partly_observed"
    assert clauses(verdict)[1:] == ["not observed: configuration"]
