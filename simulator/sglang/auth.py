"""Which key a route needs, after SGLang's ``srt/utils/auth.py``. Pure."""

from __future__ import annotations

import hmac

from simulator.options import EngineOptions

_OPEN_PREFIXES = ("/health", "/ready", "/metrics")

ADMIN_PATHS = frozenset(
    {
        "/abort_request",
        "/pause_generation",
        "/continue_generation",
        "/flush_cache",
        "/update_weights_from_disk",
        "/update_weights_from_tensor",
        "/update_weights_from_distributed",
        "/update_weight_version",
        "/init_weights_update_group",
        "/destroy_weights_update_group",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/load_lora_adapter",
        "/unload_lora_adapter",
        "/start_profile",
        "/stop_profile",
        "/set_internal_state",
    }
)


def is_allowed(options: EngineOptions, method: str, path: str, authorization: str | None) -> bool:
    """Return whether the request carries the key that its route needs."""
    if method == "OPTIONS" or path.startswith(_OPEN_PREFIXES):
        return True
    key = options.api_key
    if path in ADMIN_PATHS and options.admin_api_key is not None:
        key = options.admin_api_key
    if key is None:
        return True
    given = authorization or ""
    return hmac.compare_digest(given.encode("utf-8", "replace"), f"Bearer {key}".encode())
