"""Observable: one thing that is recorded at every step and judged, declared once.

The engine declares weights, gradients, norm and update of every model that it trains; an objective declares the rest
(conformance.objective). Recorder, record header, judge, side by side and reports iterate over these declarations and
have no list of their own. Serves claim 1 (every quantity is judged where it arises) and claim 3 (replicas are equal).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

ObservableKind = Literal["tensors", "rows", "scalar", "setting", "evidence"]
When = Literal["loaded", "every", "first", "later", "handover"]
Replicated = Literal["no", "holders", "all ranks"]
StateKind = Literal["exp_avg", "exp_avg_sq", "momentum_buffer", "step", "progress"]
STATE_KINDS: tuple[StateKind, ...] = get_args(StateKind)  # of training state, see conformance.backend

AGAINST_REBUILT = " against rebuilt"  # ends the name of a quantity that was compared within one cell
SETTING_ERROR = 1e-9  # relative, for what has no arithmetic in it: learning rate, token count, weights as loaded


@dataclass(frozen=True, kw_only=True)
class Observable:
    """One declaration.

    key: where a record holds it: a value of a step's line (scalar, setting), or tensors named ``KEY/NAME`` (tensors,
        rows).
    stage: the name under which findings, reports and faults speak of it.
    kind: ``tensors``: named tensors, each with an error of its own. ``rows``: one vector of numbers per row of the
        batch, all of them judged together. ``scalar``: a computed number. ``setting``: a number that nothing is
        computed for. ``evidence``: what the suite saw of a leg's first step, in the footer of its record.
    when: the steps at which it is judged: as ``loaded``, at ``every`` step, at the ``first`` one, or at ``later`` ones.
        What is judged at a ``handover`` is what a leg has loaded, against what the leg before had at its end.
    change: what is judged is the distance from the tensors as loaded, relative to that distance: the update.
    scale: key of the value of the oracle (of its rows, for rows) that an error is relative to; empty: its own size.
    required: a record without it cannot be judged.
    effect_at: of what is not required, the stage that judges what it does to the training. Then nothing is lost where a
        framework does not report it. Where it is empty, a cell without it is observed in part only.
    replicated: which ranks hold the same numbers: the ``holders`` of the same shard or row, ``all ranks``, or ``no``
        others.
    rounded: it is held in the precision of the computation, as a frozen model is, so the tolerance rule decides how far
        it may be although nothing is computed.
    norm_of: key of the tensors of which this scalar is the 2-norm; it is rebuilt from them and compared. Against the
        oracle's it may be as wrong as they are all together: their errors may point in one direction.
    mean_of, max_of: key of the rows of which this scalar is the mean or the largest; it is rebuilt from the rows that
        the cell itself recorded, and judged by that alone: the rows are held against the oracle.
    explains: key of the rows whose variance this scalar says the rows ``made_of`` explain; it is rebuilt as a mean is.
    made_of: key of the rows that this scalar is a weighted sum of. The error of a sum of N numbers is about theirs over
        the root of N; one run may be luckier, and is not taken at its word then.
    rowwise: the worst row of each tensor is judged, too.
    rebuilt: these are weights after a step; the judge rebuilds them from the weights before, and compares.
    column: the column of the comparison between backends in which it is shown; empty: in none.
    drawn: whether reports draw it as a curve over the steps.
    panel: the part of the report that has this curve; empty: the one that every objective has.
    title: what stands above the curve; empty: its stage.
    """

    key: str
    stage: str
    kind: ObservableKind
    when: When = "every"
    change: bool = False
    scale: str = ""
    required: bool = True
    effect_at: str = ""
    replicated: Replicated = "no"
    rounded: bool = False
    norm_of: str = ""
    mean_of: str = ""
    max_of: str = ""
    explains: str = ""
    made_of: str = ""
    rowwise: bool = False
    rebuilt: bool = False
    column: str = ""
    # How it is shown is no part of what was observed: records of before and after a change of it are judged alike.
    drawn: bool = field(default=False, compare=False)
    panel: str = field(default="", compare=False)
    title: str = field(default="", compare=False)

    @property
    def judged_as(self) -> str:
        """The name of the quantity that judges this number: what follows from rows is judged against the cell's own."""
        return self.key + AGAINST_REBUILT if self.is_of_rows else self.key

    @property
    def is_of_rows(self) -> bool:
        """Whether it is rebuilt from the rows that the cell itself recorded."""
        return bool(self.mean_of or self.max_of or self.explains)

    @property
    def replica_stage(self) -> str:
        """The stage at which differences between ranks are told; empty where no other rank holds the same."""
        if self.replicated == "no":
            return ""
        return f"{self.key.replace('.', ' ')} replicas" if self.kind == "tensors" else self.stage

    @property
    def exact_bound(self) -> float | None:
        """A bound that holds in every precision, because nothing is computed; None where the tolerance rule decides."""
        if self.when == "handover":
            return 0.0
        return SETTING_ERROR if (self.kind == "setting" or self.when == "loaded") and not self.rounded else None

    def applies(self, step: int) -> bool:
        """Whether it is judged at a step: -1 is as loaded, 0 the first optimizer step."""
        at = {"loaded": step < 0, "every": step >= 0, "first": step == 0, "later": step > 0, "handover": False}
        return at[self.when]


