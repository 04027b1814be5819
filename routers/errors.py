"""Why no rank can be chosen.

RoutingError
├── ModelRequired      several models are served and the request names none
├── UnknownModel       no worker has ever served that model
├── NoReadyWorker      the model is known, but nothing that serves it can take a request now
├── NoRoom             every rank that may take the request has as many as it is given at once
│   └── QueueFull      and as many wait as may
└── NoSuchRank         the request is pinned to a rank or worker that does not exist
"""


class RoutingError(Exception):
    """Root of everything that this package raises on purpose; the message is meant for the client."""


class ModelRequired(RoutingError):
    """Several models are served and the request names none."""


class UnknownModel(RoutingError):
    """No worker serves or has served that model."""


class NoReadyWorker(RoutingError):
    """The model is known, but nothing that serves it can take a request now."""


class NoRoom(RoutingError):
    """Every rank that may take the request has as many requests as it is given at once."""


class QueueFull(NoRoom):
    """Nothing more may wait for room."""


class NoSuchRank(RoutingError):
    """The request is pinned to a rank or worker that does not exist.

    Attributes:
        header: The request's header that says so.
    """

    def __init__(self, message: str, header: str) -> None:
        super().__init__(message)
        self.header = header
