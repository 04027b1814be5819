"""Rules of this code base that no linter has. Every check is tested on a bad snippet below."""

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("gateway", "routers", "backends", "kv_events", "relay", "simulator")
DOCUMENTED = ("gateway", "routers", "backends", "kv_events", "relay")

# Modules that decide and never act. Globs; what does not exist yet is skipped.
PURE = (
    "routers/*.py",
    "backends/body_edit.py",
    "backends/disaggregation.py",
    "backends/pair_*.py",
    "backends/prefill_events.py",
    "backends/*/pd.py",
    "backends/cancel_policy.py",
    "backends/leg_events.py",
    "backends/lifecycle.py",
    "backends/plain_ids.py",
    "backends/sse.py",
    "backends/worker_spec.py",
    "gateway/answer.py",
    "gateway/answer_headers.py",
    "gateway/child_ids.py",
    "gateway/engine_errors.py",
    "gateway/envelope.py",
    "gateway/errors.py",
    "gateway/expand.py",
    "gateway/fold_choice.py",
    "gateway/kv_leases.py",
    "gateway/kv_silence.py",
    "gateway/merge.py",
    "gateway/merge_stream.py",
    "gateway/pair_failure.py",
    "gateway/outcome.py",
    "gateway/prompt_logprobs.py",
    "gateway/prompts.py",
    "gateway/tokens/*chat.py",
    "gateway/tokens/content_format.py",
    "gateway/tokens/option.py",
    "gateway/tokens/prompts.py",
    "gateway/usage.py",
    "kv_events/codec*.py",
    "kv_events/delivery.py",
    "kv_events/errors.py",
    "kv_events/hashing.py",
    "kv_events/index.py",
    "kv_events/index_[!s]*.py",
    "kv_events/orphans.py",
    "kv_events/publisher.py",
    "kv_events/relay_snapshot.py",
    "kv_events/relay_wire.py",
    "kv_events/replay_frames.py",
    "kv_events/sequence.py",
    "kv_events/snapshot.py",
    "kv_events/sources.py",
    "kv_events/types.py",
    "relay/buffer.py",
    "relay/errors.py",
    "relay/feed.py",
    "relay/follower.py",
    "relay/identity.py",
    "relay/lanes.py",
    "relay/machine.py",
    "relay/metadata.py",
    "relay/protobuf.py",
    "simulator/cache.py",
    "simulator/faults.py",
    "simulator/kv_encoding.py",
    "simulator/kv_journal.py",
    "simulator/scheduler.py",
)
IMPURE_IMPORTS = frozenset({"asyncio", "httpx", "zmq", "fastapi", "socket", "time", "logging"})

# The backends have their own, since they lie below the gateway.
TASK_OWNERS = ("gateway/tasks.py", "backends/tasks.py")
TASK_MAKERS = frozenset({"create_task", "ensure_future", "gather"})

MAX_LINES = 400
SWALLOWED = frozenset({"CancelledError", "GeneratorExit", "BaseException"})
# Written in pieces, so that this file passes its own check.
FOREIGN = re.compile(
    r"index" + r"-url|files\.python" + r"hosted|/simple" + r"/|(?<![\w.])/(home|root|Users)" + r"/\w|/work" + r"/\w"
)

Check = Callable[[str, ast.Module], Iterator[str]]


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def _last(node: ast.expr) -> str:
    return _dotted(node).rpartition(".")[2]


def _caught(handler: ast.ExceptHandler) -> set[str]:
    if handler.type is None:
        return {"BaseException"}
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return set(map(_last, types))


