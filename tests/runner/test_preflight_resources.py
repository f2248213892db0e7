"""What cells will take: estimated from shapes, refused before anything is started, and told with what would fit."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cells import cell_of
from plain_profile import write_profile

from conformance.cli import main as cli
from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES, HostResources
from conformance.matrix.cell import Cell
from conformance.matrix.options import Ranks, Selection
from conformance.matrix.profile import select_cells
from conformance.models.components import parameter_shapes
from conformance.models.families import read_architecture
from conformance.runner import preflight
from conformance.runner.placement import SessionConfig, Where
from conformance.runner.preflight import DOUBT, advice, check_resources, needs_of
from conformance.runner.resource_estimate import Estimate, Size, estimate, on_slots, size_of, total
from conformance.runtime import leased_slots
from conformance.runtime.multihost.relay import JoinedHost

SIZE = Size(parameters=10**9, trained=10**9, recorded=10**9, vocabulary=32_000)
PLENTY = HostResources(memory=1e15, disk=1e15, cache=None)


def cell(backend: str = "fsdp2", layout: str = "dp2", precision: Any = "exact", **changes: Any) -> Cell:
    return cell_of(backend, "sft-packed", "llama", layout, precision, **{"steps": 2, **changes})


def sparse_model(folder: Path, *, layers: int, hidden: int, vocab: int) -> Path:
    """A Llama of any size: its weights are a hole in the file, of which only the header is read."""
    source = FIXTURES / "models" / "llama"
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "hidden_size": hidden, "vocab_size": vocab, "intermediate_size": 4 * hidden}
    config |= {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64, "head_dim": 64}
    (folder / "config.json").write_text(json.dumps(config))
    header, at = {}, 0
    for name, shape in parameter_shapes(read_architecture(folder, disable_dropout=True)).items():
        end = at + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as weights:
        weights.write(len(text).to_bytes(8, "little") + text)
        weights.truncate(8 + len(text) + at)
    return folder


def test_record_estimate_counts_weights_and_steps() -> None:
    two, five = (estimate(cell(steps=steps), SIZE) for steps in (2, 5))
    assert two.record == (1 + 2 * 2) * 8e9
    assert five.record == (1 + 2 * 5) * 8e9  # two moments are read in place of a gradient and weights that are not
    assert estimate(cell(precision="fp32"), SIZE).record == (1 + 2 * 2) * 4e9
    assert sorted(estimate(cell(precision="fp32"), SIZE).references.values()) == [5 * 4e9, 5 * 8e9]


def test_of_adapters_the_base_is_recorded_and_gets_no_gradients() -> None:
    adapted = cell_of("fsdp2", "sft-lora", "llama", "dp2", "exact", steps=2)
    base, size = size_of(cell().scenario), size_of(adapted.scenario)
    lora = adapted.scenario.lora
    assert lora
    shapes = parameter_shapes(read_architecture(FIXTURES / "models" / "llama"))
    count = sum(lora.r * sum(shapes[f"{target}.weight"]) for target in lora.targets(shapes))
    assert size.trained == count < base.trained / 5
    assert size.parameters == size.recorded == base.parameters + count
    made = estimate(adapted, size)
    assert made.record == (size.parameters + 2 * (count + size.recorded)) * 8.0
    assert made.rank < estimate(cell(), base).rank
    grpo = size_of(cell_of("fsdp2", "grpo-lora", "llama", "dp2", "exact", steps=2).scenario)
    assert grpo.parameters - grpo.recorded == base.parameters, "the frozen reference"


def test_cutting_the_model_or_the_rows_makes_ranks_smaller() -> None:
    whole = estimate(cell(layout="dp2"), SIZE)
    for layout in ("dp2.tp2", "pp2", "dp4", "sp4"):
        assert estimate(cell(layout=layout), SIZE).rank < estimate(cell(layout="dp1"), SIZE).rank
    assert estimate(cell(layout="dp2.tp2"), SIZE).rank < whole.rank
    assert estimate(cell(precision="fp32"), SIZE).rank < whole.rank


def test_a_run_has_the_memory_of_its_worst_cell_and_the_disk_of_all() -> None:
    cells = [cell(), cell(precision="fp32"), cell(layout="dp4.tp2")]
    estimates = [(one, estimate(one, SIZE)) for one in cells]
    of_all = total(estimates)
    assert of_all.worst is cells[2]
    assert of_all.host > max(one.host for _, one in estimates)  # ranks of the other worker group hold on to something
    oracles = {name: size for _, one in estimates for name, size in one.references.items()}
    assert len(oracles) == 2  # the exact cells have one oracle; its float64 run serves the other, too
    assert of_all.disk == sum(one.record for _, one in estimates) + sum(oracles.values())


def test_workers_run_their_largest_cells_at_once_and_share_disk() -> None:
    """pytest -n: every worker has ranks, an oracle and a judge of its own, and keeps its worker groups."""
    cells = [(one, estimate(one, SIZE)) for one in (cell(precision="fp32"), cell(), cell(layout="dp4.tp2"))]
    one, two, many = (total(cells, workers=workers) for workers in (1, 2, 99))
    least, middle, most = sorted(of_cell.host for _, of_cell in cells)
    assert most <= one.host < most + 2e9  # two ranks wait for cells of another worker group
    assert middle <= two.host - one.host < middle + 2e9
    assert least <= many.host - two.host < least + 2e9  # there are no further cells
    assert {one.worst, two.worst, many.worst} == {one.worst}
    assert one.disk == two.disk


def test_as_many_workers_are_advised_as_fit() -> None:
    cells = [cell(seed=seed) for seed in range(4)]
    resources = replace(PLENTY, memory=needs_of(cells, PLENTY, workers=2).total.host * 1.01)
    needs = needs_of(cells, resources, workers=4)
    assert advice(needs, resources) == "2 of the 4 workers would fit: -n 2"
    assert "4 cells at once, the largest sft-packed/llama/fsdp2/dp2/exact" in needs.impossible[0]
    assert "3 cells at once" in needs_of(cells, resources, workers=3).doubtful[0]
    assert not needs_of(cells, resources, workers=2).doubtful
    alone = replace(PLENTY, memory=needs_of(cells, PLENTY).total.host / 1.4)  # would not be refused, but does not fit
    assert "would fit" not in advice(needs_of(cells, alone, workers=2), alone)


def joined(host: str, slots: int, resources: HostResources = PLENTY) -> JoinedHost:
    return JoinedHost(name=f"{host} (process 1)", host=host, slots=slots, resources=resources)


@pytest.mark.parametrize(
    ("memory", "of_host", "each", "workers", "slots", "warns"),
    [
        (140e9, 1e12, 2, 0, 10, False),  # by sixteen processors: two ranks and an oracle a cell
        (140e9, 1e12, 1, 0, 8, False),
        (12e9, 1e12, 2, 0, 4, False),  # by memory: two cells of two ranks
        (12e9, 1e12, 2, 9, 4, True),
        (140e9, 20e9, 2, 0, 4, False),  # by the host's memory: six processes
        (140e9, 1e12, 2, 1, 2, False),  # alone
        (140e9, 1e12, 1, 1, 1, False),
    ],
)
def test_small_cells_share_a_gpu_by_processors_and_memory(
    *,
    memory: float,
    of_host: float,
    each: int,
    workers: int,
    slots: int,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: Any,
) -> None:
    monkeypatch.setattr(preflight, "gpus_of_host", lambda: ("GPU-a",))
    monkeypatch.setattr(preflight, "memory_of_gpus", lambda: {"GPU-a": (0, int(memory))})
    monkeypatch.setattr(preflight, "processors_of_host", lambda: 16)
    monkeypatch.setattr(preflight, "available_memory", lambda: int(of_host))
    ranks = Ranks(device="cuda", ranks_per_gpu=each)
    assert len(preflight.leased_gpus(ranks, cells=[cell()], workers=workers)) == slots
    assert [record.getMessage() for record in caplog.records] == (
        ["the memory of a GPU suffices for 2 cells at once, not for 9"] if warns else []
    )


def test_noise_runs_lease_a_share_beside_each_cell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(preflight, "gpus_of_host", lambda: ("GPU-a",))
    monkeypatch.setattr(preflight, "memory_of_gpus", lambda: {"GPU-a": (0, int(140e9))})
    monkeypatch.setattr(preflight, "processors_of_host", lambda: 16)
    monkeypatch.setattr(preflight, "available_memory", lambda: int(1e12))
    ranks = Ranks(device="cuda", ranks_per_gpu=2)
    shares = preflight.leased_gpus(ranks, cells=[cell(), cell(precision="bf16")], workers=0)
    assert len(shares) == 5 * 2 + 5
    assert Where(SessionConfig(out=tmp_path, gpus=shares, ranks_per_gpu=2)).oracles == 5


@pytest.mark.parametrize(
    ("processors", "lanes", "oracles"), [(1, 1, 1), (2, 2, 1), (3, 2, 1), (4, 2, 2), (5, 2, 2), (16, 8, 8)]
)
def test_two_cells_run_at_once_from_two_processors_on(
    processors: int, lanes: int, oracles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leased_slots, "processors_of_host", lambda: processors)
    assert (leased_slots.lanes_of_host(), leased_slots.oracles_of_host()) == (lanes, oracles)


@pytest.mark.parametrize(
    ("memory", "each", "precisions", "slots"),
    [
        (150e9, 1, ("exact", "fp32"), 4),  # a rank has two shares in the exact tier, and one in fp32
        (150e9, 1, ("exact",), 2),
        (300e9, 1, ("exact",), 4),
        (80e9, 1, ("exact",), 1),
        (80e9, 1, ("fp32",), 2),
        (115e9, 1, ("fp32",), 3),
        (150e9, 2, ("exact",), 2),
        (150e9, 2, ("exact", "fp32"), 4),
        (150e9, 3, ("exact", "fp32"), 3),
    ],
)
def test_large_cells_divide_a_gpu_by_the_smallest(
    memory: float, each: int, precisions: tuple[str, ...], slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """68 GB of a rank in the exact tier, and 35 in fp32, with a context; at most four ranks."""
    monkeypatch.setattr(preflight, "gpus_of_host", lambda: ("GPU-a",))
    monkeypatch.setattr(preflight, "memory_of_gpus", lambda: {"GPU-a": (0, int(memory))})
    monkeypatch.setattr(preflight, "processors_of_host", lambda: 16)
    monkeypatch.setattr(preflight, "available_memory", lambda: int(1e12))
    ranks = Ranks(device="cuda", ranks_per_gpu=each)
    patterns = tuple(f"grpo-real/*/fsdp2/dp2/{name}" for name in precisions)
    cells = select_cells(Selection(profile="real-size", cells=patterns))
    assert len(preflight.leased_gpus(ranks, cells=cells)) == each
    assert len(preflight.leased_gpus(ranks, cells=[*cells, cell()], workers=0)) == slots  # tiny cells decide nothing
    monkeypatch.setattr(preflight, "processors_of_host", lambda: 2 * (each + 1))
    assert len(preflight.leased_gpus(ranks, cells=cells, workers=0)) == min(slots, 2 * each)
    monkeypatch.setattr(preflight, "memory_of_gpus", dict)
    assert len(preflight.leased_gpus(ranks, cells=cells, workers=0)) == each


@pytest.mark.parametrize(("precisions", "slots"), [(("exact", "fp32"), 2), (("fp32",), 3), (("exact",), 2)])
def test_large_cells_have_shares_that_leave_least_of_a_gpu(
    precisions: tuple[str, ...], slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 150 GB, three shares hold three ranks of 45, or one of 60; two hold two of either."""
    monkeypatch.setattr(preflight, "gpus_of_host", lambda: ("GPU-a",))
    monkeypatch.setattr(preflight, "memory_of_gpus", lambda: {"GPU-a": (0, int(150e9))})
    monkeypatch.setattr(preflight, "processors_of_host", lambda: 16)
    monkeypatch.setattr(preflight, "available_memory", lambda: int(1e12))
    monkeypatch.setattr(preflight, "is_large", lambda _: True)
    monkeypatch.setattr(preflight, "leased_bytes", lambda cell: int(60e9 if cell.scenario.tier.is_exact else 45e9))
    cells = [cell(precision=name) for name in precisions]
    assert len(preflight.leased_gpus(Ranks(device="cuda"), cells=cells, workers=0)) == slots


