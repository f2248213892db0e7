"""Judges which samples a pipeline gives to which row, rank, step and micro-batch, and what is left after a resume.

Documents are made up: the token at place p of document d is d * STRIDE + p, so each token of a row tells where it is
from. Orders are judged by what any order has to keep, because each library has a generator of its own: every sample
once an epoch, as many steps on every rank, another order in the next epoch, and the same samples after a resume.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from conformance.backends.engines import NotSupported
from conformance.backends.text import OrderPlan, Packing, ServedPipeline, TextFailed
from conformance.judge.text import TextCheck
from conformance.oracle.chat import RULES

STRIDE, CAPACITY, PADDING = 100, 16, -1
LENGTHS = (7, 3, 9, 4, 12, 5, 3, 8, 16, 2, 6)
TOKEN_LIMIT = 24  # of a micro-batch; more than the longest of LENGTHS
PLAN = OrderPlan(samples=23, ranks=2, rows=3)
Steps = list[list[list[int]]]  # of a rank, step and row: the sample


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Names a part of a document that stands in a row without a gap."""

    document: int
    start: int
    end: int


def judge_order(pipeline: ServedPipeline) -> Iterator[TextCheck]:
    """Judges packing, positions, order, resume and micro-batches of a pipeline; leaves out those that it lacks."""
    judges: tuple[Callable[[ServedPipeline], Iterator[TextCheck]], ...] = (_judge_packing, _judge_epochs, _judge_micro)
    for stage, judge in zip(("packing", "order", "micro-batches"), judges, strict=True):
        try:
            yield from judge(pipeline)
        except NotSupported as error:
            yield TextCheck(stage=stage, state="unsupported", text=f"{error}", short="not offered")
        except TextFailed as error:
            yield TextCheck(stage=stage, state="infrastructure", text=f"{error}", short="failed")


def _check(stage: str, problem: str, text: str, short: str) -> TextCheck:
    return TextCheck(stage=stage, state="differs" if problem else "conforms", text=problem or text, short=short)


def _judge_packing(pipeline: ServedPipeline) -> Iterator[TextCheck]:
    rule = pipeline.info.packs
    if not rule:
        raise NotSupported("does not pack documents into rows")
    documents = [
        {"tokens": [STRIDE * number + place for place in range(length)], "targets": [False, *[True] * (length - 1)]}
        for number, length in enumerate(LENGTHS, start=1)
    ]
    rows = pipeline.pack(documents, CAPACITY)
    found = [_pieces(tokens) for tokens, _, _ in rows]
    layout = "; ".join(" ".join(f"{p.document}" + _part(p) for p in row) for row in found)
    yield _check("packing", _packing_problem(rule, found), f"{rule}: {layout}", rule)
    yield _check("positions", _position_problem(found, rows), "restart in every document", "restart")


def _part(piece: Piece) -> str:
    whole = (piece.start, piece.end) == (0, LENGTHS[piece.document])
    return "" if whole else f"[{piece.start}:{piece.end}]"


def _pieces(tokens: Sequence[int]) -> list[Piece]:
    """Returns the pieces of documents in a row, by their made-up tokens. Raises TextFailed for any other token."""
    found: list[Piece] = []
    for token in tokens:
        document, place = divmod(token, STRIDE)
        document -= 1
        if token == PADDING:
            continue
        if not 0 <= document < len(LENGTHS) or place >= LENGTHS[document]:
            raise TextFailed(f"a packed row has the token {token}, which is of no document")
        if found and (found[-1].document, found[-1].end) == (document, place):
            found[-1] = replace(found[-1], end=place + 1)
        else:
            found.append(Piece(document=document, start=place, end=place + 1))
    return found


def _packing_problem(rule: Packing, rows: Sequence[Sequence[Piece]]) -> str:
    """Returns what is wrong with packed rows; empty if nothing is."""
    copies = Counter((p.document, place) for row in rows for p in row for place in range(p.start, p.end))
    lost = [d for d, length in enumerate(LENGTHS) if any(not copies[d, place] for place in range(length))]
    if lost:
        return f"document {lost[0]} has lost tokens"
    if twice := [key for key, count in copies.items() if count > 1]:
        return f"token {twice[0][1]} of document {twice[0][0]} is in {copies[twice[0]]} rows"
    if over := [i for i, row in enumerate(rows) if sum(p.end - p.start for p in row) > CAPACITY]:
        return f"row {over[0]} has more than {CAPACITY} tokens"
    if rule == "wrapped":
        stream = [(p.document, place) for row in rows for p in row for place in range(p.start, p.end)]
        in_turn = [(d, place) for d, length in enumerate(LENGTHS) for place in range(length)]
        return "" if stream == in_turn else "the rows are not the stream of all documents"
    if cut := next((p for row in rows for p in row if _part(p)), None):
        return f"document {cut.document} of {LENGTHS[cut.document]} tokens is cut at {cut.start or cut.end}"
    expected = sorted(sorted(row) for row in RULES[rule](LENGTHS, CAPACITY))
    observed = sorted(sorted(p.document for p in row) for row in rows)
    if rule == "in order" or _by_length(expected) != _by_length(observed):
        different = next((row for row in observed if row not in expected), None)
        return f"by the rule {rule!r} no row has the documents {different}" if different else ""
    return ""


