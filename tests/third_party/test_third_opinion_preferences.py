"""A third opinion on preferences, rewards of answers and steps, and KTO: losses and gradients of the oracle and of impl
agree with TRL and OpenRLHF on random pairs, in float64, one document at a time and in micro-batches of packed rows."""

import math
import random
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rl_calls import trl_kto
from rl_libraries import NoFloat32, float64_by_default, load, taken_out
from torch import Tensor
from torch.nn import functional
from transformers.loss.loss_utils import ForTokenClassification

from conformance.core.host import FIXTURES
from conformance.data.forms import pair
from conformance.data.tokenizer import encode, load_tokenizer
from conformance.oracle.objectives import functions_of as oracle_of
from conformance.spec.batch import Batch, Document, Row
from conformance.spec.offline import LABEL, MARGIN, Dpo, Kto, ProcessRewardModel, RewardModel
from impl.interface.micro_batches import MicroBatch, Outputs, collate
from impl.objectives.policy_gradient import functions_of as impl_of

VOCABULARY = 7


@dataclass(frozen=True)
class Case:
    """A step of whole pairs, two in each row but the last.

    logits, reference: (T, VOCABULARY) by document, or of a reward model's one column.
    """

    batch: Batch
    logits: list[Tensor]
    reference: list[Tensor]
    role: str

    @property
    def answers(self) -> list[tuple[Tensor, Tensor]]:
        """The policy's and the reference's log-probs of the targets of each document, chosen and rejected in turn."""
        pairs = zip(self.batch.documents, self.logits, self.reference, strict=True)
        return [(_targets(document, own), _targets(document, frozen)) for document, own, frozen in pairs]

    @property
    def steps(self) -> tuple[Tensor, Tensor]:
        """The values and the labels of all steps, (steps,)."""
        ends = [torch.tensor(document.targets) for document in self.batch.documents]
        labels = [torch.tensor(document.columns[LABEL]).double() for document in self.batch.documents]
        return (
            torch.cat([one[at, 0] for one, at in zip(self.logits, ends, strict=True)]),
            torch.cat([one[at] for one, at in zip(labels, ends, strict=True)]),
        )


def _logprobs(document: Document, logits: Tensor) -> Tensor:
    """log p of each token but the first, (T - 1,)."""
    return logits[:-1].log_softmax(-1).gather(1, torch.tensor(document.tokens[1:])[:, None])[:, 0]


def _targets(document: Document, logits: Tensor) -> Tensor:
    return _logprobs(document, logits)[torch.tensor(document.targets[1:])]


def case_of(seed: int, objective: Any) -> Case:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    documents = []
    for number in range(5):
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 4))]
        columns: dict[str, Any] = {MARGIN: number / 2, LABEL: float(number in (0, 3, 4))}
        for _ in range(2):
            answer = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 6))]
            mask = [True] + [rng.random() < 0.8 for _ in answer[1:]]  # a tool's answer may stand inside
            if isinstance(objective, ProcessRewardModel):
                columns = {LABEL: tuple(rng.randrange(3) / 2 for _ in (*prompt, *answer))}
            documents.append(Document((*prompt, *answer), (*(False for _ in prompt), *mask), columns))
    rows = tuple(Row(n, tuple(documents[4 * n : 4 * n + 4])) for n in range(3))
    (batch,) = objective.annotate([Batch(0, 100, rows)])
    role = objective.roles[-1]
    width = 1 if role.head == "value" else VOCABULARY
    logits, reference = (
        [torch.randn(len(d.tokens), width, dtype=torch.float64, generator=generator) for d in documents]
        for _ in range(2)
    )
    return Case(batch, [one.requires_grad_() for one in logits], reference, role.name)


def loss_of_oracle(case: Case, objective: Any) -> Tensor:
    functions: Any = oracle_of(objective)
    documents = case.batch.documents
    outputs = [{case.role: own, "reference": frozen} for own, frozen in zip(case.logits, case.reference, strict=True)]
    for document, both in zip(documents, outputs, strict=True) if hasattr(functions, "see") else ():
        functions.see(document, {role: one.detach() for role, one in both.items()}, stable=torch.float64)
    totals, recorded, minimised = functions.totals(case.batch), 0.0, torch.zeros((), dtype=torch.float64)
    for document, both in zip(documents, outputs, strict=True):
        term = functions.term(
            case.role,
            both[case.role],
            document,
            totals=totals,
            earlier={"reference": both["reference"]},
            stable=torch.float64,
        )
        assert term.loss is not None
        recorded += term.values.get("loss", 0.0)
        minimised = minimised + term.loss
    # Both answers of a pair have its loss, each with the gradient of its own score.
    return minimised - minimised.detach() + recorded


