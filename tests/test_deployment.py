"""The image, the compose files and the dashboard fit the programs that they start and read."""

import json
import os
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import pytest

from gateway.cli import main
from gateway.kv_listen_options import read_listen_options
from gateway.settings import Settings, load_settings
from kv_events.relay_keys import write_key_file
from relay.settings import load_settings as load_relay_settings
from simulator.command import build_parser, options_from_args
from simulator.server import SimulatedEngine
from tests.fakes.running import PATIENCE_S, running_gateway

ROOT = Path(__file__).resolve().parent.parent
DASHBOARD = ROOT / "deploy/grafana/dashboards/forebay.json"
# Gateway, and the engines in front of which it stands.
SET_UPS = {
    "gateway": (None, ("sglang-0", "sglang-1")),
    "gateway-vllm": ("vllm", ("vllm-0", "vllm-1")),
    "gateway-sim": ("sim", ("simulated-0", "simulated-1")),
    "gateway-multinode": ("multinode", ("node-0",)),
}
GPU_ENGINES = ("sglang-0", "sglang-1", "vllm-0", "vllm-1")
# Each has the network of its node.
RELAYS = {"relay-0": "node-0", "relay-1": "node-1"}
NODES = tuple(RELAYS.values())
ENGINES = (*GPU_ENGINES, "simulated-0", "simulated-1", *NODES)
OBSERVERS = ("prometheus", "grafana")
# What Prometheus itself puts on every sample, and what deploy/prometheus.yml adds.
SCRAPE_LABELS = {"job", "instance", "gateway"}
WORD = re.compile(r"[a-zA-Z_]\w*")


def read_yaml(name: str, environ: Mapping[str, str] | None = None) -> Any:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed, and nothing else reads YAML")
    return yaml.safe_load(interpolated((ROOT / name).read_text("utf-8"), environ or {}))


def interpolated(text: str, environ: Mapping[str, str]) -> str:
    """Put variables in as Compose does, as far as the files use it."""

    def value(match: re.Match[str]) -> str:
        name, operator, rest = match.groups()
        if environ.get(name):
            return environ[name]
        assert operator == "-", f"{name} has no default: {rest}"
        return str(rest)

    return re.sub(r"\$\{(\w+)(?::([-?])([^}]*))?\}", value, text)


@pytest.fixture
def services() -> dict[str, Any]:
    found: dict[str, Any] = read_yaml("docker-compose.yml")["services"]
    return found


def image_environment() -> dict[str, str]:
    """The variables that the image sets for the gateway."""
    return dict(re.findall(r"\b(FOREBAY_\w+)=(\S+)", "".join(instructions("ENV"))))


def settings_of(service: Mapping[str, Any]) -> Settings:
    command, *arguments = service["command"]
    assert command == "serve"
    return load_settings(arguments, {**image_environment(), **service.get("environment", {})})


def flag(command: list[str], name: str) -> str:
    return next(word.partition("=")[2] for word in command if word.startswith(name + "="))


# --- compose


def test_services_and_profiles(services: dict[str, Any]) -> None:
    assert set(services) == {*SET_UPS, *ENGINES, *RELAYS, *OBSERVERS}
    profiles = {gateway: profile for gateway, (profile, _) in SET_UPS.items()}
    profiles |= {engine: profile for profile, engines in SET_UPS.values() for engine in engines}
    profiles |= dict.fromkeys(OBSERVERS, "observe") | dict.fromkeys((*RELAYS, *NODES), "multinode")
    for name, service in services.items():
        wanted = profiles[name]
        assert service.get("profiles", []) == ([wanted] if wanted else []), name


@pytest.mark.parametrize("gateway", SET_UPS)
def test_gateways_are_started_with_valid_options(services: dict[str, Any], gateway: str) -> None:
    settings = settings_of(services[gateway])
    engines = SET_UPS[gateway][1]
    assert tuple(urlsplit(spec.url).hostname for spec in settings.workers) == engines
    others = [*NODES[1:], *RELAYS] if engines == NODES[:1] else []
    assert services[gateway]["depends_on"] == [*engines, *others]
    for spec, engine in zip(settings.workers, engines, strict=True):
        assert str(urlsplit(spec.url).port) == flag(services[engine]["command"], "--port")
        assert flag(services[engine]["command"], "--host") == "0.0.0.0"
    assert settings.host == "0.0.0.0"


@pytest.mark.parametrize("engine", ["simulated-0", "simulated-1", *NODES])
def test_simulated_engines_are_started_with_valid_options(services: dict[str, Any], engine: str) -> None:
    command, *arguments = services[engine]["command"]
    assert command == "simulate"
    assert options_from_args(build_parser().parse_args(arguments)).engine == "sglang"


