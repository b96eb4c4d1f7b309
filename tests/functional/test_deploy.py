"""What deploy/ and the dashboard refer to exists: options, files, metrics and their labels."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from megatron_async.cli.main import build_parser
from megatron_async.engine.metrics import EngineCounters
from megatron_async.serving.front_end.metrics import GAUGES, EngineCollector, ServerMetrics
from megatron_async.serving.http.http_server import ABORT_SECONDS
from megatron_async.serving.messages import Snapshot
from megatron_async.serving.supervisor import STOP_SECONDS

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DASHBOARD_PATH = ROOT / "deploy" / "grafana-dashboard.json"
VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


def load(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def served_with(arguments: list[str]) -> Any:
    """What ``megatron-async`` takes its arguments for; wrong ones end the test."""
    return build_parser().parse_args(arguments)


# --- the image ------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile, each on one line."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.M)
    lines = text.replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines if line.strip()]


def last(name: str) -> Any:
    """Of the instructions of a name, the one that counts."""
    return json.loads([rest for each, rest in instructions() if each == name][-1])


def test_what_the_image_copies_exists_and_is_in_its_context() -> None:
    copied = [rest.split()[:-1] for name, rest in instructions() if name == "COPY"]
    sources = [s for each in copied if not each[0].startswith("--from") for s in each]
    assert {"megatron_async", "inference", "setup.py"} <= set(sources)
    kept = {
        line[1:]
        for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    for source in sources:
        assert (ROOT / source).exists() and source.split("/")[0] in kept
    for name in kept:
        assert (ROOT / name).exists()


def test_the_image_serves_and_is_no_root() -> None:
    tini, dashes, *program = last("ENTRYPOINT")
    assert (tini, dashes, *program[:2]) == ("tini", "--", "megatron-async", "serve")
    args = served_with([*program[1:], *last("CMD")])
    assert (args.host, args.model) == ("0.0.0.0", "/model")
    named = dict(instructions())
    assert int(named["EXPOSE"]) == args.port and f":{args.port}/health" in named["HEALTHCHECK"]
    user = int(named["USER"])
    assert user > 0 and any(f"--uid {user}" in rest for name, rest in instructions())
    check = json.loads(named["HEALTHCHECK"].partition("CMD ")[2])
    compile(check[2], "HEALTHCHECK", "exec")


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="needs hadolint")
def test_hadolint_finds_nothing() -> None:
    subprocess.run(["hadolint", DEPLOY / "Dockerfile"], check=True)


# --- compose --------------------------------------------------------------------------------------


def compose() -> dict[str, Any]:
    found: dict[str, Any] = load("compose.yaml")
    return found


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Target by source; variables without a default are written as they are."""
    pairs = [re.fullmatch(r"(.+?):(/[^:]*)(?::ro)?", each) for each in service["volumes"]]
    assert all(pairs)
    return {pair[2]: pair[1] for pair in pairs if pair}


def test_the_files_of_the_services_exist() -> None:
    services = compose()["services"]
    build = services["server"]["build"]
    context = (DEPLOY / build["context"]).resolve()
    assert context == ROOT and (context / build["dockerfile"]).is_file()
    files = [s for each in services.values() for s in mounts(each).values() if s.startswith(".")]
    assert len(files) == 5
    for file in files:
        assert (DEPLOY / file).is_file(), file
    named = {s for each in services.values() for s in mounts(each).values() if s.isalpha()}
    assert named == set(compose()["volumes"])


def test_the_server_gets_options_that_it_has() -> None:
    server = compose()["services"]["server"]
    command = [VARIABLE.sub(lambda found: found[3] or "x", each) for each in server["command"]]
    program = last("ENTRYPOINT")[2:]
    args = served_with([*program[1:], *command])
    assert args.model in mounts(server) and args.inference_async_scheduling
    assert "MEGATRON_ASYNC_API_KEY" in server["environment"]
    assert float(server["stop_grace_period"].removesuffix("s")) > longest_stop(args)


