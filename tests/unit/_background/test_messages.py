"""Messages between a trainer and its worker."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from hpdcp._background._messages import MessageSocket

Pair = tuple[MessageSocket, MessageSocket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    both = MessageSocket.pair()
    yield both
    for end in both:
        end.close()


def test_a_message_arrives_with_its_facts_its_bytes_and_its_files(pair: Pair) -> None:
    ours, theirs = pair
    read, write = os.pipe()
    ours.send("job", {"rank": 3, "config": {"a": [1, None]}}, b"\0\1payload", [write])
    os.close(write)
    message = theirs.receive()
    assert (message.kind, message.facts, message.payload) == (
        "job",
        {"rank": 3, "config": {"a": [1, None]}},
        b"\0\1payload",
    )
    (descriptor,) = message.descriptors
    os.write(descriptor, b"through")
    assert os.read(read, 10) == b"through"
    assert not os.get_inheritable(descriptor)
    for number in (descriptor, read):
        os.close(number)


def test_messages_larger_than_a_socket_holds_come_whole_and_in_order(pair: Pair) -> None:
    ours, theirs = pair
    payloads = [os.urandom(3 << 20), b"", os.urandom(5)]
    sender = threading.Thread(target=lambda: [ours.send("m", {"n": n}, p) for n, p in enumerate(payloads)])
    sender.start()
    got = [theirs.receive() for _ in payloads]
    sender.join()
    assert [message.payload for message in got] == payloads
    assert [message.facts["n"] for message in got] == [0, 1, 2]


def test_senders_of_several_threads_do_not_mix_their_bytes(pair: Pair) -> None:
    ours, theirs = pair
    senders = [
        threading.Thread(target=lambda n=n: [ours.send("m", {"n": n}, bytes([n]) * 70_000) for _ in range(20)])
        for n in range(4)
    ]
    for sender in senders:
        sender.start()
    for _ in range(80):
        message = theirs.receive()
        assert message.payload == bytes([message.facts["n"]]) * 70_000
    for sender in senders:
        sender.join()


@pytest.mark.parametrize("sent", [0, 1, 9], ids=["nothing", "a mark", "half a head"])
def test_an_end_that_is_gone_is_told_whatever_it_had_sent(pair: Pair, sent: int) -> None:
    ours, theirs = pair
    ours._socket.sendall(b"\1" * sent)
    ours.close()
    ours.close()
    with pytest.raises(EOFError):
        theirs.receive()
    with pytest.raises(ConnectionError):
        theirs.send("late", payload=b"x" * 10_000_000)


def test_forgetting_ones_copy_leaves_the_link_to_the_other_holder(pair: Pair) -> None:
    ours, theirs = pair
    copied = MessageSocket.inherited(os.dup(ours.fileno()))
    copied.forget()
    ours.send("still there")
    assert theirs.receive().kind == "still there"
