"""Finds the first module of a differing cell whose values or gradients differ from the oracle's (`parity bisect`).

oracle_capture.py  records the values and gradients of the oracle's modules
locate.py          compares the ranks' values with these, and finds the first wrong module
run.py             runs a cell, or its exact twin, and bisects it; bisects the first differing cells of a run
explain.py         describes a bisection in words

conformance/worker/activation_capture.py records the values of a rank; conformance/results/bisection.py keeps results.
"""
