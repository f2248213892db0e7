"""Coverage: a run that judged less than was demanded, or less than an earlier one, is never green."""

import pytest

from conformance.backends.protocol import BackendEntry
from conformance.matrix import plan
from conformance.matrix.options import Demands, Ranks, Selection
from conformance.results.baseline import Outcome, RunFacts, make_baseline
from conformance.results.changes import Kind, changes_between
from conformance.results.requirements import Floor, claims
from conformance.results.verdict import STATES, RunVerdict, State, overall

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


@pytest.mark.parametrize(("patterns", "needed"), [((), ("rl", "sft")), (("*/sft/*",), ("sft or rl",))])
def test_pattern_may_be_for_one_class_of_a_framework(
    patterns: tuple[str, ...], needed: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [BackendEntry(name=name, target=f"adapter:{name}") for name in ("sft", "rl")]
    monkeypatch.setattr(plan, "selected_backends", lambda _: entries)
    selection = Selection(backend=("adapter:sft", "adapter:rl"), cells=patterns)
    floor = plan.floor_from_demands(Demands(), selection, [], ranks=Ranks())
    assert sorted(floor.backends) == sorted(needed)
    states: dict[str, State] = {"a/llama/sft/dp2/exact": "conforms", "a/llama/rl/dp2/exact": "unsupported"}
    assert (floor.unmet(states) == ()) == bool(patterns)
    assert floor.unmet(dict.fromkeys(states, "unsupported"))[0].startswith(f"requested: backend {floor.backends[0]}, ")


@pytest.mark.parametrize(("state", "met"), [("differs", True), ("unsupported", False), ("infrastructure", False)])
def test_controls_alone_are_no_run_with_a_fault(state: State, met: bool) -> None:
    unmet = Floor().unmet({ONE: "conforms", f"{ONE}/fault-x": state})
    assert (unmet == ()) == met
    assert all(sentence.startswith("planted: no cell with a fault was judged") for sentence in unmet)


def test_nothing_is_demanded_by_default() -> None:
    assert Floor().unmet({}) == ()


@pytest.mark.parametrize(
    ("before", "now", "kind", "lost"),
    [
        ("conforms", "unsupported", "refused", True),
        ("conforms", "infrastructure", "unjudged", True),
        ("conforms", "not_run", "unjudged", True),
        ("conforms", None, "gone", True),
        ("conforms", "partly_observed", "less", True),
        ("expected_difference", "partly_observed", "less", True),
        ("differs", "unsupported", "refused", True),
        ("differs", "infrastructure", "unjudged", True),
        ("not_run", "unsupported", "refused", True),
        ("infrastructure", None, "gone", True),
        ("infrastructure", "not_run", None, False),
        ("conforms", "differs", "new", False),
        (None, "differs", "new", False),
        ("infrastructure", "differs", "new", False),
        ("differs", "differs", None, False),
        ("differs", "conforms", "fixed", False),
        ("infrastructure", "partly_observed", "fixed", False),
        ("expected_difference", "conforms", "fixed", False),
        ("conforms", "expected_difference", "declared", True),
        ("differs", "expected_difference", "fixed", False),
        ("partly_observed", "expected_difference", "declared", False),
        ("unsupported", "unsupported", None, False),
        ("unsupported", None, None, False),
        (None, "unsupported", None, False),
        (None, "infrastructure", "unjudged", False),
        ("unsupported", "conforms", "judged", False),
        (None, "conforms", "judged", False),
        ("not_run", "conforms", "judged", False),
        ("partly_observed", "conforms", "more", False),
    ],
)
def test_a_change_of_a_cell_has_a_name_and_may_lose_coverage(
    before: State | None, now: State | None, kind: Kind | None, lost: bool
) -> None:
    then = {ONE: Outcome(state=before)} if before else {}
    floor = Floor(baseline=make_baseline("old", [("", None, {}, then)]))
    states: dict[str, State] = {ONE: now} if now else {}
    found = changes_between({ONE: before} if before else {}, states)
    assert [change.kind for change in found] == ([kind] if kind else [])
    assert [change.is_loss for change in found] == ([lost] if kind else [])
    expected = f"coverage lost since old: {ONE} ({STATES[now].name if now else 'not in the run'})"
    assert floor.unmet(states) == ((expected,) if lost else ())


def run(verdict: RunVerdict, **states: State) -> RunFacts:
    named = {"one": ONE, "two": TWO}
    return "", verdict, {}, {named[name]: Outcome(state=state) for name, state in states.items()}


WHOLE = run("conforms", one="conforms", two="conforms")
REFUSED = run("conforms", one="conforms", two="unsupported")
DECLARED = run("conforms", one="conforms", two="expected_difference")
RED, RED_REFUSED = (run("differs", one="differs", two=two) for two in ("conforms", "unsupported"))
NARROW = run("conforms", one="conforms")


@pytest.mark.parametrize(
    ("nights", "two", "is_lost"),
    [
        ((WHOLE, RED_REFUSED), "unsupported", True),  # or else a loss would be forgotten after a night
        ((RED_REFUSED,), "unsupported", False),
        ((RED, RED_REFUSED), "unsupported", True),
        ((RED, RED_REFUSED), "conforms", False),
        ((WHOLE, NARROW), None, True),
        ((WHOLE, NARROW), "unsupported", True),
        ((WHOLE, REFUSED), "unsupported", False),  # a green run accepts it
        ((NARROW, RED), "unsupported", True),
        ((WHOLE, run("incomplete", one="conforms", two="expected_difference")), "expected_difference", True),
        ((WHOLE, DECLARED), "expected_difference", False),
    ],
)
def test_coverage_is_held_against_the_last_run_that_passed(
    nights: tuple[RunFacts, ...], two: State | None, is_lost: bool
) -> None:
    now: dict[str, State] = {ONE: "conforms", **({TWO: two} if two else {})}
    assert bool(Floor(baseline=make_baseline("old", nights)).unmet(now)) == is_lost


def test_a_history_without_an_earlier_run_is_no_baseline_in_silence() -> None:
    (unmet,) = Floor(baseline=make_baseline("kept", [])).unmet({ONE: "conforms"})
    assert unmet == "kept has no earlier run of this selection: lost coverage cannot be found"


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
