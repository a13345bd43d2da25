"""Frames over a socket: a length (uint64), then so many bytes, one frame after another.

TCP keeps the order and repeats what is lost; that a frame is whole and the right one is the frame's
own to say (`frames.py`). A length of 0 ends the stream: a connection that closes before it lost
something.
"""

import queue
import socket
import struct
import threading
from collections.abc import Iterable, Iterator

LENGTH = struct.Struct("<Q")
AHEAD = 4  # frames read before they are asked for
MOST = 1 << 40  # bytes of a frame: a larger length is no length


class TransportError(ConnectionError):
    """A connection that ended in the middle, or carries something else."""


def send(connection: socket.socket, frames: Iterable[bytes]) -> int:
    """Sends frames as they come and ends the stream; how many."""
    count = 0
    for frame in frames:
        connection.sendall(LENGTH.pack(len(frame)))
        connection.sendall(frame)
        count += 1
    connection.sendall(LENGTH.pack(0))
    return count


def receive(connection: socket.socket) -> Iterator[bytes]:
    """Frames in the order sent, waiting for each. Raises TransportError for a stream cut off."""
    while size := LENGTH.unpack(_exactly(connection, LENGTH.size))[0]:
        if size > MOST:
            raise TransportError(f"transport: a frame of {size} bytes: no frames are sent here")
        yield _exactly(connection, size)


class Arriving:
    """Frames of an iterator that waits, read on a thread so that an engine can work meanwhile."""

    def __init__(self, frames: Iterable[bytes]):
        self._queue: queue.Queue[bytes | BaseException | None] = queue.Queue(maxsize=AHEAD)
        self._ended = False
        threading.Thread(target=self._read, args=(frames,), daemon=True).start()

    def take(self, wait: bool) -> bytes | None:
        """The next frame; None if there is none yet (only without `wait`) or no more. Raises what
        the iterator raised."""
        if self._ended:
            return None
        try:
            item = self._queue.get(block=wait)
        except queue.Empty:
            return None
        if not isinstance(item, bytes):
            self._ended = True
        if isinstance(item, BaseException):
            raise item
        return item

    @property
    def ended(self) -> bool:
        """Whether the last frame has been taken."""
        return self._ended

    def _read(self, frames: Iterable[bytes]) -> None:
        try:
            for frame in frames:
                self._queue.put(frame)
        except BaseException as error:  # raised again by whoever takes it
            self._queue.put(error)
        else:
            self._queue.put(None)


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts, left = [], size
    while left:
        part = connection.recv(min(left, 1 << 20))
        if not part:
            raise TransportError(f"transport: the stream ended {left} bytes before its end")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
