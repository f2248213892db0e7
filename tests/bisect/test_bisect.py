"""`parity bisect` names the first wrong module and the direction, and says where none is wrong.

In this process, a Hugging Face model trains a step by itself, and a module of it is broken; the same is done to modules
of the three backends on several ranks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from bisect_backends import DEFECTS, FAMILIES, PLANTED
from cells import exhaustive
from conftest import make_cell
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel

from conformance.backends.protocol import Traced
from conformance.bisect.explain import describe
from conformance.bisect.locate import Reference, bisect, compare, references
from conformance.core.host import FIXTURES
from conformance.data.inputs import FrozenInputs, prepare_inputs
from conformance.judge.tolerance import largest_rounding
from conformance.numerics.float64_tier import exact_tier
from conformance.results.bisection import Bisected, Bisection, Direction, First, Wrong
from conformance.spec.batch import Batch, read_batches
from conformance.worker.activation_capture import Issuing, Piece, capturing, read_issued, read_pieces
from impl.engine.hugging_face import hugging_face_modules
from impl.interface.micro_batches import collate, numbered, token_numbers
from impl.models.loading import load_model


@dataclass(frozen=True)
class Step:
    inputs: FrozenInputs
    batch: Batch
    oracle: Reference


Steps = Callable[[str], Step]  # by the model's family


class OneProcess:
    """A Hugging Face model and a loop of one's own, in two micro-batches."""

    def __init__(self, step: Step) -> None:
        (folder,) = step.inputs.models.values()
        self.batch, half = step.batch, len(step.batch.rows) // 2
        self.rows = (step.batch.rows[:half], step.batch.rows[half:])
        with exact_tier():
            self.model: PreTrainedModel = load_model(folder, dtype=torch.float64, attention="eager")

    def traced(self, model: str, batch: Batch) -> Traced:
        parts = [numbered(batch, rows, collate(rows)) for rows in self.rows]
        return Traced(
            modules=hugging_face_modules(self.model, tp=1, tp_rank=0), tokens=tuple(map(token_numbers, parts))
        )

    def train(self, *, times: int = 1) -> None:
        for inputs in map(collate, self.rows * times):
            logits = self.model(input_ids=inputs.tokens, position_ids=inputs.positions, use_cache=False).logits
            losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), inputs.labels, reduction="sum")
            (losses / self.batch.target_count).backward()

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    @cache
    def made(family: str) -> Step:
        cell = make_cell("sft-packed", family, "dp1", "exact", rows=4, accumulation=1)
        inputs = prepare_inputs(cell.scenario, tmp_path_factory.mktemp(family))
        batches, scenario = read_batches(inputs.batches), cell.scenario.reference
        found = references(scenario=scenario, models=inputs.models, batches=batches, step=0, weights=lambda *_: None)
        return Step(inputs, batches[0], found["policy"])

    return made


def found_in(step: Step, folder: Path, kind: str = "", module: str = "") -> Bisected:
    backend = OneProcess(step)
    if kind:
        DEFECTS[kind](backend.model.get_submodule(module))
    with exact_tier(), capturing(backend, "policy", step.batch, rank=0, folder=folder):  # type: ignore[arg-type]
        backend.train()
    return bisect("policy", read_pieces(folder), backend.gradients(), step.oracle)


def lines_of(found: Bisected, stage: str = "gradients") -> list[str]:
    return describe(Bisection(cell="a", records=(), stage=stage, traced="a", models=(found,))).lines


@pytest.mark.parametrize("family", FAMILIES)
def test_every_value_and_gradient_of_a_hugging_face_model_is_the_oracles(
    family: str, steps: Steps, tmp_path: Path
) -> None:
    found = found_in(steps(family), tmp_path)
    assert (found.forward, found.backward, found.unseen, dict(found.parameters)) == (None, None, (), {})
    layers = 3 if family == "gemma3" else 2
    values = 2 * (3 + layers * (13 if family == "gemma3" else 11))  # an input and an output each
    assert found.compared == (values, values - 1)  # tokens have no gradient
    assert found.where == "outside the model"


