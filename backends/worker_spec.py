"""Parsing of worker SPECs, ``URL[,key=value]*``, and of their TOML form.

Pure. A spec is what an operator says about a worker; what the engine says about itself is
asked for later, wherever a field is ``auto`` or ``None``.
"""

import dataclasses
import difflib
import ipaddress
import re
from collections.abc import Mapping
from typing import Final, NoReturn
from urllib.parse import urlsplit

ENGINES: Final = ("auto", "sglang", "vllm")
ROLES: Final = ("auto", "regular", "prefill", "decode")

_FORM: Final = "give http[s]://HOST[:PORT][/PREFIX], ports 1 to 65535"
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
# SGLang's own router writes a data-parallel rank behind the URL.
_RANK_SUFFIX: Final = re.compile(r"@\d{1,5}$")
_HOST_NAME: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252})")
_PATH: Final = re.compile(r"(/([A-Za-z0-9._~!$&'()*+;=:@-]|%[0-9A-Fa-f]{2})+)*")
_ENV_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ZMQ_TCP: Final = re.compile(r"tcp://(\*|[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})")
_ZMQ_IPC: Final = re.compile(r"ipc://[^\s,]+")
_CONTROL_OR_SPACE: Final = re.compile(r"[\x00-\x20\x7f]")


class WorkerSpecError(ValueError):
    """A worker SPEC is not valid; the message names the key and what is allowed."""


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What an operator says about one worker.

    Attributes:
        url: Base address without a trailing slash, default port dropped, host in lower case.
        engine: One of ``ENGINES``; ``auto`` asks the engine.
        role: One of ``ROLES``; ``auto`` asks the engine.
        model: Name of the served model; ``None`` asks the engine.
        kv_events: ``auto``, ``off`` or the ZMQ endpoint of the engine's publisher (of rank 0).
        api_key_env: Environment variable that holds the worker's API key; ``None`` for no key.
        admin_api_key_env: The same for the engine's admin routes; ``None`` for no key.
        bootstrap_port: SGLang's bootstrap port on a prefill worker; ``None`` asks the engine.
    """

    url: str
    engine: str = "auto"
    role: str = "auto"
    model: str | None = None
    kv_events: str = "auto"
    api_key_env: str | None = None
    admin_api_key_env: str | None = None
    bootstrap_port: int | None = None


KEYS: Final = tuple(field.name for field in dataclasses.fields(WorkerSpec) if field.name != "url")


def parse_worker_spec(text: str) -> WorkerSpec:
    """Parse ``URL[,key=value]*``, as in ``http://10.0.0.5:30000,role=prefill``.

    Raises:
        WorkerSpecError: The URL, a key or a value is not allowed, or a key occurs twice.
    """
    url, *pairs = (part.strip() for part in text.split(","))
    shown = _shown(url)
    values: dict[str, object] = {"url": url}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        key = key.strip()
        if not equals:
            raise WorkerSpecError(f"worker {shown}: {pair!r} is not key=value; keys are {', '.join(KEYS)}")
        if key == "url":
            raise WorkerSpecError(f"worker {shown}: the URL comes first and without a key")
        if key in values:
            raise WorkerSpecError(f"worker {shown}: key {key!r} is given twice")
        values[key] = value.strip()
    return worker_spec_from_mapping(values)


def worker_spec_from_mapping(values: Mapping[str, object]) -> WorkerSpec:
    """Build a spec from the keys and values of one TOML ``[[workers]]`` table.

    Keys may be written with ``-`` in place of ``_``. Ports may be integers or digits.

    Raises:
        WorkerSpecError: ``url`` is missing, or a key or value is not allowed.
    """
    named: dict[str, object] = {}
    # The URL itself is one of them only as long as there is none.
    keys = KEYS if "url" in values else ("url", *KEYS)
    where = f"worker {_shown(str(values['url']))}" if "url" in values else "worker"
    for written, value in values.items():
        key = written.replace("-", "_")
        if key != "url" and key not in KEYS:
            raise WorkerSpecError(f"{where}: unknown key {written!r}{_hint(key, keys)}")
        if key in named:
            raise WorkerSpecError(f"{where}: key {key!r} is given twice")
        named[key] = value
    if "url" not in named:
        raise WorkerSpecError("worker: url is missing; give http://HOST:PORT or https://HOST:PORT")
    url = normalize_worker_url(_text("worker", "url", named["url"]))
    where = f"worker {url}"
    return WorkerSpec(
        url=url,
        engine=_choice(where, "engine", named.get("engine", "auto"), ENGINES),
        role=_choice(where, "role", named.get("role", "auto"), ROLES),
        model=_text(where, "model", named["model"]) if "model" in named else None,
        kv_events=_kv_events(where, named.get("kv_events", "auto")),
        api_key_env=_env_name(where, "api_key_env", named),
        admin_api_key_env=_env_name(where, "admin_api_key_env", named),
        bootstrap_port=_port(where, "bootstrap_port", named["bootstrap_port"]) if "bootstrap_port" in named else None,
    )


def normalize_worker_url(text: str) -> str:
    """Check a worker's address and bring it to the one form that identifies the worker.

    A path prefix is kept; a trailing slash, the scheme's default port and a ``@<rank>`` suffix
    are dropped; scheme and host become lower case.

    Raises:
        WorkerSpecError: Not an ``http`` or ``https`` URL of a host, or it has userinfo, a query,
            a fragment, a bad port or an unclean path.
    """
    if _CONTROL_OR_SPACE.search(text):
        _refuse(text, "has a space or a control character")
    bare = _RANK_SUFFIX.sub("", text)
    try:
        parts = urlsplit(bare)
        host, port = parts.hostname, parts.port
    except ValueError as exc:
        # The library's text is left out: it may repeat a password that it took for a port.
        raise WorkerSpecError(f"worker {_shown(text)!r}: url has a bad port or address; {_FORM}") from exc
    if parts.scheme not in _DEFAULT_PORTS or "://" not in bare:
        _refuse(bare, "does not start with http:// or https://")
    if "@" in parts.netloc:
        _refuse(bare, "holds a user name or password; name a variable with api_key_env in place of it")
    if "?" in bare or "#" in bare:
        _refuse(bare, "has a query or a fragment")
    if not host:
        _refuse(bare, "has no host")
    if port == 0 or parts.netloc.endswith(":"):
        _refuse(bare, "has no usable port")
    path = parts.path.removesuffix("/")
    if not _PATH.fullmatch(path) or {".", ".."} & set(path.split("/")):
        _refuse(bare, "has a path prefix with empty, dot or wrongly escaped segments")
    suffix = "" if port in (None, _DEFAULT_PORTS[parts.scheme]) else f":{port}"
    return f"{parts.scheme}://{_host(bare, parts.netloc, host)}{suffix}{path}"


def worker_id(spec: WorkerSpec) -> str:
    """Name a worker by its address, with ``[A-Za-z0-9._:-]`` only, so that it fits into a path.

    ``http://127.0.0.1:30000`` is ``127.0.0.1:30000``. The port is always there. ``https`` puts
    ``https:`` in front. An IPv6 address is ``ipv6:`` and the address with ``-`` for ``:``. A path
    prefix follows as ``:`` and the path with ``.`` for ``/`` and ``_hh`` for every byte outside
    ``[A-Za-z0-9-]``. Different addresses have different ids: a component that starts with a dot
    can only be a path, and an address with dashes after ``ipv6:`` is never a port.
    """
    parts = urlsplit(spec.url)
    host = parts.hostname or ""
    if ":" in host:
        host = "ipv6:" + host.replace(":", "-")
    components = [host, str(parts.port or _DEFAULT_PORTS[parts.scheme])]
    if parts.scheme == "https":
        components.insert(0, "https")
    if parts.path:
        components.append("".join(_id_character(char) for char in parts.path))
    return ":".join(components)


def _id_character(char: str) -> str:
    if char == "/":
        return "."
    return char if char.isalnum() or char == "-" else f"_{ord(char):02x}"


def _host(url: str, netloc: str, host: str) -> str:
    if netloc.startswith("["):
        try:
            address = ipaddress.IPv6Address(host)
        except ValueError as exc:
            raise WorkerSpecError(f"worker {_shown(url)!r}: url has a bad IPv6 address; {_FORM}") from exc
        if address.scope_id is not None:
            _refuse(url, "has an IPv6 zone")
        return f"[{address.compressed}]"
    if not _HOST_NAME.fullmatch(host):
        _refuse(url, "has a host that is no name or address")
    return host.lower()


def _shown(url: str) -> str:
    """Blank out what may be a password; messages end up in logs."""
    return re.sub(r"//[^/]*@", "//***@", url)


def _refuse(url: str, why: str) -> NoReturn:
    raise WorkerSpecError(f"worker {_shown(url)!r}: url {why}; {_FORM}")


def _hint(key: str, keys: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(key, keys, n=1)
    return f"{f', did you mean {near[0]!r}?' if near else ';'} keys are {', '.join(keys)}"


def _text(where: str, key: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise WorkerSpecError(f"{where}: {key} must be a string that is not empty")
    return value.strip()


def _choice(where: str, key: str, value: object, allowed: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise WorkerSpecError(f"{where}: {key} is {value!r}; allowed are {', '.join(allowed)}")
    return value


def _env_name(where: str, key: str, named: Mapping[str, object]) -> str | None:
    if key not in named:
        return None
    value = named[key]
    if not isinstance(value, str) or not _ENV_NAME.fullmatch(value):
        # The value is not repeated: someone may have put the key itself here.
        raise WorkerSpecError(f"{where}: {key} must be the name of an environment variable ([A-Za-z0-9_])")
    return value


def _port(where: str, key: str, value: object) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value[:9])
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 65535:
        raise WorkerSpecError(f"{where}: {key} is {value!r}; ports are 1 to 65535")
    return value


def _kv_events(where: str, value: object) -> str:
    if isinstance(value, str):
        tcp = _ZMQ_TCP.fullmatch(value)
        if value in ("auto", "off") or _ZMQ_IPC.fullmatch(value) or (tcp and 1 <= int(tcp[2]) <= 65535):
            return value
    raise WorkerSpecError(f"{where}: kv_events is {value!r}; allowed are auto, off, tcp://HOST:PORT, ipc://PATH")
