"""What docs/relay.md tells to run can be run."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.settings import load_settings as load_gateway_settings
from kv_events.relay_keys import write_key_file
from relay.settings import load_settings
from simulator.command import build_parser, options_from_args

ROOT = Path(__file__).resolve().parent.parent.parent
TEXT = (ROOT / "docs/relay.md").read_text("utf-8")


def commands() -> Iterator[list[str]]:
    for block in re.findall(r"```sh\n(.*?)```", TEXT, re.S):
        for line in block.splitlines():
            if line.startswith("forebay "):
                yield shlex.split(line, comments=True)[1:]


def with_files(directory: Path, words: list[str]) -> list[str]:
    """Put real files in the place of those that an example names."""
    found = []
    for word in words:
        path = directory / word
        if re.fullmatch(r"(node\d|gateway)\.key", word) and not path.exists():
            write_key_file(path)
        elif re.fullmatch(r"admin\.key", word):
            path.write_text("secret\n")
        found.append(str(path) if path.exists() and path.is_file() else word)
    return found


def test_there_are_commands() -> None:
    kinds = [command[0] for command in commands()]
    assert {kind: kinds.count(kind) for kind in kinds} == {"simulate": 2, "serve": 2, "relay": 10}


@pytest.mark.parametrize("command", list(commands()), ids=" ".join)
def test_commands_have_valid_options(command: list[str], tmp_path: Path) -> None:
    kind, *words = command
    if kind == "simulate":
        assert options_from_args(build_parser().parse_args(words)).nnodes == 2
    elif kind == "serve":
        assert load_gateway_settings(with_files(tmp_path, words), {}).kv_listen
    elif "--keygen" in words:
        assert load_settings(words, {}).keygen
    else:
        found = load_settings(with_files(tmp_path, words), {})
        is_follower = bool(found.engine_target) or "30001" in found.engine_url
        assert found.registers is not is_follower
        assert found.keys or found.worker_url is None
