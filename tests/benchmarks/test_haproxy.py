import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.haproxy import config_text, version_of


@pytest.mark.parametrize("is_for_streams", [False, True])
def test_configuration_names_every_engine_and_compares_like_with_like(is_for_streams: bool) -> None:
    lines = [line.strip() for line in config_text(8080, [9001, 9002], is_for_streams=is_for_streams).splitlines()]
    assert "bind 127.0.0.1:8080" in lines
    assert [line for line in lines if line.startswith("server ")] == [
        "server engine0 127.0.0.1:9001",
        "server engine1 127.0.0.1:9002",
    ]
    for needed in (
        "nbthread 1",
        "mode http",
        "no option http-buffer-request",
        "option http-keep-alive",
    ):
        assert needed in lines
    assert ("option http-no-delay" in lines) is is_for_streams


@pytest.mark.parametrize("is_for_streams", [False, True])
@pytest.mark.skipif(shutil.which("haproxy") is None, reason="haproxy is not installed")
def test_haproxy_accepts_it(tmp_path: Path, is_for_streams: bool) -> None:
    config = tmp_path / "haproxy.cfg"
    config.write_text(config_text(8080, [9001, 9002], is_for_streams=is_for_streams))
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
