"""Messages between processes: each arrives whole or not at all, whatever its length and whoever does not read."""

import os
import re
import socket

import pytest
from worker_group_helpers import no_descriptor_left

from conformance.runtime import messages
from conformance.runtime.messages import Garbage, Wire, readable, wire_pair

LENGTHS = [1, 1 << 10, 1 << 12, 1 << 21]  # of which the last two do not fit into a packet


@pytest.fixture
def ends() -> tuple[Wire, Wire]:
    own, theirs = wire_pair()
    return own, Wire(theirs)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_message_of_any_length_arrives(ends: tuple[Wire, Wire], length: int) -> None:
    sender, receiver = ends
    sender.send({"text": "x" * length})
    assert receiver.receive() == ({"text": "x" * length}, [])


def test_messages_arrive_in_order(ends: tuple[Wire, Wire]) -> None:
    sender, receiver = ends
    for length in LENGTHS:
        sender.send({"text": "x" * length})
    assert [len(message["text"]) for message, _ in (receiver.receive() for _ in LENGTHS) if message] == LENGTHS


@pytest.mark.parametrize("length", LENGTHS)
def test_a_message_that_is_not_sent_in_time_is_dropped_and_the_next_one_is_whole(length: int) -> None:
    """The other side does not read until the socket's buffer is full, and then it does."""
    own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
    sender, receiver = Wire(own), Wire(theirs)
    sent = [{"number": number, "text": "x" * length} for number in range(20)]
    taken = [message for message in sent if sender.send(message, limit_s=0.01)]
    received = []
    while readable([receiver], limit_s=0.0):
        received.append(receiver.receive()[0])
    assert 0 < len(received) < len(sent)
    assert received == taken == sent[: len(received)]
    sender.send({"number": "next"})
    assert receiver.receive() == ({"number": "next"}, [])


@pytest.mark.parametrize("length", LENGTHS)
def test_descriptors_travel_with_a_message(ends: tuple[Wire, Wire], length: int) -> None:
    sender, receiver = ends
    read, write = os.pipe()
    sender.send({"text": "x" * length}, fds=[write])
    message, [received] = receiver.receive()
    assert message == {"text": "x" * length}
    assert not os.get_inheritable(received)
    os.write(received, b"hello")
    assert os.read(read, 10) == b"hello"
    for fd in (read, write, received):
        os.close(fd)


def test_no_descriptor_of_a_long_message_is_left() -> None:
    with no_descriptor_left():
        own, theirs = wire_pair()
        receiver = Wire(theirs)
        own.send({"text": "x" * LENGTHS[-1]})
        receiver.receive()
        own.close()
        receiver.close()


@pytest.mark.parametrize("packet", [b"no message", b"[1]", b"\xff", b"in the last descriptor"])
def test_what_is_no_message_is_garbage(packet: bytes) -> None:
    own, theirs = wire_pair()
    theirs.send(packet)
    with pytest.raises(Garbage, match=re.escape(repr(packet))):
        own.receive()


def test_a_message_beyond_the_limit_is_garbage(ends: tuple[Wire, Wire], monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = ends
    sender.send({"text": "x" * LENGTHS[-1]})
    monkeypatch.setattr(messages, "_LONGEST_MESSAGE", 1 << 20)
    with pytest.raises(Garbage, match=r"a message of \d+ bytes; write large results to a file"):
        receiver.receive()


def test_the_end_comes_after_what_was_sent(ends: tuple[Wire, Wire]) -> None:
    sender, receiver = ends
    for length in LENGTHS:
        sender.send({"text": "x" * length})
    sender.close()
    assert [len(message["text"]) for message, _ in (receiver.receive() for _ in LENGTHS) if message] == LENGTHS
    assert receiver.receive() == (None, [])


@pytest.mark.parametrize("length", LENGTHS)
def test_a_message_to_nobody_is_dropped(ends: tuple[Wire, Wire], length: int) -> None:
    sender, receiver = ends
    receiver.close()
    sender.send({"text": "x" * length})
    assert sender.receive() == (None, [])


def test_the_last_message_of_an_end_that_closed_with_others_unread_is_received() -> None:
    wire, other = wire_pair()
    far = Wire(other)
    wire.send({"do": "live"})
    far.send({"type": "refused"})
    far.close()
    assert wire.receive() == ({"type": "refused"}, [])
    assert wire.receive() == (None, [])
    wire.close()
