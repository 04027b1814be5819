"""What the documents list is what the code has."""

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

import gateway.errors
from backends import pair_types
from backends.errors import AnswerTooLarge, UpstreamError
from backends.prefill_events import PrefillRefused
from gateway.access_log import AccessRecord, format_text
from gateway.coalescing import LONGEST_HOLD_S, MUTE_S
from gateway.errors import ErrorReport, InvalidRequest, engine_failure, report_of
from gateway.kv_silence import MIN_ANSWERS, SILENCE_S
from gateway.options import Option
from gateway.outcome import Outcome
from gateway.pair_failure import PairFailed
from gateway.prefixes import ENGINE_TOKENIZE_PAUSE_S, ENGINE_TOKENIZE_TIMEOUT_S, MIN_TEXT_BYTES
from gateway.settings import NOT_YET, Settings, load_settings, options
from gateway.tokens.service import MAX_PENDING, THREADS, TIME_LIMIT_S
from kv_events.index import CAPACITY_SLACK, DEFAULT_CAPACITY_BLOCKS
from kv_events.orphans import MAX_BYTES, MAX_EVENTS
from kv_events.sequence import SourceState
from routers.assumed import APPROXIMATE_TTL_S, MAX_ASSUMPTIONS, MAX_BLOCKS
from routers.cost import DEFAULT_COST, CostParameters, placement_cost, with_recompute
from routers.errors import NoSuchRank, RoutingError
from routers.kv_aware import CROWDED_ABOVE_MEAN, CROWDED_TIMES_MEAN
from routers.prefix_approximate import CHUNK_BYTES
from simulator.server import SimulatedEngine
from tests.fakes.running import running_gateway

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")
KV_ROUTING = (ROOT / "docs/kv-routing.md").read_text("utf-8")
OPERATING = (ROOT / "docs/operating.md").read_text("utf-8")
IN_WORDS = {2: "two", 3: "three"}
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# Pairs of type and status that are given outside of gateway/errors.py.
ELSEWHERE = {
    ("invalid_request", 403),  # a pin without the admin key
    ("unsupported", 400),  # state inside one engine
    ("unavailable", 504),  # an addressed call without an answer
}


def table(text: str, heading: str) -> list[list[str]]:
    """The rows of the first table under ``heading``, without its head; cells as text."""
    section = re.split(r"^#+ ", text.partition(f"# {heading}\n")[2], flags=re.M)[0]
    assert section, f"there is no section {heading!r}"
    rows = re.findall(r"^\|(.*)\|$", section, re.M)[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)] for row in rows]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


# --- options


def option_rows() -> Iterator[str]:
    """The lines of the README's table of options, as the code has them."""
    yield "| option | default | takes | what it is |"
    yield "| --- | --- | --- | --- |"
    for option in options():
        name = f"`{option.flag}`" + " (repeatable)" * option.repeatable
        cells = [name, option.default, takes(option), option.description + missing(option)]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def takes(option: Option) -> str:
    if option.is_switch:
        return "true, false"
    return ", ".join(filter(None, [option.unit, option.allowed.replace("|", ", ")]))


def missing(option: Option) -> str:
    """Say what this release does not have of it."""
    if option.field in NOT_YET:
        return " (*not in this release*)"
    values = [entry.partition("=")[2] for entry in NOT_YET if entry.startswith(option.field + "=")]
    return f" (*not in this release:* {', '.join(values)})" if values else ""


def test_the_readme_lists_every_option() -> None:
    expected = "\n".join(option_rows())
    found = "\n".join(re.findall(r"^\|.*$", README.partition("## Every option\n")[2].partition("\n## ")[0], re.M))
    if found != expected:
        print(expected)
    assert found == expected, "put the table above under 'Every option' of README.md"


# --- errors and outcomes

MAKERS: dict[str, Callable[[], list[ErrorReport]]] = {
    "too_large": lambda: [gateway.errors.too_large(1)],
    "headers_too_large": lambda: [gateway.errors.headers_too_large(1)],
    "too_slow": lambda: [gateway.errors.too_slow("x")],
    "unauthorized": lambda: [gateway.errors.unauthorized(is_admin=False)],
    "forbidden": lambda: [gateway.errors.forbidden()],
    "not_found": lambda: [gateway.errors.not_found("/x")],
    "wrong_method": lambda: [gateway.errors.wrong_method("GET", "POST")],
    "report_of": lambda: [report_of(error) for error in raised()],
    "engine_failure": lambda: [
        engine_failure(500, ""),
        engine_failure(503, ""),
        engine_failure(503, "The request queue is full."),
    ],
}


