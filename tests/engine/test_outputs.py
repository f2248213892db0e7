"""Log-probs and entropy from logits: against plain autograd in float64, on whole logits and on vocabulary shards."""

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import ranks_of
from output_tasks import example, plain_statistics, with_ties
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.oracle.objectives import DistillationFunctions
from conformance.runtime import Pool
from conformance.spec.batch import Document
from conformance.spec.offline import Distillation
from impl.interface.micro_batches import Outputs
from impl.models import outputs
from impl.models.outputs import divergences, token_statistics

HONEST = 1e-15  # relative, in float64


def both(statistics: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy, where both were asked for."""
    logprobs, entropy = statistics
    assert entropy is not None
    return logprobs, entropy


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def assert_close(found: Sequence[Tensor | None], expected: Sequence[Tensor], limit: float) -> None:
    for output, reference in zip(found, expected, strict=True):
        assert output is not None
        assert error(output, reference) < limit


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=["log-probs", "entropy", "both"])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
def test_outputs_and_gradients_are_those_of_log_softmax(temperature: float, used: tuple[int, ...]) -> None:
    given = example(11)
    logits = given["logits"].requires_grad_()
    expected = plain_statistics(logits, given["labels"], temperature)
    found = token_statistics(logits, given["labels"], temperature=temperature)
    gradients = []
    for statistics in (found, expected):
        parts = [both(statistics)[i] * given["upstream"][i] for i in used]
        loss = torch.stack([part.sum() for part in parts]).sum()
        gradients.append(torch.autograd.grad(loss, logits)[0])
    assert_close([found[i] for i in used], [expected[i] for i in used], HONEST)
    assert error(*gradients) < HONEST


def test_several_uses_of_both_outputs_add_up() -> None:
    given = example(11)
    logits = given["logits"].requires_grad_()

    def loss(logp: Tensor, entropy: Tensor | None) -> Tensor:
        assert entropy is not None
        return (logp.exp() * entropy).sum() + (logp * entropy.square()).sum() - entropy.sum()

    found = torch.autograd.grad(loss(*token_statistics(logits, given["labels"], temperature=0.7)), logits)
    expected = torch.autograd.grad(loss(*plain_statistics(logits, given["labels"], 0.7)), logits)
    assert error(found[0], expected[0]) < HONEST


def test_without_entropy_log_probs_and_their_gradient_are_the_same() -> None:
    given = example(11)
    logits = given["logits"].requires_grad_()
    logp, entropy = token_statistics(logits, given["labels"], temperature=0.7, entropy=False)
    with_entropy, _ = token_statistics(logits, given["labels"], temperature=0.7)
    assert entropy is None
    assert torch.equal(logp, with_entropy)
    gradients = [torch.autograd.grad(x, logits, given["upstream"][0])[0] for x in (logp, with_entropy)]
    assert torch.equal(*gradients)


def test_where_there_is_no_target_outputs_and_gradients_are_zero() -> None:
    given = example(11)
    logits = given["logits"].requires_grad_()
    found = token_statistics(logits, given["labels"])
    (gradient,) = torch.autograd.grad(both(found), logits, tuple(given["upstream"]))
    nothing = given["labels"] < 0
    assert nothing.any()
    for tensor in (*found, gradient):
        assert tensor is not None
        assert not tensor[nothing].any()
        assert tensor[~nothing].all()


def test_logits_stay_as_they_are_and_backward_can_run_twice() -> None:
    given = example(11)
    logits = given["logits"].clone().requires_grad_()
    found = token_statistics(logits, given["labels"])
    twice = [torch.autograd.grad(both(found), logits, tuple(given["upstream"]), retain_graph=True)[0] for _ in range(2)]
    assert torch.equal(logits, given["logits"])
    assert torch.equal(*twice)


def test_a_second_derivative_is_refused_and_not_wrong() -> None:
    given = example(11)
    logits = given["logits"].requires_grad_()
    logp, _ = token_statistics(logits, given["labels"])
    (gradient,) = torch.autograd.grad(logp.square().sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_of_low_precision_give_float32_and_gradients_of_their_own_dtype(dtype: torch.dtype) -> None:
    given = example(11, dtype)
    labels, upstream = given["labels"], given["upstream"]
    logits = given["logits"].requires_grad_()
    found = token_statistics(logits, labels, temperature=0.7)
    (gradient,) = torch.autograd.grad(both(found), logits, tuple(upstream.float()))
    wide = logits.detach().double().requires_grad_()
    expected = plain_statistics(wide, labels, 0.7)
    (expected_gradient,) = torch.autograd.grad(expected, wide, tuple(upstream))
    for output, reference in zip(found, expected, strict=True):
        assert output is not None
        assert output.dtype == torch.float32
        assert error(output, reference) < 1e-6
    assert gradient.dtype == dtype
    rounding = max(1e-6, torch.finfo(dtype).eps)
    assert error(gradient, expected_gradient) < rounding


def test_logits_far_from_zero_lose_no_digits() -> None:
    given = example(11, torch.float32)
    moved = (given["logits"] * 2**10).round() / 2**10 + 2**12  # exact in float32
    found = token_statistics(moved, given["labels"])
    expected = plain_statistics(moved.double(), given["labels"], 1.0)
    assert_close(found, expected, 1e-6)


def test_a_masked_logit_counts_for_nothing() -> None:
    given = example(11)
    labels = given["labels"] % 7
    logits = given["logits"].clone()
    logits[..., 7:] = -torch.inf
    logits.requires_grad_()
    kept = given["logits"][..., :7].clone().requires_grad_()
    found = token_statistics(logits, labels, temperature=0.7)
    expected = plain_statistics(kept, labels, 0.7)
    upstream = tuple(1e3 * given["upstream"])
    (gradient,) = torch.autograd.grad(both(found), logits, upstream)
    (expected_gradient,) = torch.autograd.grad(expected, kept, upstream)
    assert_close(found, expected, HONEST)
    assert error(gradient[..., :7], expected_gradient) < HONEST
    assert not gradient[..., 7:].any()


def test_a_masked_label_has_no_probability() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 1.0]], dtype=torch.float64)
    logp, _ = token_statistics(logits, torch.tensor([1]))
    assert logp.item() == -torch.inf


class _Largest(TorchDispatchMode):
    """How many tensors of at least ``elements`` that were made inside were alive at the same time."""

    def __init__(self, elements: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._elements, self._alive, self.most = elements, set[int](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {x.untyped_storage()._cdata for x in args if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel() >= self._elements:
            storage = result.untyped_storage()
            if storage._cdata not in before | self._alive:  # neither in place nor a view
                self._alive.add(storage._cdata)
                weakref.finalize(storage, self._alive.discard, storage._cdata)
                self.most = max(self.most, len(self._alive))
        return result

    @property
    def held(self) -> int:
        return len(self._alive)


@pytest.mark.parametrize("tokens_at_once", [1, 2, 5])
@pytest.mark.parametrize("entropy", [False, True])
def test_token_statistics_in_chunks_equal_whole(
    monkeypatch: pytest.MonkeyPatch, entropy: bool, tokens_at_once: int
) -> None:
    given = example(11, torch.bfloat16)
    logits, watch = given["logits"].requires_grad_(), _Largest(given["logits"].numel())
    upstream = tuple(given["upstream"].float()[: 1 + entropy])

    def run() -> tuple[Tensor, ...]:
        found = [
            x for x in token_statistics(logits, given["labels"], temperature=0.7, entropy=entropy) if x is not None
        ]
        return *found, *torch.autograd.grad(found, logits, upstream)

    whole = run()
    monkeypatch.setattr("impl.models.outputs.WIDENED_AT_ONCE", tokens_at_once * 11 + 1)
    with watch:
        parts = run()
    assert all(map(torch.equal, parts, whole))
    assert watch.most == 1  # the gradient


@pytest.mark.parametrize("real", [1, 7, 10, 11])
def test_padding_of_the_vocabulary_takes_no_part(real: int) -> None:
    given = example(11)
    labels = given["labels"] % real
    logits = given["logits"].requires_grad_()
    found = both(token_statistics(logits, labels, vocab_size=real))
    expected = both(token_statistics(logits[..., :real], labels))
    gradients = [torch.autograd.grad(x, logits, tuple(given["upstream"]))[0] for x in (found, expected)]
    assert all(map(torch.equal, (*found, gradients[0]), (*expected, gradients[1])))
    assert not gradients[0][..., real:].any()


@pytest.mark.parametrize(("entropy", "most"), [(False, 1), (True, 2)])
def test_token_statistics_makes_one_copy_of_logits(entropy: bool, most: int) -> None:
    given = example(11, torch.bfloat16)
    logits = given["logits"].requires_grad_()
    watch = _Largest(logits.numel())
    with watch:
        found = [x for x in token_statistics(logits, given["labels"], entropy=entropy) if x is not None]
        assert watch.most == most
        assert watch.held == 0
        torch.autograd.backward(found, tuple(given["upstream"].float()[: len(found)]))
    assert watch.most <= most + 1  # the gradient in bfloat16


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels run on a GPU")
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("real", [9000, 8999, 1])
def test_kernels_compute_what_pytorchs_operations_do(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, temperature: float, entropy: bool, real: int
) -> None:
    given = {name: x.cuda() for name, x in example(9000, dtype).items()}
    logits, labels = given["logits"].requires_grad_(), given["labels"] % real
    assert outputs._kernels(logits), "Triton is missing, or a C compiler"
    upstream = tuple(given["upstream"].float()[: 1 + entropy])

    def run() -> list[Tensor]:
        both = token_statistics(logits, labels, temperature=temperature, vocab_size=real, entropy=entropy)
        found = [x for x in both if x is not None]
        return [*found, *torch.autograd.grad(found, logits, upstream)]

    fused = run()
    monkeypatch.setattr(outputs, "_kernels", lambda z: None)
    *plain, gradient = run()
    for ours, theirs in zip(fused[:-1], plain, strict=True):
        assert (ours - theirs).abs().max() < 1e-6 * theirs.abs().max().clamp(min=1)
    assert (fused[-1] - gradient).norm() <= torch.finfo(dtype).eps / 2 * gradient.norm()
    assert not fused[-1][..., real:].any()


def test_detached_outputs_have_the_same_numbers_and_no_graph() -> None:
    values = torch.ones(2, 3, requires_grad=True) * 2
    detached = Outputs(values=values).detach()
    assert detached.logprobs is None
    assert detached.values is not None
    assert torch.equal(detached.values, values)
    assert not detached.values.requires_grad


Run = Callable[..., list[Any]]


@pytest.fixture
def run_ranks(pool: Pool, tmp_path: Path) -> Run:
    def run(task: str, sizes: list[int], **arguments: Any) -> list[Any]:
        config, kwargs, task = ranks_of("fsdp2", len(sizes)), {"sizes": sizes, **arguments}, f"output_tasks:{task}"
        outcome = pool.run(key="outputs", config=config, task=task, kwargs=kwargs, log_dir=tmp_path, budget_s=60)
        assert outcome.state == "done", outcome.reason
        return outcome.results

    return run


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("sizes", [[6, 5], [1, 10], [11, 0], [4, 4, 3], [2, 2, 0], [0, 7, 1]], ids=str)
def test_shards_of_the_vocabulary_are_the_whole(
    run_ranks: Run, sizes: list[int], temperature: float, entropy: bool
) -> None:
    results = run_ranks("shard_errors", sizes, temperature=temperature, entropy=entropy, masked=[])
    assert max(error for result in results for error in result["errors"]) < HONEST
    assert all(result["outputs"] == results[0]["outputs"] for result in results)


@pytest.mark.parametrize("masked", [[2], [0, 1, 2, 3], [4, 10]], ids=str)
def test_masked_logits_of_shards_do_not_count(run_ranks: Run, masked: list[int]) -> None:
    results = run_ranks("shard_errors", [4, 4, 3], temperature=1.0, entropy=True, masked=masked)
    assert max(error for result in results for error in result["errors"]) < HONEST


@pytest.mark.parametrize("top_k", [1, 3, 6, 10])
def test_of_equal_logits_of_a_teacher_the_first_ones_are_among_the_top_k(run_ranks: Run, top_k: int) -> None:
    """For backends, on the whole vocabulary and on shards of it, and for the oracle."""
    student, teacher = with_ties(11)
    objective = Distillation(top_k=top_k)
    whole = divergences(student, teacher, objective, None)
    equal = (teacher == teacher.topk(top_k).values[:, -1:]).sum(-1)
    assert (equal > 1).any()
    document = Document((0,) * 22, (False, *(True,) * 21))
    logits = (torch.cat([z, z[:1]]) for z in (student, teacher))
    of_oracle = DistillationFunctions(objective).term(
        "policy",
        next(logits),
        document,
        totals={"token_count": 21.0},
        earlier={"teacher": next(logits)},
        stable=torch.float32,
    )
    torch.testing.assert_close(whole, of_oracle.rows["divergence"], rtol=1e-5, atol=1e-6)
    for sizes in ([6, 5], [1, 10], [4, 4, 3]):
        for shard in run_ranks("shards_with_ties", sizes, top_k=top_k):
            torch.testing.assert_close(torch.tensor(shard), whole, rtol=1e-5, atol=1e-6)
