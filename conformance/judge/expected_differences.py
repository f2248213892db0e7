"""Compares a cell that has conventions or a known defect with an oracle that has the same (docs/principles.md).

A cell with conventions has to agree with the oracle that has all of them, in all stages by the usual bounds. A
convention counts only where the cell differs from the oracle without it. If a cell agrees without a convention and not
with it, the convention is stale, and the cell differs.

A cell with a known defect has to differ from the oracle without it, and to agree with the oracle that has it. If the
oracle cannot have the defect, only the quantities that the expectation names may differ. A cell with a planted fault,
which has no known defects, has to differ.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from conformance.backends.faults import needs_in_words
from conformance.judge.direction import SCALE, SIZE, is_summed_in
from conformance.judge.tolerance import OF_ROWS, gradient_stages
from conformance.judge.verdict import judge_folders
from conformance.results.verdict import NO_FAULT, Quantity, Verdict
from conformance.spec.conventions import AnyConvention, Conventions, of_oracle
from conformance.spec.known_defects import UPDATES, Bug, Defect, Known, MeanOfMeans, Unmodelled, defects_of
from conformance.spec.observables import Observable, stages

Defects = tuple[Defect, ...]
Oracles = Callable[[Defects], Path | None]  # the folder of the oracle with these defects; None if there is none
NO_ORACLE = "there is no record of the oracle with {}; run the cell again"


@dataclass(frozen=True, kw_only=True)
class _Judge:
    """Judges the records of a cell by the oracle with different conventions and defects."""

    cell: str
    phases: Sequence[Path]
    oracles: Oracles
    observables: Sequence[Observable]

    def by(self, conventions: Conventions, defects: Defects = ()) -> Verdict:
        wanted = (*of_oracle(conventions), *defects)
        if (folder := self.oracles(wanted)) is None:
            kinds = " and ".join(one.kind for one in wanted) or "no defect"
            return Verdict(state="infrastructure", reason=NO_ORACLE.format(kinds))
        unjudged = frozenset(one.unjudged for one in conventions if one.unjudged)
        return judge_folders(self.cell, self.phases, folder, defects=wanted, unjudged=unjudged)

    def with_all(self, conventions: Conventions, defects: Defects = ()) -> Verdict:
        """Judges by the oracle with all conventions, and checks that each of them shows."""
        verdict = self.by(conventions, defects)
        if verdict.state not in NO_FAULT:
            stale, verdict = self._stale(conventions, defects, verdict) if verdict.state == "differs" else ((), verdict)
        else:
            without = {one: self.by(_without(conventions, one), defects) for one in conventions}
            if failed := next((one for one in without.values() if one.state == "infrastructure"), None):
                return failed
            shown = tuple(one for one in conventions if without[one].state == "differs")
            # The generators are judged without the convention only, and are equal.
            stale = tuple(
                one
                for one in conventions
                if one not in shown and one.unjudged in {q.stage for q in without[one].quantities}
            )
            named = f"with {_listed(shown)}" if shown else ""
            reason = "; ".join(filter(None, (verdict.reason, named)))
            verdict = replace(verdict, reason=reason, conventions=tuple(map(str, shown)))
        if not stale:
            return verdict
        reason = f"declares {_listed(stale)}, but does not show it: the cell agrees without; remove the convention"
        return replace(verdict, state="differs", reason=reason, conventions=())

    def _stale(self, conventions: Conventions, defects: Defects, differs: Verdict) -> tuple[Conventions, Verdict]:
        """Returns the conventions without which a cell that differs agrees, and its verdict without them; none and the
        verdict ``differs`` if there are no such conventions."""
        stale: Conventions = ()
        verdict = differs
        for one in conventions:
            less = self.by(_without(conventions, *stale, one), defects)
            if less.state in NO_FAULT:
                return (*stale, one), less
            if less.state == "differs" and self._progress(less) > self._progress(verdict):
                stale, verdict = (*stale, one), less
        return (), differs

    def _progress(self, verdict: Verdict) -> tuple[int, int, int]:
        """Returns how far the cell agrees: the step and the stage of the first finding, and fewer findings."""
        first = verdict.findings[0]
        return first.step, stages(self.observables).index(first.stage), -len(verdict.findings)


def _without(conventions: Conventions, *left_out: AnyConvention) -> Conventions:
    return tuple(one for one in conventions if one not in left_out)


def _listed(conventions: Conventions) -> str:
    words = [f"{one.words} ({one})" for one in conventions]
    return f"the convention{'s' if len(words) > 1 else ''} {' and '.join(words)}"


def explained(
    verdict: Verdict,
    cell: str,
    phases: Sequence[Path],
    *,
    conventions: Conventions,
    candidates: Conventions,
    means: Sequence[MeanOfMeans],
    bugs: Sequence[Bug] = (),
    oracles: Oracles,
    observables: Sequence[Observable],
) -> Verdict:
    """Names a convention of the ``candidates`` with which a cell that differs agrees in all stages, as likely cause.

    A convention whose first stage comes after the first finding is not tried. ``conventions``: those that are declared.
    One of ``bugs`` is named if the cell agrees at all steps with the oracle that has the bug, but for the stages of
    which the bug says that they may differ.
    If gradients are wrong that no cause explains, or a loss by one of ``means``, these are tried on gradients.
    """
    if verdict.state != "differs" or not verdict.findings:
        return verdict
    first, order = verdict.findings[0], stages(observables)
    same = [q for q in verdict.findings if (q.stage, q.step) == (first.stage, first.step)]
    judge = _Judge(cell=cell, phases=phases, oracles=oracles, observables=observables)
    for one in candidates:
        if first.step <= 0 and order.index(one.stage) > order.index(first.stage):
            continue
        if one.unjudged and one.unjudged != first.stage:
            continue
        if judge.by((*conventions, one)).state in NO_FAULT:
            hint = f"agrees in all stages with {one.words} (convention {one})"
            hinted = tuple(replace(q, hint=hint) if q in same else q for q in verdict.quantities)
            return replace(verdict, quantities=hinted, reason=_with_hint(verdict.reason, same, hint))
    of_steps = [q for q in verdict.findings if q.step >= 0]  # others are no numbers that a bug could explain
    step, stage = (of_steps[0].step, of_steps[0].stage) if of_steps else (0, "")
    # Where weights after a step were not read, a wrong update shows first in the next step.
    for bug in (one for one in bugs if stage in one.stages or (step > 0 and one.stages == UPDATES)):
        by = judge.by(conventions, (bug,))
        left = {q.stage for q in by.findings}
        explained_stages = {q.stage for q in verdict.findings} - left  # none if a lost micro-batch has no target token
        if by.state == "infrastructure" or not left <= set(bug.may_differ) or not explained_stages:
            continue
        but = f" but {' and '.join(sorted(left))}" if left else ""
        hint = f"agrees in all stages{but} with {bug.words}"
        numbers = [q for q in of_steps if (q.stage, q.step) == (stage, step)]
        hinted = tuple(replace(q, hint=hint) if q in numbers else q for q in verdict.quantities)
        return replace(verdict, quantities=hinted, reason=_with_hint(verdict.reason, numbers, hint))
    gradients = [q for q in verdict.findings if q.stage in gradient_stages(observables) and q.step == first.step]
    is_unknown = first in gradients and not any(q.hint for q in gradients)
    for mean in (one for one in means if gradients and (is_unknown or any(one.words in q.hint for q in same))):
        by = judge.by(conventions, (mean,))
        if by.state == "infrastructure" or any((q.stage, q.step) == (first.stage, first.step) for q in by.findings):
            continue
        wrong = {(q.stage, q.step) for q in by.findings}
        right = [q for q in gradients if (q.stage, q.step) not in wrong]
        hint = f"agrees with {mean.words}"
        hinted = tuple(replace(q, hint=hint) if q in right else q for q in verdict.quantities)
        reason = _with_hint(verdict.reason, same, hint) if is_unknown else verdict.reason
        return replace(verdict, quantities=hinted, reason=reason) if right else verdict
    return verdict


def _with_hint(reason: str, findings: Sequence[Quantity], hint: str) -> str:
    """Replaces the hint of the finding that the reason names, or adds the new one."""
    before = next((q.hint for q in findings if q.hint and f"({q.hint})" in reason), "")
    return reason.replace(f"({before})", f"({hint})") if before else f"{reason}; {hint}"


def judge_cell(
    cell: str,
    phases: Sequence[Path],
    *,
    known: Sequence[Known],
    conventions: Conventions,
    oracles: Oracles,
    observables: Sequence[Observable],
) -> Verdict:
    """Judges the records of a cell's phases by the oracle with its ``conventions``. If differences are ``known``, also
    judges them by the oracle that has all these defects as well.

    If all is as expected, the verdict has the quantities against the correct oracle, else those against the defective
    one: these begin where something unexpected is wrong. A cell with a planted fault that agrees with the oracle proves
    nothing, and does not pass.
    """
    judge = _Judge(cell=cell, phases=phases, oracles=oracles, observables=observables)
    verdict = judge.by(conventions) if known or planted_in(cell) else judge.with_all(conventions)
    if verdict.state in NO_FAULT and (planted := planted_in(cell)):
        reason = (
            f"{' and '.join(planted)} was planted and called, and nothing differs: this cell lacks what the fault "
            f"needs, or the fault is not detected; {'; '.join(map(needs_in_words, planted))} (docs/reference/faults.md)"
        )
        return replace(verdict, state="infrastructure", reason=reason)
    if not known or verdict.state == "infrastructure":
        return verdict
    known_reasons = "; ".join(f"{one.reason} ({one.link})" for one in known)
    if verdict.state != "differs":
        reason = f"expected to differ ({known_reasons}), but: {verdict.reason}; remove the expectation"
        return replace(verdict, state="differs", reason=reason)
    defects = defects_of(known)
    behind = judge.with_all(conventions, defects) if defects or conventions else verdict
    if behind.state == "infrastructure":
        return replace(behind, reason=f"of the oracle with the expected defects: {behind.reason}")
    allowed = [one.unmodelled for one in known if one.unmodelled]
    unexplained = [f for f in behind.findings if not any(_explains(u, f, behind, observables) for u in allowed)]
    if unexplained:
        first, more = unexplained[0], len(unexplained) - 1
        unlike = f"but not like this: {first}, and {more} more"
        reason = f"expected to differ ({known_reasons}), {unlike}; correct the expectation"
        return replace(behind, state="differs", reason=reason)
    for one in allowed:
        if not any(_is_named(one, finding) for finding in behind.findings):
            where = f"at {one.stage} in {', '.join(one.tensors)}"
            reason = f"expected to differ {where} ({known_reasons}), and does not; correct or remove the expectation"
            return replace(behind, state="differs", reason=reason)
    agrees = f"with that, {behind.reason}" if defects and not behind.findings else "nothing else differs"
    reason = f"{known_reasons}; {agrees}"
    return replace(verdict, state="expected_difference", reason=reason, conventions=behind.conventions)


def planted_in(cell: str) -> list[str]:
    """Returns the names of the faults that are planted in a cell, from its id."""
    return [part.removeprefix("fault-") for part in cell.split("/")[5:] if part.startswith("fault-")]


def _explains(allowed: Unmodelled, finding: Quantity, verdict: Verdict, observables: Sequence[Observable]) -> bool:
    """Whether the defect names the finding, or the finding follows from the first one that the defect names.

    A scale of many tensors follows from a finding of one of them that is explained.
    """
    if SCALE in finding.tensor or SIZE in finding.tensor:
        summed = (f for f in verdict.findings if f.stage == finding.stage and ": " not in f.tensor)
        if any(
            is_summed_in(f.tensor.removesuffix(f" {OF_ROWS}"), finding.tensor)
            and _explains(allowed, f, verdict, observables)
            for f in summed
        ):
            return True
        finding = replace(finding, tensor=finding.tensor.partition(": ")[0])
    if _is_named(allowed, finding):
        return True
    named = [f.step for f in verdict.findings if _is_named(allowed, f)]
    if not allowed.onward or not named or not _is_against_the_oracle(finding, observables):
        return False
    order = stages(observables)
    if allowed.stage not in order:
        return False
    return (finding.step, order.index(finding.stage)) > (min(named), order.index(allowed.stage))


def _is_named(allowed: Unmodelled, finding: Quantity) -> bool:
    tensor = finding.tensor.removesuffix(f" {OF_ROWS}")
    is_of_any_model = finding.stage == allowed.stage or finding.stage.endswith(f" {allowed.stage}")
    return is_of_any_model and any(fnmatchcase(tensor, pattern) for pattern in allowed.tensors)


def _is_against_the_oracle(finding: Quantity, observables: Sequence[Observable]) -> bool:
    """Whether the quantity was computed and compared with the oracle, not with the cell's own record."""
    of_stage = [o for o in observables if o.stage == finding.stage]
    if any(o.kind == "setting" and o.key == finding.tensor for o in of_stage):
        return False
    name = finding.tensor.removesuffix(f" {OF_ROWS}")
    computed = any(o.key == name for o in of_stage if o.kind in ("scalar", "rows"))
    # Quantities that are rebuilt, missing, of another shape or compared between ranks have more than a name.
    return computed or (" " not in name and any(o.kind == "tensors" and o.when != "loaded" for o in of_stage))
