"""``forebay explain``: why a running gateway would send a request where it would send it."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlencode

from gateway.admin_client import AskFailed, ask, base_of, cells, client_parser, fail, printable, table
from gateway.settings import SettingsError

_COLUMNS: Final = {
    "mark": "",
    "worker_id": "WORKER",
    "dp_rank": "RANK",
    "blocks": "OVERLAP",
    "in_flight": "IN FLIGHT",
    "active_blocks": "ACTIVE BLOCKS",
    "active_prefill_tokens": "PREFILL TOKENS",
    "cost": "COST",
    "role": "ROLE",
    "excluded": "EXCLUDED",
}


def run(argv: Sequence[str]) -> int:
    """Have a gateway explain where a request would go, and print that. Nothing is sent to an engine.

    Returns:
        0 when the explanation was printed, 1 when there is none.

    Raises:
        SettingsError: An option is wrong, or a file cannot be read.
    """
    parser = client_parser(
        "forebay explain", "Show where a running gateway would send a request, and why; no engine is sent anything."
    )
    parser.add_argument(
        "--path", metavar="PATH", help="route of the request, like /v1/completions (default: told from its fields)"
    )
    parser.add_argument("file", metavar="FILE", help="the request's JSON body; - reads it from standard input")
    arguments = parser.read(argv)
    query = "" if arguments.path is None else "?" + urlencode({"path": arguments.path})
    base_of(arguments)  # a wrong option is told before standard input is waited for
    try:
        answer = ask(arguments, "/route/explain" + query, _body(arguments.file))
    except AskFailed as exc:
        return fail(str(exc))
    url = f"{base_of(arguments)}/route/explain"
    try:
        document = answer.json()
        if 400 <= answer.status_code < 500 and answer.status_code != 404:
            return fail(f"the gateway refused the request: {document['error']['message']}")
        if answer.status_code != 200:
            return fail(f"{url} answered {answer.status_code}; is this a gateway, of this release?")
        shown = _shown(document)
    except (ValueError, KeyError, TypeError, AttributeError):
        return fail(f"{url} answered {answer.status_code} without an explanation; is this a gateway?")
    sys.stdout.write(json.dumps(document, indent=2) + "\n" if arguments.json else shown)
    return 0


def _body(file: str) -> bytes:
    if file == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(file).read_bytes()
    except OSError as exc:
        raise SettingsError(f"FILE: {file}: {exc.strerror}; give a file with a JSON request, or -") from exc


def _shown(document: Mapping[str, object]) -> str:
    chosen, candidates = document["chosen"], document["candidates"]
    if not isinstance(candidates, list) or not (chosen is None or isinstance(chosen, Mapping)):
        raise TypeError("not an explanation")
    has_roles = any(one.get("role") in ("prefill", "decode") for one in candidates)
    columns = {name: head for name, head in _COLUMNS.items() if has_roles or name != "role"}
    taken = [] if chosen is None else [one for one in (chosen.get("prefill"), chosen) if one is not None]
    rows = [cells(_with_marks(one, taken), list(columns)) for one in candidates]
    text = table(list(columns.values()), rows) if rows else "no workers\n"
    goes = "to " + (" and ".join(f"{one['worker_id']} rank {one['dp_rank']}" for one in taken) or "no worker")
    how = f"policy {document['policy']}, {document['blocks_hashed']} block(s) hashed"
    return text + printable(f"{goes}: {document['reason']} ({how})") + "\n"


def _with_marks(one: Mapping[str, object], taken: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """A candidate with the cells that are made from several fields."""
    names = ("worker_id", "dp_rank")
    is_chosen = any(all(one.get(name) == chosen[name] for name in names) for chosen in taken)
    overlap, prompt, cost = one.get("overlap_blocks"), one.get("prompt_blocks"), one.get("cost")
    blocks = None if overlap is None and prompt is None else f"{printable(overlap)}/{printable(prompt)}"
    number = f"{cost:.2f}" if isinstance(cost, int | float) else cost
    return {**one, "mark": "*" if is_chosen else " ", "blocks": blocks, "cost": number}
