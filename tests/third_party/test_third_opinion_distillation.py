"""A third opinion on distillation and dynamic fine-tuning: losses and gradients of the oracle and of impl agree with
those of TRL and verl on random logits, in float64."""

import random
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version
from rl_libraries import NoFloat32, float64_by_default, taken_out
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from conformance.oracle.objectives import DistillationFunctions as Oracle
from conformance.oracle.objectives import functions_of as oracle_of
from conformance.spec.batch import Batch, Document, Row
from conformance.spec.offline import Dft, Distillation
from impl.interface.micro_batches import Outputs, collate
from impl.models.outputs import divergence_of
from impl.objectives.policy_gradient import functions_of as impl_of

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
    assert [one[0].item() for one in part] == pytest.approx([one[0].item() for one in whole], rel=1e-13, abs=0)


def test_renormalised_top_k_by_hand() -> None:
    objective = Distillation(beta=0.0, temperature=2.0, top_k=2)
    for own, student, teacher, targets in both_sides(1, objective):
        ids = teacher[targets].topk(2).indices
        log_q, log_p = ((z[targets] / 2).gather(1, ids).log_softmax(-1) for z in (student, teacher))
        agree(objective, 1, functional.kl_div(log_q, log_p, reduction="batchmean", log_target=True), student, own)


def dft_of_oracle(documents: list[Document], logits: list[Tensor]) -> Tensor:
    functions = oracle_of(Dft())
    totals = functions.totals(Batch(0, 100, (Row(0, tuple(documents)),)))
    terms = [
        functions.term("policy", one, document, totals=totals, earlier={}, stable=torch.float64).loss
        for document, one in zip(documents, logits, strict=True)
    ]
    return torch.stack([term for term in terms if term is not None]).sum()


def dft_of_impl(documents: list[Document], logits: list[Tensor]) -> Tensor:
    """In two micro-batches of one row with two packed documents."""
    functions: Any = impl_of(Dft())
    rows = [Row(n, tuple(documents[2 * n : 2 * n + 2])) for n in range(2)]
    totals = {key: torch.tensor(number) for key, number in functions.totals(rows).items()}
    losses = []
    for row in rows:
        inputs = collate([row])
        distributions = torch.cat(logits[2 * row.index : 2 * row.index + 2]).log_softmax(-1)
        found = distributions.gather(1, inputs.labels[0, :, None].clamp(min=0)).T.where(inputs.targets, 0)
        outputs = Outputs(logprobs=found, targets=inputs.targets.double())
        losses.append(functions.evaluate("policy", outputs, inputs, totals=totals, others={}).loss)
    return torch.stack(losses).sum()


def padded(documents: list[Document]) -> Tensor:
    """The labels of documents as TRL has them, (documents, length): -100 for a token that is not a target."""
    labels = [torch.tensor(d.tokens).where(torch.tensor(d.targets), -100) for d in documents]
    return pad_sequence(labels, batch_first=True, padding_value=-100)


def dft_of_trl_function(documents: list[Document], logits: list[Tensor], count: Tensor | None) -> Tensor:
    """TRL 1.9.2: a function of logits and labels."""
    softmax = taken_out("trl==1.9.2", "trl/trainer/utils.py", "selective_log_softmax", F=functional)
    known = {"nn": torch.nn, "selective_log_softmax": softmax}
    function = taken_out("trl==1.9.2", "trl/trainer/sft_trainer.py", "dft_loss", **known)
    outputs = SimpleNamespace(logits=pad_sequence(logits, batch_first=True))
    loss: Tensor = function(outputs, padded(documents), num_items_in_batch=count)
    return loss


def dft_of_trl_method(documents: list[Document], logits: list[Tensor], count: Tensor | None) -> Tensor:
    """TRL 1.16.0: a method that gets the log-probs of targets, zero elsewhere, from its model."""
    labels = padded(documents)[:, 1:]
    distributions = pad_sequence(logits, batch_first=True)[:, :-1].log_softmax(-1)
    logprobs = distributions.gather(2, labels[..., None].clamp(min=0))[..., 0].where(labels != -100, 0)
    nothing = torch.zeros_like(labels)
    outputs = SimpleNamespace(log_probs=logprobs, label_mask=labels != -100, entropy=nothing, is_top1=nothing)
    self = SimpleNamespace(
        **{"model": SimpleNamespace(training=True), "compute_loss_func": None, "label_smoother": None},
        **{"aux_loss_enabled": False, "_tp_size": 1, "_total_train_tokens": 0},
        _metrics={"train": defaultdict(list)},
        args=SimpleNamespace(loss_type="dft", average_tokens_across_devices=True),
        accelerator=SimpleNamespace(parallelism_config=None, num_processes=1, gather_for_metrics=lambda x: x),
        get_tp_size=lambda: 1,
    )
    known = {"Version": Version, "accelerate": SimpleNamespace(__version__="1.12.0")}
    method = taken_out("trl", "trl/trainer/sft_trainer.py", "SFTTrainer.compute_loss", **known)
    inputs = {"attention_mask": torch.ones_like(labels)}
    loss: Tensor = method(self, lambda **_: outputs, inputs, num_items_in_batch=count)
    return loss


@pytest.mark.parametrize("trl", [dft_of_trl_function, dft_of_trl_method])
@pytest.mark.parametrize("counted", [True, False])
def test_dynamic_fine_tuning_of_trl(trl: Any, *, counted: bool) -> None:
    """Counted: in micro-batches that get the number of targets of the whole step. Otherwise the step is one of them."""
    for seed in range(5):
        documents, generator = documents_of(seed), torch.Generator().manual_seed(seed)
        together = torch.randn(
            sum(len(d.tokens) for d in documents), VOCABULARY, dtype=torch.float64, generator=generator
        ).requires_grad_()
        logits = list(together.split([len(d.tokens) for d in documents]))
        if counted:
            count = torch.tensor(sum(sum(d.targets) for d in documents))
            parts = [trl(documents[at : at + 2], logits[at : at + 2], count) for at in (0, 2)]
            theirs = torch.stack(parts).sum()
        else:
            theirs = trl(documents, logits, None)
        for ours in (dft_of_oracle, dft_of_impl):
            own = ours(documents, logits)
            assert own.item() == pytest.approx(theirs.item(), rel=1e-12, abs=0), (ours.__name__, seed)
            gradients = [torch.autograd.grad(loss, together, retain_graph=True)[0] for loss in (own, theirs)]
            torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-13)
