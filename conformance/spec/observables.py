"""Declares the roles of models in a cell, and the quantities that are recorded at every step and judged.

This module declares weights, gradients, gradient norm and update of every trained model; an objective declares the rest
(conformance.spec.objectives). The recorder, the judge, the comparison of backends and the reports iterate over these
declarations and have no lists of their own.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

Head = Literal["causal", "value", "multi-token"]


@dataclass(frozen=True, kw_only=True)
class Role:
    """Describes the role of one model.

    ``head``: ``causal`` gives logits over the vocabulary, ``value`` one number per token, ``multi-token`` also the
    logits of the tokens further ahead, from modules behind the decoder. A model that is not ``trained`` is frozen.
    ``noise``: how far its weights are from those of the folder, relative.
    """

    name: str
    head: Head = "causal"
    trained: bool = True
    noise: float = 0.05

    @property
    def prefix(self) -> str:
        """Returns the prefix of the keys of this model's observables; empty for a policy or a reward model."""
        return "" if self in (POLICY, REWARD, MULTI_TOKEN) else self.name


POLICY = Role(name="policy")
CRITIC = Role(name="critic", head="value")
REWARD = Role(name="reward", head="value")
REFERENCE = Role(name="reference", trained=False)
MULTI_TOKEN = Role(name="policy", head="multi-token")

# What an objective's data set holds
Reads = Literal["samples", "preferences", "labelled answers", "labelled steps", "rollouts"]
IN_PAIRS: tuple[Reads, ...] = ("preferences", "labelled answers")


def documents_together(reads: Reads) -> int:
    """Returns how many consecutive documents stay in one micro-batch: 2 for pairs of answers."""
    return 2 if reads in IN_PAIRS else 1


ObservableKind = Literal["tensors", "rows", "scalar", "setting", "evidence"]
When = Literal["loaded", "every", "first", "later", "handover"]
Replicated = Literal["no", "holders", "all ranks"]
StateKind = Literal["exp_avg", "exp_avg_sq", "momentum_buffer", "step", "progress"]
STATE_KINDS: tuple[StateKind, ...] = get_args(StateKind)  # kinds of training state, see Backend.named_tensors
MOMENTS: tuple[StateKind, ...] = STATE_KINDS[:3]

AGAINST_REBUILT = " against rebuilt"  # suffix of a quantity that is compared with other numbers of the same cell
SHARE = ": elements "  # in the name of a quantity that is a share of a tensor's elements, and no error
SETTING_ERROR = 1e-9  # relative bound of numbers that are not computed: learning rate, token count, loaded weights


