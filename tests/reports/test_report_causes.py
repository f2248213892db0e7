"""What the reports say first: causes, errors as a person says them, planted faults, findings that are named."""

import json
import math
import random
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from report_sample import CRASHED, DIFFERS, LATE, change, entries_of, entry_of, rewrite, sample_cell

from conformance.core.host import CHECKOUT
from conformance.judge.verdict import _difference
from conformance.results.bisection import OUTSIDE
from conformance.results.verdict import Quantity, State, off
from conformance.spec.objectives import Ppo, all_observables
from conformance.spec.observables import AGAINST_REBUILT
from reports.html import linked, write_html
from reports.load import MENTION, Cell, findings, read_report
from reports.markdown import write_markdown
from reports.page_data import Shared, cell_data
from reports.summary import causes, headline
from reports.tables import mutation_score
from reports.wording import circumstances, explain, likely_causes, worst_first

LARGER = DIFFERS.replace("dp2.tp2", "dp4.tp2.seqpar")
SMALLER = DIFFERS.replace("dp2.tp2", "tp2")


@pytest.fixture(scope="module")
def larger(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample, with two more cells that differ as DIFFERS does."""
    folder = Path(shutil.copytree(sample, tmp_path_factory.mktemp("larger") / "out"))
    entries = entries_of(folder)
    differing = entry_of(folder, DIFFERS)
    for cell, ranks in ((LARGER, 8), (SMALLER, 2)):
        layout = cell.split("/")[3]
        changed = replace(differing, cell=cell, layout=layout, world_size=ranks, folder=f"cells/{layout}", records=())
        entries.append(changed)
    rewrite(folder, entries)
    return folder


@pytest.fixture
def out(larger: Path, tmp_path: Path) -> Path:
    """A copy of the larger sample that a test may damage."""
    return Path(shutil.copytree(larger, tmp_path / "out"))


def test_causes_group_cells_by_first_differing_tensors(out: Path) -> None:
    report = read_report(out)
    first, *others = causes(report)
    assert [cell.id for cell in first.cells] == [SMALLER, DIFFERS, LARGER]
    assert all(len(cause.cells) == 1 for cause in others)
    title, text = headline(report)
    assert title == "5 cells of 27 fail"
    assert text.startswith(f"Start with {SMALLER}. First difference in gradients: model.layers.1.self_attn.o_proj.bias")
    assert "2 more cells have the same cause. 2 other causes below. 2 more cells gave no answer." in text


def test_cells_with_one_first_wrong_module_have_one_cause(out: Path) -> None:
    report = read_report(out)
    module: Any = SimpleNamespace(models=(SimpleNamespace(where="model.layers.0.self_attn"),))
    outside: Any = SimpleNamespace(models=(SimpleNamespace(where=OUTSIDE),))
    for found, count in ((module, 1), (outside, 2)):
        cells = tuple(replace(c, bisection=found) if c.id in (DIFFERS, LATE) else c for c in report.cells)
        having = [one for one in causes(replace(report, cells=cells)) if {c.id for c in one.cells} & {DIFFERS, LATE}]
        assert len(having) == count


def test_what_all_backends_share_is_named_in_cell_and_list(tmp_path: Path) -> None:
    out, rng = tmp_path / "out", random.Random(0)
    names = [DIFFERS, DIFFERS.replace("fsdp2", "megatron")]
    entries = [sample_cell(out, cell, str(number), rng) for number, cell in enumerate(names)]
    verdict = entries[0].verdict
    for states in (("differs", "differs"), ("differs", "conforms")):
        of = [verdict if state == "differs" else entries[1].verdict for state in states]
        rewrite(out, [replace(entry, verdict=one) for entry, one in zip(entries, of, strict=True)])
        alike = states[1] == "differs"
        text, page = write_markdown(out).read_text(encoding="utf-8"), write_html(out).read_text(encoding="utf-8")
        assert ("All 2 backends differ alike" in text, "All 2 backends differ alike" in page) == (alike, alike)
        assert "<b>Likely cause</b> Only biases" in page
        first, *_ = causes(read_report(out))
        told = cell_data(first.first, Shared(), first)
        assert bool(told["first"]["shared"]) == alike
        assert "Likely cause: `model.layers.1.self_attn.o_proj.bias`: Only biases" in text


def test_backends_with_different_numbers_have_different_causes(tmp_path: Path) -> None:
    """Of a loss each report names the one tensor "loss", whatever its cause."""
    out, rng = tmp_path / "out", random.Random(0)
    names = [DIFFERS, DIFFERS.replace("fsdp2", "megatron")]
    entries = [sample_cell(out, cell, str(number), rng) for number, cell in enumerate(names)]
    for errors, count in (((0.17, 0.17), 1), ((0.17, 0.002), 2)):
        found = [Quantity(stage="loss", tensor="loss", step=0, observed=error, allowed=1e-11) for error in errors]
        differ = [replace(entries[0].verdict, quantities=(one,), strips=()) for one in found]
        rewrite(out, [replace(entry, verdict=one) for entry, one in zip(entries, differ, strict=True)])
        assert [len(cause.cells) for cause in causes(read_report(out))] == [2 // count] * count


def test_hints_of_later_stages_are_no_likely_causes(out: Path) -> None:
    entry = entry_of(out, SMALLER)
    late = replace(entry.verdict.findings[-1], stage="weights after N steps", hint="2 times the reference")
    change(out, SMALLER, verdict={"quantities": (*entry.verdict.quantities, late)})
    assert list(likely_causes(next(c for c in read_report(out).cells if c.id == SMALLER)).values()) == [
        "model.layers.1.self_attn.o_proj.bias"
    ]


def test_reports_name_the_worst_tensor_that_the_reason_names(out: Path) -> None:
    entry = entry_of(out, SMALLER)
    worst = entry.verdict.findings[0]
    rebuilt = replace(worst, tensor=worst.tensor + AGAINST_REBUILT, observed=math.inf, hint="")
    found = replace(entry.verdict, quantities=(rebuilt, *entry.verdict.quantities))
    change(out, SMALLER, verdict={"reason": _difference(found, ["and more"]), "quantities": found.quantities})
    cell = next(cell for cell in read_report(out).cells if cell.id == SMALLER)
    assert f"worst: {worst}" in cell.reason
    assert worst_first(cell)[:2] == [worst, rebuilt]
    assert circumstances(cell) == "and more"
    assert worst.tensor in explain(cell)
    assert AGAINST_REBUILT not in explain(cell)


def test_reason_of_a_failing_cell_is_said_once(out: Path) -> None:
    entry = entry_of(out, SMALLER)
    reason = f"first difference at gradients, step 0, 1 of 42 tensors; worst: {entry.verdict.findings[0]}; and more"
    change(out, SMALLER, verdict={"reason": reason})
    cells = {cell.id: cell for cell in read_report(out).cells}
    assert circumstances(cells[SMALLER]) == "and more"
    assert circumstances(cells[CRASHED]) == cells[CRASHED].reason


def test_failures_that_say_the_same_but_for_numbers_are_one_cause(out: Path) -> None:
    change(out, LARGER, verdict={"state": "infrastructure", "reason": "rank 0 of 2 died\nof this", "quantities": ()})
    change(out, CRASHED, verdict={"reason": "rank 1 of 8 died\nof that"})
    found = next(cause for cause in causes(read_report(out)) if cause.first.state == "infrastructure")
    assert [cell.id for cell in found.cells] == [CRASHED, LARGER]


def test_markdown_has_each_cause_once_with_its_worst_finding_first(out: Path) -> None:
    entry = entry_of(out, SMALLER)
    first = next(q for q in entry.verdict.quantities if q.ratio > 1)
    mild = replace(first, tensor="lm_head.weight", observed=2 * first.allowed, hint="of the head")
    change(out, SMALLER, verdict={"quantities": (mild, *entry.verdict.quantities)})
    text = write_markdown(out).read_text(encoding="utf-8")
    assert text.count("### ✗ `sft-packed/pangu/fsdp2") == 2  # lm_head.weight is another cause
    change(out, SMALLER, verdict={"quantities": entry.verdict.quantities})
    text = write_markdown(out).read_text(encoding="utf-8")
    assert text.count("### ✗ `sft-packed/pangu/fsdp2") == 1
    assert f"2 more cells with the same cause: `{DIFFERS}`, `{LARGER}`" in text
    assert "Likely cause: `model.layers.1.self_attn.o_proj.bias`: Only biases" in text


@pytest.mark.parametrize(
    ("observed", "allowed", "text"),
    [
        (0.88, 1e-11, "88 % off, allowed 1e-11"),
        (2.5, 2.1e-2, "250 % off, allowed 0.021"),
        (2.43e-4, 1e-11, "0.024 % off, allowed 1e-11"),
        (1.23e-9, 1e-11, "1.23e-9 off, allowed 1e-11"),
        (61234.0, 1e-11, "61,000 times its size off, allowed 1e-11"),
        (math.inf, 0.0, "beyond any tolerance, allowed nothing"),
        (math.nan, 1e-11, "not a number, allowed 1e-11"),
    ],
)
def test_an_error_is_said_as_a_person_says_it(observed: float, allowed: float, text: str) -> None:
    assert off(Quantity(stage="loss", tensor="loss", step=0, observed=observed, allowed=allowed)) == text


def test_mutation_score_counts_each_fault_and_backend_once(tmp_path: Path) -> None:
    out, rng = tmp_path / "out", random.Random(0)
    lost = "fault-lost-bias"
    wrong: tuple[State, bool] = ("differs", True)
    told: dict[str, tuple[State, bool]] = {
        f"fsdp2/dp2/fp32/{lost}": wrong,
        "fsdp2/dp2/fp32": ("conforms", False),
        f"fsdp2/dp2/fp32/{lost}/fault-other": wrong,  # both together prove neither
        f"fsdp2/tp2/fp32/{lost}": ("infrastructure", False),  # was called, and nothing differs
        f"fsdp2/sp2/fp32/{lost}": ("unsupported", False),
        f"deepspeed/dp2/fp32/{lost}": wrong,
        "deepspeed/dp2/fp32": wrong,
        f"megatron/dp2/fp32/{lost}": wrong,
        f"megatron/dp2/exact/{lost}": wrong,
        "megatron/dp2/exact": ("expected_difference", False),
    }
    entries = []
    for number, (cell, (state, is_wrong)) in enumerate(told.items()):
        entry = sample_cell(out, f"sft/pangu/{cell}", str(number), rng)
        quantities = entry.verdict.quantities if state != "unsupported" else ()
        if is_wrong:
            quantities = tuple(replace(q, observed=2 * q.allowed or 1.0) for q in quantities)
        verdict = replace(entry.verdict, state=state, quantities=quantities, strips=())
        entries.append(replace(entry, verdict=verdict))
    rewrite(out, entries)
    score = mutation_score(read_report(out))
    assert score
    counted = {
        row.backend: (len(row.caught), len(row.silent), len(row.unproven), len(row.unanswered)) for row in score.counted
    }
    assert {row.fault for row in score.rows} == {"lost-bias", "lost-bias + other"}
    assert counted == {"deepspeed": (0, 0, 1, 0), "megatron": (0, 0, 2, 0), "fsdp2": (1, 1, 0, 1)}
    assert score.rows[-1].stages == (entries[0].stages[0],)
    page = write_html(out).read_text(encoding="utf-8")
    assert 'Planted faults: <a href="#score-title">1 of 3 caught</a>' in page
    assert "### Planted faults: 1 of 3 pairs of fault and backend caught" in write_markdown(out).read_text()


def test_without_planted_faults_there_is_no_score(out: Path) -> None:
    assert mutation_score(read_report(out)) is None
    assert "Planted faults" not in write_html(out).read_text(encoding="utf-8")


def test_a_finding_that_is_named_is_a_link_to_its_text() -> None:
    reason = "see docs/findings/ring-attention-window.md, <b> and docs/findings/no-such-finding.md"
    found = findings([reason])
    assert list(found) == ["ring-attention-window"]
    assert found["ring-attention-window"].startswith("# ")
    html = linked(reason)
    assert '<a href="#finding-ring-attention-window">docs/findings/ring-attention-window.md</a>, &lt;b&gt;' in html


def test_every_finding_that_a_backend_links_to_is_written_up() -> None:
    texts = [file.read_text(encoding="utf-8") for file in (CHECKOUT / "impl").rglob("*.py")]
    names = {name for text in texts for name in MENTION.findall(text)}
    assert findings(texts).keys() == names
    assert len(names) > 5


@pytest.fixture(scope="module")
def smaller(larger: Path) -> Cell:
    return next(cell for cell in read_report(larger).cells if cell.id == SMALLER)


def cell_with(cell: Cell, right: str, stage: str, **entry: Any) -> Cell:
    """The cell, of which a quantity of one stage is right and one of another stage differs."""
    errors = {right: 0.0, stage: 1.0}
    found = [Quantity(stage=name, tensor=name, step=0, observed=errors[name], allowed=1e-11) for name in errors if name]
    verdict = replace(cell.entry.verdict, quantities=tuple(found), strips=())
    return replace(cell, entry=replace(cell.entry, verdict=verdict, **entry))


@pytest.mark.parametrize(
    ("stages", "entry", "why"),
    [
        (":log-probs", {}, ""),
        (":gradients", {}, ""),
        (":clipped update", {}, ""),  # no gradient is shown
        ("gradients:clipped update", {}, "The first difference is in clipped update, which no module computes"),
        (":loss", {}, ""),
        ("log-probs:loss", {}, "The first difference is in loss, which no module computes"),
        (":advantages", {}, "The first difference is in advantages, which no module computes"),
        (":weights", {}, "The first difference is in weights, which no module computes"),
        (":configuration", {}, "The first difference is in configuration, which no module computes"),
        (":log-probs", {"records": ("legs/0", "legs/1")}, "It has 2 phases"),
        (":log-probs", {"layout": "dp2.ckpt"}, "This layout recomputes modules (ckpt)"),
    ],
)
def test_bisect_is_suggested_only_where_a_module_is_wrong(
    smaller: Cell, stages: str, entry: dict[str, Any], why: str
) -> None:
    found = cell_with(
        smaller, *stages.split(":"), **({"observables": all_observables(Ppo()), "records": ("legs/0",)} | entry)
    )
    untraced = cell_data(found, Shared())["untraced"]
    assert untraced.startswith(why)
    assert bool(untraced) == bool(why)


def test_one_command_runs_all_cells_of_a_cause_again(out: Path) -> None:
    first, *others = causes(read_report(out))
    for cause, count in ((first, 3), (others[0], 0)):
        shared = Shared()
        data = cell_data(cause.first, shared, cause)
        words = shlex.split(shared.strings[data["together"]])
        assert [words[i + 1] for i, word in enumerate(words) if word == "--cells"] == [c.id for c in cause.cells][
            :count
        ]


def test_without_a_likely_cause_a_passing_cell_of_another_model_is_named(out: Path) -> None:
    report = read_report(out)
    wrong: Any = next(cell for cell in report.cells if cell.id == SMALLER)
    sizes = {"hidden_size": 48, "layers": [{"attention": {"heads": 6, "window": None}, "feed_forward": {"size": 8}}]}
    other = json.loads(json.dumps(sizes).replace("48", "64").replace("6,", "8,").replace("8}", "9}"))
    module: Any = SimpleNamespace(models=(SimpleNamespace(where="model.layers.0.self_attn"),))
    failing, passing = (
        replace(
            wrong,
            entry=replace(
                wrong.entry, cell=f"s/{model}/fsdp2/tp2/fp32", verdict=replace(wrong.entry.verdict, **verdict)
            ),
            bisection=module,
            oracle=replace(wrong.oracle, header={"resolved": {"dtype": "x", "architecture": {"policy": policy}}}),
        )
        for model, policy, verdict in (("odd", sizes, {}), ("even", other, {"state": "conforms", "quantities": ()}))
    )
    for hint, listed in (("", True), ("told", False)):
        first = replace(wrong.findings[0], hint=hint)
        verdict = replace(failing.entry.verdict, quantities=(first,))
        cells = (replace(failing, entry=replace(failing.entry, verdict=verdict)), passing)
        (cause,) = causes(replace(report, cells=cells))
        text = "s/even/fsdp2/tp2/fp32 passes. Its model differs: policy.hidden_size 48, there 64; "
        assert cause.passing == (f"{text}policy.layers.0.attention.heads 6, there 8." if listed else "")


def test_only_told_causes_are_counted_as_likely(out: Path) -> None:
    report = read_report(out)
    told = sum(bool(likely_causes(cause.first)) for cause in causes(report))
    assert 0 < told < len(causes(report))
    page = write_html(out).read_text(encoding="utf-8")
    assert f"{len(causes(report))} failures by the first difference or the first wrong module, {told} with" in page