@pytest.mark.parametrize("family", ["mixtral", "deepseek-v3"])
def test_bisect_experts_are_one_module_and_mla_is_whole(family: str) -> None:
    model = load_model(FIXTURES / "models" / family, dtype=torch.float64, attention="eager")
    found = {traced.name: traced for traced in hugging_face_modules(model, tp=2, tp_rank=1)}
    assert {"model.layers.1.mlp", "model.layers.1.self_attn.o_proj"} <= found.keys()
    assert "model.layers.1.mlp.down_proj" not in found
    taken = found["model.layers.1.self_attn.o_proj"].input
    assert (taken.first_feature == 0) == (family == "deepseek-v3")


FAST = {  # an embedding, linear layers, blocks, a norm and the head
    ("forward", "model.embed_tokens"),
    ("backward", "model.layers.0.mlp.down_proj"),
    ("backward", "model.layers.1.self_attn"),
    ("forward", "model.layers.1.mlp"),
    ("forward", "model.norm"),
    ("backward", "lm_head"),
}


@pytest.mark.parametrize(("kind", "module"), [one if one in FAST else exhaustive(*one) for one in PLANTED])
def test_a_defect_of_a_module_is_found_there_and_in_its_direction(
    kind: str, module: str, steps: Steps, tmp_path: Path
) -> None:
    found = found_in(steps("llama"), tmp_path, kind, module)
    first = found.forward if kind == "forward" else found.backward
    assert first
    assert first.inside
    assert found.where == module
    assert (found.forward is None) == (kind == "backward")
    assert 1e-7 < first.wrong.error < 1e-5
    assert first.wrong.would_be_right == "it is 1.000001 times the reference"


@pytest.mark.parametrize("family", [exhaustive(family) for family in FAMILIES[1:]])
@pytest.mark.parametrize(("kind", "module"), PLANTED)
def test_so_it_is_in_every_family(family: str, kind: str, module: str, steps: Steps, tmp_path: Path) -> None:
    assert found_in(steps(family), tmp_path, kind, module).where == module


def test_a_defect_between_two_modules_is_told_as_one(steps: Steps, tmp_path: Path) -> None:
    forward = found_in(steps("llama"), tmp_path / "forward", "forward", "model.layers.0")
    assert forward.where == "between model.layers.0.mlp and model.layers.1.input_layernorm"
    backward = found_in(steps("llama"), tmp_path / "backward", "backward", "model.layers.1")
    assert backward.where == "between model.layers.1.input_layernorm and model.layers.0.mlp"
    lines = lines_of(backward)
    assert lines[0] == f"step 0: first wrong value, backward: {backward.where}"
    assert lines[1].startswith(
        "  wrong: the gradient of the output of model.layers.0.mlp is 1.01e-6 off, allowed 1e-11"
    )
    assert "  forward: all 50 inputs and outputs of modules are right, to 1e-11" in lines


def test_a_wrong_token_is_named_by_its_row(steps: Steps, tmp_path: Path) -> None:
    step = steps("llama")
    found_in(step, tmp_path)
    pieces = read_pieces(tmp_path)
    piece = next(p for p in pieces if (p.name, p.side, p.micro_batch) == ("model.layers.1.mlp", "output", 0))
    (where,) = (piece.tokens == step.batch.rows[0].length + 3).nonzero()[0].tolist()
    piece.values[where, 7] += 1e-3
    found = bisect("policy", pieces, step.oracle.gradients, step.oracle)
    assert found.where == "model.layers.1.mlp"
    lines = lines_of(found)
    assert f"  tokens: 1 of {int(step.oracle.known.sum())}, in 1 rows: row 1 token 3" in lines
    assert "  features: 7 to 7 of 64" in lines


def test_a_gradient_that_does_not_come_back_is_found(steps: Steps, tmp_path: Path) -> None:
    found = found_in(steps("llama"), tmp_path, "silent", "model.layers.1.mlp.down_proj")
    assert found.forward is None
    assert found.backward
    assert found.where == "model.layers.1.mlp.down_proj"
    assert found.backward.wrong.silent == (0,)
    assert "  wrong: the gradient of the input of model.layers.1.mlp.down_proj is missing" in lines_of(found)