@dataclass(frozen=True, kw_only=True)
class Observable:
    """Declares one quantity.

    key: its name in a record: the key of a value in a step's line (scalar, setting), or the first part of the tensor
        names ``KEY/NAME`` (tensors, rows).
    stage: its stage, as named by findings, reports and faults.
    kind: ``tensors``: named tensors, each with its own error. ``rows``: one vector of numbers per row of the batch, all
        rows judged together. ``scalar``: a computed number. ``setting``: a number that is not the result of arithmetic.
        ``evidence``: what the suite itself observed of one step of a phase, stored in the footer of the record.
    when: when it is judged: as ``loaded``, at ``every`` step, at the ``first`` step only, or at all ``later`` steps. At
        a ``handover``, the state that a phase loaded is compared with the state at the end of the previous phase.
    change: the difference to the tensors as loaded (the update) is judged, relative to the norm of the oracle's update.
    scale: key of the oracle's value or rows that the error is relative to. Empty: the size of the quantity itself.
    required: a record without this quantity cannot be judged.
    effect_at: for a quantity that is not required, the stage that judges its effect on the training. If it is set, a
        cell that does not report the quantity can still conform; if it is empty, such a cell is partly observed.
    replicated: which ranks hold the same numbers: the ``holders`` of the same shard or row, ``all ranks``, or ``no``
        other rank.
    rounded: the tensors are stored in the compute dtype, as those of a frozen model. So the tolerance rule gives their
        bound, although they are not the result of arithmetic.
    norm_of: key of the tensors whose 2-norm this scalar is. The judge also computes the norm from these tensors and
        compares. Against the oracle, the noise of the norm is that of the scale of all these tensors together.
    mean_of, max_of: key of the rows whose mean or maximum this scalar is. The judge computes it from the rows that the
        cell itself recorded and compares only with this value, because the rows are compared with the oracle's. A cell
        that does not record the rows is compared with the oracle's scalar.
    explains: key of the rows whose variance the rows ``made_of`` explain; this scalar is the explained share. It is
        computed from the recorded rows and compared, as a mean is.
    made_of: key of the rows of which this scalar is a weighted sum. The error of a sum of N numbers is about the error
        of one number divided by sqrt(N). One noise run of the oracle may be closer by chance, so the noise is taken to
        be at least this estimate.
    sum_of: key of rows that only the oracle records, whose sum this scalar is. The noise is taken to be at least the
        error of the sum if the errors of these terms are independent.
    weights_gradients: the gradient of each token is multiplied by the probability whose logarithm these rows hold, so
        what rounding adds to the probabilities scales all gradients.
    one_direction: the errors of the numbers that this sum is ``made_of`` may all point in one direction, so the error
        of the sum may be as large as that of one number. Values are such numbers: one weight row makes all of them.
    rowwise: the worst row of each tensor is judged as well.
    rebuilt: the tensors are weights after a step. The judge also computes them from the weights before and compares.
    lost_if: key of the setting that is 1 at steps whose update is skipped because gradients overflowed in fp16. This
        quantity is then neither recorded nor judged. Empty: nothing is skipped.
    column: the column of the comparison between backends that shows this quantity. Empty: none.
    drawn: whether reports draw it as a curve over the steps.
    panel: the part of the report that has this curve. Empty: the part that all objectives have.
    title: the heading of the curve. Empty: its stage.
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
    sum_of: str = ""
    weights_gradients: bool = field(default=False, compare=False)
    one_direction: bool = False
    rowwise: bool = False
    rebuilt: bool = False
    lost_if: str = ""
    column: str = ""
    # The next three fields only concern reports. They are not compared, so old records stay valid if they change.
    drawn: bool = field(default=False, compare=False)
    panel: str = field(default="", compare=False)
    title: str = field(default="", compare=False)

    @property
    def judged_as(self) -> str:
        """Returns the name under which this number is judged: with suffix AGAINST_REBUILT if it follows from rows."""
        return self.key + AGAINST_REBUILT if self.is_of_rows else self.key

    @property
    def is_of_rows(self) -> bool:
        """Tells whether the judge computes this scalar from the rows that the cell itself recorded."""
        return bool(self.rows_key)

    @property
    def rows_key(self) -> str:
        """Returns the key of the rows that this scalar is computed from; empty if it is computed from none."""
        return self.mean_of or self.max_of or self.explains

    @property
    def replica_stage(self) -> str:
        """Returns the stage of differences between ranks with the same numbers; empty if no two ranks share numbers."""
        if self.replicated == "no":
            return ""
        return f"{self.key.replace('.', ' ')} replicas" if self.kind == "tensors" else self.stage

    @property
    def exact_bound(self) -> float | None:
        """Returns the bound, in every precision, of what is not computed; None if the tolerance rule decides."""
        if self.when == "handover":
            return 0.0
        return SETTING_ERROR if (self.kind == "setting" or self.when == "loaded") and not self.rounded else None

    def applies(self, step: int) -> bool:
        """Tells whether it is judged at ``step``: -1 means as loaded, 0 is the first optimizer step."""
        at = {"loaded": step < 0, "every": step >= 0, "first": step == 0, "later": step > 0, "handover": False}
        return at[self.when]


def rows(key: str, stage: str, *, column: str = "") -> Observable:
    """Declares one number per response token; all ranks that hold a row hold the same numbers."""
    return Observable(key=key, stage=stage, kind="rows", replicated="holders", column=column)


def scalar(key: str, stage: str) -> Observable:
    """Declares one number for the whole step."""
    return Observable(key=key, stage=stage, kind="scalar", replicated="all ranks")


def terms_of(key: str) -> str:
    """Returns the key of rows that only the oracle records: what each token adds to this loss."""
    return f"{key}_terms"


def distance_of(quantity: str) -> str:
    """Returns the key of rows that only the oracle records: how far this quantity of each token is from a clip."""
    return f"{quantity}_to_clip"


def curve(key: str, stage: str, words: str, *, printed: str = "") -> Observable:
    """Declares a scalar that reports draw. ``words``: its name. ``printed``: verl's name for it, if not ``key``."""
    title = f"{words} ({printed or key})"
    return replace(scalar(key, stage), drawn=True, panel="Policy and critic", title=title)


