"""The page holds every cell with its state in words, readable without a script, and what the script draws of it."""

import base64
import gzip
import json
import math
import random
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chromium import Browser
from report_sample import (
    CELLS,
    CONFORMS,
    CRASHED,
    CRITIC,
    DIFFERS,
    PARTLY,
    RESUMED,
    RL,
    ROWS,
    RUN,
    STEPS,
    TARGETS,
    WRONG_ROW,
    change,
    entries_of,
    entry_of,
    folder_of,
    rewrite,
    sample_cell,
)

from conformance.backends.protocol import find_backend
from conformance.matrix.profile import Overrides, expand, load_profile
from conformance.results.run_results import cell_summary, write_summary
from conformance.results.verdict import STATES, Quantity, margin
from conformance.spec.objectives import Ppo, all_observables
from reports.ci_formats import write_junit
from reports.html import PER_BLOCK, write_html
from reports.load import read_report
from reports.markdown import write_markdown
from reports.page_data import DIGITS, GRADE, GRADES, POWER, SHADES, flattened, graded, locate, spelled
from reports.wording import first_finding, share

SCREEN = 1280, 720  # px
BACKENDS = ("fsdp2", "deepspeed", "megatron")
QUICK = [str(cell) for cell in expand(load_profile("quick"), list(map(find_backend, BACKENDS)), Overrides())]
HOSTILE = '<script>alert("x")</script>'


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the quick profile in which every cell conforms."""
    out, rng = tmp_path_factory.mktemp("quick") / "out", random.Random(0)
    entries = [sample_cell(out, cell, str(number), rng) for number, cell in enumerate(QUICK)]
    write_summary(out, RUN, [cell_summary(entry) for entry in entries])
    return out


@pytest.fixture(scope="module")
def page(sample: Path) -> str:
    return write_html(sample).read_text(encoding="utf-8")


def block(page: str, name: str) -> Any:
    """What one of the page's blocks holds."""
    found = re.search(rf'<script type="application/gzip" id="{name}"[^>]*>([^<]*)</script>', page)
    assert found
    return json.loads(gzip.decompress(base64.b64decode(found[1])))


def cell_block(page: str, cell: str) -> Any:
    """The block of a cell, which its square in the matrix refers to."""
    found = re.search(rf'data-n="(\d+)" data-cell="{re.escape(cell)}"', page)
    assert found
    return block(page, f"block-{int(found[1]) // PER_BLOCK}")[int(found[1]) % PER_BLOCK]


def unpacked(page: str, cell: str) -> list[tuple[str, str, int, float, float]]:
    """Stage, tensor, step, observed and allowed of all quantities of a cell."""
    shared = block(page, "shared")
    strings, values = shared["strings"], shared["values"]
    return [
        (strings[stage], strings[name], step, float(error), float(bound))
        for stage, names, steps, allowed, digits, powers in cell_block(page, cell)["tables"]
        for name, step, bound, error in zip(
            values[names], values[steps], values[allowed], numbers(digits, powers), strict=True
        )
    ]


def numbers(digits: str, powers: str | list[int]) -> list[float]:
    """The numbers whose digits and powers the page keeps apart."""
    powers = [ord(one) - POWER if isinstance(one, str) else one for one in powers]
    width = len(digits) // max(1, len(powers))
    parts = (digits[width * i : width * (i + 1)].strip() for i in range(len(powers)))
    return [float(part if part.isalpha() else f"{part}e{power}") for part, power in zip(parts, powers, strict=True)]


def test_the_first_screen_has_the_verdict_every_count_and_every_cell(sample: Path, page: str) -> None:
    assert "<h1>3 cells of 25 fail</h1>" in page
    lead = re.search(r'<p class="lead">(.*?)</p>', page)
    assert lead
    assert lead[1].startswith("fsdp2, deepspeed, megatron and deepspeed-to-fsdp2 against a float64 reference: ")
    attention = page.partition('class="attention"')[2].partition("</section>")[0]
    assert "gradients: model.layers.1.self_attn.o_proj.bias, at step 0" in attention
    for state, count in read_report(sample).counts.items():
        word = STATES[state].name.replace(" ", "-")
        shown = rf'data-filter="is:{word}".*?<b>{count}</b><span>{STATES[state].name}</span>'
        assert re.search(shown, page, re.DOTALL)
    assert len(re.findall(r'<a class="box ', page)) == len(CELLS)


