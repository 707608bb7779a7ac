"""Messages between a trainer and its background worker: JSON facts, bytes, and descriptors; no pickle.

the worker says    ready               it has started
the trainer says   job                 one save
the worker says    stage               in a save by waves: copy the items of this plan
the trainer says   staged, not_staged  they lie there; or why they could not be copied
the worker says    released            nothing more is asked for: the trainer may change its state
the worker says    saved, failed       the end of the save
the trainer says   give_up             another rank will not come to the end of this attempt
the trainer says   stop                no more saves
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

_HEAD: Final = struct.Struct("<QQI")
_MOST_DESCRIPTORS: Final = 64


@dataclass(frozen=True, slots=True)
class Message:
    """One message as it arrived."""

    kind: str
    facts: Mapping[str, Any]
    payload: bytes
    descriptors: tuple[int, ...]
    """Open here now; whoever takes the message closes them."""


class MessageSocket:
    """One end. Messages may be sent from several threads; one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.Lock()

    @classmethod
    def pair(cls) -> tuple[MessageSocket, MessageSocket]:
        """Both ends of a new connection."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(ours), cls(theirs)

    @classmethod
    def inherited(cls, descriptor: int) -> MessageSocket:
        """The end that another process left open in this one."""
        return cls(socket.socket(fileno=descriptor))

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(
        self, kind: str, facts: Mapping[str, Any] | None = None, payload: bytes = b"", descriptors: Sequence[int] = ()
    ) -> None:
        """Send one message; OSError when the other end is gone."""
        text = json.dumps({"kind": kind, **(facts or {})}).encode()
        head = _HEAD.pack(len(text), len(payload), len(descriptors))
        with self._sending:
            if descriptors:
                socket.send_fds(self._socket, [head[:1]], list(descriptors))
                head = head[1:]
            self._socket.sendall(head + text)
            if payload:
                self._socket.sendall(payload)

    def has_message(self, seconds: float | None) -> bool:
        """Whether there is something to receive, or the other end is gone, within so many seconds; None: no limit."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(None if seconds is None else seconds * 1000))

    def receive(self) -> Message:
        """The next message; EOFError when the other end is gone."""
        try:
            first, descriptors, _, _ = socket.recv_fds(self._socket, 1, _MOST_DESCRIPTORS)
            head = first + self._exactly(_HEAD.size - 1) if first else b""
            if not head:
                raise EOFError
            text_length, payload_length, count = _HEAD.unpack(head)
            facts = json.loads(self._exactly(text_length))
            payload = self._exactly(payload_length)
        except ConnectionError as error:
            raise EOFError from error
        assert count == len(descriptors), "descriptors were lost on the way"
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        return Message(facts.pop("kind"), facts, payload, tuple(descriptors))

    def _exactly(self, length: int) -> bytes:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            count = self._socket.recv_into(view)
            if count == 0:
                raise EOFError
            view = view[count:]
        return bytes(data)

    def close(self) -> None:
        """Tell the other end that nothing more comes; idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def forget(self) -> None:
        """Close this process's copy only, as a forked child must: the connection itself goes on."""
        self._socket.close()
