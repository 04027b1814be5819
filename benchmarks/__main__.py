"""``python -m benchmarks``: CPU per request and per event, as a ratio to haproxy in the same run.

Exits with 0 whether aims are met or not, with 1 if something failed to run, with 2 if it cannot start.
"""

import argparse
import datetime
import json
import os
import platform
import shutil
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Final, NoReturn

from benchmarks import micro, procfs, report
from benchmarks.cases import Case, Context, cases
from benchmarks.processes import BenchmarkFailed
from benchmarks.report import Outcome
from benchmarks.stage import haproxy_version

MICRO: Final = "micro"
# Program and the Debian package that it comes from.
_PROGRAMS: Final = {"wrk": "wrk", "haproxy": "haproxy"}
_LIBRARIES: Final = ("uvicorn", "uvloop", "httptools", "msgspec")


def build_parser(names: Sequence[str]) -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", allow_abbrev=False, description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter windows, fewer requests")
    parser.add_argument(
        "--only", metavar="NAME", action="append", choices=names, help="run this case alone (repeatable)"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything that was measured to FILE")
    parser.add_argument("--list", action="store_true", help="list the cases and exit")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    found = cases()
    names = [*(case.name for case in found), MICRO]
    arguments = build_parser(names).parse_args(argv)
    if arguments.list:
        for case in found:
            print(f"{case.name:12} {case.title}")
        print(f"{MICRO:12} single functions, microseconds a call")
        return 0
    wanted = arguments.only or names
    chosen = [case for case in found if case.name in wanted]
    missing = {package for program, package in _PROGRAMS.items() if chosen and shutil.which(program) is None}
    if missing:
        print(f"missing: apt install {' '.join(sorted(missing))}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _interrupt)
    about = describe()
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    context = Context(is_quick=arguments.quick, say=lambda line: print(line, flush=True))
    outcomes: list[Outcome] = []
    micro_us: dict[str, float] = {}
    try:
        outcomes.extend(run_case(case, context) for case in chosen)  # keeps what is done when interrupted
        if MICRO in wanted:
            print(f"{MICRO}:")
            micro_us = micro.run(context.say)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        # What was measured before an interrupt is worth keeping.
        if outcomes:
            print("\n" + report.text(outcomes))
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(report.as_json(outcomes, micro_us, about), indent=1) + "\n", "utf-8")
    return 1 if any(outcome.error is not None for outcome in outcomes) else 0


def run_case(case: Case, context: Context) -> Outcome:
    """Run one case; a failure becomes part of its outcome."""
    context.say(f"{case.name}: {case.title}")
    try:
        result = case.run(context)
    except (BenchmarkFailed, OSError) as exc:
        context.say(f"  failed: {exc}")
        return Outcome(case.name, case.title, case.item, case.aim, error=str(exc) or repr(exc))
    return Outcome(case.name, case.title, case.item, case.aim, result)


def describe() -> dict[str, str]:
    """Where and with what is measured."""
    cores = os.cpu_count() or 1
    can_pin = {procfs.TEST_CORE, procfs.LOAD_CORE} <= os.sched_getaffinity(0)
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cores": f"{cores} ({'pinned' if can_pin else 'not pinned'})",
        "load average": f"{os.getloadavg()[0]:.2f}",
        "Python": platform.python_version(),
        "kernel": platform.release().partition("-")[0],
        "haproxy": haproxy_version() if shutil.which("haproxy") else "-",
        **{name: version(name) for name in _LIBRARIES},
    }


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
