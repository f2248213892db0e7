"""Training logs, ours and other frameworks', held against each other: ``parity diff``.

readers/ turn a file into rows; run.py makes curves of them under canonical names (metrics.py), with NaN where a blank
is one (blanks.py); alignment.py puts the curves of several runs on common positions; band.py says what is allowed and
comparison.py where they part; hints.py guesses why; text.py, markdown.py and html.py tell it. docs/comparing-runs.md
gives the statistics and their sources.
"""