def cancellation_is_passed_on(path: str, tree: ast.Module) -> Iterator[str]:
    """Whoever catches a cancellation ends with a bare ``raise``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and _caught(node) & SWALLOWED:
            last = node.body[-1]
            if not (isinstance(last, ast.Raise) and last.exc is None):
                yield f"{path}:{node.lineno}: does not end in a bare raise"
        elif isinstance(node, ast.Call) and _last(node.func) == "suppress" and set(map(_last, node.args)) & SWALLOWED:
            yield f"{path}:{node.lineno}: suppresses a cancellation"


def tasks_have_owners(path: str, tree: ast.Module) -> Iterator[str]:
    """Tasks come from TaskGroups, or from the module that owns the rest."""
    if path in TASK_OWNERS:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in TASK_MAKERS:
            owner = _dotted(node.value)
            if owner == "asyncio" or owner.endswith(("loop", "get_running_loop")) or isinstance(node.value, ast.Call):
                yield f"{path}:{node.lineno}: {owner}.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and node.module == "asyncio":
            for alias in node.names:
                if alias.name in TASK_MAKERS:
                    yield f"{path}:{node.lineno}: from asyncio import {alias.name}"


def pure_modules_do_nothing(path: str, tree: ast.Module) -> Iterator[str]:
    """Pure modules import nothing that acts, waits, or tells the time."""
    if not any(fnmatch(path, pattern) for pattern in PURE):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        for name in [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]:
            if name.partition(".")[0] in IMPURE_IMPORTS:
                yield f"{path}:{node.lineno}: a pure module imports {name}"


def public_names_have_docstrings(path: str, tree: ast.Module) -> Iterator[str]:
    """Modules, and public classes, functions and methods that are no overrides of a library's, say what they do."""
    if path.partition("/")[0] not in DOCUMENTED:
        return
    if ast.get_docstring(tree) is None:
        yield f"{path}:1: module without a docstring"
    yield from _undocumented(path, tree.body)


def _undocumented(path: str, body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
            continue
        decorators = set(map(_last, node.decorator_list))
        if ast.get_docstring(node) is None and not decorators & {"override", "overload", "setter"}:
            yield f"{path}:{node.lineno}: {node.name} has no docstring"
        if isinstance(node, ast.ClassDef):
            yield from _undocumented(path, node.body)


def names_say_something(path: str, tree: ast.Module) -> Iterator[str]:
    """No module and no class is named after nothing in particular."""
    if {"utils", "helpers", "util", "helper"} & set(re.split(r"[/.]", path)):
        yield f"{path}: a module needs a name that says what is in it"
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name.endswith("Manager"):
            yield f"{path}:{node.lineno}: class {node.name}"


CHECKS: tuple[Check, ...] = (
    cancellation_is_passed_on,
    tasks_have_owners,
    pure_modules_do_nothing,
    public_names_have_docstrings,
    names_say_something,
)


def too_long(path: str, text: str) -> str | None:
    """Say so if a module has more lines than anyone reads at once."""
    lines = text.count("\n")
    return f"{path}: {lines} lines, {MAX_LINES} at most" if lines > MAX_LINES else None


def foreign_names(path: str, text: str) -> list[str]:
    """Find addresses of package indexes and paths of somebody's machine."""
    return [f"{path}:{n}: {line.strip()[:80]}" for n, line in enumerate(text.splitlines(), 1) if FOREIGN.search(line)]


def modules() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text("utf-8")


def tracked_texts() -> Iterator[tuple[str, str]]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.decode().split("\0")):
        path = ROOT / name
        # Captured bytes of engines are kept as they came.
        if name.startswith("tests/data/") or not path.is_file():
            continue
        try:
            yield name, path.read_text("utf-8")
        except UnicodeDecodeError:
            continue


@pytest.mark.parametrize("check", CHECKS)
def test_packages_keep_the_rule(check: Check) -> None:
    assert [found for path, text in modules() for found in check(path, ast.parse(text))] == []


def test_modules_are_short() -> None:
    assert [found for path, text in modules() if (found := too_long(path, text))] == []


def test_tracked_files_name_no_index_and_no_machine() -> None:
    assert [found for name, text in tracked_texts() for found in foreign_names(name, text)] == []


