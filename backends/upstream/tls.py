"""TLS towards workers."""

import ssl
from pathlib import Path


def client_context(ca_file: Path | None = None, insecure: bool = False) -> ssl.SSLContext:
    """Make a context for connections to ``https`` workers: TLS 1.2 or newer, certificate and host name checked.

    Loading the system's authorities takes a tenth of a second, so this belongs to the start of a process.

    Args:
        ca_file: Authorities to trust in place of the system's, PEM.
        insecure: Accept every certificate under every name. For tests inside a trusted network only.

    Raises:
        OSError: ``ca_file`` cannot be read or holds no certificate (``ssl.SSLError`` is one).
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif ca_file is not None:
        context.load_verify_locations(cafile=ca_file)
    else:
        context.load_default_certs()
    return context
