"""The options of ``forebay relay``: read, checked, and told of in one line each if they are wrong.

Nothing is connected here, and everything that can be wrong with an argument is found here.
"""

import argparse
import difflib
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NoReturn

from backends.worker_spec import WorkerSpecError, normalize_worker_url
from kv_events.errors import KeyFileRefused
from kv_events.relay_keys import KeyPair, read_key_pair
from relay.errors import SettingsRefused

ENV_PREFIX: Final = "FOREBAY_RELAY_"
WEEK_S: Final = 604_800.0
_GRPC: Final = re.compile(r"grpc://((?:\[[0-9A-Fa-f:.%]+\]|[^\s\[\]/:?#@]+):\d{1,5})/?", re.ASCII)
_HEADER_TEXT: Final = re.compile(r"[!-~]+")


@dataclass(frozen=True, slots=True)
class RelaySettings:
    """What the operator wants.

    Attributes:
        keygen: Only make a key pair in this file, ``None`` to relay; then nothing else is set.
        engine_url: The local engine's HTTP address; empty if it is asked over gRPC.
        engine_target: Its gRPC ``HOST:PORT``; empty if it is asked over HTTP.
        engine_key: The engine's API key, ``None`` if it needs none.
        gateways: Their HTTP addresses, at least one.
        worker_url: The leader's address as gateways know it; ``None`` is the engine's own.
        registers: A leader adds its worker to the gateways.
        admin_key: The gateways' admin key, ``None`` if they need none.
        keys: CURVE key pair, ``None`` for gateways on this machine only.
        health_host: Where ``/health``, ``/ready`` and ``/metrics`` are served.
        health_port: Port of these, 0 for any free one, ``None`` for none.
        startup_deadline_s: Longest wait in each phase of the start.
        overall_deadline_s: Longest wait in all of them together, ``None`` for no limit.
        failure_limit_s: A local source that is away for so long ends the relay.
        log_format: ``text`` or ``json``.
    """

    keygen: Path | None = None
    engine_url: str = ""
    engine_target: str = ""
    engine_key: str | None = field(default=None, repr=False)
    gateways: tuple[str, ...] = ()
    worker_url: str | None = None
    registers: bool = False
    admin_key: str | None = field(default=None, repr=False)
    keys: KeyPair | None = field(default=None, repr=False)
    health_host: str = "127.0.0.1"
    health_port: int | None = None
    startup_deadline_s: float = 1800.0
    overall_deadline_s: float | None = None
    failure_limit_s: float = 60.0
    log_format: str = "text"


@dataclass(frozen=True, slots=True)
class _Option:
    """One option: its name, and what the help page says."""

    name: str
    metavar: str
    text: str
    default: str = "none"

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()


