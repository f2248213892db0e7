"""The dynamic loss scale of fp16, the same on all backends (Micikevicius et al., arXiv 1710.03740, section 3.3).

An update whose gradients overflow is skipped: weights, moments, step counts and the schedule stay as they are, and the
scale halves, at the first overflow. After GROWTH_INTERVAL updates in a row without one it doubles.
"""

INITIAL_POWER = 12  # of two; from the usual 16 or 32 the first updates overflow, and are skipped until it has fallen
GROWTH_INTERVAL = 2000
