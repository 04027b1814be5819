"""What can go wrong between the gateway and a worker.

BackendError
├── UpstreamError                 one call to a worker failed; attributes say how far it got
│   ├── ConnectFailed             nothing was sent: refused, unreachable, name not found, TLS failed
│   │   └── ConnectTimeout        nothing was sent: no connection within the limit
│   ├── RequestUnsendable         nothing was sent: the request cannot be written as HTTP
│   ├── ConnectionDropped         the connection ended before the first byte of an answer
│   ├── AnswerBroken              the connection ended inside the answer
│   ├── AnswerTooLarge            the answer, or one event of it, is above the configured bound
│   └── AnswerMalformed           what came is not HTTP, or not of a kind that the request can have
├── CallEnded                     not a fault: this side ended the wait
│   ├── CallClosed                the call was closed while somebody waited for it
│   └── CallInterrupted           the wait was interrupted; the call goes on under another owner
└── IdentifyFailed                a worker's metadata could not be read or is not what a worker serves
"""


class BackendError(Exception):
    """Root of everything that this package raises on purpose."""


class UpstreamError(BackendError):
    """One call to a worker failed; no byte of the request is guaranteed to have been processed or not."""


class ConnectFailed(UpstreamError):
    """No connection could be made, so the worker has seen nothing of the request."""


class ConnectTimeout(ConnectFailed):
    """No connection within the connect timeout."""


class RequestUnsendable(UpstreamError):
    """The request holds bytes that would end a line of its head, so nothing was sent."""


class ConnectionDropped(UpstreamError):
    """The connection ended after the request was written and before any byte of the answer.

    Attributes:
        was_reused: It had carried calls before, so that its end may be the worker's idle limit and not its answer.
    """

    was_reused = False


class AnswerBroken(UpstreamError):
    """The connection ended, or the framing broke, inside the answer."""


class AnswerTooLarge(UpstreamError):
    """The answer passed a bound of this gateway.

    Attributes:
        limit_bytes: The bound that was passed.
    """

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"the engine's answer is larger than {limit_bytes} bytes")
        self.limit_bytes = limit_bytes


class AnswerMalformed(UpstreamError):
    """The worker sent something that is no HTTP, or an answer of a kind that the request cannot have."""


class CallEnded(BackendError):
    """This side ended a wait on a call; see the two subclasses."""


class CallClosed(CallEnded):
    """The call was closed by this side."""


class CallInterrupted(CallEnded):
    """The wait was interrupted by this side; the call itself is still alive."""


class IdentifyFailed(BackendError):
    """A worker's metadata could not be read, or says that the address is no serving engine."""