def test_squares_show_symbol_and_margin(sample: Path, page: str) -> None:
    for cell in read_report(sample).cells:
        box = re.search(rf'<a class="box {cell.state}" href="#cell-{re.escape(cell.id)}".*?</a>', page)
        assert box
        assert f'aria-hidden="true">{STATES[cell.state].symbol}</span><span>{cell.entry.layout}</span>' in box[0]
        first = first_finding(cell)
        text = share(first.observed) if first else margin(cell.closest.ratio) if cell.closest else ""
        assert (f'<span class="margin">{text}</span>' if text else "</span></a>") in box[0]


@pytest.mark.slow
def test_first_screen_has_a_tile_of_every_quick_cell(browser: Browser, quick: Path) -> None:
    browser.open(write_html(quick).as_uri(), width=SCREEN[0], height=SCREEN[1])
    tiles = browser.run(
        "[...document.querySelectorAll('.tile')].map((e) => [e.hash, e.getBoundingClientRect().toJSON()])"
    )
    assert sorted(address.removeprefix("#cell-") for address, _ in tiles) == sorted(QUICK)
    assert max(box["bottom"] for _, box in tiles) <= SCREEN[1] / 2
    assert max(box["right"] for _, box in tiles) <= SCREEN[0]
    cut = "boxes.filter((box) => box.scrollHeight > box.clientHeight + 1).map((box) => box.dataset.cell)"
    assert browser.run(cut) == []
    browser.run("setFilter('megatron')")
    assert browser.count(".tile:not(.away)") == sum("/megatron/" in cell for cell in QUICK)


def test_a_seed_or_a_planted_fault_has_its_own_place_in_the_matrix(out: Path) -> None:
    entries = entries_of(out)
    for extra in ("seed1", "fault-bias"):
        entry = entry_of(out, CONFORMS)
        other = replace(entry, cell=f"{entry.cell}/{extra}", variant=f"{entry.variant}/{extra}", records=())
        entries.append(replace(other, folder=f"cells/{extra}", verdict=replace(entry.verdict, state="not_run")))
    rewrite(out, entries)
    page = write_html(out).read_text(encoding="utf-8")
    assert len(re.findall(r'<a class="box ', page)) == len(CELLS) + 2


def test_every_state_and_reason_is_readable_without_a_script(sample: Path, page: str) -> None:
    found = re.search(r"<noscript>(.*?)</noscript>", page, re.DOTALL)
    assert found
    assert "A script draws curves" in found[1]
    for cell in read_report(sample).cells:
        line = (
            rf'<li id="cell-{re.escape(cell.id)}"><b>{STATES[cell.state].symbol} {STATES[cell.state].name}</b>.*</li>'
        )
        shown = re.search(line, found[1])
        assert shown
        assert cell.reason in shown[0]


# What the script draws


def test_a_differing_cell_holds_where_it_starts_and_how_to_reproduce_it(page: str) -> None:
    cell = cell_block(page, DIFFERS)
    first = cell["first"]
    assert (first["stage"], first["step"]) == ("gradients", 0)
    assert [finding[0] for finding in first["findings"]] == ["model.layers.1.self_attn.o_proj.bias"]
    assert first["findings"][0][3:] == [first["findings"][0][1] / 40, "[17]"]
    assert first["later"] == ["clipped update", "weights after N steps"]
    assert first["hints"] == [
        [
            "model.layers.1.self_attn.o_proj.bias",
            "Only biases after a row-parallel product differ: is the bias added once per tp rank?",
        ]
    ]
    assert cell["reproduce"].startswith(f"parity run --cells '{DIFFERS}'")


