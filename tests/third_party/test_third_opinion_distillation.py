"""A third opinion on distillation: divergences and gradients of the oracle and of impl agree with those of TRL and verl
on random logits, in float64."""

import random
from types import SimpleNamespace

import pytest
import torch
from rl_libraries import NoFloat32, float64_by_default, taken_out
from torch import Tensor
from torch.nn import functional

from conformance.oracle.distillation import DistillationFunctions as Oracle
from conformance.spec.batch import Batch, Document, Row
from conformance.spec.supervised import Distillation
from impl.interface.micro_batches import collate
from impl.models.outputs import divergence_of

VOCABULARY = 11


def documents_of(seed: int) -> list[Document]:
    rng = random.Random(seed)
    lengths = [rng.randint(2, 9) for _ in range(4)]
    return [
        Document(
            tuple(rng.randrange(VOCABULARY) for _ in range(length)),
            (False, *(rng.random() < 0.7 for _ in range(length - 2)), True),
        )
        for length in lengths
    ]


def both_sides(seed: int, objective: Distillation) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """(loss, student, teacher, targets) by the oracle and by impl; logits (T, V) of all documents, in one row."""
    documents = documents_of(seed)
    generator, length = torch.Generator().manual_seed(seed), sum(len(d.tokens) for d in documents)
    student, teacher = (torch.randn(length, VOCABULARY, dtype=torch.float64, generator=generator) for _ in range(2))
    student.requires_grad_()
    row = Row(0, tuple(documents))
    inputs = collate([row])
    totals = {"token_count": float(row.target_count)}
    functions, start, terms = Oracle(objective), 0, []
    assert functions.totals(Batch(0, length, (row,))) == totals
    for document in documents:
        own, frozen = (z[start : start + len(document.tokens)] for z in (student, teacher))
        start += len(document.tokens)
        term = functions.term("policy", own, document, totals=totals, earlier={"teacher": frozen}, stable=torch.float64)
        assert term.loss is not None
        terms.append(term.loss)
    inputs.kept["distribution"] = teacher[None]
    found = divergence_of(student[None], inputs, objective, None)
    targets = inputs.targets[0]
    return [
        (torch.stack(terms).sum(), student, teacher, targets),
        (found.sum() / row.target_count, student, teacher, targets),
    ]


def agree(objective: Distillation, seed: int, theirs: Tensor, student: Tensor, own: Tensor) -> None:
    assert own.item() == pytest.approx(theirs.item(), rel=1e-12, abs=1e-13), (objective, seed)
    gradients = [torch.autograd.grad(loss, student, retain_graph=True)[0] for loss in (own, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_divergences_of_trl(beta: float, temperature: float) -> None:
    method = taken_out("trl", "trl/experimental/gkd/gkd_trainer.py", "GKDTrainer.generalized_jsd_loss", F=functional)
    objective = Distillation(beta=beta, temperature=temperature)
    for seed in range(5):
        for own, student, teacher, targets in both_sides(seed, objective):
            theirs = method(
                student[targets][None], teacher[targets][None], beta=beta, temperature=temperature,
                num_items_in_batch=targets.sum(),
            )  # fmt: skip
            agree(objective, seed, theirs, student, own)


@pytest.mark.parametrize("top_k", [3, VOCABULARY])
def test_top_k_of_verl_keeps_probabilities(top_k: int) -> None:
    known = {"F": functional, "get_ulysses_sequence_parallel_world_size": lambda: 1}
    file = "verl/trainer/distillation/fsdp/losses.py"
    known["kl_divergence"] = taken_out("verl", file, "kl_divergence")
    method = taken_out("verl", file, "compute_forward_kl_topk", **known)
    objective = Distillation(beta=0.0, top_k=top_k, renormalise_top_k=False)
    config = SimpleNamespace(distillation_loss=SimpleNamespace(log_prob_min_clamp=None))
    for seed in range(5):
        for own, student, teacher, targets in both_sides(seed, objective):
            with NoFloat32(), float64_by_default():
                log_p, ids = teacher[targets].log_softmax(-1).topk(top_k, dim=-1)
                nested = (torch.nested.as_nested_tensor([one], layout=torch.jagged) for one in (log_p, ids))
                theirs = method(student[targets][None], *nested, config, "thd")["distillation_losses"].mean()
            agree(objective, seed, theirs, student, own)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_all_tokens_as_top_k_are_the_whole_vocabulary(beta: float) -> None:
    whole, part = (both_sides(0, Distillation(beta=beta, top_k=count)) for count in (None, VOCABULARY))
    assert [one[0].item() for one in part] == pytest.approx([one[0].item() for one in whole], rel=1e-13)


def test_renormalised_top_k_by_hand() -> None:
    objective = Distillation(beta=0.0, temperature=2.0, top_k=2)
    for own, student, teacher, targets in both_sides(1, objective):
        ids = teacher[targets].topk(2).indices
        log_q, log_p = ((z[targets] / 2).gather(1, ids).log_softmax(-1) for z in (student, teacher))
        agree(objective, 1, functional.kl_div(log_q, log_p, reduction="batchmean", log_target=True), student, own)
