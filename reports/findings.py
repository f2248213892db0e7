"""Findings: what is written up in docs/findings, for a page that has to open offline and from an installed wheel.

A reason that names ``docs/findings/NAME.md`` has a link to the text of this finding at the end of the page.
"""

import re
from collections.abc import Iterable
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
# Beside ``reports`` in a checkout, inside it in an installed wheel.
FOLDER = _PACKAGE / "_findings" if (_PACKAGE / "_findings").is_dir() else _PACKAGE.parent / "docs" / "findings"
MENTION = re.compile(r"docs/findings/([a-z0-9-]+)\.md")


def findings(texts: Iterable[str]) -> dict[str, str]:
    """By name the Markdown of every finding that the texts mention and that there is, in alphabetical order."""
    names = sorted({name for text in texts for name in MENTION.findall(text)})
    files = {name: FOLDER / f"{name}.md" for name in names}
    return {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}
