"""Faults: known silent bugs, planted on purpose, that the suite must catch (claim 7).

A backend names *seams*: functions of its own or of its library with a fixed meaning, given as ``module:qualified.name``
in its class attribute ``seams``. A fault wraps one seam. So a fault written once works on every backend with that seam,
and no backend has a branch for faults in its code.
"""

from impl.faults.catalogue import CATALOGUE, Fault
from conformance.faults.injection import find_fault, plant

__all__ = ["CATALOGUE", "Fault", "find_fault", "plant"]
