"""Reads one publisher of the local engine, puts its batches in order, and hands them to the feed. Shell.

What a gateway's own subscriber does, without the index behind it.
"""

import logging
from collections import Counter
from collections.abc import Callable

from kv_events.follower import PublisherFollower
from kv_events.publisher import SubscriberLimits
from kv_events.sequence import Deliver
from kv_events.sources import Source
from kv_events.zmq_reader import Context
from relay.feed import Feed

logger = logging.getLogger("forebay.relay")


class SourceReader(PublisherFollower):
    """Follows one publisher from ``start`` to ``close``. Its replays and resets never touch other ranks.

    Attributes:
        source: The publisher.
        frames: Batches handed on.
        resets: How often all that was known was forgotten, by reason.
        dropped: Messages that cannot be, by reason.
    """

    def __init__(
        self,
        context: Context,
        source: Source,
        feed: Feed,
        on_state: Callable[[int, bool], None],
        limits: SubscriberLimits | None = None,
    ) -> None:
        """Prepare to follow ``source``; the context stays its owner's, ``on_state`` hears what the feed hears."""
        super().__init__(context, source, limits)
        self.frames = 0
        self.resets: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self._feed = feed
        self._on_state = on_state

    def close(self) -> None:
        """Close the sockets; the feed is told nothing more. May be called again."""
        self._close()

    def on_boot(self, identity: str) -> None:
        """Take note of the identity of the engine's process, as the engine tells it."""
        if identity and self._reader is not None:
            super().on_boot(identity)

    def _connected(self, is_connected: bool) -> None:
        rank = self.source.dp_rank
        logger.info("%s the publisher of rank %d", "reached" if is_connected else "lost", rank)
        self._feed.source_state(rank, is_connected)
        self._on_state(rank, is_connected)

    def _deliver(self, command: Deliver) -> None:
        self.frames += 1
        self._feed.source_frame(self.source.dp_rank, command.seq, command.payload)

    def _forget(self, reason: str, *, is_new_epoch: bool, keeps_queue: bool) -> None:
        del keeps_queue  # there is none
        rank = self.source.dp_rank
        self.resets[reason] += 1
        logger.info("rank %d starts anew: %s", rank, reason)
        if is_new_epoch:
            self._feed.source_restarted(rank)
        else:
            self._feed.source_gap(rank)

    def _dropped(self, reason: str) -> None:
        self.dropped[reason] += 1