def test_running_requests_get_their_time_at_the_end(services: dict[str, Any]) -> None:
    for gateway in SET_UPS:
        grace = re.fullmatch(r"(\d+)s", services[gateway]["stop_grace_period"])
        assert grace is not None
        assert int(grace[1]) > settings_of(services[gateway]).drain_timeout_s + 5


def test_admin_routes_are_for_the_container_itself(services: dict[str, Any]) -> None:
    for gateway in set(SET_UPS) - {"gateway-multinode"}:
        settings = settings_of(services[gateway])
        assert settings.admin_api_key_file is None
        assert settings.admin_allow == ("127.0.0.0/8", "::1/128")


def test_engines_publish_no_ports_and_share_a_network_with_gateways_only(services: dict[str, Any]) -> None:
    for engine in ENGINES:
        assert not {"ports", "network_mode", "expose"} & set(services[engine]), engine
    in_network = {name for name, service in services.items() if "engines" in service.get("networks", ())}
    assert in_network == {*SET_UPS, *ENGINES}
    assert all(services[engine]["networks"] == ["engines"] for engine in ENGINES)
    assert all(services[observer]["networks"] == ["front"] for observer in OBSERVERS)


def test_published_ports_are_this_machine_s_own_unless_it_says_otherwise(services: dict[str, Any]) -> None:
    published = [port for service in services.values() for port in service.get("ports", ())]
    hosts = [port.split(":")[1] for port in published]
    assert all(port.startswith("127.0.0.1:") for port in published)
    assert len(set(hosts)) == len(hosts) == 6
    opened = read_yaml("docker-compose.yml", {"GATEWAY_ADDRESS": "0.0.0.0"})["services"]
    assert {name for name, service in opened.items() if "0.0.0.0:" in "".join(service.get("ports", ()))} == set(SET_UPS)


def test_every_service_is_checked_for_health(services: dict[str, Any]) -> None:
    for name, service in services.items():
        if name in SET_UPS:
            assert "healthcheck" not in service, "the image has one"
        else:
            assert service["healthcheck"]["test"][0] == "CMD", name
            assert {"interval", "timeout", "retries"} <= set(service["healthcheck"]), name


@pytest.mark.parametrize("engine", GPU_ENGINES)
def test_gpu_engines(services: dict[str, Any], engine: str) -> None:
    service = services[engine]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "device_ids": [engine[-1]], "capabilities": ["gpu"]}
    events = json.loads(flag(service["command"], "--kv-events-config"))
    assert events["publisher"] == "zmq"
    assert events.get("enable_kv_cache_events", True) is True
    assert re.match(r"(lmsysorg/sglang|vllm/vllm-openai):v\d", service["image"])


def test_the_nodes_are_one_engine(services: dict[str, Any]) -> None:
    """They publish on loopback only, which is their relay's too."""
    options = [options_from_args(build_parser().parse_args(services[node]["command"][1:])) for node in NODES]
    assert [one.node_rank for one in options] == [0, 1]
    assert {(one.nnodes, one.dp_size, one.dist_init_addr) for one in options} == {(2, 4, "node-0:20000")}
    assert all((one.kv_events or "").startswith("tcp://127.0.0.1:") for one in options)
    for relay, node in RELAYS.items():
        assert services[relay]["network_mode"] == f"service:{node}"
        assert not {"ports", "networks"} & set(services[relay])


def with_keys(tmp_path: Path, command: list[str]) -> list[str]:
    """Put files in the place of a service's secrets, made as docs/relay.md says."""
    public = {}
    for name in ("gateway_curve", "relay_0", "relay_1"):
        if not (tmp_path / name).exists():
            public[name] = write_key_file(tmp_path / name).public_key.decode()
    if public:
        (tmp_path / "relays").write_text(f"{public['relay_0']} node 0\n{public['relay_1']} node 1\n")
        (tmp_path / "relay_admin").write_text("admin-secret\n")
    return [word.replace("/run/secrets/", f"{tmp_path}/") for word in command]


