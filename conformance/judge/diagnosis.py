"""Names the likely cause of a finding, from what its number has in common with layout, clipping and token counts.

A likely cause decides nothing: it is named for a quantity that was already found wrong. It has to explain this very
number: with the cause undone, the remaining error has to be within the tolerance. Where nothing fits, none is named.
A missing reduction explains no number; it is named where wrong gradients and gradients that differ between ranks are of
the same parameters.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from conformance.judge.rebuilt import CLIP
from conformance.judge.tolerance import Measurement, gradient_stages
from conformance.numerics.comparison import likely_causes, powers_of, times
from conformance.records.step_tensors import Record, StepRecord
from conformance.results.verdict import Quantity
from conformance.spec.known_defects import means_of_means
from conformance.spec.layout import Layout
from conformance.spec.observables import CONFIGURATION, LOGPROBS, LOSS, Observable, is_unread, terms_of
from conformance.spec.scenario import Scenario

CLOSE = 1e-3  # relative distance of a scale from the factor that explains it, in every precision
TRAINING_STATE = "training state"  # the stage of what a resume loads, behind the name of a critic
ZERO = 1e-9  # scale that is taken for zero: below every factor that is known, above what sums leave that cancel
MOST_STEPS = 100_000  # longest schedule that is searched
MOST_KINDS = 3  # kinds of parameters that are named as what wrong ones have in common
PARTS = ("bias", "lora_A", "lora_B")  # of a module; its weight goes without saying
MOST = 10  # largest number of positions of a step, divided by its target tokens
LARGEST_GROUP = 64  # responses to one prompt
PROOF = 10  # times less of an error has to be left without a mean of means, which may be near the right mean
TOLD_BY_ONE_NUMBER = 0.1  # a number is always some factor of another; one nearer to 1 than this looks like a cause
EPSILON = 1e-5  # error that the epsilon beside a deviation leaves, which a factor of the deviation does not explain

UNREDUCED = "not reduced: ranks that share these parameters have different gradients, of their own rows or shards"

BARE = re.compile(r"\S+ times the reference")

# Modules of a layer in the order in which the backward pass comes to them.
_IN_LAYER = (
    "post_feedforward_layernorm",
    "mlp.down_proj",
    "mlp.",
    "pre_feedforward_layernorm",
    "post_attention_layernorm",
    "self_attn.o_proj",
    "self_attn.v_proj",
    "self_attn.",
    "input_layernorm",
)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The numbers of one step that a likely cause may refer to.

    tokens: targets of the optimizer step. clip: the factor by which the oracle clipped, where it did, by stage of
    gradients and of updates. oracle: the record of the step; None for the weights as loaded.
    """

    scenario: Scenario
    layout: Layout
    tokens: float
    clip: Mapping[str, float]
    gradients: frozenset[str]
    updates: frozenset[str]
    oracle: StepRecord | None


def facts_of_steps(
    phases: Sequence[Record], oracle: Record, scenario: Scenario, observables: Sequence[Observable]
) -> dict[int, Facts]:
    """Collects the facts of each step; those of step -1, the weights as loaded, belong to the first phase."""
    layouts = {step.step: phase.layout for phase in phases for step in phase.steps}
    parameters = [o for o in observables if o.kind == "tensors"]
    known = {}
    for step in (None, *oracle.steps):
        number = step.step if step else -1
        norms = {o.norm_of: step.value(o.key) for o in observables if o.norm_of} if step else {}
        norm_of = {o.stage: norms.get(re.sub("weight$", "gradient", o.key)) for o in parameters}
        clip = {stage: _clip(norm, scenario.optimizer.max_grad_norm) for stage, norm in norm_of.items()}
        known[number] = Facts(
            scenario=scenario,
            layout=layouts.get(number, phases[0].layout),
            tokens=(step.value("token_count") if step else None) or 1,
            clip={stage: factor for stage, factor in clip.items() if factor},
            gradients=gradient_stages(observables),
            updates=frozenset(o.stage for o in observables if o.change),
            oracle=step,
        )
    return known


def _clip(norm: float | None, max_norm: float | None) -> float | None:
    return max_norm / (norm + 1e-6) if norm and max_norm and norm > max_norm else None