def test_every_quantity_is_in_the_page_with_its_bound(sample: Path, page: str) -> None:
    for entry in entries_of(sample):
        held = {(q.stage, q.tensor, q.step): (q.observed, q.allowed) for q in entry.verdict.quantities}
        found = {
            (stage, tensor, step): (error, bound) for stage, tensor, step, error, bound in unpacked(page, entry.cell)
        }
        assert found.keys() == held.keys()
        for key, (observed, allowed) in held.items():
            assert found[key][0] == pytest.approx(observed, rel=5e-4, abs=0)
            assert found[key][1] == allowed


def test_digits_and_powers_are_the_errors() -> None:
    rng = random.Random(0)
    errors = [0.0, 5e-324, 1.5e300, 1e-11, 9.996e-12, 1.00049e-11, *(10 ** rng.uniform(-16, 3) for _ in range(200))]
    found = [Quantity(stage="s", tensor="t", step=0, observed=error, allowed=1e-11) for error in errors]
    shown = numbers(*spelled(found))
    assert shown == pytest.approx(errors, rel=1.1 * 10 ** (1 - DIGITS), abs=0)
    assert [error <= 1e-11 for error in shown] == [error <= 1e-11 for error in errors]
    assert numbers(*spelled(found[3:])) == shown[3:]  # without the powers that no character has
    odd = [replace(found[0], observed=error) for error in (math.nan, math.inf, 1.5)]
    assert str(numbers(*spelled(odd))) == "[nan, inf, 1.5]"


def test_grades_are_the_errors_within_six_percent() -> None:
    rng = random.Random(0)
    errors = [0.0, 5e-324, 1e-11, *(10 ** rng.uniform(-20, -11) for _ in range(200))]
    found = [Quantity(stage="s", tensor="t", step=0, observed=error, allowed=1e-11) for error in errors]
    powers = [(GRADE - ord(one)) / GRADES for one in graded(found)[0]]
    shown = [1e-11 * 10**power if error else 0.0 for power, error in zip(powers, errors, strict=True)]
    assert shown == pytest.approx(errors, rel=0.06, abs=0)
    assert max(shown) == 1e-11


def test_rounding_carries_no_quantity_across_its_tolerance(out: Path) -> None:
    entry = entry_of(out, DIFFERS)
    near = [1 + 1e-16 * 2**n for n in range(50)] + [1 - 1e-16 * 2**n for n in range(50)]
    quantities = tuple(
        replace(q, observed=q.allowed * part) for q, part in zip(entry.verdict.quantities, near, strict=False)
    )
    change(out, DIFFERS, verdict={"quantities": quantities})
    found = unpacked(write_html(out).read_text(encoding="utf-8"), DIFFERS)
    held = {(q.stage, q.tensor, q.step): q.ratio <= 1 for q in quantities}
    assert {(stage, tensor, step): error / bound <= 1 for stage, tensor, step, error, bound in found} == held
    assert set(held.values()) == {True, False}


def test_what_is_drawn_is_what_the_observables_say(page: str) -> None:
    values = block(page, "shared")["values"]
    plain, critic = cell_block(page, CONFORMS), cell_block(page, CRITIC)
    norm = "gradient norm"
    assert values[plain["charts"]] == [["loss", "loss", "loss", "loss", ""], [norm, norm, "grad_norm", "grad_norm", ""]]
    assert values[critic["charts"]][2] == [f"critic {norm}"] * 2 + ["critic.grad_norm"] * 2 + [""]
    assert values[plain["maps"]] == ["weights", "gradients", "clipped update", "weights after N steps"]
    assert set(values[critic["maps"]]) == {f"{who}{s}" for who in ("", "critic ") for s in values[plain["maps"]]}
    assert critic["series"]["values"].keys() == {
        *plain["series"]["values"],
        *(f"critic.{key}" for key in ("grad_norm", "lr")),
    }