BAD = [
    pytest.param(cancellation_is_passed_on, "x/y.py", f"try:\n  f()\n{handler}", id=handler.replace("\n", " "))
    for handler in (
        "except asyncio.CancelledError:\n  pass",
        "except (ValueError, CancelledError):\n  raise ValueError",
        "except BaseException as exc:\n  raise exc",
        "except GeneratorExit:\n  return_()",
        "except:\n  if f():\n    raise",
    )
] + [
    pytest.param(cancellation_is_passed_on, "x/y.py", "with suppress(asyncio.CancelledError):\n  f()", id="suppress"),
    pytest.param(tasks_have_owners, "gateway/x.py", "asyncio.create_task(f())", id="create_task"),
    pytest.param(tasks_have_owners, "gateway/x.py", "make = asyncio.ensure_future", id="ensure_future by name"),
    pytest.param(tasks_have_owners, "gateway/x.py", "from asyncio import gather as g", id="gather imported"),
    pytest.param(tasks_have_owners, "gateway/x.py", "asyncio.get_running_loop().create_task(f())", id="loop's task"),
    pytest.param(tasks_have_owners, "gateway/x.py", "self._loop.create_task(f())", id="kept loop's task"),
    pytest.param(pure_modules_do_nothing, "routers/x.py", "import time", id="clock in a policy"),
    pytest.param(pure_modules_do_nothing, "backends/sse.py", "from asyncio import Queue", id="queue in a parser"),
    pytest.param(pure_modules_do_nothing, "gateway/answer.py", "def f():\n  import httpx", id="import inside"),
    pytest.param(public_names_have_docstrings, "gateway/x.py", "x = 1", id="module docstring"),
    pytest.param(public_names_have_docstrings, "gateway/x.py", "'''X.'''\ndef f(): pass", id="function docstring"),
    pytest.param(public_names_have_docstrings, "relay/x.py", "'''X.'''\nclass C: pass", id="class docstring"),
    pytest.param(
        public_names_have_docstrings, "gateway/x.py", "'''X.'''\nclass C:\n  '''C.'''\n  async def f(self): ...",
        id="method docstring",
    ),
    pytest.param(names_say_something, "gateway/utils.py", "", id="utils"),
    pytest.param(names_say_something, "gateway/helpers/x.py", "", id="helpers"),
    pytest.param(names_say_something, "gateway/x.py", "class TaskManager: pass", id="Manager"),
]  # fmt: skip

GOOD = [
    pytest.param(cancellation_is_passed_on, "x/y.py", "try:\n  f()\nexcept BaseException:\n  g()\n  raise", id="raise"),
    pytest.param(cancellation_is_passed_on, "x/y.py", "try:\n  f()\nexcept OSError:\n  pass", id="other error"),
    pytest.param(cancellation_is_passed_on, "x/y.py", "with suppress(OSError):\n  f()", id="suppress other error"),
    pytest.param(tasks_have_owners, "gateway/tasks.py", "asyncio.create_task(f())", id="the owner"),
    pytest.param(tasks_have_owners, "gateway/x.py", "group.create_task(f())", id="TaskGroup"),
    pytest.param(pure_modules_do_nothing, "routers/x.py", "import timeit, random", id="harmless imports"),
    pytest.param(pure_modules_do_nothing, "gateway/x.py", "import time", id="not a pure module"),
    pytest.param(public_names_have_docstrings, "simulator/x.py", "def f(): pass", id="not a documented package"),
    pytest.param(
        public_names_have_docstrings, "gateway/x.py",
        "'''X.'''\ndef _f(): pass\nclass _C:\n  def f(self): pass\n@overload\ndef g(): ...",
        id="private names and overloads",
    ),
    pytest.param(names_say_something, "gateway/x.py", "class Managed: pass", id="not a Manager"),
]  # fmt: skip


@pytest.mark.parametrize(("check", "path", "text"), BAD)
def test_bad_snippets_are_found(check: Check, path: str, text: str) -> None:
    assert len(list(check(path, ast.parse(text)))) == 1


@pytest.mark.parametrize(("check", "path", "text"), GOOD)
def test_good_snippets_pass(check: Check, path: str, text: str) -> None:
    assert list(check(path, ast.parse(text))) == []


def test_long_modules_are_found() -> None:
    assert too_long("x.py", "x\n" * MAX_LINES) is None
    assert too_long("x.py", "x\n" * (MAX_LINES + 1)) == f"x.py: {MAX_LINES + 1} lines, {MAX_LINES} at most"


@pytest.mark.parametrize(
    ("line", "is_foreign"),
    [
        ("--index" + "-url https://pypi.example", True),
        ("https://files.python" + "hosted.org/x", True),
        ("https://mirror.example/simple" + "/x", True),
        ("open('/home" + "/someone/x')", True),
        ("see /root" + "/x", True),
        ("/work" + "/main/x", True),
        ("https://h/home/x", False),
        ("a simple / plain thing", False),
    ],
)
def test_foreign_names_are_found(line: str, is_foreign: bool) -> None:
    assert bool(foreign_names("x", f"fine\n{line}\n")) is is_foreign


def test_every_rule_has_a_bad_snippet() -> None:
    assert {param.values[0] for param in BAD} == set(CHECKS)