def likely_cause(m: Measurement, facts: Facts, *, allowed: float) -> str:
    """Names the likely cause of a measurement that was found wrong; empty if no known cause explains it.

    allowed: the bound of the measurement. The error that is left without the cause may not exceed it.
    """
    if m.replica:
        return "ranks that should hold the same numbers do not"
    if m.stage == CONFIGURATION.stage:
        return m.where  # what was requested and observed
    if m.broken:
        return f"it holds {m.broken}"
    name = m.tensor.rpartition(".")[2]
    if name == "lr":
        return _another_step(m, facts, allowed)
    if name == "token_count" and m.scale is not None:
        return f"{m.max_abs:.0f} targets {'are missing' if m.scale < 1 else 'too many'}"
    if m.scale is None or not math.isfinite(m.scale) or abs(m.scale - 1) < 1e-6:
        return ""
    if abs(m.scale) < ZERO:  # one row of zeros is no cause: the tokens of other ranks may be missing in it
        return "" if m.residual > ZERO or m.of_row else _zero(m, facts)
    if means := _means(m, facts, allowed):
        return f"it is {' or '.join(means)}"
    factors = _known_factors(m, facts, allowed)
    if factors:
        return times(m.scale, causes=factors)
    fits = m.left_without(m.scale) <= allowed
    one_number = m.value is not None and abs(m.scale - 1) < TOLD_BY_ONE_NUMBER
    return times(m.scale) if m.scalar and fits and f"{m.scale:.4g}" != "1" and not one_number else ""


def without_bare_factors(quantities: Sequence[Quantity]) -> list[Quantity]:
    """Removes hints that name only a factor and no cause, if another hint names a cause."""
    named = any(q.hint and not BARE.fullmatch(q.hint) for q in quantities)
    return [replace(q, hint="") if named and BARE.fullmatch(q.hint) else q for q in quantities]


def with_unreduced(quantities: Sequence[Quantity], observables: Sequence[Observable]) -> list[Quantity]:
    """Names a missing reduction as the cause of wrong gradients, at steps at which the parameters with wrong gradients
    are those whose gradients differ between ranks that hold the same parameter."""
    hints: dict[tuple[str, str, int], str] = {}
    for gradient in (o for o in observables if o.stage in gradient_stages([o])):
        for step in {q.step for q in quantities}:
            wrong = [q for q in quantities if q.step == step and not q.ratio <= 1]
            of = [q for q in wrong if q.stage == gradient.stage]
            apart = [q.tensor for q in wrong if q.stage == gradient.replica_stage]
            names = {name.removeprefix(f"{gradient.key} ").partition(" on ranks ")[0] for name in apart}
            if of and names == {_parameter(q.tensor) for q in of}:
                hints |= {(q.stage, q.tensor, q.step): UNREDUCED for q in of}
    return [replace(q, hint=hints.get((q.stage, q.tensor, q.step), q.hint)) for q in quantities]


def _another_step(m: Measurement, facts: Facts, allowed: float) -> str:
    """Names the step whose learning rate was observed, the nearest one if there are several."""
    schedule, rate = facts.scenario.schedule, facts.scenario.optimizer.lr
    if m.value is None:
        return ""
    steps = range(max(schedule.total_steps, facts.scenario.steps) + 1) if schedule.total_steps < MOST_STEPS else ()
    matches = [step for step in steps if abs(m.value - schedule.factor(step) * rate) <= allowed * rate]
    nearest = min(matches, key=lambda step: (abs(step - m.step), step), default=None)
    return "" if nearest in (None, m.step) else f"the learning-rate schedule is at step {nearest} instead of {m.step}"


def _zero(m: Measurement, facts: Facts) -> str:
    if m.stage in facts.gradients:
        return "it is zero: the loss does not reach it, or it was cleared before it was read"
    if m.stage in facts.updates:
        return "it has not moved: it is never trained, or its update is lost"
    if m.stage.endswith(TRAINING_STATE):
        return "it is zero: the resume has not loaded it"
    return "it is zero"


def _known_factors(m: Measurement, facts: Facts, allowed: float) -> list[str]:
    assert m.scale is not None
    layout, accumulation, tokens = facts.layout, facts.scenario.accumulation, facts.tokens
    sizes: dict[str, float] = {
        "dp": layout.dp,
        "rep": layout.rep,
        "tp": layout.tp,
        "sp": layout.sp,
        "ulysses": layout.ulysses,
        "accumulation": accumulation,
        "dp x sp": layout.dp * layout.sp,
        "dp x accumulation": layout.dp * accumulation,
        "world size": layout.world_size,
        "tokens": tokens,
        "tokens / dp": tokens / layout.dp,
    }
    factors = powers_of(sizes)
    if clip := facts.clip.get(m.stage):
        again = "clipped before it was read" if m.stage in facts.gradients else "clipped twice"
        factors |= {f"the clip factor: {again}": clip, "1/(the clip factor): it was not clipped": 1 / clip}
    near = likely_causes(m.scale, factors, within=CLOSE)
    left = {text: m.left_without(factors[text]) for text in near}
    known = sorted((text for text in near if left[text] <= allowed), key=left.__getitem__)
    return known or _token_counts(m, facts, allowed) or _group_sizes(m, allowed)


