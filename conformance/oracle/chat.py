"""Renders chat templates and labels each character of what they render, without transformers, and packs documents.

A chat template is rendered by jinja with the settings that transformers documents. The label of a character says which
message it belongs to and what it is for that message: its ``header``, ``scaffold``, ``content``, ``end`` or ``space``.
The content of a message is found by exchanging it: what changes in the rendered text is the content. This is another
way than that of conformance.data.tokenizer, which compares renderings of growing conversations.

Packing follows the rules that libraries name. Each function takes lengths and the capacity of a row, and returns the
documents of each row by their numbers. None of them cuts a document; ``wrapped`` rows, which do, are the stream of all
tokens in pieces of the capacity.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from itertools import takewhile
from typing import Any, Literal

from conformance.core.errors import lost_calls, lost_message

Message = Mapping[str, Any]
Kind = Literal["header", "scaffold", "content", "end", "space"]
KINDS: tuple[Kind, ...] = ("header", "scaffold", "content", "end", "space")
EXCHANGED = "\ue010exchanged\ue011"  # characters of private use, which no template writes
OPEN, CLOSE = "\ue012", "\ue013"  # around what {% generation %} marks


@dataclass(frozen=True, kw_only=True)
class Label:
    """Says what a character is for. message: the number of its message. role: the role of that message.

    kind: ``header`` is what a prompt that waits for the message ends with; ``scaffold`` is what the template writes
    between the header and the text of the message, such as an empty block of reasoning; ``content`` is the text of the
    message with its calls of tools; ``end`` ends the message; ``space`` is white space after it.
    """

    message: int
    role: str
    kind: Kind


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """Holds a rendered conversation. labels: of each character. marked: whether {% generation %} marks it, or None."""

    text: str
    labels: tuple[Label, ...]
    marked: tuple[bool, ...] | None


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """Renders conversations. special: the special tokens of the tokenizer, by their names in templates."""

    source: str
    special: Mapping[str, str]

    def text(self, messages: Sequence[Message], tools: Sequence[Any] = (), *, waits: bool = False) -> str:
        """Returns the text of a conversation. waits: whether it ends with the header of an answer.

        Errors of jinja and of the template propagate.
        """
        return self._raw(messages, tools, waits=waits).replace(OPEN, "").replace(CLOSE, "")

    def render(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> Rendered:
        """Returns the text of a conversation with its labels.

        Raises UsageError for a message that the template renders away. Errors of the template propagate.
        """
        raw = self._raw(messages, tools)
        text = raw.replace(OPEN, "").replace(CLOSE, "")
        spans = [_Span.find(self, messages, tools, number, text) for number in range(len(messages))]
        labels: list[Label] = []
        for number, (message, span) in enumerate(zip(messages, spans, strict=True)):
            kinds = self._kinds(messages, tools, number, text[len(labels) : span.tail], span, len(labels))
            labels += [Label(message=number, role=message["role"], kind=kind) for kind in kinds]
        return Rendered(text=text, labels=tuple(labels), marked=_marks(raw) if OPEN in raw else None)

    def _kinds(
        self, messages: Sequence[Message], tools: Sequence[Any], number: int, text: str, span: "_Span", at: int
    ) -> list[Kind]:
        """Labels the part of the text that begins at ``at`` and belongs to a message."""
        before = text[: max(span.start - at, 0)]
        header = len(before)
        if messages[number]["role"] == "assistant" and number:
            waiting, answered = (self.text(messages[:number], tools, waits=waits) for waits in (True, False))
            same = _outside(waiting, _common(answered, waiting), self.special.values())
            header = _common(before, waiting[same:])
        if not span.has_scaffold:
            before = before[:header]
        content, tail = text[len(before) : span.end - at], text[span.end - at :]
        space = len(tail) - len(tail.rstrip())
        counts = (header, len(before) - header, len(content), len(tail) - space, space)
        return [kind for kind, count in zip(KINDS, counts, strict=True) for _ in range(count)]

    def _raw(self, messages: Sequence[Message], tools: Sequence[Any], *, waits: bool = False) -> str:
        text: str = _compiled(self.source).render(
            messages=[dict(one) for one in messages],
            tools=list(tools) or None,
            documents=None,
            add_generation_prompt=waits,
            **self.special,
        )
        return text


@dataclass(frozen=True, kw_only=True)
class _Span:
    """Locates a message in a text: its content from ``start`` to ``end``, and what ends it up to ``tail``.

    has_scaffold: whether the text before the content is the same for every content, so that it is not the message's.
    """

    start: int
    end: int
    tail: int
    has_scaffold: bool = True

    @classmethod
    def find(
        cls, template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Any], number: int, whole: str
    ) -> "_Span":
        """Finds a message by exchanging its content. Raises UsageError if the text stays as it is."""
        before, after = messages[:number], messages[number + 1 :]
        silent = {key: value for key, value in messages[number].items() if key != "tool_calls"}
        exchanged = silent | {"content": EXCHANGED}
        other = template.text((*before, exchanged, *after), tools)
        if other == whole:
            raise lost_message(number + 1, messages[number])
        if messages[number].get("tool_calls") and template.text((*before, silent, *after), tools) == whole:
            raise lost_calls(number + 1)
        ahead, found, behind = other.partition(EXCHANGED)
        start, same = _common(whole, other), _common(whole[::-1], other[::-1])
        if found:
            start, same = min(start, len(ahead)), min(same, len(behind))
        end = max(len(whole) - same, start)
        tail = len(whole)
        if after:
            alone = template.text((*before, exchanged), tools).partition(EXCHANGED)[2]
            tail = end + _outside(whole[end:], _common(whole[end:], alone), template.special.values())
        return cls(start=start, end=end, tail=tail, has_scaffold=start == len(ahead))


def _common(text: str, other: str) -> int:
    """Counts the characters that two texts have in common at their start."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False)))


