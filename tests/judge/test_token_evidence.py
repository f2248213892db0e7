"""Which tokens each rank holds where ranks share sequences, and how many heads they gather at a time."""

from typing import Any

import pytest
import torch

from conformance.judge.token_evidence import (
    CONTIGUOUS,
    SLICES,
    ZIGZAG,
    gathered_for_tokens,
    heads_at_a_time,
    held_by_layout,
    shows_tokens,
    shows_what_enters,
)
from conformance.spec.batch import Document, Row
from conformance.spec.layout import Layout
from conformance.worker.evidence import Embedding, Watch
from conformance.worker.operators import Collective
from impl.context_parallel.sequence_sharding import SplitMode, place, shard_inputs
from impl.interface.micro_batches import collate

VOCABULARY = 60
LENGTHS = ((7, 11), (5,), (13, 4))  # of the documents of each row


def rows_of(data: int) -> list[Row]:
    """The first data rank has the tokens from 1 on, the second one those from the last one back."""
    tokens = iter(range(1, VOCABULARY) if not data else range(VOCABULARY - 1, 0, -1))
    documents = [[tuple(next(tokens) for _ in range(length)) for length in row] for row in LENGTHS]
    return [
        Row(index=n, documents=tuple(Document(tokens=d, targets=(False,) + (True,) * (len(d) - 1)) for d in row))
        for n, row in enumerate(documents)
    ]


