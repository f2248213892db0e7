"""Mutates files at random but reproducibly; tests/support/fuzz_inputs.py checks the results."""

import copy
import json
import math
import random
import re
from pathlib import Path
from typing import Any

NUMBERS = (0, -1, 1, 2, 3, 7, 1.5, -0.0, 1e-300, 1e308, 2**31, 2**63, 10**30, 5e-324)
WORDS = ("", " ", "5", "yes", "../..", "/dev/zero", "~nobody", "dp2", "\0", "é", "x" * 5000, "{{ 1 / 0 }}", "a.b")
JUNK: tuple[Any, ...] = (*(None, True, False, [], {}, [1], [[]], {"a": {}}, math.nan, math.inf), *NUMBERS, *WORDS)
TOML_TEXTS = (
    '"dp02"',
    '"dp٢"',
    '"dp2-to-dp4"',
    '"dp300"',
    '"dp65537"',
    '"zero9"',
    '"sp2.torchcp"',
    '"../x"',
    '"\\u0000"',
)
TOML_LONG = ("9" * 5000, "[" * 3000, f"'{'x' * 5000}'")
TOML_WORDS = ("nan", "inf", "-inf", "true", "[]", "{}", "[1,2]", '"5"', '"1e-3"', "''", "1979-05-27", "1e999")
TOML_ODD = ("{a={a={a=1}}}", "٢", "==", "0x10", "1_000", "[5]", '{steps="2"}', '"os:system"', '[{save="export"}]')
TOML_JUNK = (*map(str, NUMBERS), *TOML_LONG, *TOML_WORDS, *TOML_ODD)
TEMPLATES = """{{ 'a' * 10 ** 8 }}
{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
{% for i in range(10 ** 9) %}x{% endfor %}
{{ messages[5]['content'] }}
{{ raise_exception('no') }}
{{ ''.__class__.__mro__ }}
{% include 'x' %}
{% if %}
{{ messages

constant
{{ messages[0]['content'] }}
{{ messages }}
{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}
{{ '%9999999d' % 1 }}
{{ 1 / 0 }}
{{ 10 ** 10 ** 5 }}""".splitlines()


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    place, length = rng.randrange(len(data) + 1), rng.choice((1, 2, 8, 64))
    return rng.choice(
        (
            data[:place],
            data[:place] + data[place + length :],
            data[:place] + rng.randbytes(length) + data[place + length :],
            data[:place] + rng.choice((b"\xff", b"\xc3(", b"\0", b"\xed\xa0\x80", b"\n", b'"', b"}")) + data[place:],
            data + data[:place],
            b"\xef\xbb\xbf" + data,
            b"",
        )
    )


def mutate_json(rng: random.Random, values: Any) -> Any:
    """One value somewhere in it is replaced, removed, or joined by another."""
    holders = [holder for holder in _holders(values) if holder]
    if not holders:
        return _junk(rng)
    holder = rng.choice(holders)
    key = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    action = rng.randrange(5)
    if action == 0:
        del holder[key]
    elif action == 1 and isinstance(holder, dict):
        holder[rng.choice((*WORDS, "auto_map", "text_config", "quantization_config"))] = _junk(rng)
    elif action == 2 and isinstance(holder[key], int | float):
        holder[key] *= rng.choice((-1, 2, 0.5, 3, 10**6))
    else:
        holder[key] = _junk(rng)
    return values


def _junk(rng: random.Random) -> Any:
    """A copy, because a later mutation may put a value into one that it has put there, or even into itself."""
    return copy.deepcopy(rng.choice(JUNK))


def _holders(values: Any) -> list[Any]:
    if not isinstance(values, dict | list):
        return []
    inside = values.values() if isinstance(values, dict) else values
    return [values, *(holder for value in inside for holder in _holders(value))]


def rewrite_json(rng: random.Random, file: Path) -> None:
    """Mutate a JSON file in place: its values, sometimes its bytes, or nest it without end."""
    way = rng.randrange(10)
    if way == 0:
        file.write_text(rng.choice(("[" * 100_000, '{"a":' * 100_000, '{"a": %s}' % ("9" * 5000), "[]", "null", "5")))
    elif way <= 2:
        file.write_bytes(mutate_bytes(rng, file.read_bytes()))
    else:
        values = json.loads(file.read_text(encoding="utf-8"))
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            values = mutate_json(rng, values)
        file.write_text(json.dumps(values), encoding="utf-8")


def rewrite_toml(rng: random.Random, text: str, file: Path) -> None:
    """Write TOML with some values, texts, lines or bytes changed."""
    lines = text.splitlines()
    way = rng.randrange(9)
    for _ in range(rng.choice((1, 1, 2))):
        place = rng.choice([number for number, line in enumerate(lines) if " = " in line] or [0])
        texts = re.findall(r'"[^"]*"', lines[place])
        if way == 0:
            lines[place] = ""
        elif way == 1:
            key = rng.choice(("seed", "steps", "name", "zz", "trust_remote_code", "[data]"))
            lines.insert(rng.randrange(len(lines)), f"{key} = {rng.choice(TOML_JUNK)}")
        elif way <= 4 and texts:
            lines[place] = lines[place].replace(rng.choice(texts), rng.choice((*TOML_TEXTS, *TOML_JUNK)))
        elif way <= 7:
            lines[place] = f"{lines[place].partition(' = ')[0]} = {rng.choice(TOML_JUNK)}"
    data = "\n".join(lines).encode()
    file.write_bytes(mutate_bytes(rng, data) if way == 8 else data)