def _by_length(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns the lengths of the documents of each row: documents of the same length may take each other's places."""
    return sorted(sorted(LENGTHS[number] for number in row) for row in rows)


def _position_problem(
    pieces: Sequence[Sequence[Piece]], rows: Sequence[tuple[list[int], list[bool], list[int]]]
) -> str:
    """Returns what is wrong with positions and targets of packed rows; empty if nothing is."""
    for number, (row, (_, targets, positions)) in enumerate(zip(pieces, rows, strict=True)):
        at = 0
        for piece in row:
            length = piece.end - piece.start
            if positions[at : at + length] != list(range(length)):
                return f"the positions of document {piece.document} in row {number} are {positions[at : at + length]}"
            if at and targets[at]:
                return f"row {number} predicts the first token of document {piece.document} from the document before"
            if not all(targets[at + 1 : at + length]):
                return f"row {number} has lost targets of document {piece.document}"
            at += length
    return ""


def _judge_epochs(pipeline: ServedPipeline) -> Iterator[TextCheck]:
    endless, plan = pipeline.info.endless, replace(PLAN, drops_last=pipeline.info.drops_last)
    whole = pipeline.order(plan)
    problems = [_epoch_problem(whole, plan, endless=endless)]
    if pipeline.order(plan) != whole:
        problems.append("the same seed gives another order")
    if not endless:
        dropping = replace(plan, drops_last=True)
        problems.append(_epoch_problem(pipeline.order(dropping), dropping, endless=False))
    orders = [_stream(epoch)[: plan.samples] for epoch in whole]
    if endless:
        orders = [_stream(whole[0])[start : start + plan.samples] for start in (0, plan.samples)]
    if orders[0] == orders[1]:
        problems.append("the second epoch has the order of the first")
    if _stream(whole[0])[: PLAN.samples] == list(range(PLAN.samples)):
        problems.append("the samples are not shuffled")
    dealt = pipeline.order(replace(plan, shuffles=False, epochs=1))[0]
    repeated = len(_stream(dealt)) - PLAN.samples
    how = "in turn" if dealt[0][0] == list(range(0, PLAN.ranks * PLAN.rows, PLAN.ranks)) else "in blocks"
    rest = f"{-repeated} of {PLAN.samples} left out" if plan.drops_last else f"{repeated} repeated in the last step"
    text = f"ranks take samples {how}, " + ("endless" if endless else rest)
    yield _check("order", next(filter(None, problems), ""), text, how)
    after = replace(plan, after=2)
    resumed, left = pipeline.order(after), [rank[after.after :] for rank in whole[0]]
    problem = ""
    if resumed[0] != left:
        rank, step = next(
            (rank, step)
            for rank in range(PLAN.ranks)
            for step in range(max(len(left[rank]), len(resumed[0][rank])))
            if resumed[0][rank][step : step + 1] != left[rank][step : step + 1]
        )
        got, wanted = resumed[0][rank][step : step + 1], left[rank][step : step + 1]
        problem = (
            f"step {after.after + step} of rank {rank} has the samples {got[0] if got else 'none'} after a resume, and "
            f"{wanted[0] if wanted else 'none'} without"
        )
    elif resumed[1:] != whole[1:]:
        problem = "the epoch after a resumed one has another order"
    yield _check("resume", problem, f"after step {after.after} the same samples follow", "the same")


def _stream(epoch: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    """Returns the samples in the order of steps, and of ranks within a step."""
    steps = max(map(len, epoch))
    return [i for step in range(steps) for rank in epoch for i in (rank[step] if step < len(rank) else ())]


def _epoch_problem(epochs: Sequence[Sequence[Sequence[Sequence[int]]]], plan: OrderPlan, *, endless: bool) -> str:
    """Returns what is wrong with epochs; empty if nothing is."""
    if any(len(epoch) != plan.ranks for epoch in epochs) or len(epochs) != (1 if endless else plan.epochs):
        return f"there are {len(epochs)} epochs of {[len(epoch) for epoch in epochs]} ranks"
    if len({len(rank) for epoch in epochs for rank in epoch}) > 1:
        return f"ranks have {[len(rank) for rank in epochs[0]]} steps, so one waits for the others for ever"
    for number, epoch in enumerate(epochs):
        copies = Counter(_stream(epoch))
        if endless:
            lost = [i for i in range(plan.samples) if copies[i] < plan.epochs]
            if lost or any(count > plan.epochs + 1 for count in copies.values()):
                return f"sample {lost[0] if lost else copies.most_common(1)[0][0]} is not there once an epoch"
            continue
        lost = [i for i in range(plan.samples) if not copies[i]]
        repeated = sum(count - 1 for count in copies.values())
        if plan.drops_last and repeated:
            return f"epoch {number} repeats sample {copies.most_common(1)[0][0]} although the last step is dropped"
        if len(lost) >= (plan.ranks * plan.rows if plan.drops_last else 1):
            return f"epoch {number} leaves out {len(lost)} samples, such as {lost[0]}"
        if repeated >= plan.ranks * plan.rows:
            return f"epoch {number} repeats {repeated} samples: more than the last step needs"
    return ""


def _judge_micro(pipeline: ServedPipeline) -> Iterator[TextCheck]:
    found = pipeline.micro_batches(LENGTHS, TOKEN_LIMIT)
    counts = [sum(LENGTHS[i] for i in one) for one in found]
    copies, problem = Counter(chain.from_iterable(found)), ""
    if set(copies) != set(range(len(LENGTHS))) or max(copies.values()) > 1:
        wrong = next(i for i in range(len(LENGTHS)) if copies[i] != 1)
        problem = f"sample {wrong} is in {copies[wrong]} micro-batches"
    elif max(counts) > TOKEN_LIMIT:
        problem = f"a micro-batch has {max(counts)} tokens, and the limit is {TOKEN_LIMIT}: micro-batches of {counts}"
    yield _check("micro-batches", problem, f"tokens of each of {len(counts)}: {counts}", f"{len(counts)} micro-batches")
