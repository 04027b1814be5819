"""``forebay workers``: the worker list of a running gateway, as a table or as JSON."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from gateway.admin_client import AskFailed, ask, base_of, cells, client_parser, fail, table

_COLUMNS: Final = ("id", "role", "engine", "model_id", "state", "in_flight", "dp_size", "detail")


def run(argv: Sequence[str]) -> int:
    """Ask a gateway for its workers and print them.

    Returns:
        0 when the list was printed, 1 when the gateway could not be asked.

    Raises:
        SettingsError: An option is wrong, or the key file is not usable.
    """
    arguments = client_parser("forebay workers", "List the workers of a running gateway.").read(argv)
    try:
        answer = ask(arguments, "/workers")
    except AskFailed as exc:
        return fail(str(exc))
    base = base_of(arguments)
    if answer.status_code != 200:
        return fail(f"{base}/workers answered {answer.status_code}; is this a gateway?")
    try:
        document = answer.json()
        rows = [_row(worker) for worker in document["workers"]]
    except (ValueError, KeyError, TypeError, AttributeError):
        return fail(f"{base}/workers did not answer with a worker list; is this a gateway?")
    sys.stdout.write(json.dumps(document, indent=2) + "\n" if arguments.json else _table(rows))
    return 0


def _row(worker: Mapping[str, object]) -> list[str]:
    engine = " ".join(str(worker[name]) for name in ("engine", "engine_version") if worker.get(name))
    detail = worker.get("detail")
    shown = {**worker, "engine": engine, "detail": "" if detail == worker.get("state") else detail}
    return cells(shown, _COLUMNS)


def _table(rows: list[list[str]]) -> str:
    if not rows:
        return "no workers\n"
    return table([column.removesuffix("_id").replace("_", " ").upper() for column in _COLUMNS], rows)
