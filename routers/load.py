"""Load booked on ranks: taken in the same step as the choice, given back exactly once. Pure."""


class RankLoad:
    """What the live requests have booked on one rank.

    Attributes:
        in_flight: Requests, or items of batches, that run or wait there.
        blocks: KV blocks of their prompts.
        prefill_tokens: Prompt tokens whose prefill has not ended.
    """

    __slots__ = ("blocks", "in_flight", "prefill_tokens")

    def __init__(self) -> None:
        self.in_flight = 0
        self.blocks = 0
        self.prefill_tokens = 0

    @property
    def is_idle(self) -> bool:
        """Nothing is booked."""
        return not (self.in_flight or self.blocks or self.prefill_tokens)

    def book(self, *, requests: int, blocks: int, prefill_tokens: int) -> "RankBooking":
        """Take load on this rank; synchronous, so that no other choice can come between a choice and its booking.

        Args:
            requests: Number of sequences, ``>= 1``.
            blocks: KV blocks of their prompts.
            prefill_tokens: Prompt tokens that must be computed.
        """
        if requests < 1 or blocks < 0 or prefill_tokens < 0:
            raise ValueError(f"cannot book {requests} requests, {blocks} blocks, {prefill_tokens} tokens")
        return RankBooking(self, requests, blocks, prefill_tokens)


class RankBooking:
    """One request's share of a rank's load."""

    __slots__ = ("_blocks", "_is_released", "_load", "_prefill_tokens", "_requests")

    def __init__(self, load: RankLoad, requests: int, blocks: int, prefill_tokens: int) -> None:
        self._load = load
        self._requests = requests
        self._blocks = blocks
        self._prefill_tokens = prefill_tokens
        self._is_released = False
        load.in_flight += requests
        load.blocks += blocks
        load.prefill_tokens += prefill_tokens

    def first_token(self) -> None:
        """The prefill has ended: give its tokens back."""
        self._load.prefill_tokens -= self._prefill_tokens
        self._prefill_tokens = 0

    def release(self) -> None:
        """Give everything back.

        Raises:
            RuntimeError: The booking was released before.
        """
        if self._is_released:
            raise RuntimeError("a booking was released twice")
        self._is_released = True
        self.first_token()
        self._load.in_flight -= self._requests
        self._load.blocks -= self._blocks