def _means(m: Measurement, facts: Facts, allowed: float) -> list[str]:
    """Names parts of a step if the loss is the mean of their means, as computed from the oracle's tokens."""
    if (oracle := facts.oracle) is None or not oracle.value(m.tensor):
        return []
    key = terms_of(m.tensor) if m.tensor != LOSS.key or facts.scenario.objective.kind != "sft" else LOGPROBS.key
    terms = {int(n.partition("/")[2]): t for n, t in oracle.tensors().items() if n.startswith(f"{key}/")}
    counts = [len(terms.get(row, ())) for row in range(facts.scenario.data.rows)]
    whole = sum(of_row.double().sum().item() for of_row in terms.values())
    found = []
    for kind in means_of_means(facts.scenario, facts.layout) if whole else ():
        sizes = kind.sizes(counts)
        other = sum(of_row.double().sum().item() / sizes[row] for row, of_row in terms.items())
        if other and m.left_without(other * sum(counts) / whole) <= min(allowed, m.error / PROOF):
            found.append(kind.words)
    return found


def _token_counts(m: Measurement, facts: Facts, allowed: float) -> list[str]:
    """Names the number of tokens that a loss was divided by, if that is a whole number."""
    near = facts.scenario.tier.count_error
    if near is None or not m.tensor.endswith("loss") or not m.scale:
        return []
    count = facts.tokens / m.scale
    whole = round(count)
    if whole < 1 or abs(count - whole) > near or whole > MOST * facts.tokens:
        return []
    if not m.left_without(facts.tokens / whole) <= allowed:
        return []
    excess = abs(whole - facts.tokens)
    cause = "targets are left out of the count" if whole < facts.tokens else "positions without targets are counted"
    return [f"{facts.tokens:.0f}/{whole}: divided by {whole} tokens, so {excess:.0f} {cause}"]


def _group_sizes(m: Measurement, allowed: float) -> list[str]:
    """Names the size of a group by which all advantages are off, if that is one whole number."""
    assert m.scale is not None
    if not m.tensor.endswith("advantage"):
        return []
    causes = {
        "sqrt({n}/{less}): a deviation with n instead of n - 1 of groups of {n}": 0.5,
        "sqrt({less}/{n}): a deviation with n - 1 instead of n of groups of {n}": -0.5,
        "{n}/{less}: a mean without the response itself of groups of {n}": 1,
        "{less}/{n}: a mean with the response itself of groups of {n}": -1,
    }
    found = [
        text.format(n=n, less=n - 1)
        for text, power in causes.items()
        for n in range(2, LARGEST_GROUP + 1)
        if m.left_without((n / (n - 1)) ** power) <= max(allowed, EPSILON)
    ]
    return found if len(found) == 1 else []


def backward_place(name: str) -> tuple[int, int]:
    """Returns a sort key that puts parameters, by their Hugging Face names, in the order of the backward pass.

    The order is the head, the last norm, layers from the last to the first, embeddings. Other names come first, and
    quantities of all parameters together last.
    """
    if _is_of_all(name):
        return 2, 0
    if name.startswith("model.embed_tokens"):
        return 1, 0
    if layer := re.match(r"model\.layers\.(\d+)\.(.*)", name):
        inside = next((i for i, module in enumerate(_IN_LAYER) if layer[2].startswith(module)), len(_IN_LAYER))
        return -int(layer[1]), inside
    return -(2**62), int(name.startswith("model.norm"))


