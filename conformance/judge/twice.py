"""Twice: what is said of a cell that was run in ranks that had run others, and once more in fresh ones (claim 9).

What an earlier cell has left in a process may be what differs. A cell that is wrong only then is wrong all the same:
whoever trains twice in one process meets it.
"""

from dataclasses import replace

from conformance.record.results import Attempt
from conformance.record.states import NO_FAULT, STATES
from conformance.record.verdict import Verdict


def in_both(used: Verdict, fresh: Verdict) -> Verdict:
    """One verdict that tells both; ``used``: of the ranks that had run other cells."""
    both = ((used, "after other cells"), (fresh, "in fresh ranks"))
    wrong = [one for state in ("differs", "infrastructure") for one in both if one[0].state == state]
    if not wrong:
        return used
    (worst, when), (other, otherwise) = wrong[0], both[1 if wrong[0] is both[0] else 0]
    head, _, rest = worst.reason.partition("\n")
    their_head = other.reason.partition("\n")[0]
    if worst.state == other.state and (worst.first_stage or head) == (other.first_stage or their_head):
        said = f"{head}; {otherwise}, too"
    elif other.state in NO_FAULT:
        verb = "differs" if worst.state == "differs" else "fails"
        said = f"{verb} only {when}: {head}; {otherwise} {STATES[other.state].name}: {their_head}"
    else:
        said = f"{head}; {otherwise}: {their_head}"
    reason = "\n".join(filter(None, (said, rest)))
    told = worst if worst.quantities else other
    return replace(told, state=worst.state, reason=reason)


def told_of(used: Attempt, fresh: Attempt) -> tuple[Attempt, Attempt]:
    """The attempt whose records a verdict of both rests on, and the other one."""
    return (fresh, used) if fresh.completed and not used.completed else (used, fresh)
