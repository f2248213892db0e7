"""Compares training logs of any framework: ``parity diff``.

    readers.py            reads a log into rows: a file, a folder, event files of TensorBoard, a run of wandb
    structured.py         reads CSV and JSON
    lines.py              reads the lines of a console, and lists the formats with a sample each
    rows.py               holds rows, and numbers those that name no step
    metrics.py            names metrics
    run.py                makes curves of the rows under canonical names, with NaN where a value is missing
    alignment.py          puts the curves of several runs on common positions
    tolerance_band.py     says how far two runs may differ
    comparison.py         finds where the runs first differ
    likely_causes.py      names likely causes
    output.py, page.py    write text, Markdown, JSON and HTML

docs/guides/comparing-runs.md gives the statistics and their sources.
"""
