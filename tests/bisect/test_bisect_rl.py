"""Bisecting GRPO and PPO: policy and critic, and what is wrong around them."""

from typing import Any

import pytest
from bisect_backends import entry
from cells import BACKENDS
from conftest import make_cell
from rl_fault_cells import ROWS, SCENARIOS, rl_cell

from conformance.backends.faults import catalogue
from conformance.backends.protocol import BackendEntry
from conformance.bisect.explain import describe
from conformance.bisect.run import bisect_cell, bisect_step
from conformance.matrix.cell import Cell
from conformance.results.bisection import OUTSIDE, Bisected, Bisection, Direction, First, Wrong, most_telling_first
from conformance.runner.session import Session

PLAIN = BackendEntry(name="traceable", target="plain_traced:Traceable")
SGD = {"name": "sgd", "lr": 0.05, "max_grad_norm": 0.5}


def plain_ppo(backend: BackendEntry = PLAIN, faults: tuple[str, ...] = (), **overrides: Any) -> Cell:
    size: dict[str, Any] = {"rows": ROWS, "accumulation": 1, "optimizer": SGD}
    return make_cell("ppo", "llama", "dp2", "exact", backend=backend, faults=faults, **size, **overrides)


@pytest.mark.exhaustive
def test_a_module_of_the_critic_is_found_in_a_later_roll_out(session: Session) -> None:
    """The step begins with forward passes for the roll-out, which are not of its update, and with trained weights."""
    defective = entry(PLAIN, "backward", "model.layers.0.self_attn.o_proj", "critic")
    cell = plain_ppo(defective, objective={"kind": "ppo", "kl_coef": 0.05, "mini_batches": 1, "ppo_epochs": 1})
    critic, policy = bisect_step(session, cell, 1).models
    assert (critic.model, critic.where) == ("critic", "model.layers.0.self_attn.o_proj")
    assert critic.backward
    assert critic.backward.wrong.ranks == (1,)
    assert (policy.model, policy.is_right, policy.unseen) == ("policy", True, ())


@pytest.mark.exhaustive
def test_wrong_returns_are_outside_the_model_and_their_stage_is_named(session: Session) -> None:
    verdict, found = bisect_cell(session, plain_ppo(faults=("gae-across-documents",), steps=1))
    assert verdict.first_stage == "returns"
    assert found
    assert found.models[0].where == OUTSIDE
    assert describe(found).answer.startswith(
        "step 0: outside the model: the gradient that the loss gives to lm_head is wrong"
    )
    assert ("first stage that differs", "returns") in describe(found).facts


MODULES = [("forward", "model.layers.1.self_attn", "policy"), ("backward", "model.layers.0.mlp", "critic")]
LAYOUTS = {"fsdp2": "tp2.seqpar.losspar", "deepspeed": "dp2.zero3", "megatron": "tp2.seqpar"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", LAYOUTS)
@pytest.mark.parametrize(("kind", "module", "role"), MODULES)
def test_a_defect_of_either_model_is_found_in_every_backend(
    backend: str, kind: str, module: str, role: str, session: Session
) -> None:
    defective = entry(BACKENDS[backend], kind, module, role)
    cell = make_cell("ppo", "llama", LAYOUTS[backend], "exact", rows=12, backend=defective)
    found = bisect_step(session, cell, 1)
    assert (found.found.model, found.found.where) == (role, module)
    assert found.models[1].is_right


OUTSIDES = {
    "fsdp2": ("mean-of-micro-batch", "mask-lost"),
    "deepspeed": ("groups-by-position", "ratio-inverted"),
    "megatron": ("values-off-by-one", "clip-sides-exchanged"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("backend", "fault"), [(backend, fault) for backend in OUTSIDES for fault in OUTSIDES[backend]]
)
def test_what_is_wrong_around_the_models_is_told_with_its_stage(backend: str, fault: str, session: Session) -> None:
    cell = rl_cell(backend, SCENARIOS[fault], catalogue()[fault].cells.layouts[backend], fault)
    verdict, found = bisect_cell(session, cell)
    assert found
    assert found.models[0].where == OUTSIDE
    assert ("first stage that differs", verdict.first_stage) in describe(found).facts


def bisected(model: str, where: str) -> Bisected:
    return Bisected(
        model=model,
        forward=wrong("forward", where) if where == "forward" else None,
        backward=wrong("backward", where) if where.startswith("backward") else None,
        compared=(1, 1),
        unseen=(),
        unknown=(),
        parameters={"a": 1.0} if where in ("parameters", "factor") else {},
        gradients=1,
        factor=2.0 if where == "factor" else None,
    )


def wrong(direction: Direction, where: str) -> First:
    """``backward``: of a module; ``backward of the loss``: what comes into the head."""
    value = Wrong(
        key=("model.norm", "output"),
        error=1.0,
        ranks=(0,),
        hold=(0,),
        silent=(),
        tokens=1,
        compared=1,
        rows=1,
        places=((0, 0),),
        missing=0,
        features=(0, 0, 1),
        would_be_right="",
    )
    inside = where != "backward of the loss"
    return First(direction=direction, module="model.norm", inside=inside, before=None, given_by=(), wrong=value)


def test_the_most_telling_model_comes_first() -> None:
    order = ("forward", "backward", "parameters", "backward of the loss", "right")
    models = [bisected(where, where) for where in reversed(order)]
    assert [one.model for one in most_telling_first(models)] == list(order)


@pytest.mark.parametrize("stage", ["advantages", "loss", "clipped update", "weights after N steps"])
def test_what_is_outside_the_model_is_told_with_the_stage_that_differs_first(stage: str) -> None:
    where = "backward of the loss" if stage in ("advantages", "loss") else "right"
    found = Bisection(cell="a", records=(), stage=stage, traced="a", models=(bisected("policy", where),))
    assert describe(found).answer.startswith("step 0: outside the model: ")
    assert ("first stage that differs", stage) in describe(found).facts


def test_the_model_of_a_cell_with_several_is_named() -> None:
    models = (bisected("critic", "forward"), bisected("policy", "backward of the loss"))
    found = describe(Bisection(cell="a", records=(), stage="advantages", traced="a", models=models))
    assert found.answer == "step 0: first wrong module of the critic, forward: model.norm"
    assert (
        dict(found.facts)["also policy"] == "outside the model: the gradient that the loss gives to model.norm is wrong"
    )
