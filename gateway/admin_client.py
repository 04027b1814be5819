"""What the small clients of the admin API share: options, one request, one table, and refusals that are one line."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import httpx

from gateway.options import LineParser
from gateway.settings import DAY_S, SettingsError
from gateway.start_checks import read_key_option

_JSON: Final = {"content-type": "application/json"}


class AskFailed(Exception):
    """The gateway did not give what was asked for; the message is one line with the remedy."""


def client_parser(prog: str, description: str) -> LineParser:
    """Make a command line with the options that every client has."""
    parser = LineParser(prog=prog, description=description)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the gateway (default: %(default)s)")
    parser.add_argument(
        "--admin-api-key-file", type=Path, metavar="FILE", help="file whose first key is sent (default: none)"
    )
    parser.add_argument("--timeout-s", type=float, default=10.0, metavar="S", help="longest wait (s; default: 10)")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON (default: a table)")
    return parser


def ask(arguments: argparse.Namespace, path: str, body: bytes | None = None) -> httpx.Response:
    """Send one request to the gateway: a GET, or with ``body`` a POST of that JSON.

    Args:
        arguments: Read by a ``client_parser``.
        path: Path and query.
        body: What to post.

    Returns:
        The answer, whatever its status is, but for 401 and 403.

    Raises:
        SettingsError: An option is wrong, or the key file is not usable.
        AskFailed: The gateway gave no answer, or wants another key.
    """
    key_file: Path | None = arguments.admin_api_key_file
    key = None if key_file is None else read_key_option("--admin-api-key-file", key_file)[0]
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    timeout_s: float = arguments.timeout_s
    if not 0 < timeout_s <= DAY_S:
        raise SettingsError(f"--timeout-s: {timeout_s:g} is out of range; above 0, at most {DAY_S} (s)")
    base = base_of(arguments)
    try:
        # Proxies are for the way out; a gateway is near.
        if body is None:
            answer = httpx.get(base + path, headers=headers, timeout=timeout_s, trust_env=False)
        else:
            answer = httpx.post(
                base + path, headers={**headers, **_JSON}, content=body, timeout=timeout_s, trust_env=False
            )
    except httpx.InvalidURL as exc:
        raise SettingsError(f"--url: {base!r} is not an address: {exc}") from exc
    except httpx.HTTPError as exc:
        raise AskFailed(f"no answer from {base}: {exc or type(exc).__name__}; is the gateway running there?") from exc
    if answer.status_code in (401, 403):
        raise AskFailed(f"{base} refused the request ({answer.status_code}); give its key with --admin-api-key-file")
    return answer


def base_of(arguments: argparse.Namespace) -> str:
    """The gateway's address, without a slash at its end.

    Raises:
        SettingsError: It is none.
    """
    base = str(arguments.url).rstrip("/")
    if not base.startswith(("http://", "https://")):
        raise SettingsError(f"--url: {base!r} is not an http:// or https:// address")
    return base


def printable(value: object) -> str:
    """A value as a cell; keeps engines' texts from steering the terminal."""
    text = "-" if value is None or value == "" else str(value)
    return "".join(char if char.isprintable() else "?" for char in text)


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows under titles, in columns."""
    lines = [titles, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)
    return "\n".join(padded) + "\n"


def cells(row: Mapping[str, object], columns: Sequence[str]) -> list[str]:
    """The named values of one object, as cells."""
    return [printable(row.get(column)) for column in columns]


def fail(message: str) -> int:
    """Say what went wrong; returns the exit code."""
    sys.stderr.write(f"forebay: {printable(message)}\n")
    return 1