def test_relays_and_their_gateway_have_the_keys_that_they_need(services: dict[str, Any], tmp_path: Path) -> None:
    gateway = services["gateway-multinode"]
    settings = load_settings(with_keys(tmp_path, gateway["command"][1:]), image_environment())
    options = read_listen_options(settings)
    assert options is not None
    assert options.keys is not None
    for relay, node in RELAYS.items():
        command = services[relay]["command"]
        assert command[0] == "relay"
        found = load_relay_settings(with_keys(tmp_path, command[1:]), {})
        assert found.keys is not None
        assert found.keys.public_key in options.authorized
        assert found.admin_key == "admin-secret"
        assert found.gateways == ("http://gateway-multinode:8000",)
        assert urlsplit(found.engine_url).port == int(flag(services[node]["command"], "--port"))
        assert found.worker_url == (settings.workers[0].url if node == "node-0" else None)
        (checked,) = [word for word in services[relay]["healthcheck"]["test"] if "urlopen" in word]
        assert f"127.0.0.1:{found.health_port}/ready" in checked
        assert {f"/run/secrets/{name}" for name in services[relay]["secrets"]} <= {
            word.partition("=")[2] for word in command
        }
    secrets = read_yaml("docker-compose.yml")["secrets"]
    used = {name for service in services.values() for name in service.get("secrets", ())}
    assert set(secrets) == used
    assert all(secret["file"].startswith("./deploy/keys/") for secret in secrets.values())


def test_images_have_a_tag_and_no_host(services: dict[str, Any]) -> None:
    images = {service["image"] for service in services.values()} | set(re.findall(r"^FROM (\S+)", dockerfile(), re.M))
    for image in images:
        name, _, tag = image.partition(":")
        assert tag, image
        assert "." not in name.partition("/")[0], image


def test_every_mounted_file_is_there(services: dict[str, Any]) -> None:
    sources = [v.split(":")[0] for service in services.values() for v in service.get("volumes", ())]
    files = [source for source in sources if source.startswith("./")]
    assert len(files) == 3
    assert all((ROOT / file).exists() for file in files)


def test_the_file_with_keys() -> None:
    keys = {"ENGINE_KEY": "engine-secret", "ENGINE_ADMIN_KEY": "engine-admin-secret"}
    overlay = read_yaml("deploy/keys.yml", keys)
    base = read_yaml("docker-compose.yml")["services"]
    assert set(overlay["services"]) == {"gateway", "sglang-0", "sglang-1"}
    gateway = overlay["services"]["gateway"]
    settings = settings_of(gateway)
    assert [spec.url for spec in settings.workers] == [spec.url for spec in settings_of(base["gateway"]).workers]
    for spec in settings.workers:
        assert (gateway["environment"][spec.api_key_env], gateway["environment"][spec.admin_api_key_env]) == (
            "engine-secret",
            "engine-admin-secret",
        )
    mounted = {f"/run/secrets/{name}" for name in gateway["secrets"]}
    assert {str(settings.api_key_file), str(settings.admin_api_key_file)} == mounted
    assert set(gateway["secrets"]) == set(overlay["secrets"])
    for engine in ("sglang-0", "sglang-1"):
        command = overlay["services"][engine]["command"]
        assert set(base[engine]["command"]) < set(command)
        assert (flag(command, "--api-key"), flag(command, "--admin-api-key")) == tuple(keys.values())
    with pytest.raises(AssertionError, match="ENGINE_KEY has no default"):
        read_yaml("deploy/keys.yml", {"ENGINE_ADMIN_KEY": "x"})


def test_prometheus_looks_for_every_gateway() -> None:
    (job,) = read_yaml("deploy/prometheus.yml")["scrape_configs"]
    (names,) = job["dns_sd_configs"]
    assert set(names["names"]) == set(SET_UPS)
    assert names["port"] == Settings.model_fields["port"].default
    assert {rule["target_label"] for rule in job["relabel_configs"]} <= SCRAPE_LABELS


def test_grafana_finds_prometheus_and_the_dashboard(services: dict[str, Any]) -> None:
    (source,) = read_yaml("deploy/grafana/provisioning/datasources/prometheus.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert set(re.findall(r'"type": "prometheus",\s+"uid": "(\w+)"', DASHBOARD.read_text())) == {source["uid"]}
    (provider,) = read_yaml("deploy/grafana/provisioning/dashboards/forebay.yml")["providers"]
    mounts = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    assert mounts["./deploy/grafana/dashboards"] == provider["options"]["path"]


# --- dashboard


def dashboard() -> Any:
    return json.loads(DASHBOARD.read_text("utf-8"))


def queries() -> Iterator[str]:
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    for variable in dashboard()["templating"]["list"]:
        yield variable["query"]["query"]


def test_the_dashboard_has_panels_side_by_side() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels) > 10
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells), "two panels overlap"
    assert all(x < 24 for x, _ in cells)