def loss_of_impl(case: Case, objective: Any) -> Tensor:
    functions: Any = impl_of(objective)
    totals = {key: torch.tensor(number) for key, number in functions.totals(case.batch.rows).items()}
    micro_batches = [packed(case, rows) for rows in (case.batch.rows[:2], case.batch.rows[2:])]
    if hasattr(functions, "ahead"):
        parts = [functions.ahead(own, inputs, totals=totals, others=others) for inputs, own, others in micro_batches]
        totals |= {key: torch.stack([part[key] for part in parts]).sum().detach() for key in parts[0]}
    losses = [
        functions.evaluate(case.role, own, inputs, totals=totals, others=others).loss
        for inputs, own, others in micro_batches
    ]
    return torch.stack(losses).sum()


def packed(case: Case, rows: tuple[Row, ...]) -> tuple[MicroBatch, Outputs, dict[str, Outputs]]:
    """The micro-batch of some rows, and the outputs of the trained and of the frozen model."""
    inputs = collate(rows)
    own, frozen = (torch.zeros(inputs.tokens.shape, dtype=torch.float64) for _ in range(2))
    for r, row in enumerate(rows):
        start = 0
        for document in row.documents:
            at, length = case.batch.documents.index(document), len(document.tokens)
            if case.role == "reward":
                own[r, start : start + length] = case.logits[at][:, 0]
            else:
                own[r, start : start + length - 1] = _logprobs(document, case.logits[at])
                frozen[r, start : start + length - 1] = _logprobs(document, case.reference[at])
            start += length
    if case.role == "reward":
        return inputs, Outputs(values=own), {}
    own, frozen = (numbers.where(inputs.targets, 0) for numbers in (own, frozen))
    return (
        inputs,
        Outputs(logprobs=own, targets=inputs.targets.double()),
        {"reference": Outputs(logprobs=frozen)},
    )


def agree(objective: Any, theirs: Any) -> None:
    """Losses and gradients of both sides are those of ``theirs``, on ten random steps.

    It gets the answers' log-probs, or the last values of a reward model, chosen and rejected in turn; of a process
    reward model, the values and labels of all steps.
    """
    for seed in range(10):
        case = case_of(seed, objective)
        if isinstance(objective, ProcessRewardModel):
            wanted = theirs(*case.steps)
        else:
            wanted = theirs([one[-1, 0] for one in case.logits] if case.role == "reward" else case.answers)
        gradients = _gradients(wanted, case)
        for mine in (loss_of_oracle, loss_of_impl):
            with float64_by_default():
                loss = mine(case, objective)
            assert loss.item() == pytest.approx(wanted.item(), rel=1e-12, abs=1e-12), mine.__name__
            for own, other in zip(_gradients(loss, case), gradients, strict=True):
                torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-12)


def _gradients(loss: Tensor, case: Case) -> tuple[Tensor, ...]:
    """Of every document; zeros for one that the loss does not depend on."""
    return torch.autograd.grad(loss, case.logits, materialize_grads=True)


def in_turn(answers: list[tuple[Tensor, Tensor]], which: int, *, mean: bool) -> tuple[Tensor, Tensor]:
    """Sums, or means, of the log-probs of the chosen and of the rejected answers, (pairs,)."""
    numbers = torch.stack([both[which].mean() if mean else both[which].sum() for both in answers])
    return numbers[::2], numbers[1::2]


@cache
def openrlhf_dpo() -> Any:
    (module,) = load("openrlhf", ["openrlhf.models.loss"], names=["openrlhf"])
    return module.DPOLoss


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_dpo_of_openrlhf(smoothing: float) -> None:
    theirs = openrlhf_dpo()(0.3, smoothing)
    agree(
        Dpo(beta=0.3, label_smoothing=smoothing),
        lambda answers: theirs(*in_turn(answers, 0, mean=False), *in_turn(answers, 1, mean=False))[0],
    )


def test_ipo_of_openrlhf_takes_sums() -> None:
    theirs = openrlhf_dpo()(0.3, ipo=True)
    agree(
        Dpo(loss_type="ipo", beta=0.3),
        lambda answers: theirs(*in_turn(answers, 0, mean=False), *in_turn(answers, 1, mean=False))[0],
    )


