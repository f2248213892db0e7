"""Digest: what a record's footer says of the record. Alone in a module because readers without torch need it, too."""

import hashlib
import json
from typing import Any


def record_digest(body: bytes, footer: dict[str, Any]) -> str:
    """SHA-256 of all lines before the footer and of the footer's own values, apart from the digest itself."""
    values = {key: value for key, value in footer.items() if key != "sha256"}
    return hashlib.sha256(body + json.dumps(values).encode()).hexdigest()
