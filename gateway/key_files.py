"""Keys from where operators keep them: files and environment variables, never settings."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from backends.worker_spec import WorkerSpec
from gateway.options import SettingsError, reason_of

_HEADER_TEXT: Final = re.compile(r"[\x21-\x7e]+")


def read_key_file(path: Path) -> tuple[str, ...]:
    """Read keys, one a line; blank lines and lines that start with ``#`` are skipped.

    Raises:
        SettingsError: The file cannot be read, has no key, or has one that no header can carry.
    """
    try:
        lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as exc:
        raise SettingsError(f"key file {path}: cannot be read ({reason_of(exc)})") from exc
    keys = tuple(dict.fromkeys(line for line in lines if line and not line.startswith("#")))
    if not keys:
        raise SettingsError(f"key file {path}: holds no key; put one key on a line")
    if not all(_HEADER_TEXT.fullmatch(key) for key in keys):
        raise SettingsError(f"key file {path}: a key has a space or a character outside ASCII")
    return keys


def resolve_worker_keys(spec: WorkerSpec, environ: Mapping[str, str] | None = None) -> tuple[str | None, str | None]:
    """Return the API key and the admin API key that ``spec``'s variables hold; ``None`` for no key.

    Raises:
        SettingsError: A named variable is missing or empty, or holds what no header can carry.
    """
    environ = os.environ if environ is None else environ

    def key_of(option: str, name: str | None) -> str | None:
        if name is None:
            return None
        key = environ.get(name, "").strip()
        if not _HEADER_TEXT.fullmatch(key):
            state = "holds a space or a character outside ASCII" if key else "is not set"
            raise SettingsError(f"worker {spec.url}: {option}: environment variable {name} {state}")
        return key

    return key_of("api_key_env", spec.api_key_env), key_of("admin_api_key_env", spec.admin_api_key_env)