CONFIGURATION = Observable(key="evidence", stage="configuration", kind="evidence", when="loaded", required=False)
GENERATORS = Observable(key="generators", stage="generators", kind="evidence", when="handover", required=False)
LOSS = Observable(key="loss", stage="loss", kind="scalar", replicated="all ranks", column="loss", drawn=True)
TOKEN_COUNT = Observable(key="token_count", stage="loss", kind="setting", replicated="all ranks")
LOGPROBS = Observable(key="logprob", stage="log-probs", kind="rows", required=False, replicated="holders")

# For a model with a mixture of experts, see routing_observables. Each forward pass of a step has its own key.
ROUTING, ROUTER_LOSS, ROUTER_Z_LOSS = "routing", "router_loss", "router_z_loss"
ROUTER_TERMS = "router_loss_terms"  # rows of the oracle alone: the terms of the load-balancing loss
OLD_ROUTING = "old_routing"

# Only the oracle's value models have these. VALUE_GRADIENT: rows, the gradients of the loss with respect to the values
# of targets. SHIFTED, in the float64 run: how far each row of the embedding moves if these gradients are equally off
# (conformance.oracle.step).
VALUE_GRADIENT, SHIFTED = "value_gradient", "shifted"

# Settings of a step in fp16: whether its update was skipped (0 or 1), the loss scale of the next step, and the number
# of updates in a row since the scale last fell or grew.
SKIPPED = "skipped"
PROGRESS_OF_SCALE = ("loss_scale", "good_steps")


def is_unread(key: str, line: Mapping[str, Any]) -> bool:
    """Tells whether the tensors of the observable ``key`` were not read at the step with this line of a record.

    Reading tensors gathers and synchronises, which may hide a bug of the backend. So a phase of two or more steps has a
    drawn stretch without reading: from the gradients of a step to the weights after the next step. An error shows after
    it (docs/principles.md#7-observing-changes-nothing).
    """
    return key.rpartition(".")[2] in line.get("unread", ())


def model_key(model: str, key: str) -> str:
    """Returns the key of an observable of one model, such as ``critic.gradient``; the policy (empty) has no prefix."""
    return f"{model}.{key}" if model else key


def loaded_observables(model: str, *, trained: bool) -> tuple[Observable, ...]:
    """Returns the observables of a loaded model: weights and, if trained, the training state at a handover.

    ``model`` is empty for the policy.
    """
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