def trl_dpo(answers: list[tuple[Tensor, Tensor]], **settings: Any) -> Tensor:
    """The loss of DPOTrainer on padded answers, all chosen ones before all rejected ones."""
    ordered = [*answers[::2], *answers[1::2]]
    width = max(len(own) for own, _ in ordered)
    mask = torch.tensor([[0] + [1] * len(own) + [0] * (width - len(own)) for own, _ in ordered])
    own, frozen = (
        torch.stack([functional.pad(both[which], (0, width - len(both[which]))) for both in ordered])
        for which in range(2)
    )
    nothing = torch.zeros_like(frozen)
    of_metrics = {"entropy": nothing, "mean_logits": nothing, "is_top1": nothing > 0}
    models = [
        lambda numbers=numbers, **_: SimpleNamespace(log_probs=numbers, **of_metrics) for numbers in (own, frozen)
    ]
    self = SimpleNamespace(
        **{"model": SimpleNamespace(training=True), "ref_model": models[1], "_tp_size": 1, "_total_train_tokens": 0},
        **{"aux_loss_enabled": False, "ld_alpha": None, "precompute_ref_logps": False, "use_weighting": False},
        **{"f_divergence_type": "reverse_kl", "loss_weights": [1.0] * len(settings["loss_types"])},
        args=SimpleNamespace(gradient_checkpointing=False, gradient_checkpointing_kwargs=None),
        accelerator=SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x),
        _metrics={"train": defaultdict(list)},
        **{"label_smoothing": 0.0, **settings},
    )
    method = taken_out(
        "trl",
        "trl/trainer/dpo_trainer.py",
        "DPOTrainer._compute_loss",
        **{"F": functional, "math": math, "is_peft_model": lambda model: False},
        **{"disable_gradient_checkpointing": lambda *_: torch.no_grad()},
    )
    inputs = {"input_ids": torch.zeros_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask}
    loss: Tensor = method(self, models[0], inputs, False)
    return loss


@pytest.mark.parametrize(
    ("objective", "settings"),
    [
        (Dpo(beta=0.3), {"loss_types": ["sigmoid"]}),
        (Dpo(beta=0.3, loss_type="hinge"), {"loss_types": ["hinge"]}),
        (Dpo(beta=0.3, loss_type="robust", label_smoothing=0.2), {"loss_types": ["robust"], "label_smoothing": 0.2}),
        (Dpo(beta=0.3, loss_type="ipo", length_normalised=True), {"loss_types": ["ipo"]}),
        (Dpo(beta=0.3, sft_coef=1.0), {"loss_types": ["sigmoid", "sft"]}),
    ],
)
def test_losses_of_trl(objective: Dpo, settings: dict[str, Any]) -> None:
    agree(objective, lambda answers: trl_dpo(answers, beta=objective.beta, **settings))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_simpo_of_trl(smoothing: float) -> None:
    method = taken_out("trl", "trl/experimental/cpo/cpo_trainer.py", "CPOTrainer.cpo_loss", F=functional)
    self = SimpleNamespace(
        alpha=0.0,
        beta=2.0,
        simpo_gamma=0.6,
        label_smoothing=smoothing,
        loss_type="simpo",
        accelerator=SimpleNamespace(device="cpu"),
    )
    objective = Dpo(beta=2.0, reference_free=True, length_normalised=True, target_margin=0.3, label_smoothing=smoothing)
    agree(objective, lambda answers: method(self, *in_turn(answers, 0, mean=True))[0].mean())


def test_odds_ratio_of_trl() -> None:
    """Without the likelihood, which TRL takes over the prompt, too."""
    known = {"F": functional, "log1mexp": taken_out("trl", "trl/experimental/orpo/orpo_trainer.py", "log1mexp")}
    method = taken_out("trl", "trl/experimental/orpo/orpo_trainer.py", "ORPOTrainer.odds_ratio_loss", **known)
    self = SimpleNamespace(beta=0.3, accelerator=SimpleNamespace(device="cpu"))

    def theirs(answers: list[tuple[Tensor, Tensor]]) -> Tensor:
        with NoFloat32():
            loss: Tensor = -method(self, *in_turn(answers, 0, mean=True))[0].mean()
        return loss

    agree(Dpo(beta=0.3, loss_type="odds_ratio", reference_free=True, length_normalised=True), theirs)


