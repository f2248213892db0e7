"""Coverage: a run that judged less than was demanded, or less than an earlier one, is never green."""

import pytest

from conformance.record.coverage import Change, Floor, claims
from conformance.record.states import STATES, State, overall

ONE, TWO, CHAIN = "sft/llama/fsdp2/dp2/exact", "sft/llama/megatron/tp2/exact", "sft/llama/fsdp2-to-megatron/dp2/exact/x"


@pytest.mark.parametrize("state", STATES)
def test_what_is_required_has_to_conform_or_to_differ_as_expected(state: State) -> None:
    unmet = Floor(require=("*/llama/*",)).unmet({ONE: state})
    assert bool(unmet) == (state not in ("conforms", "expected_difference"))
    if unmet:
        assert unmet == (f"required: '*/llama/*', but {ONE} ({STATES[state].name})",)


def test_a_requirement_that_no_cell_matches_is_not_met() -> None:
    assert Floor(require=("*/qwen3/*",)).unmet({ONE: "conforms"}) == (
        "required: no cell of the run matches '*/qwen3/*'",
    )


@pytest.mark.parametrize(("judged", "met"), [("conforms", True), ("unsupported", False), ("infrastructure", False)])
def test_a_floor_counts_cells_that_were_judged(judged: State, met: bool) -> None:
    assert (Floor(min_judged=2).unmet({ONE: "partly_observed", TWO: judged}) == ()) == met


@pytest.mark.parametrize(
    ("states", "met"),
    [
        ({ONE: "conforms", TWO: "unsupported"}, False),
        ({ONE: "conforms", TWO: "differs"}, True),
        ({ONE: "conforms", TWO: "unsupported", CHAIN: "conforms"}, True),
        ({ONE: "conforms"}, False),
    ],
)
def test_of_a_backend_that_is_asked_for_by_name_a_cell_has_to_be_judged(states: dict[str, State], met: bool) -> None:
    unmet = Floor(backends=("megatron",)).unmet(states)
    assert (unmet == ()) == met
    assert all("backend megatron" in sentence for sentence in unmet)


def test_nothing_is_demanded_by_default() -> None:
    assert Floor().unmet({}) == ()
    assert Floor().changes({ONE: "conforms"}) == ((), ())


@pytest.mark.parametrize(
    ("before", "now", "change"),
    [
        ("conforms", "unsupported", "lost"),
        ("conforms", "infrastructure", "lost"),
        ("conforms", "not_run", "lost"),
        ("conforms", None, "lost"),
        ("conforms", "partly_observed", "lost"),
        ("differs", "unsupported", "lost"),
        ("not_run", "unsupported", "lost"),
        ("conforms", "differs", ""),
        ("expected_difference", "conforms", ""),
        ("unsupported", "unsupported", ""),
        ("unsupported", None, ""),
        (None, "unsupported", ""),
        (None, "infrastructure", ""),
        ("unsupported", "conforms", "gained"),
        (None, "conforms", "gained"),
        ("partly_observed", "conforms", "gained"),
        ("infrastructure", "differs", "gained"),
    ],
)
def test_coverage_is_compared_with_an_earlier_run(before: State | None, now: State | None, change: str) -> None:
    floor = Floor(against="old", earlier={ONE: before} if before else {})
    states: dict[str, State] = {ONE: now} if now else {}
    expected = (Change(cell=ONE, before=before, now=now),)
    lost, gained = floor.changes(states)
    assert (lost, gained) == (expected if change == "lost" else (), expected if change == "gained" else ())
    assert bool(floor.unmet(states)) == (change == "lost")


def test_a_sentence_names_some_cells_and_counts_the_rest() -> None:
    states: dict[str, State] = {f"a/b/c/{number}": "unsupported" for number in range(5)}
    assert Floor(require=("*",)).unmet(states) == (
        "required: '*', but a/b/c/0 (unsupported), a/b/c/1 (unsupported), a/b/c/2 (unsupported) and 2 more",
    )


def test_claims_and_refusals_are_listed_by_backend() -> None:
    cells: dict[str, tuple[State, str]] = {ONE: ("unsupported", "use tp1"), TWO: ("infrastructure", "a rank died")}
    assert claims(cells) == {
        "fsdp2": {"claimed": [], "refused": {ONE: "use tp1"}},
        "megatron": {"claimed": [TWO], "refused": {}},
    }


@pytest.mark.parametrize(
    ("states", "complete", "verdict"),
    [
        (["conforms"], True, "conforms"),
        (["conforms"], False, "incomplete"),
        (["conforms", "partly_observed"], True, "partly_observed"),
        (["partly_observed", "not_run"], True, "incomplete"),
        (["partly_observed", "differs"], False, "differs"),
        (["expected_difference"], True, "conforms"),
        (["unsupported"], True, "incomplete"),
        (["conforms", "unsupported"], True, "conforms"),
    ],
)
def test_one_word_for_a_run(states: list[State], complete: bool, verdict: str) -> None:
    assert overall(states, complete=complete) == verdict