def test_each_host_has_the_ranks_of_its_slots_and_one_the_oracle_and_the_judge() -> None:
    large, small = cell(layout="dp4"), cell(layout="dp2", precision="fp32")
    found = [(one, estimate(one, SIZE)) for one in (small, large)]
    of_large = found[1][1]
    for slots in (1, 4):
        held, worst = on_slots(found, slots)
        assert worst is large
        assert (
            slots * of_large.rank < held < slots * of_large.rank + 2e9
        )  # and ranks of the other worker group, which wait
    both, _ = on_slots(found, 6)
    assert 2 * found[0][1].rank < both - 4 * of_large.rank < 2 * found[0][1].rank + 1e9
    assert of_large.oracle < of_large.controller < of_large.oracle + of_large.judge + 1e9
    assert of_large.controller + 4 * of_large.rank > of_large.host


def test_a_host_without_room_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of one host share its memory, and where the controller is, oracle and judge take theirs of it."""
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    monkeypatch.setattr("conformance.runner.preflight.size_of", lambda _: SIZE)
    cells = [cell(layout="dp4")]
    of_cell = estimate(cells[0], SIZE)

    def said(hosts: list[JoinedHost], own: HostResources = PLENTY) -> tuple[str, ...]:
        return needs_of(cells, own, hosts=hosts).impossible

    two = replace(PLENTY, memory=2.1 * of_cell.rank)
    assert not said([joined("a", 2, two), joined("b", 2, two)])
    (one,) = said([joined("a", 2, two), joined("b", 4, two)])
    assert one.startswith(f"host b: the ranks of its 4 slots, the largest of {cells[0]}, need about ")
    (one,) = said([joined("a", 2, two), joined("a", 2, two)])
    assert one.startswith("host a: the ranks of its 4 slots")
    (one,) = said([joined("a", 4)], replace(PLENTY, memory=of_cell.controller / 2))
    assert one.startswith(f"host here, the controller's: the oracle and judge of {cells[0]} need")
    resources = replace(PLENTY, memory=1.1 * max(of_cell.controller, 2 * of_cell.rank) / DOUBT)
    assert not said([joined("b", 2, resources)], resources)
    (one,) = said([joined("here", 2, resources)], resources)
    assert one.startswith(
        f"host here: the ranks of its 2 slots, the largest of {cells[0]}, and the oracle and judge of"
    )
    (one,) = said([joined("a", 4), joined("b", 4, replace(PLENTY, disk=1e9))])
    assert re.fullmatch(r"host b: the records need about [\d.]+ GB of disk, and 1.0 GB are free", one)
    with pytest.raises(UsageError, match=r"^host b: .* or take larger hosts"):
        check_resources(cells, PLENTY, device="cpu", warn=print, hosts=[joined("a", 2), joined("b", 4, two)])


def test_only_what_would_not_fit_if_the_estimate_were_too_high_is_refused() -> None:
    cells = [cell()]
    needed = needs_of(cells, PLENTY).total.host
    assert not needs_of(cells, PLENTY).doubtful
    doubtful = needs_of(cells, replace(PLENTY, memory=needed / 1.4))
    assert len(doubtful.doubtful) == 1
    assert not doubtful.impossible
    assert "GB of memory" in needs_of(cells, replace(PLENTY, memory=needed / 1.6)).impossible[0]
    disk = needs_of(cells, PLENTY).total.disk
    assert "GB of disk" in needs_of(cells, replace(PLENTY, disk=disk / 2)).impossible[0]
    assert "PARITY_CACHE" in needs_of(cells, replace(PLENTY, cache=disk / 4)).impossible[0]


def test_the_advice_names_a_cell_that_would_fit() -> None:
    cells = [cell(), cell(layout="dp8.tp2")]
    small, large = (one.host for _, one in needs_of(cells, PLENTY).cells)
    assert small < large
    resources = replace(PLENTY, memory=small * 1.01)
    assert advice(needs_of(cells, resources), resources) == f"1 of 2 cells would fit, such as --cells {cells[0]}"
    waiting = replace(PLENTY, memory=large * 1.01)  # not enough where the ranks of one wait while the other runs
    assert advice(needs_of(cells, waiting), waiting) == f"each cell would fit alone, such as --cells {cells[0]}"


def test_a_model_that_does_not_fit_is_refused_before_anything_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a small machine: a model that no machine has room for takes a minute to read for its digest."""
    for module in ("conformance.runner.session", "conformance.cli.plan"):
        monkeypatch.setattr(f"{module}.host_resources_of", lambda _: replace(PLENTY, memory=1e9))
    model = sparse_model(tmp_path / "huge", layers=2, hidden=1024, vocab=8000)
    assert size_of(replace(cell().scenario, model=str(model))).parameters > 4e7
    chosen = ["--backend", "plain_backend:Plain", "--profile", write_profile(tmp_path), "--model", str(model)]
    assert cli.main(["run", *chosen, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "tiny/huge/plain/dp2/fp32 needs about " in said
    assert "use a model with fewer layers" in said
    assert not (tmp_path / "out").exists()
    assert cli.main(["plan", *chosen]) == 2
    assert "cannot fit: tiny/huge/plain/dp2/fp32 needs about" in capsys.readouterr().out


def test_a_plan_tells_every_supported_cell_and_the_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--backend", "plain_backend:Plain", "--profile", write_profile(tmp_path)]) == 0
    head, line, _, cells, why, memory, disk = capsys.readouterr().out.splitlines()
    assert head.split() == ["cell", "GB", "a", "rank", "oracle", "in", "all", "GB", "of", "disk", "time"]
    assert line.startswith("tiny/llama/plain/dp2/fp32 ")
    assert cells.startswith("cells   1 of 2 are supported")
    assert why.startswith("        tiny/llama/plain/pp2/fp32: unsupported: ")
    assert memory.startswith("memory  ")
    assert disk.startswith("disk    ")


def test_time_grows_with_work_and_shrinks_with_processors() -> None:
    rates: Any = dict.fromkeys(("exact", "fp32"), 1e10)

    def seconds(one: Estimate, processors: int = 2) -> float:
        return one.seconds(rates, "exact", processors=processors)

    one, more = estimate(cell(), SIZE), estimate(cell(rows=48), SIZE)
    assert seconds(one) < seconds(more)
    assert seconds(one, processors=1) > seconds(one)
