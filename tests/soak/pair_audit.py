"""What the gateway says of requests over pairs against what the engines' logs say. Pure."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gateway.outcome import Outcome

Line = Mapping[str, Any]
# Of each worker, what its processes have told of themselves; those that were killed may have told of less.
Logs = Mapping[str, Sequence[Mapping[str, Any]]]
_ABANDONED = re.compile(r"^forebay_handoff_abandoned_total ([\d.e+]+)$", re.MULTILINE)


def audit_pairs(lines: Iterable[Line], logs: Logs) -> list[str]:
    """Both halves of a complete answer were complete, and prefill is blamed only where it did not do its part."""
    entries = _entries(logs)
    problems = []
    for line in lines:
        if line.get("prefill_worker") is None:
            continue
        prefill, decode = (_of(entries, line[worker], line) for worker in ("prefill_worker", "worker"))
        if line["outcome"] == Outcome.COMPLETE and line["attempts"] == 1:
            bad = [one for one in (*prefill, *decode) if not _is_whole(one) or "status" in one["faults"]]
            problems += [f"complete: {line}\n  but {one}" for one in bad]
        if line["outcome"] == Outcome.PREFILL_FAILED:
            # One that has waited for decode too long says so in an answer without a token; one whose transfer has
            # failed, behind its token, and names the room.
            good = {id for one in prefill if _is_whole(one) and not one["faults"] and one["tokens"] for id in _ids(one)}
            rooms = _rooms_of_failures(logs[line["prefill_worker"]])
            if good >= set(line["engine_ids"]) and not any(room in str(line.get("error")) for room in rooms):
                problems.append(f"prefill is blamed: {line}\n  but {prefill}")
    return problems


def audit_handoffs(lines: Iterable[Line], logs: Logs, metrics: str) -> list[str]:
    """Leases that ended at prefill, where nothing but decode can be the reason, are counted.

    Not those of which the gateway cannot know: prefill's answer was broken by a fault, or its client left while it
    came; or decode has fetched the blocks and not told prefill.
    """
    entries = _entries(logs)
    events = [one for told in logs.values() for log in told for one in log["transfers"]]
    fetched = {one["room"] for one in events if one["event"] == "fetched"}
    expired = {one["room"] for one in events if one["event"] == "expired"} - fetched
    lost = []
    for line in lines:
        if line.get("prefill_worker") is None or line["outcome"] == Outcome.CLIENT_CLOSED:
            continue
        for id in line["engine_ids"]:
            seen = [one for worker in logs for one in entries.get((worker, id), ())]
            is_answered = len(seen) > 1 and not any(one["faults"] for one in seen)
            lost += [room for room in expired if id in room and is_answered]
    found = _ABANDONED.search(metrics)
    count = float(found[1]) if found else 0
    return [f"{len(lost)} handoffs were lost, {count:g} are counted: {lost}"] if len(lost) > count else []


def _of(entries: Mapping[tuple[str, str], list[Line]], worker: str, line: Line) -> list[Line]:
    """What a worker has seen of a request, as far as it has ended there."""
    found = [one for id in line["engine_ids"] for one in entries.get((worker, id), ())]
    return [one for one in found if one["ended"] is not None]


def _entries(logs: Logs) -> dict[tuple[str, str], list[Line]]:
    found: dict[tuple[str, str], list[Line]] = defaultdict(list)
    for worker, told in logs.items():
        for entry in (one for log in told for one in log["requests"]):
            for id in _ids(entry):
                found[worker, id].append(entry)
    return found


def _rooms_of_failures(told: Sequence[Mapping[str, Any]]) -> set[str]:
    return {str(one["room"]) for log in told for one in log["transfers"] if one["event"] == "failed"}


def _ids(entry: Line) -> set[str]:
    """Ids that the gateway gave: SGLang's are in the body, vLLM's in a header."""
    return {*entry["rids"], *(value for name, value in entry["headers"] if name.lower() == "x-request-id")}


def _is_whole(entry: Line) -> bool:
    return bool(entry["status"] == 200 and entry["ended"] == "complete")


def figures(lines: Sequence[Line], logs: Logs, metrics: str) -> str:
    """A few numbers for people."""
    paired = [line for line in lines if line.get("prefill_worker")]
    outcomes = Counter(line["outcome"] for line in paired)
    again = sum(line["attempts"] > 1 for line in paired)
    abandoned = _ABANDONED.search(metrics)
    transfers = Counter(one["event"] for told in logs.values() for log in told for one in log["transfers"])
    return (
        f"{len(paired)} over pairs, {again} of them tried again, {dict(outcomes)};"
        f" {abandoned[1] if abandoned else '?'} handoffs abandoned; transfers {dict(transfers)}"
    )
