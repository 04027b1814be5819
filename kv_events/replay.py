"""Asks a publisher for messages that it sent before: one request, over a socket that is made for it. Shell."""

from collections.abc import Callable

import zmq

from kv_events.replay_frames import Message, parse_reply, replay_request
from kv_events.zmq_reader import Context, ZmqReader, quiet_socket


class ReplayRequest:
    """One replay, over the network. Its owner closes it, also when it has ended."""

    def __init__(self, context: Context, endpoint: str, start: int, wake: Callable[[], None]) -> None:
        """Ask ``endpoint`` for all messages from ``start`` on.

        Args:
            context: Stays its owner's.
            endpoint: Of the publisher's ROUTER socket.
            start: Sequence number, at least 0.
            wake: Called when there may be something to read.

        Raises:
            zmq.ZMQError: The endpoint is no address, or there is no socket to be had.
        """
        self._reader = ZmqReader(quiet_socket(context, zmq.DEALER), wake)
        try:
            self._reader.socket.connect(endpoint)
            self._reader.socket.send_multipart(replay_request(start), zmq.NOBLOCK)
        except zmq.ZMQError:
            self._reader.close()
            raise

    def receive(self) -> Message | bool:
        """Read one reply: a message, true at the end of the replay, false if nothing is there yet.

        Raises:
            BatchUndecodable: It is no reply; there may be more.
        """
        frames = self._reader.receive()
        if frames is None:
            return False
        return parse_reply(frames) or True

    def close(self) -> None:
        """Give it up. May be called again."""
        self._reader.close()