def held(
    layout: Layout, split: SplitMode, *, zigzag: bool, multiple: int = 1, backwards: bool = False, own: int = 0
) -> Any:
    """What honest ranks look up, those of ``tp`` in their part of the vocabulary, of ``own`` tokens."""
    size, own = layout.sp, own or -(-VOCABULARY // layout.tp)
    ranks: list[dict[str, Any]] = []
    for data in range(layout.data):
        inputs = collate(rows_of(data))
        source = place(inputs, split=split, size=size, zigzag=zigzag, multiple=multiple * layout.ulysses).source
        for ring in range(size)[:: -1 if backwards else 1]:
            for part in source[ring].chunk(layout.ulysses, dim=1):
                tokens = shard_inputs(inputs, part).tokens
                for tp in range(layout.tp):
                    local = torch.where((tokens >= tp * own) & (tokens < (tp + 1) * own), tokens - tp * own, 0)
                    ranks.append({"embedded": [[own, local.tolist()]]})
    ranks[0]["documents"] = [[[d.tokens for d in row.documents] for row in rows_of(n)] for n in range(layout.data)]
    return ranks


@pytest.mark.parametrize(
    ("layout", "split", "zigzag", "order"),
    [
        ("sp2.zigzag", "documents", True, ZIGZAG),
        ("sp2.zigzag", "rows", True, ZIGZAG),
        ("sp4.zigzag", "documents", True, ZIGZAG),
        ("sp2.tp2.zigzag", "documents", True, ZIGZAG),
        ("sp2.ulysses2.zigzag", "documents", True, ZIGZAG),
        ("dp2.sp2.zigzag", "rows", True, ZIGZAG),
        ("dp2.tp2.sp2.zigzag", "documents", True, ZIGZAG),
        ("sp2.ring", "documents", False, CONTIGUOUS),
        ("sp3.ring", "rows", False, CONTIGUOUS),
        ("sp2", "slices", False, SLICES),
        ("sp2.ulysses2", "slices", False, SLICES),
        ("ulysses2", "slices", False, SLICES),
    ],
)
@pytest.mark.parametrize("multiple", [1, 8])
def test_ranks_hold_the_tokens_of_their_places(
    layout: str, split: SplitMode, zigzag: bool, order: str, multiple: int
) -> None:
    of, asked = Layout.parse(layout), f"{SLICES} or {CONTIGUOUS}" if order == SLICES else order
    ranks = held(of, split, zigzag=zigzag, multiple=multiple)
    assert shows_tokens(ranks)
    assert held_by_layout(of, ranks)[1:] == (True, f"requested {asked}, observed these")
    if of.sp > 1:
        assert not held_by_layout(of, held(of, split, zigzag=zigzag, multiple=multiple, backwards=True))[1]
    ranks[0]["embedded"][0][1][0][0] += 1  # another token
    assert held_by_layout(of, ranks)[1:] == (False, f"requested {asked}, observed another order")


def test_a_part_of_the_vocabulary_that_few_tokens_need_shows_no_order() -> None:
    """Few tokens are in the second part, so zeros of its ranks fit places of several ranks."""
    of = Layout.parse("dp2.tp2.sp2.ring")
    assert held_by_layout(of, held(of, "documents", zigzag=False, own=56))[1]
    assert not held_by_layout(of, held(of, "documents", zigzag=False, own=56, backwards=True))[1]
    assert not held_by_layout(of, held(of, "documents", zigzag=True, own=56))[1]


@pytest.mark.parametrize("split", ["documents", "rows"])
@pytest.mark.parametrize("tp", ["", ".tp2"])
def test_another_order_of_the_ring_is_named(split: SplitMode, tp: str) -> None:
    ring, zigzag = Layout.parse(f"sp2.ring{tp}"), Layout.parse(f"sp2.zigzag{tp}")
    found = held_by_layout(zigzag, held(zigzag, split, zigzag=False))
    assert found[1:] == (False, f"requested {ZIGZAG}, observed {CONTIGUOUS}")
    found = held_by_layout(ring, held(ring, split, zigzag=True))
    assert found[1:] == (False, f"requested {CONTIGUOUS}, observed {ZIGZAG}")


@pytest.mark.parametrize("layout", ["sp2.zigzag", "sp2.tp2.zigzag", "sp2.ulysses2", "sp2.ring"])
@pytest.mark.parametrize("transposed", [False, True])
def test_what_is_looked_up_has_to_enter_the_layers(layout: str, transposed: bool) -> None:
    """A rank that computes other rows beside its lookups multiplies different rows for equal tokens."""
    of = Layout.parse(layout)
    split: SplitMode = "slices" if "ulysses" in layout else "rows"
    ranks = held(of, split, zigzag="zigzag" in layout)
    for rank in ranks:
        tokens = torch.tensor(rank["embedded"][0][1])
        tokens[tokens > 0] = (tokens[tokens > 0] + 1) // 2  # each token twice
        rank["embedded"][0][1] = tokens.tolist()
        rank["entered"] = [(tokens.T if transposed else tokens).flatten().tolist()]
    of_batch = ranks[0]["documents"]
    ranks[0]["documents"] = [
        [[[_halved(token, of) for token in document] for document in row] for row in rows] for rows in of_batch
    ]
    assert shows_what_enters(ranks)
    assert held_by_layout(of, ranks)[1]
    last = ranks[-1]["entered"][0]
    ranks[-1]["entered"] = [[(number * 7 + place) % 50 for place, number in enumerate(last)]]
    assert not held_by_layout(of, ranks)[1]
    ranks[-1]["entered"] = [[0] * len(last)]  # of a product with nothing
    assert not held_by_layout(of, ranks)[1]
    ranks[-1]["entered"] = [[]]
    assert not shows_what_enters(ranks)
    assert held_by_layout(of, ranks)[1]


def _halved(token: int, layout: Layout) -> int:
    """Returns the token that ``token`` is replaced by, in its rank's part of the vocabulary."""
    begin = token // (own := -(-VOCABULARY // layout.tp)) * own
    return begin + (token - begin + 1) // 2


def test_heads_that_are_gathered_at_a_time_are_counted() -> None:
    of = Layout.parse("sp2.stride2")
    ranks = held(of, "slices", zigzag=False)
    tokens = len(ranks[0]["embedded"][0][1][0])
    for rank in ranks:
        rank["gathered"] = [[[0, 1], [tokens, 2, 8], tokens * 32, 4], [[0, 1], [48, 3, 8], 2304, 4]]
    assert heads_at_a_time(of, ranks) == {2}


def test_numbers_of_tokens_are_told_from_weights() -> None:
    of = Layout.parse("ulysses2.zero2")
    (rank, _) = held(of, "slices", zigzag=False)
    tokens = len(rank["embedded"][0][1][0])
    rank["gathered"] = [[[0, 1], [1, tokens], 2 * tokens, 3], [[0, 1], [2 * tokens + 1], 4 * tokens + 2, 9]]
    assert gathered_for_tokens(of, rank, lambda group: group == [0, 1]) == 6 * tokens
    assert gathered_for_tokens(of, rank, lambda group: False) == 0


@pytest.mark.parametrize("shares", [True, False])
def test_lookups_are_observed_where_ranks_share_sequences(shares: bool) -> None:
    embedding = Embedding(rows=60, columns=4, tp=1)
    weight, at = torch.rand(60, 4, requires_grad=True), torch.tensor([[3, 5, 59], [1, 0, 2]])
    with (watch := Watch(embedding=embedding if shares else None)).step():
        (torch.nn.functional.embedding(at, weight) + weight[at]).sum().backward()
        torch.nn.functional.embedding(at + 1 - 1, weight)  # of a later micro-batch
    assert not any(watch.entered)
    watch._collective(Collective("all_gather", (0, 1), torch.float32, 12, (1, 6)))
    found = watch.to_json()
    assert found.get("embedded") == ([(60, at.tolist())] * 2 if shares else None)
    assert found.get("gathered") is None  # after the first backward pass


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_that_layers_multiply_first_are_grouped(dtype: torch.dtype) -> None:
    """Lookups beside those that enter the layers show which tokens the layers get, and later lookups show nothing."""
    # Numbers of one seed: of random rows in bf16, two of five tokens are taken for equal in one case of twenty.
    weight = torch.rand(60, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    own = torch.tensor([[3, 5, 59, 3], [1, 3, 5, 2]])
    with (watch := Watch(embedding=Embedding(rows=60, columns=32, tp=1))).step():
        weight[own + 0]
        weight[torch.arange(8)]
        states = weight[own] * 2.0 ** torch.arange(8).view(2, 4, 1).to(dtype)  # of another size in each row
        states[..., :16] @ torch.rand(16, 4).to(dtype)
        states @ torch.rand(32, 4).to(dtype)
        weight[own - 0]
    *first, last = watch.to_json()["entered"]
    assert last == []
    tokens = own.flatten().tolist()
    for groups in first:
        assert len({*zip(tokens, groups, strict=True)}) == len({*tokens}) == len({*groups})
    assert len(first) == 3


def test_lookups_in_other_matrices_are_none_of_tokens() -> None:
    """Experts look up their tokens, and kernels the rows of documents, more often than a model its embedding."""
    weight, at = torch.nn.Parameter(torch.rand(60, 4)), torch.tensor([[3, 5, -1]])
    with (watch := Watch(embedding=Embedding(rows=120, columns=4, tp=2))).step():
        states = weight[at].expand(20, 3, 4).contiguous()  # (rows, length, hidden)
        for _ in range(20):
            states.view(60, 4)[torch.arange(30)]
            torch.rand(60, 8)[torch.arange(30)]
            torch.rand(500, 4)[torch.arange(30)]
            weight[torch.tensor([], dtype=torch.long)]
    assert watch.to_json()["embedded"] == [(60, [[3, 5, 59]])]


def test_rows_that_are_padded_on_the_left_are_in_order() -> None:
    of = Layout.parse("ulysses2.zero2")
    rows = [[1, 2, 3, 4, 5], [6, 7, 8]]
    padded = [[0, 1, 2, 3, 4, 5], [0, 0, 0, 6, 7, 8]]
    ranks: list[dict[str, Any]] = [{"embedded": [[60, [row[part : part + 3] for row in padded]]]} for part in (0, 3)]
    ranks[0]["documents"] = [[[row] for row in rows]]
    assert held_by_layout(of, ranks)[1]
    ranks[1]["embedded"][0][1][0][0] += 1
    assert not held_by_layout(of, ranks)[1]


@pytest.mark.parametrize("multiple", [1, 2, 8])
def test_documents_may_be_padded_to_a_multiple_of_their_pieces(multiple: int) -> None:
    """As libraries for long documents do, each one by itself; rank 0 of zigzag has the first and the last quarter."""
    of, documents = Layout.parse("sp2.zigzag"), [list(range(1, 8)), list(range(20, 31))]
    parts: list[list[int]] = [[], []]
    for document in documents:
        quarter = -(-len(document) // (4 * multiple)) * multiple
        padded = document + [0] * (4 * quarter - len(document))
        quarters = [padded[n * quarter : (n + 1) * quarter] for n in range(4)]
        for rank in (0, 1):
            parts[rank] += quarters[rank] + quarters[3 - rank]
    ranks: list[dict[str, Any]] = [{"embedded": [[60, [part]]]} for part in parts]
    ranks[0]["documents"] = [[documents]]
    assert held_by_layout(of, ranks)[1]
    parts[0][0], parts[0][1] = parts[0][1], parts[0][0]
    assert not held_by_layout(of, ranks)[1]


def test_ranks_that_hold_all_tokens_each_do_not_share_them() -> None:
    for name in ("sp2", "sp2.ring"):
        tokens = list(range(1, 41))
        ranks: list[dict[str, Any]] = [{"embedded": [[60, [tokens]]]} for _ in range(2)]
        ranks[0]["documents"] = [[[tokens]]]
        assert not held_by_layout(Layout.parse(name), ranks)[1]


def test_rows_one_after_another_show_no_micro_batch() -> None:
    ranks: list[dict[str, Any]] = [
        {"embedded": [[60, [row]] for row in ([1, 2], [5, 6])]},
        {"embedded": [[60, [[3, 4]]]]},
    ]
    ranks[0]["documents"] = [[[[1, 2, 3, 4]], [[5, 6, 7, 8]]]]
    assert not shows_tokens(ranks)