_OPTIONS: Final = (
    _Option("engine", "URL", "the local engine's HTTP address; grpc://HOST:PORT for a follower's gRPC"),
    _Option("gateway", "URL", "a gateway's HTTP address; give it once for each gateway"),
    _Option("worker_url", "URL", "the leader's address as gateways know it", "that of --engine"),
    _Option("register", "", "on the leader's node: add the worker to the gateways, and keep it added", "off"),
    _Option("engine_api_key_file", "FILE", "file whose first line is the engine's API key"),
    _Option("admin_api_key_file", "FILE", "file whose first line is the gateways' admin key"),
    _Option("key_file", "FILE", "CURVE key pair of this relay; needed for gateways on other machines"),
    _Option("keygen", "FILE", "make a key pair in a new file, print its public key, and end"),
    _Option("health_host", "HOST", "address to serve /ready, /health and /metrics at", "127.0.0.1"),
    _Option("health_port", "PORT", "port to serve them at; 0 = any free one", "not served"),
    _Option("startup_deadline_s", "S", "longest wait in each phase of the start (s)", "1800"),
    _Option("overall_deadline_s", "S", "longest wait in all phases of the start together (s)"),
    _Option(
        "relay_failure_limit_s", "S", "a publisher of the engine that is away for so long ends the relay (s)", "60"
    ),
    _Option("log_format", "text|json", "form of the log on stderr", "text"),
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsRefused(f"{message.removeprefix('argument ')}; see forebay relay --help")


def build_parser() -> argparse.ArgumentParser:
    """Make the parser of the command; values stay text."""
    parser = _Parser(
        prog="forebay relay",
        description="Relay the KV events of one engine node to gateways. Run one beside each node of an engine.",
        epilog="Exit codes: 0 stopped, 1 refused or lost (the last line of stderr says why), 2 bad arguments.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for option in _OPTIONS:
        text = f"{option.text} (default: {option.default}; {option.env})"
        if option.name == "register":
            parser.add_argument(option.flag, action="store_const", const="true", help=text)
        else:
            action = "append" if option.name == "gateway" else "store"
            parser.add_argument(option.flag, action=action, metavar=option.metavar, help=text)
    return parser


def load_settings(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> RelaySettings:
    """Read the arguments after ``relay``, and the environment under them; ``--help`` raises ``SystemExit``.

    Raises:
        SettingsRefused: Something is wrong; the text names the option and the remedy.
    """
    given = _Given(argv, os.environ if environ is None else environ)
    if (keygen := given.text("keygen")) is not None:
        return RelaySettings(keygen=Path(keygen))
    engine = given.text("engine")
    if engine is None:
        raise SettingsRefused("--engine: missing; give the local engine's address, such as http://127.0.0.1:30000")
    grpc = _GRPC.fullmatch(engine)
    worker_url = given.url("worker_url")
    registers = given.switch("register")
    if grpc is not None and (registers or worker_url is not None):
        flag = "--register" if registers else "--worker-url"
        raise SettingsRefused(f"{flag}: is for the leader's node, and grpc:// is a follower's; leave it out here")
    key_file = given.text("key_file")
    try:
        keys = None if key_file is None else read_key_pair(Path(key_file))
    except KeyFileRefused as exc:
        raise SettingsRefused(f"--key-file: {exc}") from exc
    log_format = given.text("log_format") or "text"
    if log_format not in ("text", "json"):
        raise SettingsRefused(f"--log-format: {log_format!r} is none; write text or json")
    return RelaySettings(
        engine_url="" if grpc else _url("--engine", engine, ", or grpc://HOST:PORT for a follower's gRPC"),
        engine_target=grpc[1] if grpc else "",
        engine_key=given.key("engine_api_key_file"),
        gateways=given.gateways(),
        worker_url=worker_url,
        registers=registers,
        admin_key=given.key("admin_api_key_file"),
        keys=keys,
        health_host=given.text("health_host") or "127.0.0.1",
        health_port=given.port("health_port"),
        startup_deadline_s=given.seconds("startup_deadline_s") or 1800.0,
        overall_deadline_s=given.seconds("overall_deadline_s"),
        failure_limit_s=given.seconds("relay_failure_limit_s") or 60.0,
        log_format=log_format,
    )


class _Given:
    """What was written, by option: the command line before the environment; empty variables are not set."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        parser = build_parser()
        known, unknown = parser.parse_known_args(list(argv))
        if unknown:
            flag = unknown[0].partition("=")[0]
            if not flag.startswith("-"):
                raise SettingsRefused(f"{unknown[0]}: unexpected argument; see forebay relay --help")
            raise SettingsRefused(f"{flag}: unknown option{_nearest(flag, lambda option: option.flag)}")
        self._values: dict[str, str | list[str]] = {}
        names = {option.env: option.name for option in _OPTIONS}
        for env in sorted(name for name in environ if name.startswith(ENV_PREFIX)):
            if env not in names:
                raise SettingsRefused(f"{env}: unknown environment variable{_nearest(env, lambda option: option.env)}")
            if text := environ[env].strip():
                self._values[names[env]] = text.split() if names[env] == "gateway" else text
        self._values |= vars(known)

    def text(self, name: str) -> str | None:
        value = self._values.get(name)
        if value is None:
            return None
        assert isinstance(value, str)
        if not value.strip():
            raise SettingsRefused(f"{_flag(name)}: is empty; give a value, or leave the option out")
        return value.strip()

    def switch(self, name: str) -> bool:
        text = self.text(name) or "false"
        if text not in ("true", "false"):
            raise SettingsRefused(f"{_flag(name)}: {text!r} is neither true nor false")
        return text == "true"

    def url(self, name: str) -> str | None:
        text = self.text(name)
        return None if text is None else _url(_flag(name), text)

    def gateways(self) -> tuple[str, ...]:
        written = self._values.get("gateway", [])
        if not written:
            raise SettingsRefused("--gateway: missing; give a gateway's address, such as http://10.0.0.1:8000")
        urls = tuple(_url("--gateway", text) for text in written)
        for url in urls:
            if urls.count(url) > 1:
                raise SettingsRefused(f"--gateway: {url} is given twice; give each gateway once")
        return urls

    def port(self, name: str) -> int | None:
        text = self.text(name)
        if text is None:
            return None
        if not (text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= 65_535):
            raise SettingsRefused(f"{_flag(name)}: {text!r} is no port; 0 to 65535")
        return int(text)

    def seconds(self, name: str) -> float | None:
        text = self.text(name)
        if text is None:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 < value <= WEEK_S:
            raise SettingsRefused(f"{_flag(name)}: {text!r} is out of range; above 0, at most {WEEK_S:g} (s)")
        return value

    def key(self, name: str) -> str | None:
        text = self.text(name)
        if text is None:
            return None
        try:
            lines = [line.strip() for line in Path(text).read_text("utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as exc:
            reason = exc.strerror if isinstance(exc, OSError) else "it is no text"
            raise SettingsRefused(f"{_flag(name)}: {text} cannot be read ({reason})") from exc
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys or not _HEADER_TEXT.fullmatch(keys[0]):
            raise SettingsRefused(f"{_flag(name)}: {text} must have a key without spaces as its first line")
        return keys[0]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _url(flag: str, text: str, or_else: str = "") -> str:
    try:
        return normalize_worker_url(text)
    except WorkerSpecError as exc:
        # It takes the address for that of a worker, and shows it without its password.
        raise SettingsRefused(f"{flag}: {str(exc).removeprefix('worker ')}{or_else}") from exc


def _nearest(name: str, spelling: Callable[[_Option], str]) -> str:
    near = difflib.get_close_matches(name, [spelling(option) for option in _OPTIONS], n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else "; see forebay relay --help"