@pytest.mark.exhaustive
def test_a_gradient_that_comes_back_on_one_rank_only_is_found(steps: Steps, tmp_path: Path) -> None:
    step = steps("llama")
    found_in(step, tmp_path)
    pieces = read_pieces(tmp_path)
    lost = ("model.layers.1.mlp", "gradient of the input")
    of_another = [replace(piece, rank=1) for piece in pieces if (piece.name, piece.side) != lost]
    found = bisect("policy", [*pieces, *of_another], step.oracle.gradients, step.oracle)
    assert found.backward
    assert (found.backward.wrong.key, found.backward.wrong.silent, found.where) == (lost, (1,), lost[0])


def test_wrong_gradients_of_parameters_alone_are_told_as_these(steps: Steps, tmp_path: Path) -> None:
    step = steps("llama")
    found_in(step, tmp_path)
    pieces, right = read_pieces(tmp_path), step.oracle.gradients
    one = bisect("policy", pieces, right | {"model.norm.weight": 2 * right["model.norm.weight"]}, step.oracle)
    assert one.where == "gradients of parameters"
    assert one.parameters == {"model.norm.weight": pytest.approx(1.0)}
    missing = bisect("policy", pieces, {name: g for name, g in right.items() if name != "lm_head.weight"}, step.oracle)
    assert missing.where == "gradients of parameters"
    assert list(missing.parameters) == ["lm_head.weight"]
    doubled = bisect("policy", pieces, {name: 2 * gradient for name, gradient in right.items()}, step.oracle)
    assert doubled.where == "outside the model"
    assert doubled.factor == pytest.approx(2.0)
    assert "denominator of the loss" in lines_of(doubled)[0]


def test_nothing_is_said_of_a_model_that_is_not_shown(steps: Steps, tmp_path: Path) -> None:
    step = steps("llama")
    found_in(step, tmp_path)
    some = [piece for piece in read_pieces(tmp_path) if ".layers.1." not in piece.name]
    found = bisect("policy", some, step.oracle.gradients, step.oracle)
    assert found.where == "unknown"
    assert "model.layers.1.mlp" in found.unknown
    assert lines_of(found)[0].startswith("step 0: unknown")
    fused = [piece for piece in read_pieces(tmp_path) if not piece.name.endswith("q_proj")]
    assert bisect("policy", fused, step.oracle.gradients, step.oracle).where == "outside the model"


def test_a_gross_error_of_one_precision_is_found_in_it(steps: Steps, tmp_path: Path) -> None:
    step, name = steps("llama"), "s/m/b/dp1/bf16"
    found_in(step, tmp_path)
    rounded = [replace(piece, values=piece.values * 1.05) for piece in read_pieces(tmp_path)]
    gradients, bound = step.oracle.gradients, largest_rounding("bf16")
    assert bisect("policy", rounded, gradients, step.oracle, bound).is_right
    gross = [
        replace(p, values=2 * p.values) if (p.name, p.side) == ("model.layers.1.mlp", "output") else p for p in rounded
    ]
    found = bisect("policy", gross, gradients, step.oracle, bound)
    assert (found.where, found.first and found.first.wrong.would_be_right) == ("model.layers.1.mlp", "")
    lines = describe(Bisection(cell=name, records=(), stage="log-probs", traced=name, models=(found,))).lines
    assert lines[1].startswith("  traced: bf16: the exact tier agrees with the reference, so the defect is in code")
    assert "allowed 0.5" in lines[2]


@pytest.mark.exhaustive
def test_what_is_wrong_from_the_loss_on_is_outside_the_model(steps: Steps, tmp_path: Path) -> None:
    step = steps("llama")
    backend = OneProcess(step)
    backend.model.register_forward_hook(lambda _, __, out: out | {"logits": 2 * out.logits - out.logits.detach()})
    with exact_tier(), capturing(backend, "policy", step.batch, rank=0, folder=tmp_path):  # type: ignore[arg-type]
        backend.train()
    found = bisect("policy", read_pieces(tmp_path), backend.gradients(), step.oracle)
    assert found.backward
    assert (found.backward.module, found.where) == ("lm_head", "outside the model")
    assert found.backward.wrong.would_be_right == "it is 2 times the reference"