def exposed(text: str) -> dict[str, set[str]]:
    """Names in a metrics page with the labels that their samples have; families without samples are there too."""
    names: dict[str, set[str]] = {}
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M):
        for suffix in ("_bucket", "_count", "_sum") if kind == "histogram" else ("",):
            names[name + suffix] = set()
    for name, labels in re.findall(r"^(\w+)(?:\{(.*)\})? \S+$", text, re.M):
        names.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return names


def documented() -> dict[str, set[str]]:
    """Metrics and their labels as the operators' page lists them: a family without samples shows none."""
    rows = re.findall(r"^\| `(forebay_\w+)` \| \w+ \| (.*?) \|", (ROOT / "docs/operating.md").read_text("utf-8"), re.M)
    return {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in rows}


async def test_the_dashboard_asks_for_what_the_gateway_has(engine: SimulatedEngine) -> None:
    async with running_gateway(engine.url) as running:
        body = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
        assert (await running.client.post("/generate", json=body)).status_code == 200
        await running.record()
        names = exposed((await running.client.get("/metrics")).text)
    asked = {name for query in queries() for name in WORD.findall(query) if name.startswith(("forebay_", "process_"))}
    assert asked - set(names) == set()
    assert len(asked) > 10
    for query in queries():
        labels = set(re.findall(r"(\w+)\s*=~?\"", query))
        for group in re.findall(r"by \((.*?)\)", query):
            labels |= set(WORD.findall(group))
        known = {label for name in asked if name in query for label in names[name] | documented().get(name, set())}
        assert labels <= known | SCRAPE_LABELS, query


def test_every_metric_is_on_the_dashboard() -> None:
    text = " ".join(queries())
    assert len(documented()) > 20
    assert {name for name in documented() if name not in text} == set()
    assert {"process_resident_memory_bytes", "process_cpu_seconds_total"} <= set(WORD.findall(text))


# --- image


def dockerfile() -> str:
    return re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text("utf-8"))


def instructions(name: str) -> list[str]:
    return re.findall(rf"^(?:HEALTHCHECK .*?)?\b{name} (.*)$", dockerfile(), re.M)


def test_the_image_runs_the_command_as_nobody_in_particular(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(instructions("ENTRYPOINT")[-1]) == ["forebay"]
    command = json.loads(instructions("CMD")[-1])
    assert command == ["serve"]
    assert main([*command, "--help"]) == 0
    assert "--worker" in capsys.readouterr().out
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", instructions("USER")[-1])
    assert instructions("EXPOSE") == [str(Settings.model_fields["port"].default)]
    assert instructions("STOPSIGNAL") == ["SIGTERM"]


def test_the_image_gets_every_package_and_nothing_that_is_ignored() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    copied = [
        source.rstrip("/")
        for line in instructions("COPY")
        if "--from" not in line
        for source in line.split()[:-1]
    ]  # fmt: skip
    assert set(packages) <= set(copied)
    ignore = [line for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line[:1] not in ("", "#")]
    assert ignore[0] == "*"
    allowed = {line[1:].rstrip("/") for line in ignore if line.startswith("!")}
    assert allowed == set(copied)
    assert all((ROOT / source).exists() for source in copied)
    assert not any(fnmatch(name, pattern) for pattern in allowed for name in (".git", ".venv", "deploy", "tests"))


async def run_health_check(port: int) -> int:
    (program,) = [json.loads(command) for command in instructions("CMD") if "-c" in command]
    environ = {**os.environ, "FOREBAY_PORT": str(port)}
    with anyio.fail_after(PATIENCE_S):
        finished = await anyio.run_process([sys.executable, *program[1:]], check=False, env=environ)
    return finished.returncode


async def test_the_image_s_health_check(engine: SimulatedEngine) -> None:
    async with running_gateway(engine.url) as running:
        port = running.address[1]
        assert await run_health_check(port) == 0
    assert await run_health_check(port) != 0


def locked(name: str) -> dict[str, str]:
    """Blocks of a lock file by name and version, without markers."""
    blocks = re.split(r"\n(?=\S)", (ROOT / name).read_text("utf-8").strip())
    return {block.split()[0]: "\n".join(sorted(re.findall(r"--hash=\S+", block))) for block in blocks}


def test_the_image_s_lock_is_the_other_one_without_the_tools() -> None:
    run, everything = locked("requirements-run.lock"), locked("requirements.lock")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    names = {requirement.partition("==")[0] for requirement in run}

    def plain(requirements: list[str]) -> set[str]:
        return {re.split(r"[^\w.-]", requirement)[0] for requirement in requirements}

    assert plain(project["dependencies"]) <= names
    assert not (plain(project["optional-dependencies"]["dev"]) - {"anyio", "pyyaml"}) & names
    assert run.items() <= everything.items(), "make both anew together"
    assert all(run.values())
