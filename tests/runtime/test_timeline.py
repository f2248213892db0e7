"""The timeline holds every phase once, and is a Chrome trace."""

import json
import time

import pytest

from conformance.core.timeline import (
    Span,
    Timeline,
    Track,
    process_start,
    processor_table,
    seconds_by_phase,
    table,
    to_chrome,
)

SPANS = (
    Span(kind="ranks", track="fsdp2 1 rank 0", phase="step 0", began=10.0, ended=12.0, about="a/cell"),
    Span(kind="ranks", track="fsdp2 1 rank 0", phase="step 1", began=12.0, ended=13.0, about="a/cell"),
    Span(kind="cells", track="cell_0", phase="wait: lease", began=9.0, ended=10.0),
    Span(kind="cells", track="cell_0", phase="judging", began=13.0, ended=16.0, busy=2.5),
)


def test_a_track_is_in_one_phase_at_a_time() -> None:
    processor = iter((0.0, 1.5, 1.75, 3.0))
    track = Track(lambda: next(processor))
    for phase, at in (("step 0", 1.0), ("write", 3.0), ("step 0", 4.0)):
        track.switch(phase, at=at)
    track.switch("", at=6.0)
    assert track.spans == [("step 0", 1.0, 3.0, 1.5), ("write", 3.0, 4.0, 0.25), ("step 0", 4.0, 6.0, 1.25)]


def test_an_interrupted_phase_goes_on_afterwards() -> None:
    own = Timeline()
    own.switch("judging", kind="cells", about="a/cell")
    with own.within("wait: lease"):
        time.sleep(0.001)
    own.switch("")
    assert [span.phase for span in own.spans] == ["judging", "wait: lease", "judging"]
    assert {(span.kind, span.about) for span in own.spans} == {("cells", "a/cell")}


def test_clocks_of_other_hosts_are_moved_to_this_one() -> None:
    own, now = Timeline(), time.monotonic()
    own.add("ranks", "here", [("step 0", now - 2, now - 1, 0.5)], clock=now)
    own.add("ranks", "there", [("step 0", now + 998, now + 999, 0.5)], clock=now + 1000)
    here, there = own.spans
    assert there.began == pytest.approx(here.began, abs=0.5)


def test_seconds_are_summed_by_phase_with_the_share_of_waits() -> None:
    seconds = seconds_by_phase(SPANS)
    assert seconds == {"cells": {"judging": 3.0, "wait: lease": 1.0}, "ranks": {"step": 3.0}}
    assert table(seconds)[0].startswith("cells: 4.0 s, 25% waiting")
    assert processor_table(SPANS, of_all=4.0) == [
        "processor time: 4.0 s in all, 1.5 s of it in none of the following",
        "cells: 2.5 s (judging 2.5)",
    ]


def test_a_trace_has_a_process_a_kind_and_a_thread_a_track() -> None:
    events = json.loads(json.dumps(to_chrome(SPANS, began=9.0)))["traceEvents"]
    complete = [(event["ts"], event["dur"], event["name"]) for event in events if event["ph"] == "X"]
    assert complete[:2] == [(0, 1_000_000, "wait: lease"), (1_000_000, 2_000_000, "step 0")]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {names[event["pid"]] for event in events if event["ph"] == "X"} == {"ranks", "cells"}


def test_the_start_of_this_process_is_known() -> None:
    assert 0 < time.monotonic() - process_start() < 24 * 3600
