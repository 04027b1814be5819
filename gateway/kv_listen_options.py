"""The options of the listener for relays: checked, their files read, and the listener made from them."""

from dataclasses import dataclass

import zmq

from gateway.fleet_control import FleetControl
from gateway.kv_listen import KvListener
from gateway.kv_view import KvView
from gateway.settings import Settings, SettingsError
from kv_events.errors import KeyFileRefused, SourceMisconfigured
from kv_events.relay_keys import KeyPair, is_local_endpoint, read_authorized_keys, read_key_pair
from routers.fleet import Fleet


@dataclass(frozen=True, slots=True)
class ListenOptions:
    """Where to listen, and who may connect.

    Attributes:
        endpoint: ZMQ address.
        keys: The gateway's CURVE keys; ``None`` for a plain listener inside the machine.
        authorized: Public keys of relays, with names.
    """

    endpoint: str
    keys: KeyPair | None
    authorized: dict[bytes, str]


def read_listen_options(settings: Settings) -> ListenOptions | None:
    """Check ``--kv-listen`` and the files that belong to it; ``None`` if no relay may connect.

    Raises:
        SettingsError: They contradict each other, or a file cannot be used; the message names the option.
    """
    endpoint, key_file, authorized_file = settings.kv_listen, settings.kv_key_file, settings.kv_authorized_keys
    if endpoint is None:
        for flag, path in (("--kv-key-file", key_file), ("--kv-authorized-keys", authorized_file)):
            if path is not None:
                raise SettingsError(f"{flag}: nothing listens for relays; give --kv-listen too")
        return None
    try:
        is_local = is_local_endpoint(endpoint)
    except SourceMisconfigured as exc:
        raise SettingsError(f"--kv-listen: {exc}") from exc
    if key_file is None and authorized_file is None:
        if not is_local:
            raise SettingsError(
                f"--kv-listen: {endpoint} can be reached from other machines, and events hold prompts: give "
                "--kv-key-file and --kv-authorized-keys, or listen on 127.0.0.1"
            )
        return ListenOptions(endpoint, None, {})
    if key_file is None:
        raise SettingsError("--kv-authorized-keys: keys of relays without one of the gateway; give --kv-key-file too")
    if authorized_file is None:
        raise SettingsError("--kv-key-file: a key without those of relays; give --kv-authorized-keys too")
    try:
        keys = read_key_pair(key_file)
    except KeyFileRefused as exc:
        raise SettingsError(f"--kv-key-file: {exc}") from exc
    try:
        return ListenOptions(endpoint, keys, read_authorized_keys(authorized_file))
    except KeyFileRefused as exc:
        raise SettingsError(f"--kv-authorized-keys: {exc}") from exc


def listen_for_relays(settings: Settings, kv: KvView, fleet: Fleet, workers: FleetControl) -> KvListener | None:
    """Make the listener that the settings ask for, ``None`` for none; its owner closes it.

    Raises:
        SettingsError: See ``read_listen_options``; or the address cannot be taken.
    """
    options = read_listen_options(settings)
    if options is None:
        return None
    try:
        return KvListener(
            options.endpoint,
            keys=options.keys,
            authorized=options.authorized,
            kv=kv,
            member_of=fleet.get,
            setting_of=workers.kv_setting,
        )
    except zmq.ZMQError as exc:
        raise SettingsError(f"--kv-listen: cannot listen on {options.endpoint}: {exc.strerror}") from exc