def test_secrets_must_be_given_and_ports_are_this_machines() -> None:
    text = (DEPLOY / "compose.yaml").read_text()
    required = {found[1] for found in VARIABLE.finditer(text) if found[2] == "?"}
    assert required == {"MEGATRON_ASYNC_API_KEY", "GRAFANA_ADMIN_PASSWORD", "MODEL_DIR"}
    for service in compose()["services"].values():
        assert service["ports"] and service["restart"]
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_prometheus_and_grafana_find_each_other_and_the_server() -> None:
    services = compose()["services"]
    prometheus, grafana = services["prometheus"], services["grafana"]
    config = load("prometheus.yml")
    place = next(each for each in mounts(prometheus) if each.endswith("prometheus.yml"))
    assert f"--config.file={place}" in prometheus["command"]
    for rules in config["rule_files"]:
        assert str(Path(place).parent / rules) in mounts(prometheus)
    (target,) = config["scrape_configs"][0]["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert host in services and f"127.0.0.1:{port}:{port}" in services[host]["ports"]
    (source,) = load("grafana/datasources.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = load("grafana/dashboards.yaml")["providers"]
    (shown,) = (t for t, s in mounts(grafana).items() if s.endswith(DASHBOARD_PATH.name))
    assert str(Path(shown).parent) == provider["options"]["path"]
    assert load("prometheus.yml")["scrape_configs"][0]["job_name"] in json.dumps(load("alerts.yml"))


# --- systemd --------------------------------------------------------------------------------------

UNIT = DEPLOY / "megatron-async.service"


def longest_stop(args: Any) -> float:
    """Seconds from SIGTERM to the end of the server."""
    return float(args.shutdown_timeout + ABORT_SECONDS + STOP_SECONDS)


def test_the_unit_serves_and_waits_for_the_end() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNIT)
    service = unit["Service"]
    words = shlex.split(
        service["ExecStart"].replace("${MODEL}", "/srv/model").replace("$OPTIONS", "")
    )
    args = served_with(words[1:])
    assert Path(words[0]).name == "megatron-async" and args.model == "/srv/model"
    assert float(service["TimeoutStopSec"]) > longest_stop(args)
    assert (service["Restart"], service["KillMode"]) == ("on-failure", "mixed")
    assert "KEY" not in service["ExecStart"] and service["EnvironmentFile"]
    assert "PrivateDevices" not in service and "MemoryDenyWriteExecute" not in service


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """With a program that exists in place of the server."""
    text = UNIT.read_text().replace("/opt/megatron-async/bin/megatron-async", sys.executable)
    (tmp_path / UNIT.name).write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / UNIT.name)]
    done = subprocess.run(command, capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if UNIT.name in line]
    assert done.returncode == 0 and not said, done.stderr


# --- metrics --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def labels() -> dict[str, set[str]]:
    """Of each sample that the server gives after requests of all kinds."""
    counters = EngineCounters()
    counters.not_overlapped["serial: depth 0"] = 1
    snapshot = Snapshot(0.0, counters.to_dict(), dict.fromkeys(GAUGES, 1))
    metrics = ServerMetrics("tiny", EngineCollector("tiny", lambda: snapshot))
    metrics.refused(429)
    metrics.finished("stop", None, 1.0)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for name, given, *_ in family.samples:
            found.setdefault(name, {"job", "instance"}).update(given)
    return found


def check_query(query: str, labels: dict[str, set[str]]) -> set[str]:
    """Metrics of a query; fails for a metric or a label that the server does not have."""
    names = re.findall(r"\b(megatron_async_\w+)(?:\{([^}]*)\})?", query)
    grouped = re.findall(r"\bby \(([^)]*)\)", query)
    for name, matchers in names:
        assert name in labels, f"{name} in {query}"
        matched = re.findall(r"(\w+)\s*[=!]~?", matchers)
        by = [label.strip() for group in grouped for label in group.split(",")]
        known = set().union(*(labels[each] for each, _ in names))
        assert set(matched) <= labels[name] and set(by) <= known, query
    assert query.count("(") == query.count(")")
    return {name for name, _ in names}


def test_every_alert_can_fire(labels: dict[str, set[str]]) -> None:
    (group,) = load("alerts.yml")["groups"]
    for rule in group["rules"]:
        query = rule["expr"]
        assert check_query(query, labels) or query.startswith("up{")
        used = re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])
        grouped = re.findall(r"\bby \(([^)]*)\)", query)
        assert all(label in grouped[0] for label in used if grouped)


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DASHBOARD_PATH.read_text())
    return loaded


def test_panels_have_ids_and_places_of_their_own(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    assert dashboard["schemaVersion"] >= 36 and len(panels) > 20
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_query_is_about_metrics_of_the_server(
    dashboard: dict[str, Any], labels: dict[str, set[str]]
) -> None:
    shown: set[str] = set()
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            shown |= check_query(query, labels)
            assert query.count('model_name=~"$model"') == len(
                re.findall(r"\bmegatron_async_\w+", query)
            )
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert all(label in group for group in re.findall(r"\bby \(([^)]*)\)", query))
        assert panel["type"] == "row" or panel["datasource"]["uid"] == "${datasource}"
    bare = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    assert bare >= {
        f"megatron_async_{name}"
        for name in (
            "num_requests_running",
            "num_requests_waiting",
            "generation_tokens_total",
            "request_queue_time_seconds",
            "time_to_first_token_seconds",
            "inter_token_latency_seconds",
            "kv_cache_usage_perc",
            "prefix_cache_hit_tokens_total",
            "steps_overlapped_total",
            "steps_not_overlapped_total",
            "discarded_tokens_total",
            "step_seconds_total",
            "requests_refused_total",
            "engine_ready",
        )
    }


def test_the_variables_are_of_the_server(
    dashboard: dict[str, Any], labels: dict[str, set[str]]
) -> None:
    of = {each["name"]: each for each in dashboard["templating"]["list"]}
    assert of["datasource"]["query"] == "prometheus"
    found = re.fullmatch(r"label_values\((\w+), (\w+)\)", of["model"]["query"]["query"])
    assert found is not None and found[2] in labels[found[1]]
    text = json.dumps(dashboard)
    names = set(re.findall(r"\$\{?([a-z]\w*)", text))
    assert names == set(of)
