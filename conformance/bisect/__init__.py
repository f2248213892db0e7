"""`parity bisect`: the first module of a cell whose values or gradients are not the oracle's.

capture.py    what goes into and comes out of every module of a rank, and its gradients, by hooks
reference.py  the same of the oracle
values.py     each value against the oracle's, on all ranks: where it is wrong, and what would make it right
find.py       the first wrong module, forward in execution order and backward in reverse
tell.py       the text
command.py    the command
"""
