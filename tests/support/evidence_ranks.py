"""Makes the evidence of honest ranks in any layout, and changes it as dishonest ranks would."""

from collections.abc import Callable
from typing import Any

from conformance.judge.exchange_evidence import exchange_claims
from conformance.judge.step_evidence import Linear, Step
from conformance.judge.work_evidence import work_claims
from conformance.spec.layout import Layout
from conformance.spec.scenario import parse_scenario
from conformance.worker.evidence import BYTES

LINEAR = Linear(
    layers=4000, passed=4000, outside=1024, frozen=False, uncut=False, keys=16, hidden=8, float8=4000, beside=80
)
MODEL: Any = {"layers": 4, "sums": 4, "number_bytes": 8}
ACCUMULATION, TRAINED, LENGTH = 2, 1300, 10
Ranks = list[dict[str, Any]]


ROWS = "which rank computes which rows"
OPTIMIZER: Any = {"optimizer": {"name": "sgd", "lr": 0.1}}
PASSES = "layers are gathered for each forward and backward pass, as ZeRO-3 has it"
OTHERS = "other ranks gather no weights for the backward pass, as hpZ has it"
AGAIN, AMONG, IN_FLOAT8, AS_NUMBERS = (
    "weights are gathered again for the backward pass, as ZeRO-3 has it",
    "2 ranks gather weights for the backward pass, as hpZ has it",
    "weights are gathered in float8",
    "weights in float8 are not gathered as numbers",
)


def rows_of(layout: Layout) -> list[list[list[list[int]]]]:
    """One row in each micro-batch of each data rank."""
    numbers = iter(range(layout.data * ACCUMULATION))
    return [[[[next(numbers), LENGTH, 5]] for _ in range(ACCUMULATION)] for _ in range(layout.data)]