CONFIGURATION = Observable(key="evidence", stage="configuration", kind="evidence", when="loaded", required=False)
GENERATORS = Observable(key="generators", stage="generators", kind="evidence", when="handover", required=False)
LOSS = Observable(key="loss", stage="loss", kind="scalar", replicated="all ranks", column="loss", drawn=True)
TOKEN_COUNT = Observable(key="token_count", stage="loss", kind="setting", replicated="all ranks")
LOGPROBS = Observable(key="logprob", stage="log-probs", kind="rows", required=False, replicated="holders")


def unobserved_step(first: int, count: int) -> int | None:
    """The step of a leg at which no tensor is read, between two at which all are; None in a leg too short for it.

    Reading gathers and waits. What a backend would get wrong without that shows at the step after this one (claim 7).
    """
    return first + count - 2 if count >= 3 else None


def model_key(model: str, key: str) -> str:
    """Key of a model's own observable: ``gradient`` of the policy, ``critic.gradient`` of another model."""
    return f"{model}.{key}" if model else key


def loaded_observables(model: str, *, trained: bool) -> tuple[Observable, ...]:
    """What the engine declares of every model as loaded. ``model`` is empty for the policy."""
    key, stage = model_key(model, "weight"), _stage(model, "weights")
    weights = Observable(key=key, stage=stage, kind="tensors", when="loaded", rounded=not trained)
    return (weights, *(_handed_over(model, kind) for kind in STATE_KINDS if trained))


def _handed_over(model: str, kind: str) -> Observable:
    return Observable(
        key=model_key(model, kind),
        stage=_stage(model, "training state"),
        kind="tensors",
        when="handover",
        required=False,
        effect_at=_stage(model, "weights after N steps"),
    )


def trained_observables(model: str) -> tuple[Observable, ...]:
    """What the engine declares of a model that it trains, in causal order. ``model`` is empty for the policy."""
    gradient, weight = model_key(model, "gradient"), model_key(model, "weight")
    update = _stage(model, "clipped update")
    return (
        Observable(
            key=gradient,
            stage=_stage(model, "gradients"),
            kind="tensors",
            replicated="holders",
            rowwise=True,
            column=_stage(model, "gradients"),
        ),
        Observable(
            key=model_key(model, "grad_norm"),
            stage=_stage(model, "gradient norm"),
            kind="scalar",
            required=False,
            effect_at=update,  # a norm that nobody reports is still the one that gradients are clipped by
            replicated="all ranks",
            norm_of=gradient,
            column=_stage(model, "gradient norm"),
            drawn=True,
        ),
        Observable(key=model_key(model, "lr"), stage=update, kind="setting", replicated="all ranks"),
        Observable(
            key=weight,
            stage=update,
            kind="tensors",
            when="first",
            change=True,
            rebuilt=True,
            replicated="holders",
            column=_stage(model, "update"),
        ),
        Observable(
            key=weight,
            stage=_stage(model, "weights after N steps"),
            kind="tensors",
            when="later",
            change=True,
            rebuilt=True,
            replicated="holders",
            column=_stage(model, "update"),
        ),
    )


def _stage(model: str, name: str) -> str:
    return f"{model} {name}" if model else name


def stages(observables: Iterable[Observable]) -> tuple[str, ...]:
    """All stages in causal order: what is wrong at one is expected to show at the later ones.

    Replicas come after the last observable that they are replicas of, so gradient replicas stand before the norm.
    """
    order: dict[str, None] = {}
    for observable in observables:
        for stage in (observable.stage, observable.replica_stage):
            if stage:
                order.pop(stage, None)  # the last mention counts
                order[stage] = None
    return tuple(order)


def columns(observables: Iterable[Observable]) -> tuple[str, ...]:
    """The columns of a comparison between backends, in causal order."""
    return tuple(dict.fromkeys(observable.column for observable in observables if observable.column))


def observables_to_json(observables: Sequence[Observable]) -> list[dict[str, Any]]:
    """Plain JSON values, for the header of a record."""
    return [vars(observable) | {} for observable in observables]


def observables_from_json(values: Sequence[dict[str, Any]]) -> tuple[Observable, ...]:
    """What ``observables_to_json`` gave; raises TypeError for fields that this version does not know."""
    return tuple(Observable(**value) for value in values)
