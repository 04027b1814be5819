"""Errors of this package.

KVEventError
├── BatchUndecodable    a whole message cannot be read, or passes a limit
├── DeliverySuspect     a payload was applied in part: what is known of its source can no longer be trusted
└── SourceMisconfigured a source cannot belong to its worker: block size, rank, address
"""


class KVEventError(Exception):
    """Root of the package's errors."""


class BatchUndecodable(KVEventError):
    """A message cannot be read at all; ``args[0]`` is the reason as the drop counter names it."""


class DeliverySuspect(KVEventError):
    """A payload was applied in part, in a way that may leave blocks in the index which the cache has given up."""


class SourceMisconfigured(KVEventError):
    """What a source sends cannot belong to the worker that it is registered for."""