def circumstances(
    quantities: Sequence[Quantity], phases: Sequence[Record], observables: Sequence[Observable]
) -> list[str]:
    """Describes the circumstances of the first finding, a sentence each; ``quantities`` are in causal order."""
    findings = [q for q in quantities if not q.ratio <= 1]
    first = findings[0]
    sentences = []
    gradients = {o.stage: o.replica_stage for o in observables if o.stage in gradient_stages([o])}
    if first.stage in gradients:
        sentences += _nearest_the_loss(first, quantities)
        sentences += _in_common(first, quantities)
        replicas = [f for f in findings if (f.stage, f.step) == (gradients[first.stage], first.step)]
        if replicas:
            sentences.append(f"{len(replicas)} differ between ranks as well, such as {replicas[0].tensor}")
    if any(s.step == first.step and is_unread("gradient", s.line) for phase in phases for s in phase.steps):
        sentences += _undecided(first, [q for q in quantities if q.step == first.step], observables)
    sentences += _may_be_earlier(first, phases)
    for phase in phases[1:]:
        if phase.header["first_step"] == first.step:
            sentences.append(f"step {first.step} is the first after loading")
    return sentences


def _undecided(first: Quantity, here: Sequence[Quantity], observables: Sequence[Observable]) -> Iterator[str]:
    """Names causes that look the same at a step whose gradients were not read. ``here``: quantities of this step."""
    of = [o for o in observables if (o.kind == "tensors" and o.applies(first.step)) or o.norm_of]
    model = next((o.key.rpartition(".")[0] for o in of if o.stage == first.stage), None)
    stages = {o.stage for o in of if o.key.rpartition(".")[0] == model}
    gradients, norm = stages & gradient_stages(of), {o.stage for o in of if o.norm_of} & stages
    has_clip = any(q.tensor == CLIP and q.stage in stages for q in here)
    suspects = ""
    if first.stage in gradients and not has_clip:
        suspects = "gradients or clip"
    elif first.stage in gradients and any(q.stage in norm and not q.ratio <= 1 for q in here):
        suspects = "gradients or reported norm"
    elif first.stage in stages - norm and not (has_clip or any(q.stage in gradients for q in here)):
        suspects = "gradients, clip or update"
    if suspects:
        yield f"{suspects}: cannot be told apart at a step that was not observed"


def _may_be_earlier(first: Quantity, phases: Sequence[Record]) -> Iterator[str]:
    """Says that the first finding may come from the update of the step before, after which weights were not read."""
    before = first.step - 1
    unread = any(s.step == before and is_unread("weight", s.line) for phase in phases for s in phase.steps)
    if unread and first.stage != CONFIGURATION.stage:
        yield f"clip or update of step {before} may be the cause: weights after it were not read"


def _nearest_the_loss(first: Quantity, quantities: Sequence[Quantity]) -> list[str]:
    """Names the wrong parameter nearest the loss; the parameters before it in the backward pass are right."""
    here = [q.tensor for q in quantities if (q.stage, q.step) == (first.stage, first.step) and not _is_of_all(q.tensor)]
    names, nearest = list(dict.fromkeys(map(_parameter, here))), _parameter(first.tensor)
    if _is_of_all(first.tensor) or not any(name.startswith("model.") for name in names):
        return []  # their order is not known
    right = names.index(nearest)
    after = f", after {right} parameter{'s' if right > 1 else ''} within tolerance" if right else ""
    return [f"nearest the loss: {nearest}{after}"]


def _in_common(first: Quantity, quantities: Sequence[Quantity]) -> list[str]:
    """Names the kinds of the wrong parameters, if all parameters of these kinds are wrong and others are right."""
    here = [q for q in quantities if (q.stage, q.step) == (first.stage, first.step) and not _is_of_all(q.tensor)]
    wrong = {_parameter(q.tensor) for q in here if not q.ratio <= 1}
    kinds: dict[str, set[str]] = {}
    for name in (_parameter(q.tensor) for q in here):
        kinds.setdefault(_kind(name), set()).add(name)
    found = [kind for kind, names in kinds.items() if names & wrong]
    if len(found) == len(kinds) or len(found) > MOST_KINDS or any(kinds[kind] - wrong for kind in found):
        return []
    return [f"only the gradients of {', '.join(sorted(found))}"] if found else []


def _kind(name: str) -> str:
    """Returns the module of a parameter in any layer, such as ``o_proj``, with the part of it: ``lora_B of o_proj``."""
    *modules, module = name.removesuffix(".weight").split(".")
    return f"{module} of {modules[-1]}" if module in PARTS and modules else module


def _is_of_all(tensor: str) -> bool:
    return ": " in tensor


def _parameter(tensor: str) -> str:
    """Returns a parameter's name without a trailing annotation such as ``(missing)``."""
    return tensor.partition(" ")[0]