def routing_observables(model: str) -> tuple[Observable, ...]:
    """Returns the observables of a model's routers, for a mixture of experts. ``model`` is empty for the policy.

    ``routing``: for every token, router and expert the factor of the expert's output, 0 for an expert that is not
    chosen, so choices and weights are one quantity. Below the exact tier, where rounding flips choices, backends replay
    the oracle's choices (``expert_column``). ``router_loss``: the load-balancing loss of the step. ``router_z_loss``:
    the z-loss. Both are without their factors.
    """
    stage = _stage(model, "routing")
    return (
        Observable(
            key=model_key(model, ROUTING),
            stage=stage,
            kind="rows",
            required=False,
            effect_at=_stage(model, "gradients"),
            replicated="holders",
        ),
        *(
            Observable(
                key=model_key(model, key),
                stage=stage,
                kind="scalar",
                required=False,
                effect_at=_stage(model, "gradients"),
                replicated="all ranks",
                sum_of=model_key(model, terms) if terms else "",
                drawn=True,
                title=title,
            )
            for key, terms, title in (
                (ROUTER_LOSS, ROUTER_TERMS, "load-balancing loss"),
                (ROUTER_Z_LOSS, "", "z-loss of routers"),
            )
        ),
    )


def rollout_routing(model: str, *, trained: bool) -> str:
    """Returns the key of a model's routing over a rollout before its first update; "old" for a trained model."""
    return model_key(model, OLD_ROUTING if trained else ROUTING)


def rollout_routing_observable(model: str, *, trained: bool) -> Observable:
    """Declares a model's routing before the first update of a rollout; see routing_observables."""
    return Observable(
        key=rollout_routing(model, trained=trained),
        stage=_stage(model, "old routing" if trained else "routing"),
        kind="rows",
        required=False,
        effect_at=_stage("" if trained else model, "advantages" if trained else "log-probs"),
        replicated="holders",
    )


def trained_observables(model: str, *, scaled: bool = False) -> tuple[Observable, ...]:
    """Returns the observables of an update, in causal order: loss scale, gradients, norm, learning rate, weights.

    ``model`` is empty for the policy. ``scaled``: whether the scenario configures the loss scale.
    """
    gradient, weight = model_key(model, "gradient"), model_key(model, "weight")
    update = _stage(model, "clipped update")
    lost_if = model_key(model, SKIPPED) if scaled else ""
    return (
        *(_loss_scale(model, key) for key in (SKIPPED, *PROGRESS_OF_SCALE) if scaled),
        Observable(
            key=gradient,
            stage=_stage(model, "gradients"),
            kind="tensors",
            replicated="holders",
            rowwise=True,
            lost_if=lost_if,
            column=_stage(model, "gradients"),
        ),
        Observable(
            key=model_key(model, "grad_norm"),
            stage=_stage(model, "gradient norm"),
            kind="scalar",
            required=False,
            effect_at=update,  # a wrong norm clips the gradients wrongly, even if the framework does not report it
            replicated="all ranks",
            norm_of=gradient,
            lost_if=lost_if,
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


def _loss_scale(model: str, key: str) -> Observable:
    return Observable(
        key=model_key(model, key),
        stage=_stage(model, "loss scale"),
        kind="setting",
        required=False,
        effect_at=_stage(model, "weights after N steps"),
        replicated="all ranks",
    )


def _stage(model: str, name: str) -> str:
    return f"{model} {name}" if model else name


def stages(observables: Iterable[Observable]) -> tuple[str, ...]:
    """Returns all stages in causal order: an error at one stage is expected to show at the later ones.

    The stage of replicas follows the last observable that it belongs to, so gradient replicas come before the norm.
    """
    order: dict[str, None] = {}
    for observable in observables:
        for stage in (observable.stage, observable.replica_stage):
            if stage:
                order.pop(stage, None)  # the last mention counts
                order[stage] = None
    return tuple(order)


def columns(observables: Iterable[Observable]) -> tuple[str, ...]:
    """Returns the columns of the comparison between backends, in causal order."""
    return tuple(dict.fromkeys(observable.column for observable in observables if observable.column))


def observables_to_json(observables: Sequence[Observable]) -> list[dict[str, Any]]:
    """Returns plain JSON values, for the header of a record."""
    return [vars(observable) | {} for observable in observables]


def observables_from_json(values: Sequence[dict[str, Any]]) -> tuple[Observable, ...]:
    """Parses the JSON values of ``observables_to_json``. Raises TypeError for unknown fields."""
    return tuple(Observable(**value) for value in values)
