"""Worker SPECs: what is taken, what is refused, and what the refusal says."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.worker_spec import (
    WorkerSpec,
    WorkerSpecError,
    normalize_worker_url,
    parse_worker_spec,
    worker_id,
    worker_spec_from_mapping,
)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        pytest.param("http://127.0.0.1:30000", "http://127.0.0.1:30000", id="plain"),
        pytest.param(" http://127.0.0.1:30000/ ", "http://127.0.0.1:30000", id="slash and spaces around"),
        pytest.param("HTTP://Node-1.Example:30000", "http://node-1.example:30000", id="case"),
        pytest.param("http://h:80", "http://h", id="default port of http"),
        pytest.param("https://h:443/x", "https://h/x", id="default port of https"),
        pytest.param("https://h:80", "https://h:80", id="other scheme's port"),
        pytest.param("http://h:1/engines/a.b/", "http://h:1/engines/a.b", id="path prefix"),
        pytest.param("http://h:1/a%2Fb", "http://h:1/a%2Fb", id="escaped path"),
        pytest.param("http://[2001:DB8:0::1]:30000", "http://[2001:db8::1]:30000", id="IPv6"),
        pytest.param("http://[::1]", "http://[::1]", id="IPv6 without port"),
        pytest.param("http://h:30000@3", "http://h:30000", id="rank"),
        pytest.param("http://h@3", "http://h", id="rank without port"),
        pytest.param("http://my_service:1", "http://my_service:1", id="underscore"),
    ],
)
def test_urls_are_brought_to_one_form(text: str, url: str) -> None:
    assert parse_worker_spec(text) == WorkerSpec(url)
    assert normalize_worker_url(url) == url


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("", "not empty", id="empty"),
        pytest.param("h:1", "http:// or https://", id="no scheme"),
        pytest.param("ftp://h", "http:// or https://", id="other scheme"),
        pytest.param("http:h", "http:// or https://", id="no slashes"),
        pytest.param("http://", "no host", id="no host"),
        pytest.param("http://:30000", "no host", id="port only"),
        pytest.param("http://h:0", "port", id="port 0"),
        pytest.param("http://h:", "port", id="empty port"),
        pytest.param("http://h:65536", "port", id="port too high"),
        pytest.param("http://h:x", "port", id="port no number"),
        pytest.param("http://u:secret@h:1", "api_key_env", id="userinfo"),
        pytest.param("http://h?x=1", "query", id="query"),
        pytest.param("http://h?", "query", id="empty query"),
        pytest.param("http://h#x", "fragment", id="fragment"),
        pytest.param("http://h\n:1", "control", id="newline inside"),
        pytest.param("http://h //", "space", id="space inside"),
        pytest.param("http://h/a/../b", "segments", id="dot segments"),
        pytest.param("http://h/a//b", "segments", id="empty segment"),
        pytest.param("http://h/a%zz", "segments", id="bad escape"),
        pytest.param("http://[::zz]:1", "address", id="bad IPv6"),
        pytest.param("http://[v1.x]:1", "address", id="future address"),
        pytest.param("http://[fe80::1%25eth0]:1", "", id="IPv6 zone"),
        pytest.param("http://-h:1", "host", id="bad host"),
        pytest.param("http://hä:1", "host", id="host not ASCII"),
        pytest.param("http://h:1,role", "key=value", id="no equals sign"),
        pytest.param("http://h:1,", "key=value", id="trailing comma"),
        pytest.param("http://h:1,rolle=prefill", "did you mean 'role'?", id="near miss"),
        pytest.param("http://h:1,xyzzy=1", "keys are engine, role", id="far miss"),
        pytest.param("http://h:1,uri=http://x", "'uri'; keys are engine, role", id="URL misspelt as a key"),
        pytest.param("http://h:1,url=http://x", "comes first", id="URL as a key"),
        pytest.param("http://h:1,role=prefill,role=decode", "twice", id="duplicate"),
        pytest.param("http://h:1,kv-events=off,kv_events=off", "twice", id="duplicate in two spellings"),
        pytest.param("http://h:1,engine=tgi", "auto, sglang, vllm", id="engine"),
        pytest.param("http://h:1,role=worker", "auto, regular, prefill, decode", id="role"),
        pytest.param("http://h:1,bootstrap_port=0", "1 to 65535", id="bootstrap port"),
        pytest.param("http://h:1,bootstrap_port=8k", "1 to 65535", id="bootstrap port no number"),
        pytest.param("http://h:1,model=", "model must be", id="empty model"),
        pytest.param("http://h:1,kv_events=http://x", "tcp://HOST:PORT", id="kv_events scheme"),
        pytest.param("http://h:1,kv_events=tcp://x:70000", "tcp://HOST:PORT", id="kv_events port"),
        pytest.param("http://h:1,api_key_env=sk-1", "name of an environment variable", id="key for its name"),
    ],
)
def test_refusals_name_what_is_wrong(text: str, says: str) -> None:
    with pytest.raises(WorkerSpecError) as caught:
        parse_worker_spec(text)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "http://u:secret@h:1",
        "http://u:secret@12",
        "http://u:secret@h:1,role",
        "http://u:secret@h:1,rolle=x",
        "http://u:secret@h:x",
        "http://h:1,api_key_env=secret-1",
    ],
)
def test_refusals_repeat_no_secret(text: str) -> None:
    with pytest.raises(WorkerSpecError) as caught:
        parse_worker_spec(text)
    assert "secret" not in str(caught.value)


def test_every_key_is_read() -> None:
    text = (
        "http://10.0.0.5:30000,engine=sglang,role=prefill,model=org/m=1,kv_events=tcp://*:5557,"
        "api_key_env=KEY,admin_api_key_env=ADMIN_KEY,bootstrap_port=8998"
    )
    assert parse_worker_spec(text) == WorkerSpec(
        "http://10.0.0.5:30000", "sglang", "prefill", "org/m=1", "tcp://*:5557", "KEY", "ADMIN_KEY", 8998
    )


@pytest.mark.parametrize("endpoint", ["auto", "off", "tcp://10.0.0.5:5557", "tcp://[::1]:5557", "ipc:///run/kv"])
def test_kv_events_forms(endpoint: str) -> None:
    assert parse_worker_spec(f"http://h,kv_events={endpoint}").kv_events == endpoint


def test_a_mapping_takes_toml_types_and_dashes() -> None:
    spec = worker_spec_from_mapping({"url": "http://h:1", "bootstrap-port": 8998, "role": "prefill"})
    assert spec == WorkerSpec("http://h:1", role="prefill", bootstrap_port=8998)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        pytest.param({}, "url is missing", id="no URL"),
        pytest.param({"uri": "http://h"}, "worker: unknown key 'uri', did you mean 'url'?", id="URL misspelt"),
        pytest.param({"uri": "http://h"}, "keys are url, engine, role", id="all keys, URL misspelt"),
        pytest.param({"address": "http://h"}, "'address'; keys are url, engine, role", id="URL by another name"),
        pytest.param(
            {"rolle": "x", "url": "http://h"}, "'rolle', did you mean 'role'? keys are engine", id="near miss"
        ),
        pytest.param({"url": 1}, "url must be a string", id="URL of another type"),
        pytest.param({"url": "http://h", "bootstrap_port": True}, "1 to 65535", id="boolean port"),
        pytest.param({"url": "http://h", "role": 1}, "role is 1", id="role of another type"),
        pytest.param({"url": "http://h", "kv_events": False}, "kv_events is False", id="kv_events of another type"),
        pytest.param({"url": "http://h", "api_key_env": 1}, "api_key_env", id="name of another type"),
        pytest.param({"url": "http://h", "api_key": "x"}, "api_key_env", id="key in the file"),
    ],
)
def test_mapping_refusals(values: dict[str, object], says: str) -> None:
    with pytest.raises(WorkerSpecError) as caught:
        worker_spec_from_mapping(values)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:30000", "127.0.0.1:30000"),
        ("http://Node", "node:80"),
        ("https://node", "https:node:443"),
        ("http://[::1]:30000", "ipv6:--1:30000"),
        ("http://h:1/a-b/v1.0", "h:1:.a-b.v1_2e0"),
        ("http://h:1/a%2F_", "h:1:.a_252F_5f"),
    ],
)
def test_worker_ids(url: str, expected: str) -> None:
    assert worker_id(parse_worker_spec(url)) == expected


HOSTS = st.sampled_from(["h", "https", "ipv6", "443", "80", "--1", "[::1]", "[1:2:3:4:5:6:7:8]", "1", "a.b", "a_b"])
PATHS = st.lists(st.text("a1.-_~%:@", min_size=1, max_size=3).map(lambda part: part.replace("%", "%41")), max_size=3)


@given(st.lists(st.tuples(st.sampled_from(["http", "https"]), HOSTS, st.integers(1, 999), PATHS), max_size=8))
def test_different_urls_have_different_ids(addresses: list[tuple[str, str, int, list[str]]]) -> None:
    specs = set()
    for scheme, host, port, path in addresses:
        try:
            specs.add(parse_worker_spec("/".join([f"{scheme}://{host}:{port}", *path])))
        except WorkerSpecError:
            continue
    ids = {worker_id(spec) for spec in specs}
    assert len(ids) == len(specs)
    assert all(re.fullmatch(r"[A-Za-z0-9._:-]+", name) for name in ids)