def test_scalars_of_a_policy_have_a_panel_with_the_names_that_verl_prints(page: str) -> None:
    charts = block(page, "shared")["values"][cell_block(page, RL)["charts"]]
    panel = {key: (title, tensor) for title, _, key, tensor, panel in charts if panel == "Policy and critic"}
    # judged against the tokens of the cell itself
    own = "kl_loss", "entropy_loss", "ppo_kl", "ratio_mean", "ratio_max", "critic.explained_var"
    against = "pg_clipfrac", "pg_clipfrac_lower", "critic.clipfrac"
    assert panel.keys() == {*own, *against}
    for key, (title, tensor) in panel.items():
        assert title.endswith(f"({key.replace('critic.', 'vf_')})")
        assert tensor == (f"{key} against rebuilt" if key in own else key)
        assert any(found[1] == tensor for found in unpacked(page, RL))
    others = {title for title, *_, panel in charts if not panel}
    assert others == {"loss", "critic loss", "gradient norm", "critic gradient norm"}


def strips(page: str, cell: str) -> dict[tuple[str, str, int], tuple[list[list[int]], str, Any, str]]:
    """By stage, tensor and step the first tokens of the bins, their classes, the largest difference and its place."""
    shared = block(page, "shared")
    found = {}
    for at, classes, largest, where, *_ in cell_block(page, cell)["strips"]:
        stage, tensor, step, tokens, starts = shared["values"][at]
        assert (tokens, len(classes)) == (ROWS * TARGETS, len(starts))
        found[shared["strings"][stage], shared["strings"][tensor], step] = starts, classes, largest, where
    return found


def test_report_page_marks_tokens_outside_tolerance(page: str) -> None:
    found = strips(page, RL)
    rows = [o for o in all_observables(Ppo(kl_loss_coef=0.1)) if o.kind == "rows"]
    assert found.keys() == {(o.stage, o.key, step) for o in rows for step in range(STEPS)}
    for (stage, _, step), (starts, classes, _, where) in found.items():
        outside = {row for (row, _), shade in zip(starts, classes, strict=True) if int(shade) > 1 + SHADES.index(1)}
        wrong = stage == "advantages" and step < 2
        assert outside == ({WRONG_ROW} if wrong else set())
        assert where.startswith(f"row {WRONG_ROW}, ") or not wrong
    assert strips(page, CONFORMS).keys() == {("log-probs", "logprob", step) for step in range(STEPS)}
    assert strips(page, PARTLY) == {}


def test_a_token_that_is_no_number_is_in_the_page_as_that(out: Path) -> None:
    verdict = entry_of(out, RL).verdict
    broken = [
        replace(strip, errors=(math.nan, math.inf, *strip.errors[2:]), max_abs=math.nan) for strip in verdict.strips
    ]
    quantities = tuple(replace(q, observed=math.inf) for q in verdict.quantities)
    change(out, RL, verdict={"quantities": quantities, "strips": tuple(broken)})
    for _, classes, largest, _ in strips(write_html(out).read_text(encoding="utf-8"), RL).values():
        assert classes[:2] == "ni"
        assert classes[2:].isdigit()
        assert largest == "nan"


def test_the_phases_of_a_cell_are_one_curve_and_each_has_its_configuration(page: str) -> None:
    cell, shared = cell_block(page, RESUMED), block(page, "shared")
    assert cell["series"]["steps"] == [0, 1, 2, 3, 4]
    assert [phase["first"] for phase in cell["phases"]] == [0, 2]
    for phase in cell["phases"]:
        told = {
            shared["strings"][k]: shared["strings"][v] for part in phase["config"] for k, v in shared["values"][part]
        }
        assert told["resolved.optimizer"] == "AdamW"
        assert told["scenario.objective.kind"] == "sft"
        assert not any(key.startswith("observables") for key in told)


def test_only_cells_that_do_not_conform_carry_logs(page: str) -> None:
    assert "RuntimeError: NCCL communicator was aborted on rank 1." in cell_block(page, CRASHED)["logs"]["rank-1"]
    assert "\x1b" not in cell_block(page, CRASHED)["logs"]["rank-1"]
    assert cell_block(page, CONFORMS)["logs"] == {}


def test_a_known_difference_links_to_its_bug(page: str) -> None:
    assert '<a href="https://github.com/deepspeedai/DeepSpeed/issues/7747" rel="noreferrer">' in page


