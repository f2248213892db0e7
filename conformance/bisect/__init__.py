"""Finds the first module of a differing cell whose values or gradients differ from the oracle's (`parity bisect`).

locate.py   records the values and gradients of the oracle's modules, and finds the first of the ranks' that is wrong
run.py      runs a cell, or its exact twin, and bisects it; bisects the first differing cells of a run
explain.py  describes a bisection in words

conformance/worker/activation_capture.py records the values of a rank; conformance/results/bisection.py keeps results.
"""
