"""The one ``Settings`` object of ``forebay serve``, and where its values come from.

Command line over ``FOREBAY_*`` environment over TOML file over default. Names that nobody knows
are refused with the nearest known one, in all three places. The fields of ``Settings`` are the
only list of options: their texts are the ``--help`` page. No other module reads the environment.
"""

import dataclasses
import functools
import ipaddress
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from backends.worker_spec import WorkerSpec, WorkerSpecError, parse_worker_spec, worker_id, worker_spec_from_mapping
from gateway.options import (
    LineParser,
    Option,
    SettingsError,
    declare,
    expected,
    nearest,
    options_of,
    parser_of,
    reason_of,
)
from gateway.tokens.option import parse_tokenizer_options
from routers.cost import MAX_WEIGHT
from routers.kv_aware import Guard, Recompute

__all__ = [
    "NOT_YET",
    "Settings",
    "SettingsError",
    "build_parser",
    "describe",
    "describe_changed",
    "load_settings",
    "options",
    "read_config_workers",
]

ENV_PREFIX: Final = "FOREBAY_"
MIB: Final = 1024 * 1024
DAY_S: Final = 86_400

# Options that are parsed and checked, but whose feature is not in this release: ``option`` for every value but
# the default, ``option=value`` for one value. A feature is switched on by deleting its line.
NOT_YET: Final[dict[str, str]] = {
    "processes": "one process serves all connections; run more gateways side by side",
}

# ``--kv-profile tuned``; see docs/kv-routing.md.
TUNED: Final[Mapping[str, object]] = {
    "kv_guard": "shared",
    "kv_prefill_load_scale": 16.0,
    "kv_recompute_weight": 64.0,
    "kv_recompute": "rare",
    "kv_request_weight": 256.0,
    "kv_max_wait_tokens": 80_000,
    "kv_max_wait_ratio": 16.0,
    "kv_prefill_load_model": "observed",
    "kv_coalesce_tokens": 512,
}