def test_rewards_of_openrlhf_have_margins() -> None:
    (module,) = load("openrlhf", ["openrlhf.models.loss"], names=["openrlhf"])
    margins = torch.arange(5).double() / 2
    agree(
        RewardModel(),
        lambda scores: module.PairWiseLoss()(torch.stack(scores[::2]), torch.stack(scores[1::2]), margins),
    )


@pytest.mark.parametrize("coefficient", [0.0, 0.3])
def test_rewards_of_trl_are_centred(coefficient: float) -> None:
    method = taken_out("trl", "trl/trainer/reward_trainer.py", "RewardTrainer.compute_loss", nn=torch.nn)
    self = SimpleNamespace(
        model=SimpleNamespace(training=False),
        args=SimpleNamespace(center_rewards_coefficient=coefficient or None),
        accelerator=SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x),
        _metrics={"eval": defaultdict(list)},
        _total_train_tokens=0,
    )

    def theirs(scores: list[Tensor]) -> Tensor:
        logits = torch.stack([*scores[::2], *scores[1::2]])[:, None]
        inputs = {"margin": torch.arange(5).double() / 2}
        loss: Tensor = method(self, lambda **_: SimpleNamespace(logits=logits), inputs)
        return loss

    agree(RewardModel(center_coef=coefficient), theirs)


def test_steps_of_openrlhf_have_soft_labels() -> None:
    """Its model of the whole vocabulary scores a step by two tokens; the score is the difference of their logits."""
    (module,) = load("openrlhf==0.8.11", ["openrlhf.models.loss"], names=["openrlhf"])
    right, wrong, end = 2, 5, 4
    theirs = module.PRMLoss(end, [right, wrong])

    def loss(scores: Tensor, labels: Tensor) -> Tensor:
        logits = torch.randn(1, len(scores), VOCABULARY, dtype=torch.float64)
        logits[0, :, right] = logits[0, :, wrong] + scores
        found: Tensor = theirs(torch.full((1, len(scores)), end), logits, labels.float()[None])
        return found

    agree(ProcessRewardModel(), loss)


def test_steps_of_trl_are_two_classes() -> None:
    """TRL's PRMTrainer trains with the loss of transformers' token classification, whose labels are whole numbers."""

    def loss(scores: Tensor, labels: Tensor) -> Tensor:
        logits = torch.stack([torch.zeros_like(scores), scores], dim=-1)
        losses = [
            y * classified(one[None], torch.tensor([1])) + (1 - y) * classified(one[None], torch.tensor([0]))
            for one, y in zip(logits, labels.tolist(), strict=True)
        ]
        return torch.stack(losses).mean()

    def classified(logits: Tensor, labels: Tensor) -> Tensor:
        with NoFloat32():
            found: Tensor = ForTokenClassification(logits, labels, SimpleNamespace(num_labels=2))
        return found

    agree(ProcessRewardModel(), loss)


def test_steps_of_trl_end_at_the_separator() -> None:
    tokenizer = load_tokenizer(FIXTURES / "models" / "llama")
    steps, asked = ("2 + 2 = 4", "4 + 1 = 6"), "2 + 3?"
    method = taken_out("trl==1.9.2", "trl/experimental/prm/prm_trainer.py", "PRMTrainer.tokenize_row", chain=chain)
    row = {"prompt": asked, "completions": steps, "labels": [True, False]}
    theirs = method(row, tokenizer, "\n", None, None, False, False)
    tokens, targets = encode(replace(pair(asked, "\n".join(steps)), steps=steps), tokenizer)
    answer = len(theirs["input_ids"]) - 1 - len(tokenizer(asked, add_special_tokens=False)["input_ids"])
    assert list(tokens[-answer:]) == theirs["input_ids"][-answer:]
    assert [label != -100 for label in theirs["labels"][-answer:]] == list(targets[-answer:])
    assert not any(targets[:-answer])


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 1.5)])
def test_kto_of_trl(weights: tuple[float, float]) -> None:
    signs = []

    def theirs(answers: list[tuple[Tensor, Tensor]]) -> Tensor:
        signs.append(sum((own - frozen).sum().item() for own, frozen in answers[1::2]) > 0)
        labels = [True, False, False, True, True]
        return trl_kto(answers[::2], answers[1::2], labels, beta=0.3, weights=weights)

    agree(Kto(beta=0.3, desirable_weight=weights[0], undesirable_weight=weights[1]), theirs)
    assert len(set(signs)) == 2, "no step has a KL below 0, or none above"