def test_nothing_in_the_folder_can_become_markup(out: Path) -> None:
    hostile = f"sft-packed/{HOSTILE.replace('/', '')}/fsdp2/dp2.tp2/fp32"
    entries = [entry for entry in entries_of(out) if entry.cell != DIFFERS]
    entry = entry_of(out, DIFFERS)
    quantities = tuple(replace(q, tensor=q.tensor + HOSTILE, hint=HOSTILE) for q in entry.verdict.quantities)
    verdict = replace(entry.verdict, reason=HOSTILE, quantities=quantities, strips=())
    changed = replace(entry, cell=hostile, model=HOSTILE.replace("/", ""), reproduce=HOSTILE, verdict=verdict)
    rewrite(out, [*entries, changed], command=HOSTILE, environment={HOSTILE: HOSTILE})
    (folder_of(out, CRASHED) / "legs/0/logs/rank-0.log").write_text(HOSTILE)
    page = write_html(out).read_text(encoding="utf-8")
    assert len(re.findall("<script>", page)) == 1  # the page's own
    assert len(re.findall("<script", page)) == 4 + math.ceil(len(CELLS) / PER_BLOCK)  # and its blocks
    assert "alert(" in page
    assert HOSTILE not in re.sub("`[^`\n]*`", "", write_markdown(out).read_text())  # a code span holds no markup
    assert any(case.get("name") == hostile for case in ET.parse(write_junit(out)).iter("testcase"))


def test_the_page_refers_to_nothing_outside_of_it(page: str) -> None:
    assert not re.search(r'(src|href)="(?!#|https://github.com/|data:,)', page)


def test_a_hostile_value_in_a_damaged_record_is_no_number(out: Path) -> None:
    record = folder_of(out, DIFFERS) / "legs/0/record/record.jsonl"
    record.write_text(re.sub(r'"loss": [\d.]+', f'"loss": {json.dumps(HOSTILE)}', record.read_text()))
    cell = cell_block(write_html(out).read_text(encoding="utf-8"), DIFFERS)
    assert "loss" not in cell["series"]["values"]
    assert "does not match its own digest" in cell["problem"]


def test_numbers_that_json_cannot_say_are_kept(out: Path) -> None:
    entry = entry_of(out, DIFFERS)
    first, second, *others = entry.verdict.quantities
    special = (replace(first, observed=math.inf), replace(second, observed=math.nan))
    change(out, DIFFERS, verdict={"quantities": (*special, *others)})
    found = [error for *_, error, _ in unpacked(write_html(out).read_text(encoding="utf-8"), DIFFERS)]
    assert found[0] == math.inf
    assert math.isnan(found[1])


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("model.embed_tokens.weight", ("in", "embed")),
        ("model.layers.11.self_attn.q_proj.bias", ("11", "q bias")),
        ("model.layers.0.self_attn.q_norm.weight", ("0", "q norm")),
        ("model.layers.0.post_attention_layernorm.weight", ("0", "mlp norm")),
        ("model.layers.0.mlp.experts.3.up_proj.weight", ("0", "expert up")),
        ("model.norm.weight (missing)", ("out", "final norm")),
        ("lm_head.weight", ("out", "head")),
        ("score.weight", ("out", "value head")),
    ],
)
def test_parameters_are_placed_by_layer_and_kind(name: str, where: tuple[str, str]) -> None:
    assert locate(name) == where


def test_a_number_whose_name_has_a_dot_is_no_parameter(page: str) -> None:
    shared = block(page, "shared")
    placed = {shared["strings"][int(number)] for number in shared["places"]}
    assert "critic.lr" in shared["strings"]
    assert "model.norm.weight" in placed
    assert not placed & {"critic.lr", "critic.grad_norm"}


def test_equal_layers_of_a_configuration_are_counted() -> None:
    layer = {"heads": 4, "window": [1, 2]}
    config = {"policy": {"layers": [layer, layer, layer, {**layer, "heads": 8}], "sizes": [1, 1]}}
    found = flattened(config)
    first, second = (json.dumps({**layer, "heads": heads}) for heads in (4, 8))
    assert found == {"policy.layers": f"[3 x {first}, {second}]", "policy.sizes": "[1, 1]"}
