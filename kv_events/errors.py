"""Errors of this package.

KVEventError
├── BatchUndecodable    a whole message cannot be read, or passes a limit
├── DeliverySuspect     a payload was applied in part: what is known of its source can no longer be trusted
├── SourceMisconfigured a source cannot belong to its worker: block size, rank, address
├── RelayMessageRefused what a relay or a gateway sent is no message of their wire, or passes a bound
└── KeyFileRefused      a file of CURVE keys cannot be used
"""


class KVEventError(Exception):
    """Root of the package's errors."""


class BatchUndecodable(KVEventError):
    """A message cannot be read at all; ``args[0]`` is the reason as the drop counter names it."""


class DeliverySuspect(KVEventError):
    """A payload was applied in part, in a way that may leave blocks in the index which the cache has given up."""


class SourceMisconfigured(KVEventError):
    """What a source sends cannot belong to the worker that it is registered for."""


class RelayMessageRefused(KVEventError):
    """What came is no message between relays and gateways; ``args[0]`` says why, for people."""


class KeyFileRefused(KVEventError):
    """A file of keys cannot be used; ``args[0]`` names it and says why, for people, without any key."""
