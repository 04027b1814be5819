import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.haproxy import config_text, version_of


def test_configuration_names_every_engine_and_compares_like_with_like() -> None:
    lines = [line.strip() for line in config_text(8080, [9001, 9002]).splitlines()]
    assert "bind 127.0.0.1:8080" in lines
    assert [line for line in lines if line.startswith("server ")] == [
        "server engine0 127.0.0.1:9001",
        "server engine1 127.0.0.1:9002",
    ]
    for needed in (
        "nbthread 1",
        "option http-no-delay",
        "mode http",
        "no option http-buffer-request",
        "option http-keep-alive",
    ):
        assert needed in lines


@pytest.mark.skipif(shutil.which("haproxy") is None, reason="haproxy is not installed")
def test_haproxy_accepts_it(tmp_path: Path) -> None:
    config = tmp_path / "haproxy.cfg"
    config.write_text(config_text(8080, [9001, 9002]))
    done = subprocess.run(["haproxy", "-c", "-f", str(config)], capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0, done.stderr
    assert "warning" not in (done.stdout + done.stderr).lower()


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("HAProxy version 2.6.12-1+deb12u4 2026/10/17 - https://haproxy.org/", "2.6.12"),
        ("something else", "unknown"),
    ],
)
def test_version(text: str, version: str) -> None:
    assert version_of(text) == version