def test_a_module_that_runs_again_cannot_be_bisected(steps: Steps, tmp_path: Path) -> None:
    backend = OneProcess(steps("llama"))
    with (
        pytest.raises(ValueError, match="embed_tokens was run 4 times in a step of 2 micro-batches"),
        exact_tier(),
        capturing(backend, "policy", backend.batch, rank=0, folder=tmp_path),  # type: ignore[arg-type]
    ):
        backend.train(times=2)


def test_activations_that_are_not_cut_as_the_backend_says_are_an_error(
    steps: Steps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = OneProcess(steps("llama"))
    said = backend.traced("policy", backend.batch)
    lie = Traced(modules=said.modules, tokens=tuple(tokens[:, 1:] for tokens in said.tokens))
    monkeypatch.setattr(backend, "traced", lambda *_: lie)
    with (
        pytest.raises(ValueError, match=r"the input of model.embed_tokens is .* correct the adapter's traced\(\)"),
        exact_tier(),
        capturing(backend, "policy", backend.batch, rank=0, folder=tmp_path),  # type: ignore[arg-type]
    ):
        backend.train()


RIGHT = torch.arange(24, dtype=torch.float64).reshape(6, 4).cos()  # six tokens, four features
KEY = ("model.layers.0.mlp", "output")


def ranks_show(*values: tuple[list[int], int, Tensor]) -> str | None:
    """What would be right of pieces of the ranks, each with its tokens, its first feature and its values; None if they
    are right."""
    pieces = [
        Piece(
            name=KEY[0],
            side="output",
            rank=rank,
            micro_batch=0,
            first_feature=first,
            tokens=torch.tensor(tokens),
            values=held,
        )
        for rank, (tokens, first, held) in enumerate(values)
    ]
    known = torch.ones(6, dtype=torch.bool)
    oracle = Reference(values={KEY: RIGHT}, known=known, order=(KEY,), gradients={}, places=((0, 0),) * 6)  # type: ignore
    wrong = compare(KEY, pieces, oracle, shown=pieces)  # type: ignore[arg-type]
    return wrong.would_be_right if wrong else None


ALL = list(range(6))
CASES = {
    "nothing": ([(ALL, 0, RIGHT), (ALL, 0, RIGHT)], None),
    "shards of features": ([(ALL, 0, RIGHT[:, :2]), (ALL, 2, RIGHT[:, 2:])], None),
    "padding of features": ([(ALL, 0, RIGHT[:, :3]), (ALL, 3, torch.cat([RIGHT[:, 3:], RIGHT], dim=1))], None),
    "a missing sum": (
        [(ALL, 0, RIGHT - 0.5 * RIGHT.flip(0)), (ALL, 0, 0.5 * RIGHT.flip(0))],
        "the sum over ranks 0, 1 would be right: a reduction is missing",
    ),
    "a missing mean": (
        [(ALL, 0, RIGHT + RIGHT.flip(0)), (ALL, 0, RIGHT - RIGHT.flip(0))],
        "the mean over ranks 0, 1 would be right: a reduction is missing, or a mean was left out",
    ),
    "a doubled sum": ([(ALL, 0, 2 * RIGHT), (ALL, 0, 2 * RIGHT)], "it is 2 times the reference"),
    "a factor of each rank": (
        [(ALL, 0, 2 * RIGHT), (ALL, 0, 3 * RIGHT)],
        "on rank 0 it is 2 times the reference; on rank 1 it is 3 times the reference",
    ),
    "another order of tokens": (
        [([0, 1, 2], 0, RIGHT[3:]), ([3, 4, 5], 0, RIGHT[:3])],
        "tokens are in another order: token 0 has what token 3 should have",
    ),
    "tokens of others, twice": (
        [([0, 1, 2], 0, RIGHT[3:]), ([3, 4, 5], 0, RIGHT[3:])],
        "tokens have what others should have, and these have it too: token 0 has what token 3 should have",
    ),
    "another order and noise": ([([0, 1, 2], 0, RIGHT[3:] + 1e-6), ([3, 4, 5], 0, RIGHT[:3])], ""),
    "a sum and noise": ([(ALL, 0, RIGHT - 0.5 * RIGHT.flip(0) + 1e-6), (ALL, 0, 0.5 * RIGHT.flip(0))], ""),
    "a factor and noise": ([(ALL, 0, 2 * RIGHT + 1e-6 * RIGHT.flip(0))], ""),
    "a shard of another rank": (
        [(ALL, 0, RIGHT[:, 2:]), (ALL, 2, RIGHT[:, 2:])],
        "shards are those of other ranks: of the features, rank 0 has 2 to 3 instead of 0 to 1",
    ),
    "another order of features": (
        [(ALL, 0, RIGHT[:, 2:]), (ALL, 2, RIGHT[:, :2])],
        "shards are in another order: of the features, rank 0 has 2 to 3 instead of 0 to 1, "
        "rank 1 has 0 to 1 instead of 2 to 3",
    ),
    "a bias": (
        [(ALL, 0, RIGHT + RIGHT[0])],
        "every token is off by the same vector, as by a bias that is missing or added again",
    ),
    "zero": ([(ALL, 0, 0 * RIGHT)], "it is zero"),
    "not a number": ([(ALL, 0, RIGHT / 0)], "it holds infinite numbers"),
    "anything else": ([(ALL, 0, RIGHT.square())], ""),
    "a token that nobody has": ([(ALL[1:], 0, RIGHT[1:])], ""),
}


@pytest.mark.parametrize("case", CASES)
def test_what_would_make_the_shards_right_is_told(case: str) -> None:
    shown, explanation = CASES[case]
    assert ranks_show(*shown) == explanation


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """A group of two ranks, of which only this one is there."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def first_wrong(module: str, direction: Direction, *, before: str = "") -> First:
    wrong: Wrong = None  # type: ignore[assignment]
    return First(
        direction=direction,
        module=module,
        inside=not before,
        before=(before, "output") if before else None,
        given_by=(),
        wrong=wrong,
    )


def test_collectives_are_listed_by_the_module_that_issued_them(two_ranks: None, tmp_path: Path) -> None:
    numbers, issuing = torch.zeros(5), Issuing()
    with issuing:
        dist.all_reduce(numbers)  # before the first module
        issuing.enter("mlp", "forward")
        issuing.enter("mlp.down_proj", "forward")
        dist.all_reduce(numbers)
        dist.all_reduce(numbers)
        issuing.leave("mlp.down_proj", "forward")
        with issuing.paused():
            dist.all_reduce(numbers)
        issuing.leave("mlp", "forward")
        dist.broadcast(numbers, src=0)
        issuing.enter("norm", "forward")
        issuing.leave("norm", "forward")
        issuing.enter("mlp", "backward")
        issuing.enter("mlp.down_proj", "backward")  # no gradient comes back to its input
        issuing.enter("attention", "backward")
        dist.all_reduce(numbers)
        issuing.leave("attention", "backward")
        dist.all_reduce(numbers)  # after the last one
    issuing.write(tmp_path, 0)

    def listed(first: First) -> list[tuple[str, int, int, int, tuple[int, ...]]]:
        return [(one.kind, one.size, one.times, one.elements, one.ranks) for one in read_issued(tmp_path, first)]

    assert listed(first_wrong("mlp.down_proj", "forward")) == [("all_reduce", 2, 2, 10, (0,))]
    assert listed(first_wrong("mlp", "forward")) == [("all_reduce", 2, 2, 10, (0,))]
    assert listed(first_wrong("norm", "forward", before="mlp")) == [("broadcast", 2, 1, 5, (0,))]
    assert listed(first_wrong("another", "forward", before="mlp")) == [("broadcast", 2, 1, 5, (0,))]
    assert listed(first_wrong("norm", "forward")) == []
    assert listed(first_wrong("mlp", "backward")) == []
    assert listed(first_wrong("attention", "backward")) == [("all_reduce", 2, 1, 5, (0,))]
