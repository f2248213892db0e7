"""Every regular expression takes time in proportion to the length of a text: a hostile line stops no command."""

import ast
import contextlib
import itertools
import re
import time
from collections.abc import Iterator
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

import pytest

from conformance.core.host import CHECKOUT

METHODS = ("search", "match", "fullmatch", "sub", "split", "findall", "finditer")
FILES = [
    file for package in ("conformance", "reports", "impl", "parity") for file in (CHECKOUT / package).rglob("*.py")
]
CALL = re.compile(rf"\bre\.(compile|{'|'.join(METHODS)})\(")
SHORT, FAST_S = 800, 0.0003  # a quadratic expression takes 0.001 s for so many characters
TIMES = 4  # a text so much longer takes a quadratic expression 16 times as long


def constants(text: str) -> dict[str, Any]:
    """The strings and expressions that a module assigns to names."""
    names = dict[str, Any](re=re)
    for node in ast.parse(text).body:
        with contextlib.suppress(Exception):  # it is no constant
            exec(ast.unparse(node) if isinstance(node, ast.Assign) else "", names)
    return names


def expressions(text: str, others: dict[str, Any], uses: str) -> Iterator[tuple[int, bool, re.Pattern[str]]]:
    """Line, whether it is searched, and expression of all calls of re; one of names inside a function is left out.

    ``others``: constants of other modules. ``uses``: code that may search those compiled here.
    """
    tree, names = ast.parse(text), others | constants(text)
    names_of = {node.value: ast.unparse(node.targets[0]) for node in ast.walk(tree) if isinstance(node, ast.Assign)}
    for node in [node for node in ast.walk(tree) if isinstance(node, ast.Call)]:
        called = re.fullmatch(r"re\.(\w+)", ast.unparse(node.func))
        if not called or called[1] not in ("compile", *METHODS):
            continue
        try:
            pattern = eval(ast.unparse(node.args[0]), names)
        except NameError:
            continue
        methods = {called[1]}
        if name := names_of.get(node):
            calls = re.compile(rf"\b{name}\.({'|'.join(METHODS)})\(")
            methods = set(calls.findall(text) or calls.findall(uses))
        yield node.lineno, not methods <= {"match", "fullmatch"}, re.compile(pattern)


def letters(tree: Any) -> set[str]:
    """A character for each part of an expression."""
    found = set[str]()
    for code, value in tree:
        if code in (codes.LITERAL, codes.RANGE):
            found.add(chr(value if code is codes.LITERAL else value[0]))
        elif code is codes.CATEGORY:
            found |= set({codes.CATEGORY_SPACE: " ", codes.CATEGORY_DIGIT: "1"}.get(value, "a1"))
        elif code in (codes.ANY, codes.NOT_LITERAL, codes.NEGATE):
            found.add("a")
        elif code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT, codes.SUBPATTERN):
            found |= letters(value[-1])
        elif code in (codes.IN, codes.ATOMIC_GROUP):
            found |= letters(value)
        elif code is codes.BRANCH:
            found |= set().union(*map(letters, value[1]))
    return found


def slow_text(pattern: re.Pattern[str], *, is_searched: bool) -> str:
    """Returns what is repeated in a text for which the expression is not linear; nothing if there is none."""

    def seconds(part: str, length: int) -> float:
        text = part * (length // len(part)) + "\0"
        begun = time.process_time()
        sum(1 for _ in pattern.finditer(text)) if is_searched else pattern.fullmatch(text) or pattern.match(text)
        return time.process_time() - begun

    own = sorted(letters(parser.parse(pattern.pattern, pattern.flags)))
    for part in own + ["".join(pair) for pair in itertools.permutations(own[:6], 2)]:
        if seconds(part, SHORT) > FAST_S:
            short, long = (min(seconds(part, length) for _ in range(3)) for length in (SHORT, TIMES * SHORT))
            if long > 2 * TIMES * short:
                return part
    return ""


def test_expressions_are_linear() -> None:
    texts = {file: text for file in FILES if CALL.search(text := file.read_text(encoding="utf-8"))}
    others = {name: value for text in texts.values() for name, value in constants(text).items()}
    found = [
        f"{file.relative_to(CHECKOUT)}:{line} {pattern.pattern!r} is slow on {part!r} repeated; bound a quantifier"
        for file, text in texts.items()
        for line, is_searched, pattern in expressions(text, others, "\n".join(texts.values()))
        if (part := slow_text(pattern, is_searched=is_searched))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("code", "part"),
    [
        ('A = re.compile(r"(\\w+):")\nA.search(text)', "1"),
        ('A = re.compile(r"(\\w+):")\nA.fullmatch(text)', ""),
        ('WORD = r"\\w{1,40}"\nre.search(WORD + ":", text)', ""),
        ('re.sub(r"\\s+$", "", text)', " "),
        ('re.match(r"a+a+b", text)', "a"),
    ],
)
def test_the_lint_finds_quadratic_expressions(code: str, part: str) -> None:
    ((_, is_searched, pattern),) = expressions(code, {}, code)
    assert slow_text(pattern, is_searched=is_searched) == part
