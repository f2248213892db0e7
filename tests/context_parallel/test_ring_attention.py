"""Ring attention by itself: every function against full attention in float64, on real ranks; and where tokens lie."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import exhaustive, ranks_of
from conftest import make_cell
from ring_tasks import packed_attention
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from conformance.core.host import resolve
from conformance.data.inputs import build_batches
from conformance.numerics.float64_tier import exact_tier
from conformance.runtime import Device, Pool
from conformance.spec.batch import Column, Document, Row
from impl.context_parallel import flash_attn_shim, reference_kernel
from impl.context_parallel.ring_attention import NAME, Ring, register
from impl.context_parallel.sequence_sharding import SplitMode, place, restore, shard_inputs
from impl.interface.micro_batches import NO_TARGET, MicroBatch, collate

# Odd lengths, a row with one document, documents shorter than the ring, rows of different lengths.
PACKED = [[5, 16, 9], [7, 23, 1], [30]]
ROWS = [[29], [17], [30]]
HONEST = {"float64": 1e-15, "float32": 5e-7, "bfloat16": 6e-3}

needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_two_gpus)]


def errors(pool: Pool, logs: Path, *, size: int = 2, device: Device = "cpu", **arguments: object) -> dict[str, float]:
    """Errors of out, dq, dk, dv as rank 0 measures them."""
    config = replace(ranks_of("fsdp2", size), device=device)
    outcome = pool.run(
        key="ring", config=config, task="ring_tasks:errors", kwargs=arguments, log_dir=logs, budget_s=120.0
    )
    assert outcome.state == "done", outcome.reason
    found: dict[str, float] = outcome.results[0]
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", ["float64", "float32", exhaustive("bfloat16")])
@pytest.mark.parametrize(
    ("kind", "documents"),
    [
        ("llama3", PACKED),
        ("llama3", ROWS),
        ("ring", PACKED),
        ("ring", ROWS),
        ("zigzag", PACKED),
        ("zigzag", ROWS),
        ("torchcp", ROWS),
    ],
    ids=lambda value: value if isinstance(value, str) else "packed" if value is PACKED else "rows",
)
def test_every_ring_is_full_attention(
    request: pytest.FixtureRequest,
    pool: Pool,
    tmp_path: Path,
    kind: str,
    documents: list[list[int]],
    dtype: str,
    size: int,
    device: Device,
) -> None:
    if device == "cuda":
        request.getfixturevalue("leased_gpus")
    if device == "cuda" and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    found = errors(pool, tmp_path, kind=kind, documents=documents, dtype=dtype, size=size, device=device)
    assert max(found.values()) < HONEST[dtype], found


@pytest.mark.parametrize("window", [2, 8])
def test_gathering_is_right_with_a_sliding_window(pool: Pool, tmp_path: Path, window: int) -> None:
    found = errors(pool, tmp_path, kind="llama3", documents=PACKED, dtype="float64", window=window)
    assert max(found.values()) < HONEST["float64"], found


@pytest.mark.parametrize("seed", [7, 8, 9])
@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_gathering_is_right_with_sinks(pool: Pool, tmp_path: Path, dtype: str, window: int | None, seed: int) -> None:
    found = errors(pool, tmp_path, kind="llama3", documents=PACKED, dtype=dtype, window=window, sinks=True, seed=seed)
    assert "dsinks" in found
    assert max(found.values()) < HONEST[dtype], found


def test_heads_may_be_gathered_several_at_a_time(pool: Pool, tmp_path: Path) -> None:
    found = errors(pool, tmp_path, kind="llama3", documents=PACKED, dtype="float64", head_stride=2)
    assert max(found.values()) < HONEST["float64"], found


@pytest.mark.parametrize("documents", [PACKED, ROWS], ids=["packed", "rows"])
@pytest.mark.parametrize("kind", ["ring", "zigzag"])
@pytest.mark.parametrize(("dtype", "window"), [("float32", None), ("bfloat16", None), ("bfloat16", 8)])
def test_shipped_rings_have_the_documented_defects(
    pool: Pool, tmp_path: Path, kind: str, documents: list[list[int]], dtype: str, window: int | None
) -> None:
    """docs/findings/ring-attention-gradients.md and ring-attention-window.md"""
    found = errors(pool, tmp_path, kind=kind, documents=documents, dtype=dtype, shipped=True, window=window)
    if window:
        assert not found["out"] < 0.1  # or not a number
    elif dtype == "float32":
        assert found["out"] < HONEST[dtype]
        assert found["dq"] > 0.1
    else:
        assert max(found.values()) < HONEST[dtype], found


@pytest.mark.parametrize(("of_keys", "of_values", "width"), [(16, 16, 16), (12, 8, 16), (12, 12, 16), (24, 16, 24)])
def test_kernels_get_heads_of_a_size_that_they_take(of_keys: int, of_values: int, width: int) -> None:
    """Those of GPUs raise for others. Zeros are added, and what comes out has the size of the values."""

    class Seen(Ring):
        def __init__(self) -> None:
            pass

        def _attend(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
            assert [x.shape[-1] for x in (q, k, v)] == [width] * 3
            return v

    q, k, v = (torch.ones(1, 3, 2, size) for size in (of_keys, of_keys, of_values))
    assert torch.equal(Seen()(q, k, v, scale=1.0, window=(-1, -1)), v)


def test_kernels_get_one_dtype_and_no_autocast() -> None:
    """Autocast leaves queries and keys in float32, because rotary embeddings are, and casts products of kernels."""
    seen = set()

    class Seen(Ring):
        def __init__(self) -> None: ...

        def __call__(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
            seen.update({q.dtype, k.dtype, v.dtype, torch.is_autocast_enabled("cpu")})
            return v

    register()
    query, key = (torch.ones(1, 2, 4, 8) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        ALL_ATTENTION_FUNCTIONS[NAME](torch.nn.Module(), query, key, key.bfloat16(), None, ring=Seen())
    assert seen == {torch.bfloat16, False}


def test_the_plain_kernel_has_flash_attentions_conventions() -> None:
    """Bottom-right alignment, (heads, total) log-sum-exp; a query that sees nothing has out 0 and lse +inf."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 2, 4, generator=generator, dtype=torch.float64) for n in (5, 3, 3))
    starts_q, starts_k = torch.tensor([0, 2, 5]), torch.tensor([0, 2, 3])
    window = reference_kernel.Window(causal=True)
    out, lse = reference_kernel.forward_varlen(q, k, v, starts_q, starts_k, scale=0.5, window=window)
    expected = packed_attention(q[:2], k[:2], v[:2], lengths=[2], scale=0.5)
    torch.testing.assert_close(out[:2], expected, rtol=1e-14, atol=0)
    assert torch.equal(out[2:4], torch.zeros(2, 2, 4, dtype=torch.float64))
    assert lse.shape == (2, 5)
    assert torch.isposinf(lse[:, 2:4]).all()
    torch.testing.assert_close(out[4], v[2], rtol=1e-14, atol=0)  # the last query sees the only key


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("left", [-1, 3])
def test_the_plain_kernels_backward_is_the_derivative_of_its_forward(causal: bool, left: int) -> None:
    generator = torch.Generator().manual_seed(1)
    q, dout = (torch.randn(2, 6, 4, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(2, 6, 2, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    window = reference_kernel.Window(causal=causal, left=left)
    with exact_tier():
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out, lse = reference_kernel.forward(*leaves, scale=0.3, window=window)
        expected = torch.autograd.grad(out, leaves, dout)
        found = reference_kernel.backward(dout, q, k, v, out, lse, scale=0.3, window=window)
    for x, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(x, reference, rtol=1e-12, atol=1e-13)


def test_plain_attention_is_one_operator_for_a_dispatch_mode() -> None:
    """The watch of a rank is called for each operator, and costs more than most products of a tiny model."""

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(5, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    starts, options = torch.tensor([0, 2, 5]), (0.0, 0.3, True)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    with Names():  # type: ignore[no-untyped-call]
        out, lse, _, _ = flash_attn_shim._flash_attn_varlen_forward(q, k, v, starts, starts, 3, 3, *options)
        flash_attn_shim._flash_attn_varlen_backward(q, q, k, v, out, lse, dq, dk, dv, starts, starts, 3, 3, *options)
    assert names == ["parity::attention", "parity::attention_backward", *["aten::copy_"] * 3]
    torch.testing.assert_close(out, packed_attention(q, k, v, lengths=[2, 3], scale=0.3), rtol=1e-14, atol=1e-15)


SPLITS: list[tuple[SplitMode, bool]] = [("slices", False), ("documents", False), ("documents", True), ("rows", True)]


def micro_batch() -> MicroBatch:
    """Two rows of 5 + 4 and 3 tokens, numbered from 1; columns of a number per token and of one per document."""
    numbers = iter(range(1, 100))

    def document(length: int) -> Document:
        tokens = tuple(next(numbers) for _ in range(length))
        columns: dict[str, Column] = {"per_token": tuple(token / 8 for token in tokens), "per_document": -float(length)}
        return Document(tokens, (False, *(True,) * (length - 1)), columns)

    documents = [document(length) for length in (5, 4, 3)]
    return collate((Row(0, tuple(documents[:2])), Row(1, (documents[2],))))


def tokens_of(
    inputs: MicroBatch, split: SplitMode, *, size: int, zigzag: bool = False, multiple: int = 1
) -> list[list[list[int]]]:
    source = place(inputs, split=split, size=size, zigzag=zigzag, multiple=multiple).source
    return [shard_inputs(inputs, part).tokens.tolist() for part in source]


def test_slices_are_cut_across_documents() -> None:
    assert tokens_of(micro_batch(), "slices", size=2) == [[[1, 2, 3, 4, 5, 6]], [[7, 8, 9, 10, 11, 12]]]
    five = tokens_of(micro_batch(), "slices", size=5)
    assert five == [[[1, 2, 3]], [[4, 5, 6]], [[7, 8, 9]], [[10, 11, 12]], [[0, 0, 0]]]


def test_documents_are_cut_into_equal_pieces() -> None:
    in_order = [[[1, 2, 3, 6, 7, 10, 11]], [[4, 5, 0, 8, 9, 12, 0]]]
    assert tokens_of(micro_batch(), "documents", size=2) == in_order
    zigzag = [[[1, 2, 0, 0, 6, 9, 10, 0]], [[3, 4, 5, 0, 7, 8, 11, 12]]]
    assert tokens_of(micro_batch(), "documents", size=2, zigzag=True) == zigzag


def test_rows_are_cut_as_a_whole() -> None:
    zigzag = [[[1, 2, 3, 0, 0, 0], [10, 11, 12, 0, 0, 0]], [[4, 5, 6, 7, 8, 9], [0, 0, 0, 0, 0, 0]]]
    assert tokens_of(micro_batch(), "rows", size=2, zigzag=True) == zigzag


def test_a_rank_holds_a_multiple_of_tokens() -> None:
    splits: tuple[SplitMode, ...] = ("slices", "documents", "rows")
    for split in splits:
        for part in tokens_of(micro_batch(), split, size=2, multiple=32):
            assert {len(row) for row in part} == {32}


@pytest.mark.parametrize(("split", "zigzag"), SPLITS)
@pytest.mark.parametrize("size", [2, 3, 8])
def test_ring_sharding_puts_each_target_on_one_rank(split: SplitMode, zigzag: bool, size: int) -> None:
    inputs = micro_batch()
    source = place(inputs, split=split, size=size, zigzag=zigzag, multiple=1).source
    shards = [shard_inputs(inputs, part) for part in source]
    rows, length = inputs.labels.shape
    for name in ("tokens", "labels", "positions"):
        parts = torch.stack([getattr(shard, name) for shard in shards])
        whole = restore(parts, source, rows=rows, length=length)
        assert torch.equal(whole[inputs.real], getattr(inputs, name)[inputs.real])
        if split != "rows":  # rows are cut with their padding
            assert not whole[~inputs.real].any()
    targets = sum(int((shard.labels != NO_TARGET).sum()) for shard in shards)
    assert targets == int((inputs.labels != NO_TARGET).sum())


@pytest.mark.parametrize(("split", "zigzag"), SPLITS)
@pytest.mark.parametrize("size", [2, 3, 8])
def test_columns_travel_with_their_tokens_whatever_they_are_called(split: SplitMode, zigzag: bool, size: int) -> None:
    inputs = micro_batch()
    source = place(inputs, split=split, size=size, zigzag=zigzag, multiple=1).source
    shards = [shard_inputs(inputs, part) for part in source]
    rows, length = inputs.labels.shape
    for name, column in inputs.columns.items():
        parts = torch.stack([shard.columns[name] for shard in shards])
        assert torch.equal(restore(parts, source, rows=rows, length=length)[inputs.real], column[inputs.real])
        assert not parts[source < 0].any()
    for shard in shards:  # number i of a document is that of its token i, so it stands where token i is the label
        assert list(shard.columns) == ["per_token", "per_document"]
        assert torch.equal(shard.columns["per_token"][shard.targets] * 8, shard.labels[shard.targets].float())


@pytest.mark.parametrize(("split", "zigzag"), SPLITS)
def test_whoever_cuts_and_restores_reads_nothing_from_the_device(split: SplitMode, zigzag: bool) -> None:
    """The host would wait for it. Tensors without numbers, as here, fail for whoever reads one or asks for a size."""
    inputs = micro_batch()
    rows, length = inputs.labels.shape
    source = place(inputs, split=split, size=2, zigzag=zigzag, multiple=1).source
    with FakeTensorMode(allow_non_fake_inputs=True):
        shards = [shard_inputs(inputs, part) for part in source]
        parts = torch.stack([shard.tokens.float() for shard in shards]).requires_grad_()
        restore(parts, source, rows=rows, length=length).sum().backward()
        assert parts.grad is not None


@pytest.mark.parametrize(("dp", "size"), [(1, 2), (2, 2), (1, 4), (4, 2), (1, 8)])
def test_the_data_has_what_rings_get_wrong(dp: int, size: int) -> None:
    """Documents and targets across edges, lengths that the ring does not divide, shards without a single target."""
    scenario = make_cell("sft-packed", "llama", f"dp{dp}.sp{size}", "exact").scenario
    seen = dict.fromkeys(("document", "target", "length", "empty"), 0)
    micro_batches = [
        rows
        for batch in build_batches(scenario, resolve(scenario.model))
        for rank in range(dp)
        for rows in batch.micro_batches(dp_rank=rank, dp_size=dp, accumulation=scenario.accumulation)
    ]
    for rows in micro_batches:
        inputs = collate(rows)
        source = place(inputs, split="slices", size=size, zigzag=False, multiple=1).source
        shards = [shard_inputs(inputs, part) for part in source]
        seen["document"] += sum(int(shard.positions[0, 0]) > 0 for shard in shards[1:])
        seen["target"] += sum(int(shard.labels[0, -1]) != NO_TARGET for shard in shards[:-1])
        seen["length"] += int(inputs.real.sum()) % size > 0
        seen["empty"] += sum(bool((shard.labels == NO_TARGET).all()) for shard in shards)
    assert min(seen.values()) > 0, seen
