"""`parity bisect`: the first module of a cell whose values or gradients are not the oracle's.

capture.py      what goes into and comes out of every module of a rank, and its gradients, by hooks
collectives.py  which collectives each module issues
reference.py    the same values of the oracle
values.py       each value against the oracle's, on all ranks: where it is wrong, and what would make it right
find.py         the first wrong module, forward in execution order and backward in reverse
task.py         the comparison, in a process of its own
run.py          a cell, or its exact twin, from the run to what was found
auto.py         the first differing cells of a run
tell.py         the words of it
command.py      the command

What was found is kept by conformance/results/bisection.py.
"""
