"""Faults: known silent bugs, planted on purpose, that the suite must catch (claim 8).

A backend names *seams*: functions of its own or of its library with a fixed meaning, given as ``module:qualified.name``
in its class attribute ``seams``. A fault wraps one seam. So a fault written once works on every backend with that seam,
and no backend has a branch for faults in its code. Catalogues of faults are found by entry point, as backends are: a
fault knows the inside of what it breaks, and conformance knows the inside of no backend.
"""

from conformance.faults.fault import Fault, not_called
from conformance.faults.injection import catalogue, find_fault, plant

__all__ = ["Fault", "catalogue", "find_fault", "not_called", "plant"]
