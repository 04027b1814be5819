"""What the gateway says it did against what the clients saw. Pure."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from gateway.outcome import Outcome
from tests.soak.answers import Kind
from tests.soak.client import Story
from tests.soak.plan import Leave, Manner

_ANY_ERROR = frozenset(Outcome) - {Outcome.COMPLETE, Outcome.CLIENT_CLOSED}
# /v1/messages and /v1/responses do not tell a stopped answer from one that ended by itself.
_OUTCOMES = {
    Kind.WHOLE: frozenset({Outcome.COMPLETE}),
    # Without a finish reason the log says that the stream was cut, unless it was aborted through the gateway.
    Kind.STOPPED: frozenset({Outcome.ABORTED, Outcome.ENGINE_ERROR, Outcome.COMPLETE, Outcome.TRUNCATED}),
    Kind.ERROR: _ANY_ERROR,
    Kind.CUT: frozenset({Outcome.TRUNCATED}),
}
_REQUESTS = re.compile(r'^forebay_requests_total\{.*outcome="(\w+)".*\} ([\d.e+]+)$', re.MULTILINE)
_WORDS = ("never retrieved", "never awaited", "Traceback", "ResourceWarning", "unclosed")


def audit_access(stories: Sequence[Story], lines: Sequence[dict[str, Any]]) -> list[str]:
    """Exactly one line for each request that began, and one that agrees with what its client saw."""
    problems: list[str] = []
    by_id: dict[str, list[dict[str, Any]]] = defaultdict(list)
    nameless = 0
    for line in lines:
        if line.get("outcome") not in set(Outcome):
            problems.append(f"an access line with no outcome of the contract's: {line}")
        if line.get("request_id"):
            by_id[line["request_id"]].append(line)
        else:
            nameless += 1
    missing = 0
    may_miss = 0
    for story in stories:
        found = by_id.pop(story.plan.id, [])
        plan = story.plan
        if len(found) > 1 or (found and (not plan.is_http or plan.leave is Leave.IN_HEAD)):
            problems.append(f"{len(found)} access lines: {found}\n  {story}")
        elif found:
            problems += _disagreements(story, found[0])
        elif not plan.is_http or plan.leave is Leave.IN_HEAD:
            pass
        elif not _may_be_nameless(story):
            problems.append(f"no access line\n  {story}")
        elif plan.manner is Manner.RESET:  # the reset may have overtaken the request
            may_miss += 1
        else:
            missing += 1
    for found in by_id.values():
        if len(found) == 1 and _is_made_up(found[0]):
            nameless += 1
        else:
            problems.append(f"an access line for a request of nobody: {found}")
    if not missing <= nameless <= missing + may_miss:
        problems.append(
            f"{nameless} access lines without a client's id; {missing} clients left early, and {may_miss} with a reset"
        )
    return problems


def _is_made_up(line: dict[str, Any]) -> bool:
    """Whether a line has an id of the gateway's own, since the client left before its id, in the body, was read."""
    return (
        line["outcome"] == Outcome.CLIENT_CLOSED
        and line.get("worker") is None
        and re.fullmatch(r"[0-9a-f]{32}", line["request_id"]) is not None
    )


def _may_be_nameless(story: Story) -> bool:
    """Whether the client went before the gateway can have read who it is."""
    return story.plan.leave in (Leave.IN_BODY, Leave.BEFORE_ANSWER)


def _disagreements(story: Story, line: dict[str, Any]) -> list[str]:
    problems = []
    if line["route"] != story.plan.route.path:
        problems.append("another route")
    if story.kind is not None and line["status"] != story.status:
        problems.append("another status")
    if story.kind is not None and line["outcome"] not in _OUTCOMES[story.kind] and not _was_cut_off(story, line):
        problems.append(f"another outcome than what the client saw, which is {story.kind.value!r}")
    return [f"{what}: {line}\n  {story}" for what in problems]


def _was_cut_off(story: Story, line: dict[str, Any]) -> bool:
    """Who has a request aborted and does not read what there is of the answer is cut off."""
    return story.kind is Kind.CUT and story.plan.aborts is not None and line["outcome"] == Outcome.ABORTED


def audit_metrics(text: str, lines: Sequence[dict[str, Any]]) -> list[str]:
    """The counters say what the access log says, by outcome."""
    counted: Counter[str] = Counter()
    for outcome, value in _REQUESTS.findall(text):
        counted[outcome] += int(float(value))
    logged = Counter(str(line["outcome"]) for line in lines)
    return [] if counted == logged else [f"forebay_requests_total {dict(counted)}, the access log {dict(logged)}"]


def audit_texts(stories: Sequence[Story]) -> list[str]:
    """Equal requests have equal answers, whichever engine gave them and in whatever form."""
    problems = []
    for of in ("texts", "prompts"):
        first: dict[str, Story] = {}
        for story in stories:
            if found := getattr(story, of):
                other = first.setdefault(story.plan.key, story)
                if getattr(other, of) != found:
                    problems.append(f"{found} is not {getattr(other, of)}\n  {story}\n  {other}")
    return problems


def audit_log(text: str) -> list[str]:
    """No error, and nothing that the interpreter complains of."""
    problems = []
    for line in text.splitlines():
        is_bad = any(word in line for word in _WORDS) or not line.startswith("{")
        if is_bad or json.loads(line)["level"] in ("error", "critical"):
            problems.append(f"in the gateway's log: {line}")
    return problems


def complaints(stories: Iterable[Story]) -> list[str]:
    """What the clients have to complain of."""
    return [str(story) for story in stories if story.complaints]
