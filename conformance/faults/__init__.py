"""Faults: known silent bugs, planted on purpose, that the suite must catch (claim 8).

A backend names *seams*: functions with a fixed meaning, of its own or of its library, given as
``module:qualified.name`` in the class attribute ``seams``. A fault wraps one seam. So a fault has to be written only
once for all backends with that seam, and no backend needs code for faults. Catalogues of faults are found by entry
point, as backends are, because a fault depends on the internals of what it breaks, and conformance depends on no
backend.
"""

from conformance.faults.fault import Fault, not_called
from conformance.faults.injection import catalogue, find_fault, plant

__all__ = ["Fault", "catalogue", "find_fault", "not_called", "plant"]
