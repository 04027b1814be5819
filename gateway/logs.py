"""Set-up of Python's logging, for everything but access lines: one handler, on stderr."""

import logging
import sys
from typing import Final

import orjson

_LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
# A message may quote a client or an engine; none of them may start a line of their own.
_CONTROLS: Final = {code: f"\\x{code:02x}" for code in [*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029]}


class _TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).translate(_CONTROLS)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        # What is no valid text, a lone surrogate, would make the encoder refuse the whole line.
        return orjson.dumps({key: value.encode("utf-8", "replace").decode() for key, value in fields.items()}).decode()


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """Marks the handler as ours, so that a second set-up replaces it and no other."""


def configure_logging(log_format: str, level: str) -> None:
    """Send every logger's lines from ``level`` on to stderr. A second call replaces the first.

    Args:
        log_format: ``text`` or ``json``.
        level: ``debug``, ``info``, ``warning`` or ``error``.
    """
    handler = _Handler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TextFormatter())
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(_LEVELS[level])
    # The server's own lines about its start and end say less than ours.
    logging.getLogger("uvicorn.error").setLevel(logging.NOTSET if level == "debug" else logging.WARNING)
