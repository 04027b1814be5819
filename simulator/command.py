"""``forebay simulate``: arguments, and serving until a signal."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import signal
import sys
from collections.abc import Sequence

from simulator.options import EngineOptions, OptionError
from simulator.server import SimulatedEngine

_DEFAULTS = EngineOptions()

# Option, type, help. The default is added to every help text.
_VALUES: tuple[tuple[str, type, str], ...] = (
    ("host", str, "address to listen on"),
    ("port", int, "port to listen on; 0 lets the system choose"),
    ("engine", str, "engine kind: sglang or vllm"),
    ("model", str, "served model name"),
    ("role", str, "regular, prefill or decode"),
    ("engine_version", str, "version that the engine claims instead of its own"),
    ("dp_size", int, "data-parallel ranks"),
    ("page_size", int, "tokens per cache block"),
    ("num_blocks", int, "cache blocks per rank"),
    ("max_running", int, "sequences computed at the same time, per rank"),
    ("max_queued", int, "sequences waiting, per rank; 0 = no limit"),
    ("prefill_tokens_per_s", float, "uncached prompt tokens computed per second; 0 = no time"),
    ("chunked_prefill_tokens", int, "prompt tokens computed in one step at most"),
    ("inter_token_ms", float, "milliseconds of one decode step; 0 = no time"),
    ("speedup", float, "divides all simulated times"),
    ("context_length", int, "tokens of prompt and answer together, at most"),
    ("vocab_size", int, "token ids known to the model"),
    ("seed", int, "seed of the answers"),
    ("api_key", str, "key that clients must send"),
    ("admin_api_key", str, "key for the control routes"),
    ("weight_version", str, "version of the weights at the start"),
    ("dynamic_batch_tokenizer_ms", float, "milliseconds between registering and dispatching a request"),
    ("unary_disconnect_poll_s", float, "seconds between two looks at whether a unary caller has left"),
    ("late_abort_s", float, "seconds from a stream's end to the repeated abort of its id"),
    ("health_min_s", float, "simulated seconds that a health check takes at least"),
    ("health_timeout_s", float, "simulated seconds after which a health check fails"),
    ("keep_alive_s", float, "seconds after which an idle connection is closed"),
    ("log_limit", int, "entries of each kind kept for GET /_log"),
    ("log_body_bytes", int, "bytes up to which a request body is kept"),
    ("model_aliases", str, "vLLM: more names of the model, with commas"),
    ("lora_names", str, "vLLM: adapters that can be asked for as models, with commas"),
    ("sse_keepalive_interval_s", float, "vLLM: seconds of silence before a stream gets a comment; 0 = never"),
    ("death_grace_s", float, "vLLM: seconds from the engine's death to the end of its server"),
    ("kv_events", str, "publish KV events at tcp://HOST:PORT, rank r at the port + r; port 0 = any free ports"),
    ("replay", str, "answer requests for past KV events at tcp://HOST:PORT, likewise"),
    ("kv_topic", str, "topic of the KV events"),
    ("kv_buffer_batches", int, "newest batches of KV events that a replay can bring back, per rank"),
    ("kv_hwm", int, "batches that wait for a slow subscriber before more are dropped"),
    ("kv_replay_framing", str, "new, or old for replies without the topic, as of older SGLang"),
    ("node_rank", int, "SGLang: rank of this node; those above 0 only publish"),
    ("nnodes", int, "SGLang: nodes of the engine"),
    ("dist_init_addr", str, "HOST:PORT where the first node listens for the others"),
    ("bootstrap_port", int, "where a prefill engine waits for decode engines; 0 lets the system choose"),
    ("transfer_tokens_per_s", float, "prompt tokens sent from prefill to decode per second; 0 = no time"),
    ("transfer_setup_ms", float, "vLLM: milliseconds until decode gets in touch with prefill"),
    ("transfer_lease_s", float, "vLLM: seconds for which prefill keeps blocks that nobody fetches"),
    ("transfer_timeout_s", float, "SGLang: seconds for which one half of a pair waits for the other"),
    ("lost_prefill_s", float, "seconds until decode gives up a dead prefill; none = 14, 10 when connected, vLLM 5"),
)
_SWITCHES: tuple[tuple[str, str], ...] = (
    ("incremental_streaming_output", "stream deltas instead of everything so far"),
    ("is_embedding", "answer the embedding routes"),
    ("kv_byte_hashes", "vLLM: name blocks by bytes instead of numbers in KV events"),
    ("dev_mode", "vLLM: answer the development routes"),
)
_SWITCHES_ON: tuple[tuple[str, str], ...] = (
    ("enable_scale_out", "vLLM: answer the routes under /inference"),
    ("enable_request_id_headers", "vLLM: put x-request-id on every answer"),
)


def build_parser(prog: str = "forebay simulate") -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(prog=prog, description="Run a simulated inference engine, without a GPU.")
    for name, kind, text in _VALUES:
        default = getattr(_DEFAULTS, name)
        shown = "none" if default is None else default if default != "" else "''"
        flag = "--" + name.replace("_", "-")
        metavar = name.rsplit("_", 1)[-1].upper()
        parser.add_argument(flag, type=kind, default=default, metavar=metavar, help=f"{text} (default: {shown})")
    for name, text in _SWITCHES:
        parser.add_argument("--" + name.replace("_", "-"), action="store_true", help=f"{text} (default: off)")
    for name, text in _SWITCHES_ON:
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=True, help=f"{text} (default: on)")
    parser.add_argument(
        "--survive-bad-input",
        action="store_true",
        help="answer 400 to the requests that kill the real engine (default: off)",
    )
    return parser


def options_from_args(args: argparse.Namespace) -> EngineOptions:
    """Return the options that parsed arguments mean.

    Raises:
        OptionError: A value cannot work.
    """
    names = {field.name for field in dataclasses.fields(EngineOptions)}
    values = {name: value for name, value in vars(args).items() if name in names}
    return EngineOptions(**values, die_on_bad_input=not args.survive_bad_input)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse ``argv`` and serve; returns the exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        options = options_from_args(args)
    except OptionError as exc:
        parser.error(str(exc))
    return run(options)


def run(options: EngineOptions) -> int:
    """Serve until SIGINT or SIGTERM; prints the address once it listens. Returns the exit code."""
    try:
        import uvloop
    except ImportError:
        runner = asyncio.Runner()
    else:
        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    with runner:
        try:
            runner.run(serve(options))
        except OSError as exc:
            sys.stderr.write(f"forebay simulate: cannot listen on {options.host}:{options.port}: {exc}\n")
            return 1
    return 0


async def serve(options: EngineOptions) -> None:
    """Serve on the running loop until SIGINT or SIGTERM."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    engine = SimulatedEngine(options)
    await engine.start()
    try:
        sys.stdout.write(f"simulated {options.engine} engine on {engine.url}\n")
        if options.role == "prefill":
            sys.stdout.write(f"decode engines are waited for at port {engine.options.bootstrap_port}\n")
        sys.stdout.flush()
        await stopped.wait()
    finally:
        await engine.stop()