def subclasses(root: type[Exception]) -> Iterator[type[Exception]]:
    yield root
    for kind in root.__subclasses__():
        if not kind.__module__.startswith("tests"):
            yield from subclasses(kind)


def raised() -> Iterator[Exception]:
    yield ValueError()
    yield InvalidRequest("x")
    for kind in {*subclasses(UpstreamError), *subclasses(RoutingError)}:
        if issubclass(kind, AnswerTooLarge):
            yield kind(1)
        elif issubclass(kind, PrefillRefused):
            yield kind(500, "x", "error")
        elif issubclass(kind, NoSuchRank):
            yield kind("x", "x-header")
        else:
            yield kind("x")


def reports() -> Iterator[ErrorReport]:
    for value in vars(gateway.errors).values():
        if isinstance(value, ErrorReport):
            yield value
    for make in MAKERS.values():
        yield from make()
    for value in vars(pair_types).values():
        if isinstance(value, pair_types.Failure):
            yield PairFailed(value).report


def test_every_maker_of_reports_is_known_here() -> None:
    functions = inspect.getmembers(gateway.errors, inspect.isfunction)
    own = {name for name, function in functions if function.__module__ == gateway.errors.__name__}
    made = {name for name in own if get_type_hints(getattr(gateway.errors, name)).get("return") is ErrorReport}
    assert made == set(MAKERS)


def test_every_error_type_is_documented_with_its_statuses() -> None:
    documented = {
        (kind, int(status))
        for kinds, statuses, *_ in table(OPERATING, "Errors")
        for kind in names(kinds)
        for status in re.findall(r"\b\d{3}\b", statuses)
    }
    assert documented == {(report.type, report.status) for report in reports()} | ELSEWHERE


def types_in_the_code() -> set[str]:
    """Types that are written where an error is made, anywhere in the gateway."""
    found: set[str] = set()
    for path in (ROOT / "gateway").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            given = node.args[1:2] if node.func.id == "ErrorReport" else []
            if node.func.id in ("ErrorReport", "InvalidRequest"):
                given += [keyword.value for keyword in node.keywords if keyword.arg == "type"]
            constants = [value.value for value in given if isinstance(value, ast.Constant)]
            found |= {constant for constant in constants if isinstance(constant, str)}
    return found


def test_no_error_type_is_given_in_passing() -> None:
    found = types_in_the_code()
    assert {"unsupported", "engine_error"} <= found
    assert found <= {kind for row in table(OPERATING, "Errors") for kind in names(row[0])}


def test_errors_are_counted_as_documented() -> None:
    documented = {
        (kind, outcome) for row in table(OPERATING, "Errors") for kind in names(row[0]) for outcome in names(row[2])
    }
    assert {(report.type, str(report.outcome)) for report in reports()} <= documented
    assert {outcome for _, outcome in documented} <= set(Outcome)


def test_every_outcome_is_documented() -> None:
    assert [name for row in table(OPERATING, "Outcomes") for name in names(row[0])] == [
        str(outcome) for outcome in Outcome
    ]


# --- access log, metrics, workers


def test_every_field_of_the_access_log_is_documented() -> None:
    record = AccessRecord(
        0.0,
        "POST",
        "/x",
        "/x",
        200,
        "complete",
        "a",
        ("b",),
        "c",
        0,
        "p",
        0,
        1,
        True,
        "m",
        1,
        1,
        1,
        1,
        1,
        1,
        1,
        1,
        1,
        "e",
    )
    written = re.findall(r"(\w+)=", format_text(record).decode())
    assert len(written) == len(AccessRecord.__struct_fields__)
    assert [name for row in table(OPERATING, "The access log") for name in names(row[0])] == written


async def test_every_metric_and_every_field_of_a_worker_is_documented(engine: SimulatedEngine) -> None:
    async with running_gateway(engine.url) as running:
        body = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
        assert (await running.client.post("/generate", json=body)).status_code == 200
        await running.record()
        page = (await running.client.get("/metrics")).text
        (worker,) = (await running.client.get("/workers")).json()["workers"]
        counters = (await running.client.get("/internal/state")).json()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.M))
    rows = table(OPERATING, "Metrics")
    assert {name: row[1] for row in rows for name in names(row[0])} == kinds
    for name, labels in re.findall(r"^(\w+)\{(.*)\} \S+$", page, re.M):
        if name in kinds:
            (row,) = [row for row in rows if names(row[0]) == [name]]
            assert set(names(row[2])) == set(re.findall(r'(\w+)="', labels)), name
    assert {name for row in table(OPERATING, "The fleet") for name in names(row[0])} == set(worker)
    assert set(names(OPERATING.partition("`/internal/state` has")[2].partition(".")[0])) == set(counters)


