"""What is looked at before the port is taken: files that options name, and workers that may be a mistake."""

import errno
import ipaddress
import socket
import ssl
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from backends.worker_spec import WorkerSpec
from gateway.key_files import read_key_file, resolve_worker_keys
from gateway.kv_listen_options import read_listen_options
from gateway.settings import Settings, SettingsError

_LISTEN_REMEDIES = {
    errno.EADDRINUSE: "another process has this port; choose another --port, or 0 for any free one",
    errno.EACCES: "this user may not take the port; choose a --port from 1024 on",
    errno.EADDRNOTAVAIL: "--host is no address of this machine; 127.0.0.1 is for local clients, 0.0.0.0 for all",
}


def check_files(settings: Settings) -> None:
    """Read every file and variable of credentials once, so that a mistake is told before anything runs.

    Raises:
        SettingsError: One is missing or unusable; the message names the option.
    """
    for flag, path in (
        ("--api-key-file", settings.api_key_file),
        ("--admin-api-key-file", settings.admin_api_key_file),
    ):
        if path is not None:
            read_key_option(flag, path)
    for spec in settings.workers:
        resolve_worker_keys(spec)
    check_tls(settings.tls_cert_file, settings.tls_key_file)
    read_listen_options(settings)


def read_key_option(flag: str, path: Path) -> tuple[str, ...]:
    """Read the key file that ``flag`` names.

    Raises:
        SettingsError: See ``read_key_file``; the message names ``flag`` too.
    """
    try:
        return read_key_file(path)
    except SettingsError as exc:
        raise SettingsError(f"{flag}: {exc}") from exc


def check_tls(cert: Path | None, key: Path | None) -> None:
    """Check that a listener can use the two files; ``None`` for those that were not given.

    Raises:
        SettingsError: A file cannot be read, holds something else, needs a passphrase, or they do not match.
    """
    if cert is None:
        if key is not None:
            raise SettingsError("--tls-key-file: a key without its certificate; give --tls-cert-file too")
        return
    for flag, path in (("--tls-cert-file", cert), ("--tls-key-file", key)):
        try:
            if path is not None:
                path.read_bytes()
        except OSError as exc:
            raise SettingsError(f"{flag}: {path} cannot be read ({exc.strerror or exc})") from exc

    def refuse_passphrase() -> NoReturn:
        raise SettingsError(f"--tls-key-file: the key in {key or cert} has a passphrase; give one without")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, refuse_passphrase)
    except (ssl.SSLError, ValueError) as exc:
        if isinstance(exc, SettingsError):
            raise
        if getattr(exc, "reason", None) == "KEY_VALUES_MISMATCH":
            raise SettingsError(f"--tls-key-file: {key or cert} is not the key of the certificate in {cert}") from exc
        where = f"and {key} its private key" if key else "and its private key, or give that with --tls-key-file"
        raise SettingsError(f"--tls-cert-file: {cert} must hold a PEM certificate, {where} ({exc})") from exc


def why_not_listening(host: str, port: int, error: OSError) -> str:
    """Say in one line why ``host`` and ``port`` could not be taken, and what to do."""
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if isinstance(error, socket.gaierror):
        remedy = "--host is a name that is not known here"
    else:
        remedy = _LISTEN_REMEDIES.get(error.errno or 0, "see --host and --port")
    return f"cannot listen on {shown}: {error.strerror or error}; {remedy}"


def doubtful(workers: Sequence[WorkerSpec]) -> list[str]:
    """Say what is allowed but probably not meant: no workers, or one engine under several loopback names."""
    if not workers:
        return ["no workers: requests get 503 until some are added; give --worker URL, or POST /workers"]
    local: dict[tuple[int | None, str], list[str]] = defaultdict(list)
    for spec in workers:
        parts = urlsplit(spec.url)
        if _is_loopback(parts.hostname or ""):
            local[parts.port, parts.path].append(spec.url)
    return [
        f"workers {' and '.join(urls)} look like one engine under {len(urls)} names, which then gets {len(urls)} times "
        "its share; give it once"
        for urls in local.values()
        if len(urls) > 1
    ]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