# What Kubernetes and Docker put into the environment of pods beside a service named forebay or forebay-something.
_SERVICE_LINK: Final = re.compile(
    r"FOREBAY(_\w+)?_(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)


def _zero_is_off(value: object) -> object:
    return None if value in (0, 0.0, "0", "0.0") and value is not False else value


def _networks(values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(str(ipaddress.ip_network(value)) for value in values)


def _tokenizers(values: tuple[str, ...]) -> tuple[str, ...]:
    parse_tokenizer_options(values)
    return values


Duration = Annotated[float, Field(ge=0, le=DAY_S, allow_inf_nan=False)]
Deadline = Annotated[float, Field(gt=0, le=DAY_S, allow_inf_nan=False)]
OptionalDeadline = Annotated[Deadline | None, BeforeValidator(_zero_is_off)]
Weight = Annotated[float, Field(ge=0, le=MAX_WEIGHT, allow_inf_nan=False)]
Policy = Literal["kv-aware", "least-loaded", "round-robin", "power-of-two", "consistent-hash", "prefix-approximate"]


class Settings(BaseModel):
    """Every option of ``forebay serve``, immutable. Names are the options' with ``_`` for ``-``."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False)

    config: Path | None = declare(None, "TOML file with a [server] table and [[workers]] tables")
    host: str = declare("127.0.0.1", "address to listen on")
    port: int = declare(8000, "port to listen on; 0 takes any free one", ge=0, le=65535)
    workers: tuple[WorkerSpec, ...] = declare(
        (), "engine instance as URL[,key=value]*; keys: engine, role, model, kv_events, api_key_env, "
        "admin_api_key_env, bootstrap_port",
    )  # fmt: skip
    policy: Policy | None = declare(
        None, "how a worker is chosen", shown="kv-aware where a worker publishes KV events, else least-loaded"
    )
    kv_profile: Literal["plain", "tuned"] = declare(
        "plain", "what options about cost are where they are not given: their defaults, or what did best in simulations"
    )
    kv_prefill_load_scale: Weight = declare(
        1.0, "blocks in use that one block of prefill is worth to policies that go by cost", "blocks"
    )
    kv_recompute_weight: Weight = declare(
        16.0,
        "further blocks that each block counts for them that a worker would compute anew though another has it",
        "blocks",
    )
    kv_recompute: Recompute = declare(
        "all", "blocks that weight counts for: all that another worker has, or rare ones, which at most half have"
    )
    kv_request_weight: Weight = declare(0.0, "blocks in use that each request in flight counts for to them", "blocks")
    kv_temperature: Weight = declare(0.0, "how freely they draw among costs; 0 takes the lowest")
    kv_guard: Guard = declare(
        "all",
        "crowded workers that they pass over: all that have a part of the prompt cached, or those of which others "
        "have or use half of that part",
    )
    kv_max_wait_tokens: int = declare(
        0, "prefill by which they let a first token be later than on the worker where it is soonest; 0 for no limit",
        "prompt tokens", ge=0,
    )  # fmt: skip
    kv_max_wait_ratio: Weight = declare(
        0.0, "the same for each token that a worker has cached and the soonest one has not; 0 for no limit", "tokens"
    )
    kv_prefill_load_model: Literal["none", "observed"] = declare(
        "none",
        "how prefill that goes on counts to them: in full until its first token, or less by the time that it takes, "
        "at the worker's observed pace",
    )
    kv_coalesce_tokens: int = declare(
        0, "beginning of a prompt that holds a request back while the SGLang worker which it goes to computes that for "
        "another one; 0 is off", "prompt tokens", ge=0,
    )  # fmt: skip
    upstream_mode: Literal["match", "incremental"] = declare(
        "match", "match: ask engines in the client's stream mode; incremental: always stream and fold for unary clients"
    )
    api_key_file: Path | None = declare(None, "file of client API keys, one a line; without it clients need no key")
    admin_api_key_file: Path | None = declare(None, "file of admin API keys, one a line; see --admin-allow without it")
    max_body_bytes: int = declare(64 * MIB, "longest request body taken", "bytes", ge=1)
    max_response_bytes: int = declare(
        64 * MIB, "bound of one unary engine answer and of one streamed event", "bytes", ge=1
    )
    drain_timeout_s: Duration = declare(30.0, "time that running requests get after SIGTERM", "s")
    log_format: Literal["text", "json"] = declare("text", "form of log lines")
    log_level: Literal["debug", "info", "warning", "error"] = declare(
        "info", "least severe log line shown; access lines are always written"
    )
    processes: int = declare(1, "processes that share the port", ge=1, le=256)
    max_attempts: int = declare(3, "workers tried for one request before its first byte", ge=1, le=16)
    request_timeout_s: OptionalDeadline = declare(
        None, "longest duration of a request, queue and retries included", "s", "off"
    )
    first_token_timeout_s: OptionalDeadline = declare(
        None, "longest wait for a stream's first output, queue and retries included", "s", "off"
    )
    stall_timeout_s: OptionalDeadline = declare(None, "longest silence of an engine inside an answer", "s", "off")
    client_timeout_s: Duration = declare(
        60.0, "time that a client gets for a request's head, and for a body that comes at less than 512 bytes/s; up to "
        "twice that may pass; 0 is off", "s",
    )  # fmt: skip
    upstream_client: Literal["httptools", "httpx"] = declare("httptools", "HTTP client towards engines")
    native_n: bool = declare(False, "leave n > 1 to the engine everywhere, in place of one request a choice")
    native_increments: bool = declare(
        False, "events of /generate from vLLM workers hold what is new, as where SGLang workers of the model do so"
    )
    connect_timeout_s: Deadline = declare(5.0, "longest wait for a connection to a worker", "s")
    prefill_header_timeout_s: Deadline = declare(30.0, "longest wait for a prefill worker's answer to start", "s")
    handoff_drain_timeout_s: Deadline = declare(
        30.0, "longest that a vLLM decode worker gets to take over the prompt of a client that is gone", "s"
    )
    handoff_max_age_s: Deadline = declare(20.0, "age from which a vLLM handoff is prefilled again", "s")
    prefill_hold_timeout_s: Duration = declare(
        30.0, "longest wait for prefill's end once decode has answered all; then the request fails; 0 is no limit", "s"
    )
    prefill_overlap: Literal["headers", "immediate"] = declare(
        "headers", "when decode starts on SGLang: once prefill has answered with headers, or at once"
    )
    short_prompt_tokens: int = declare(
        0, "a prompt with at most so many uncached tokens goes to one worker where one can serve it alone; 0 is off",
        "tokens", ge=0,
    )  # fmt: skip
    tokenizer: Annotated[tuple[str, ...], AfterValidator(_tokenizers)] = declare(
        (), "MODEL=DIR of a local tokenizer", shown="none"
    )
    kv_listen: str | None = declare(
        None, "ZMQ endpoint to which relays connect, tcp://HOST:PORT; without keys loopback only", "", "off"
    )
    kv_key_file: Path | None = declare(None, "CURVE key pair of the KV listener")
    kv_authorized_keys: Path | None = declare(None, "CURVE public keys of relays that may connect")
    admin_allow: Annotated[tuple[str, ...], AfterValidator(_networks)] = declare(
        ("127.0.0.0/8", "::1/128"), "network that may use admin routes while no admin key is set"
    )
    sse_keepalive_s: Duration = declare(
        0.0, "silence after which a comment is streamed; the first one ends retries; 0 is off", "s"
    )
    sse_done_after_error: bool = declare(True, "end a failed stream with data: [DONE] after the error event")
    queue_max_requests: int = declare(2048, "requests that may wait for a worker", "requests", ge=0)
    queue_max_age_s: Deadline = declare(30.0, "longest wait for a worker", "s")
    max_in_flight_per_worker: int | None = declare(
        None, "requests that one worker gets at once", "requests",
        "the engine's max_running_requests times 1.25 where known, otherwise off", ge=1,
    )  # fmt: skip
    pause_hold_s: Duration = declare(300.0, "longest wait while every worker is paused", "s")
    tls_cert_file: Path | None = declare(None, "certificate chain, PEM")
    tls_key_file: Path | None = declare(None, "private key of the certificate, PEM")
    health_interval_s: Deadline = declare(1.0, "time between two probes of a worker", "s")
    health_timeout_s: Deadline = declare(5.0, "longest wait for a probe's answer", "s")
    unhealthy_after: int = declare(3, "failed probes in a row that make a worker not ready", "probes", ge=1)
    healthy_after: int = declare(2, "good probes in a row that make it ready again", "probes", ge=1)
    breaker_failures: int = declare(5, "failed requests in a row after which a worker is left alone", "requests", ge=1)
    breaker_open_s: Deadline = declare(5.0, "time for which it is left alone, before one request tries it again", "s")
    identify_backoff_max_s: Deadline = declare(
        5.0, "longest pause between attempts to ask a new worker what it is", "s"
    )
    seed: int | None = declare(None, "seed of random choices", "", "from the operating system", ge=0)
    abort_delay_s: Duration = declare(
        0.02, "least time between writing a request and aborting it; sooner, engines miss the abort", "s"
    )

    @model_validator(mode="before")
    @classmethod
    def _begin_at_profile(cls, values: dict[str, Any]) -> dict[str, Any]:
        return {**TUNED, **values} if values.get("kv_profile") == "tuned" else values


@functools.cache
def options() -> tuple[Option, ...]:
    """Return every option in the order of the help page."""
    return options_of(Settings, ENV_PREFIX, {"workers": "worker"})


def build_parser(prog: str = "forebay serve") -> LineParser:
    """Return the command line of ``serve``."""
    return parser_of(options(), prog, "Run the gateway. Command line over environment over file over default.")


def load_settings(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> Settings:
    """Build the settings from the arguments after ``serve``, the environment and the file.

    An empty environment variable counts as not set. ``--help`` prints the page and raises ``SystemExit``.

    Args:
        argv: Arguments without the program's and the command's name.
        environ: Environment; ``None`` is the process's own.

    Raises:
        SettingsError: A name is unknown, a value is wrong or its feature is not in this release, or
            the file cannot be read.
    """
    environ = os.environ if environ is None else environ
    given = vars(build_parser().read(argv))
    from_env = {option: environ[option.env] for option in options() if _is_set(environ, option.env)}
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    path = given.get("config") or next((text for option, text in from_env.items() if option.field == "config"), None)
    if path is not None:
        values = _read_file(Path(path))
        sources = dict.fromkeys(values, f"file {path}")
    for option, text in from_env.items():
        values[option.field] = re.split(r"[\s;]+", text.strip(" \t\r\n;")) if option.repeatable else text
        sources[option.field] = f"environment variable {option.env}"
    for field, value in given.items():
        values[field] = value
        sources[field] = "command line"
    settings = _validate(values, sources)
    _refuse_unknown_variables(environ, settings)
    _refuse_not_yet(settings, sources)
    return settings


def read_config_workers(path: Path) -> tuple[WorkerSpec, ...]:
    """Read the workers of a TOML file anew; the whole file is checked as at start.

    Raises:
        SettingsError: The file cannot be read, or something in it is wrong.
    """
    values = _read_file(path)
    return _validate(values, dict.fromkeys(values, f"file {path}")).workers


def describe(settings: Settings) -> dict[str, object]:
    """Return the effective settings for the log. No key is in them: keys live in files and variables."""
    shown: dict[str, object] = settings.model_dump(mode="json", exclude={"workers"})
    return {**shown, "workers": [dataclasses.asdict(spec) for spec in settings.workers]}


def describe_changed(settings: Settings) -> str:
    """Return the settings that are not at their defaults, as one would write them; workers have lines of their own."""
    shown = settings.model_dump(mode="json", exclude={"workers"}, exclude_defaults=True)
    return " ".join(f"{name}={value}" for name, value in shown.items()) or "all at their defaults"


def _read_file(path: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise SettingsError(f"--config: file {path} cannot be read ({reason_of(exc)})") from exc
    for table, kind in document.items():
        if not isinstance(kind, {"server": dict, "workers": list}.get(table, ())):
            hint = nearest(table, ["server", "workers"]) if table not in ("server", "workers") else ""
            raise SettingsError(f"file {path}: {table!r} is not known here{hint}; write [server] and [[workers]]")
    fields = {option.key: option.field for option in options() if option.field != "config"}
    values: dict[str, Any] = {}
    for written, value in document.get("server", {}).items():
        key = written.replace("-", "_")
        if key not in fields:
            raise SettingsError(f"file {path}: [server] {written}: unknown key{nearest(key, fields)}")
        if fields[key] in values:
            raise SettingsError(f"file {path}: [server] {written}: given twice, with '-' and with '_'")
        values[fields[key]] = value
    if "workers" in document:
        listed = values.get("workers", [])
        values["workers"] = [*(listed if isinstance(listed, list) else [listed]), *document["workers"]]
    return values


def _validate(values: dict[str, Any], sources: Mapping[str, str]) -> Settings:
    by_field = {option.field: option for option in options()}
    for field, value in values.items():
        option = by_field[field]
        # Pydantic would take true for 1.
        if value == "" or (isinstance(value, bool) and not option.is_switch):
            raise SettingsError(f"{option.flag} ({sources[field]}): {value!r} is no value; {expected(option)}")
    checked = values
    if "workers" in values:
        where = f"--worker ({sources['workers']})"
        checked = {**values, "workers": _workers(where, values["workers"])}
    try:
        return Settings.model_validate(checked)
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        option = by_field[str(first["loc"][0])]
        reason = first["msg"].removeprefix("Value error, ")
        refusal = f"{option.flag} ({sources[option.field]}): {values[option.field]!r} is refused: {reason}"
        raise SettingsError(f"{refusal}; {expected(option)}") from exc


def _workers(where: str, raw: object) -> tuple[WorkerSpec, ...]:
    if not isinstance(raw, list):
        raise SettingsError(f"{where}: write a list of SPECs, or [[workers]] tables")
    specs: dict[str, WorkerSpec] = {}
    for item in raw:
        try:
            spec = worker_spec_from_mapping(item) if isinstance(item, dict) else parse_worker_spec(str(item))
        except WorkerSpecError as exc:
            raise SettingsError(f"{where}: {exc}") from exc
        if worker_id(spec) in specs:
            raise SettingsError(f"{where}: worker {spec.url} is given twice; give each address once")
        specs[worker_id(spec)] = spec
    return tuple(specs.values())


def _refuse_unknown_variables(environ: Mapping[str, str], settings: Settings) -> None:
    known = {option.env for option in options()}
    named = {name for spec in settings.workers for name in (spec.api_key_env, spec.admin_api_key_env)}
    for name in sorted(environ):
        if name.startswith(ENV_PREFIX) and name not in known | named and not _SERVICE_LINK.fullmatch(name):
            raise SettingsError(f"{name}: unknown environment variable{nearest(name, known)}")


def _refuse_not_yet(settings: Settings, sources: Mapping[str, str]) -> None:
    for entry, remedy in NOT_YET.items():
        field, _, refused = entry.partition("=")
        value = getattr(settings, field)
        if str(value) == refused if refused else value != Settings.model_fields[field].default:
            option = next(option for option in options() if option.field == field)
            text = " ".join(value) if isinstance(value, tuple) else value
            raise SettingsError(
                f"{option.flag} ({sources.get(field, 'default')}): {text} is not available in this release; {remedy}"
            )


def _is_set(environ: Mapping[str, str], name: str) -> bool:
    # FOREBAY_PORT=tcp://10.0.0.1:8000 is what Kubernetes and Docker set beside a service named forebay.
    value = environ.get(name, "")
    return value.strip() != "" and not (name.endswith("_PORT") and "://" in value)
