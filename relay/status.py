"""The pages of a relay's health server, made from its state at the moment of asking."""

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from relay.health import METRICS, Pages, json_page
from relay.process import RelayProcess


def status_pages(process: RelayProcess) -> Pages:
    """Make ``/health``, ``/ready`` and ``/metrics`` of a relay."""

    def page(path: str) -> tuple[int, str, bytes] | None:
        if path == "/health":
            return json_page(200, state="ok", phase=str(process.phase))
        if path == "/ready":
            why = process.not_ready()
            return json_page(503 if why else 200, ready=not why, phase=str(process.phase), reason=why)
        if path == "/metrics":
            return 200, METRICS, _metrics(process)
        return None

    return page


def _metrics(process: RelayProcess) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    ready = Gauge("forebay_relay_ready", "Whether the relay is ready.", registry=registry)
    ready.set(0 if process.not_ready() else 1)
    frames = Counter("forebay_relay_batches", "Batches read, by rank.", ["dp_rank"], registry=registry)
    resets = Counter("forebay_relay_resets", "Sources begun anew.", ["dp_rank", "reason"], registry=registry)
    dropped = Counter("forebay_relay_dropped", "Messages that were none.", ["dp_rank", "reason"], registry=registry)
    for rank, reader in process.readers.items():
        frames.labels(rank).inc(reader.frames)
        for reason, count in reader.resets.items():
            resets.labels(rank, reason).inc(count)
        for reason, count in reader.dropped.items():
            dropped.labels(rank, reason).inc(count)
    accepted = Gauge("forebay_relay_gateway_acknowledged", "Gateways that have all.", ["gateway"], registry=registry)
    for url, state in process.feed.gateways().items() if process.feed is not None else ():
        accepted.labels(url).set(state.is_connected and state.is_acknowledged)
    return generate_latest(registry)
