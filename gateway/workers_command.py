"""``forebay workers``: the worker list of a running gateway, as a table or as JSON."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import httpx

from gateway.options import LineParser
from gateway.settings import DAY_S, SettingsError
from gateway.start_checks import read_key_option

_COLUMNS: Final = ("id", "role", "engine", "model_id", "state", "in_flight", "dp_size", "detail")


def run(argv: Sequence[str]) -> int:
    """Ask a gateway for its workers and print them.

    Returns:
        0 when the list was printed, 1 when the gateway could not be asked.

    Raises:
        SettingsError: An option is wrong, or the key file is not usable.
    """
    arguments = _parser().read(argv)
    key_file: Path | None = arguments.admin_api_key_file
    key = None if key_file is None else read_key_option("--admin-api-key-file", key_file)[0]
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    timeout_s: float = arguments.timeout_s
    if not 0 < timeout_s <= DAY_S:
        raise SettingsError(f"--timeout-s: {timeout_s:g} is out of range; above 0, at most {DAY_S} (s)")
    base = str(arguments.url).rstrip("/")
    if not base.startswith(("http://", "https://")):
        raise SettingsError(f"--url: {base!r} is not an http:// or https:// address")
    try:
        # Proxies are for the way out; a gateway is near.
        answer = httpx.get(f"{base}/workers", headers=headers, timeout=timeout_s, trust_env=False)
    except httpx.InvalidURL as exc:
        raise SettingsError(f"--url: {base!r} is not an address: {exc}") from exc
    except httpx.HTTPError as exc:
        return _fail(f"no answer from {base}: {exc or type(exc).__name__}; is the gateway running there?")
    if answer.status_code in (401, 403):
        return _fail(f"{base} refused the request ({answer.status_code}); give its key with --admin-api-key-file")
    if answer.status_code != 200:
        return _fail(f"{base}/workers answered {answer.status_code}; is this a gateway?")
    try:
        document = answer.json()
        rows = [_row(worker) for worker in document["workers"]]
    except (ValueError, KeyError, TypeError, AttributeError):
        return _fail(f"{base}/workers did not answer with a worker list; is this a gateway?")
    sys.stdout.write(json.dumps(document, indent=2) + "\n" if arguments.json else _table(rows))
    return 0


def _parser() -> LineParser:
    parser = LineParser(prog="forebay workers", description="List the workers of a running gateway.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the gateway (default: %(default)s)")
    parser.add_argument(
        "--admin-api-key-file", type=Path, metavar="FILE", help="file whose first key is sent (default: none)"
    )
    parser.add_argument("--timeout-s", type=float, default=10.0, metavar="S", help="longest wait (s; default: 10)")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON (default: a table)")
    return parser


def _row(worker: Mapping[str, object]) -> list[str]:
    engine = " ".join(str(worker[name]) for name in ("engine", "engine_version") if worker.get(name))
    detail = worker.get("detail")
    shown = {**worker, "engine": engine, "detail": "" if detail == worker.get("state") else detail}
    return [_printable(shown.get(column)) for column in _COLUMNS]


def _printable(value: object) -> str:
    """Keep engines' texts from steering the terminal."""
    text = "-" if value is None or value == "" else str(value)
    return "".join(char if char.isprintable() else "?" for char in text)


def _table(rows: list[list[str]]) -> str:
    if not rows:
        return "no workers\n"
    lines = [[column.removesuffix("_id").replace("_", " ").upper() for column in _COLUMNS], *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)
    return "\n".join(padded) + "\n"


def _fail(message: str) -> int:
    sys.stderr.write(f"forebay: {message}\n")
    return 1
