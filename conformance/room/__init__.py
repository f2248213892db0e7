"""Room: what memory, disk and time the selected cells will take, and whether this machine has it.

estimate.py   arithmetic: models, layouts and batches -> bytes and seconds (docs/real-data.md has the formulas)
check.py      refusals, and what would fit
command.py    parity plan
"""
