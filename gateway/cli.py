"""The ``forebay`` command: from arguments to the part that does the work.

Exit codes: 0 stopped or done, 1 failed, 2 bad arguments. Users' errors are one line on stderr.
"""

import importlib.metadata
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from gateway.logs import configure_logging
from gateway.options import LineParser, nearest
from gateway.settings import SettingsError, load_settings


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; ``argv`` is without the program's name."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else ""
    try:
        if command in _COMMANDS:
            return _COMMANDS[command](arguments[1:])
        if command and not command.startswith("-"):
            return _fail(f"{command}: unknown command{nearest(command, _COMMANDS, 'forebay')}", 2)
        _parser().read(arguments or ["--help"])
    except SettingsError as exc:
        return _fail(str(exc), 2)
    except SystemExit as exc:
        # argparse leaves this way after --help, --version and its own refusals.
        return exc.code if isinstance(exc.code, int) else 2
    except KeyboardInterrupt:
        return 1
    return 0


def _parser() -> LineParser:
    parser = LineParser(
        prog="forebay",
        description="An HTTP gateway in front of SGLang and vLLM engines.",
        epilog="forebay COMMAND --help shows a command's options.",
    )
    parser.add_argument("--version", action="version", version=f"forebay {importlib.metadata.version('forebay')}")
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, text in (
        ("serve", "run the gateway"),
        ("simulate", "run a simulated engine"),
        ("demo", "run the gateway with two simulated engines"),
        ("workers", "list the workers of a running gateway"),
        ("explain", "show where a running gateway would send a request, and why"),
        ("relay", "relay an engine node's KV events to gateways"),
    ):
        commands.add_parser(name, help=text)
    return parser


def _serve(argv: Sequence[str]) -> int:
    with _early_signals():
        settings = load_settings(argv)
        from gateway.server import run

        return run(settings)


@contextmanager
def _early_signals() -> Iterator[None]:
    """Before the server has handlers of its own nothing is admitted, so that SIGTERM just ends it, also as process 1.

    Without a handler the system ignores the signal for process 1 and kills any other with a code that looks like
    a failure.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(0)

    before = signal.signal(signal.SIGTERM, stop)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the file is about to be read in any case
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if hasattr(signal, "SIGHUP"):
            signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _simulate(argv: Sequence[str]) -> int:
    from simulator.command import main as simulate

    return simulate(argv)


def _demo(argv: Sequence[str]) -> int:
    from gateway.demo import run

    return run(argv)


def _workers(argv: Sequence[str]) -> int:
    from gateway.workers_command import run

    return run(argv)


def _explain(argv: Sequence[str]) -> int:
    from gateway.explain_command import run

    return run(argv)


def _relay(argv: Sequence[str]) -> int:
    from relay.errors import SettingsRefused

    with _early_signals():
        from relay import command

        try:
            settings = command.load_settings(argv)
            configure_logging(settings.log_format, "info")
            return command.run(settings)
        except SettingsRefused as exc:
            return _fail(str(exc), 2)


def _fail(message: str, code: int) -> int:
    print(f"forebay: {message}", file=sys.stderr)
    return code


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "serve": _serve,
    "simulate": _simulate,
    "demo": _demo,
    "workers": _workers,
    "explain": _explain,
    "relay": _relay,
}