# --- links


def links(path: Path) -> Iterator[str]:
    text = path.read_text("utf-8")
    yield from (target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target)
    yield from re.findall(r"`((?:docs|deploy|tests)/[\w./-]+|Dockerfile|docker-compose\.yml)`", text)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in links(path):
        file = target.partition("#")[0]
        assert not file or (path.parent / file).exists() or (ROOT / file).exists(), f"{path.name}: {target}"


def test_the_readme_leads_to_every_document() -> None:
    targets = set(links(ROOT / "README.md"))
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} <= targets


# --- routing by caches


def test_the_parameters_of_the_cost_are_documented_with_their_defaults() -> None:
    documented = {names(row[0])[0]: row[1] for row in table(KV_ROUTING, "The cost")}
    assert documented == {field.name: str(field.default).lower() for field in fields(CostParameters)}


def test_every_state_of_a_source_is_documented() -> None:
    documented = [names(row[0])[0] for row in table(KV_ROUTING, "States of a source")]
    assert sorted(documented) == sorted(SourceState)


def test_the_worked_example_of_what_another_has() -> None:
    plain = placement_cost(DEFAULT_COST, 16, 200, 0, 0, 12, 0, 0)
    assert with_recompute(DEFAULT_COST, plain, 6.0)[0] == 120.5
    assert "24.5 + 16 * 6 = 120.5" in KV_ROUTING


def test_the_recommended_setting_is_the_profile() -> None:
    (written,) = re.findall(r"(--kv-guard .*(?:\\\n.*)*)\n```", KV_ROUTING)
    given = load_settings(written.replace("\\", "").split())
    assert given == Settings(kv_profile="tuned").model_copy(update={"kv_profile": "plain"})


@pytest.mark.parametrize(
    ("active_tokens", "decode_blocks", "cached", "said"),
    [(0, 12, 0, "24.5"), (0, 12, 6, "18.5")],
)
def test_the_worked_example_of_the_cost(active_tokens: int, decode_blocks: int, cached: int, said: str) -> None:
    total = placement_cost(DEFAULT_COST, 16, 200, active_tokens, 0, decode_blocks, 0, cached)[0]
    assert f"{total:g}" == said
    assert re.search(rf"\b{re.escape(said)}\b", KV_ROUTING)


@pytest.mark.parametrize(
    "said",
    [
        f"below {MIN_TEXT_BYTES} bytes",
        f"pieces of {CHUNK_BYTES} bytes",
        f"asked again for {ENGINE_TOKENIZE_PAUSE_S:g} s",
        f"at most {ENGINE_TOKENIZE_TIMEOUT_S:g} s; an engine",
        f"{IN_WORDS[THREADS].capitalize()} threads; at most {TIME_LIMIT_S:g} s for a request, {MAX_PENDING} at once",
        f"sent there in the last {APPROXIMATE_TTL_S:g} s",
        f"at least {CROWDED_ABOVE_MEAN} requests more than the mean and {CROWDED_TIMES_MEAN:g} times the mean",
        f"for {SILENCE_S:g} s, while its rank answered at least {IN_WORDS[MIN_ANSWERS]} prompts",
        f"bounded by {CAPACITY_SLACK:g} times the blocks that its engine says it has, or {DEFAULT_CAPACITY_BLOCKS:,}",
        f"{MAX_BLOCKS:,} blocks and {MAX_ASSUMPTIONS:,} requests each",
        f"or after {LONGEST_HOLD_S:g} s",
        f"not relied on until it does, or for {MUTE_S:g} s",
        f"{MAX_EVENTS:,} events or {MAX_BYTES >> 20} MiB a source",
    ],
)
def test_the_numbers_of_routing_by_caches_are_those_of_the_code(said: str) -> None:
    assert said in " ".join(KV_ROUTING.split())


def test_metrics_that_documents_name_exist() -> None:
    listed = {name for row in table(OPERATING, "Metrics") for name in names(row[0])}
    suffixes = ("_count", "_sum", "_bucket", "_*")
    for document in DOCUMENTS:
        for name in re.findall(r"\bforebay_(?:kv|route|rank)_[a-z_]+\*?", document.read_text("utf-8")):
            known = name in listed or any(name.removesuffix(suffix) in listed for suffix in suffixes)
            assert known or name.endswith("_*"), f"{document.name}: {name}"