def honest(layout: Layout) -> Ranks:
    """Ranks of ``tp``, ``sp`` and ``ulysses`` vary faster than those of ``dp``."""
    inner, rows = layout.world_size // layout.data, rows_of(layout)
    own = LENGTH * ACCUMULATION * LINEAR.layers // inner
    activations, keys = LENGTH * LINEAR.hidden // layout.sp, LENGTH * LINEAR.keys
    found = []
    for rank in range(layout.world_size):
        first = rank // inner * inner
        model = list(range(first, first + inner))
        data = list(range(rank % layout.tp, layout.world_size, layout.tp)) if layout.tp < layout.world_size else model
        shards, place = len(data) // layout.rep, data.index(rank)
        sharing = data[place // shards * shards :][:shards]
        moved: list[list[Any]] = [
            ["all_reduce", data[place % shards :: shards] if layout.rep > 1 else data, "later", 2, 0],
            ["all_gather", sharing, "update", 1, TRAINED // layout.tp],
        ]
        moved[0][-1] = ACCUMULATION * TRAINED // layout.tp
        if layout.zero == 3:
            moved.append(["all_gather", sharing, "forward", 1, TRAINED // layout.tp])
            among = data[place // layout.hpz * layout.hpz :][: layout.hpz] if layout.hpz > 1 else sharing
            moved.append(["all_gather", among, "backward 0", 4, ACCUMULATION * LINEAR.layers // layout.tp])
        if layout.tp > 1:
            moved.append(["reduce_scatter", model, "forward", 4, 4 * activations])
        if layout.sp > 1:
            moved.append(["send" if "ring" in layout.options else "all_gather", model, "forward", 1, keys])
        if layout.ulysses > 1:
            moved += [["all_to_all", model, where, 4, 4 * activations] for where in ("forward", "backward 0")]
        given = [row[0] for micro_batch in rows[rank // inner] for row in micro_batch]
        work = [["forward", own], ["backward", 2 * own]]
        found.append({"rows": given, "work": work, "moved": moved, "lengths": [LENGTH]})
    return found


def wrong(layout: str, change: Callable[[Ranks], object]) -> set[str]:
    of, scenario = Layout.parse(layout), parse_scenario({"name": "x", "model": "m", "precision": "exact"} | OPTIMIZER)
    change(ranks := honest(of))
    step = Step(ranks, rows_of(of))
    claims = [
        *work_claims(of, step, scenario, LINEAR, layers=2, experts=0),
        *exchange_claims(
            of, step, LINEAR, stage=of.stage(None), trained=TRAINED / of.tp, **MODEL, accumulation=ACCUMULATION
        ),
    ]
    return {text for text, holds, _ in claims if not holds}


def keeps(ranks: Ranks) -> None:
    pass


def moves_little(kind: str, where: str = "") -> Callable[[Ranks], None]:
    """Makes one element of every collective of this kind and pass."""

    def change(ranks: Ranks) -> None:
        for rank in ranks:
            for entry in rank["moved"]:
                if entry[0] == kind and entry[2].startswith(where):
                    entry[-1] = 1

    return change


def works(phase: str, factor: float) -> Callable[[Ranks], None]:
    def change(ranks: Ranks) -> None:
        for rank in ranks:
            rank["work"] = [[name, int(count * (factor if name == phase else 1))] for name, count in rank["work"]]

    return change


def recomputes(factor: float) -> Callable[[Ranks], None]:
    """Shows the recomputed products of all layers, and multiplies the others of the backward pass."""

    def change(ranks: Ranks) -> None:
        works("backward", factor)(ranks)
        for rank in ranks:
            rank["work"].append(["recomputed", rank["work"][0][1]])

    return change


def gives_all_rows(ranks: Ranks) -> None:
    every = sorted({row for rank in ranks for row in rank["rows"]})
    for rank in ranks:
        rank["rows"] = every


def gives_half_of_its_rows(ranks: Ranks) -> None:
    for number, rank in enumerate(ranks):
        rank["rows"] = rank["rows"][number % 2 :: 2]


def changes_when_read(ranks: Ranks) -> None:
    ranks[1]["changed_by_reading"] = 1


def sends(ranks: Ranks) -> None:
    ranks[0]["moved"].append(["send", [0, 1], "forward", 1, 100])


def gathers(elements: int) -> Callable[[Ranks], None]:
    def change(ranks: Ranks) -> None:
        for rank in ranks:
            rank["moved"].append(["all_gather", rank["moved"][0][1], "forward", 1, elements])

    return change


gathers_weights, gathers_metrics = gathers(TRAINED), gathers(3)


def gathers_over_all(ranks: Ranks) -> None:
    for rank in ranks:
        next(entry for entry in rank["moved"] if entry[2] == "backward 0")[1] = list(range(len(ranks)))


def gathers_over_neighbors(ranks: Ranks) -> None:
    """As DeepSpeed with AutoTP: ranks with different parts of a weight (docs/findings/deepspeed-hpz-autotp.md)."""
    for number, rank in enumerate(ranks):
        next(entry for entry in rank["moved"] if entry[2] == "backward 0")[1] = [number // 2 * 2, number // 2 * 2 + 1]


def gathers_over_all_again(elements: int) -> Callable[[Ranks], None]:
    return lambda ranks: ranks[0]["moved"].append(["all_gather", list(range(len(ranks))), "backward 1", 1, elements])


def looks_up(*tokens: int, pieces: int = 0, of: int = LENGTH, times: int = 1) -> Callable[[Ranks], None]:
    """Shows as many looked up tokens of each rank, in each call, and lets pairs gather pieces of ``of`` elements."""

    def change(ranks: Ranks) -> None:
        ranks[0]["documents"] = [[[[*range(LENGTH)]]]]
        for number, (rank, own) in enumerate(zip(ranks, tokens, strict=True)):
            data = [number // 2 * 2, number // 2 * 2 + 1]
            rank["embedded"] = [[60, [[*range(number * own, (number + 1) * own)]]]] * times if own else []
            rank["moved"].append(["all_gather", data, "forward", pieces, pieces * of])
            rank["gathered"] = [[data, [of // 2], of, pieces]]

    return change


def gathers_in_passes(*, forward: float, backward: float, update: float) -> Callable[[Ranks], None]:
    """Gathers that many times the weights of layers in these passes."""

    def change(ranks: Ranks) -> None:
        for rank in ranks:
            rank["moved"] = [entry for entry in rank["moved"] if entry[0] != "all_gather"]
            group = rank["moved"][0][1]
            for where, times in (("forward", forward), ("backward 1", backward), ("update", update)):
                rank["moved"].append(["all_gather", group, where, 1, int(times * LINEAR.layers)])

    return change


def gathers_bytes(elements: int, *passes: str, numbers: int = LINEAR.outside) -> Callable[[Ranks], None]:
    """Turns gathers of the backward pass into some of bytes, adds such gathers to other passes, and leaves gathers of
    numbers in the forward pass."""

    def change(ranks: Ranks) -> None:
        for rank in ranks:
            sharing = next(entry[1] for entry in rank["moved"] if entry[0] == "all_gather")
            for entry in rank["moved"]:
                if entry[2].startswith("backward"):
                    entry[0] = BYTES
                elif entry[:3] == ["all_gather", sharing, "forward"]:
                    entry[4] = numbers
            rank["moved"] += [[BYTES, sharing, where, 1, elements] for where in passes]

    return change


def reduces_once(ranks: Ranks) -> None:
    for rank in ranks:
        rank["moved"][0][-1] //= ACCUMULATION
    for number, rank in enumerate(ranks[:4]):  # activations of tensor-parallel ranks, in groups of the same size
        first = number // 2 * 2
        rank["moved"].append(["all_reduce", [first, first + 1], "later", 4, 10 * TRAINED])


def reduces(where: str, *, pieces: int = 1) -> Callable[[Ranks], None]:
    """Reduces all gradients in a pass."""

    def change(ranks: Ranks) -> None:
        for rank in ranks:
            rank["moved"][0][2:4] = where, pieces * rank["moved"][0][3]

    return change


def moves_gathers(*passes: str, reduced: str = "backward 0") -> Callable[[Ranks], None]:
    """Gathers weights in these passes instead of after the update, and reduces gradients in a backward pass."""

    def change(ranks: Ranks) -> None:
        for rank in ranks:
            kind, group, _, count, elements = rank["moved"].pop(1)
            rank["moved"] += [[kind, group, where, count, elements] for where in passes]
            rank["moved"][0][2] = reduced

    return change


def says_when(ranks: Ranks) -> None:
    for rank in ranks:
        rank["boundaries"] = ACCUMULATION


def multiplies_in_float8(ranks: Ranks, error: float | str) -> None:
    ranks[0] |= {"float8": 1, "float8_error": error}