def _outside(text: str, place: int, special: Any) -> int:
    """Returns the last place up to ``place`` that is not inside a special token."""
    for token in special:
        for start in range(max(place - len(token) + 1, 0), place):
            if text.startswith(token, start) and start < place < start + len(token):
                return start
    return place


def _marks(raw: str) -> tuple[bool, ...]:
    """Returns whether each character, without the marks, is between two of them."""
    marked, is_open = [], False
    for character in raw:
        if character in (OPEN, CLOSE):
            is_open = character == OPEN
        else:
            marked.append(is_open)
    return tuple(marked)


@lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
    """Compiles a chat template in the environment of chat templates: a sandbox, with the functions that they use."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Puts OPEN and CLOSE around the block {% generation %}."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.CallBlock(self.call_method("wrap"), [], [], body).set_lineno(line)

        def wrap(self, caller: Callable[[], str]) -> str:
            return f"{OPEN}{caller()}{CLOSE}"

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    return environment.from_string(source)


Rows = list[list[int]]


def in_order(lengths: Sequence[int], capacity: int) -> Rows:
    """Fills a row with the next documents, and begins another row with the first one that does not fit."""
    rows: Rows = []
    for number, length in enumerate(lengths):
        if not rows or sum(lengths[i] for i in rows[-1]) + length > capacity:
            rows.append([])
        rows[-1].append(number)
    return rows


def best_fit(lengths: Sequence[int], capacity: int) -> Rows:
    """Puts the longest document first, each into the row with the least room that suffices (best fit decreasing)."""
    rows: Rows = []
    for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        room = [capacity - sum(lengths[i] for i in row) for row in rows]
        fitting = [i for i in range(len(rows)) if room[i] >= lengths[number]]
        if fitting:
            rows[min(fitting, key=lambda i: room[i])].append(number)
        else:
            rows.append([number])
    return rows


def knapsack(lengths: Sequence[int], capacity: int) -> Rows:
    """Fills one row after another, always with the longest of the documents left that fits."""
    left, rows = sorted(range(len(lengths)), key=lambda i: lengths[i]), []
    while left:
        row: list[int] = []
        while fitting := [i for i in left if sum(lengths[j] for j in row) + lengths[i] <= capacity]:
            row.append(fitting[-1])
            left.remove(fitting[-1])
        rows.append(row)
    return rows


RULES: dict[str, Callable[[Sequence[int], int], Rows]] = {
    "in order": in_order,
    "best fit": best_fit,
    "knapsack": knapsack,
}
