"""Files of examples/serving/ and their pages: metrics, options and settings that exist."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shlex
from typing import Any

import pytest
import yaml
from support.paths import ROOT

from jax_q4k import models
from jax_q4k.models.cli.commands import serve
from jax_q4k.models.server.application import app
from jax_q4k.models.server.guard import _OPEN_PATHS
from jax_q4k.models.server.metrics import Metrics
from jax_q4k.models.server.run import _GRACE
from jax_q4k.models.server.settings import Settings

FOLDER = ROOT / "examples" / "serving"
SERVING = (ROOT / "docs" / "serving.md").read_text()
SCALE = (ROOT / "docs" / "scale.md").read_text()
DASHBOARD = json.loads((FOLDER / "grafana-dashboard.json").read_text())


def text(name: str) -> str:
    return (FOLDER / name).read_text()


def code(name: str) -> str:
    """A file without its comments."""
    return re.sub(r"(^|\s)#.*", "", text(name))


def parser() -> argparse.ArgumentParser:
    commands = argparse.ArgumentParser().add_subparsers()
    serve.add_parser(commands)
    return commands.choices["serve"]


class Engine:
    """An engine of which only the statistics are read."""

    def stats(self) -> Any:
        fields = {field.name: 1 for field in dataclasses.fields(models.EngineStats)}
        counts = {"lost_tokens": {"window": 1}, "step_tokens": {8: 1}}
        return models.EngineStats(**fields | counts)


@pytest.fixture(scope="module")
def metrics() -> dict[str, set[str]]:
    """Names of the samples that the server exposes -> their labels."""
    registry = Metrics()
    registry.watch(Engine())
    samples = [sample for family in registry.registry.collect() for sample in family.samples]
    return {sample.name: set(sample.labels) for sample in samples}


def expressions() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_the_dashboard_queries_metrics_of_the_server(metrics):
    for expression in expressions():
        names = re.findall(r"jax_q4k:\w+", expression)
        assert names and set(names) <= metrics.keys(), expression
        labels = re.findall(r"by \((\w+)\)", expression)
        assert set(labels) <= metrics[names[0]], expression
    named = set(re.findall(r"jax_q4k:\w+", json.dumps(DASHBOARD)))
    assert named <= metrics.keys()
    latencies = ("time_to_first_token", "inter_token_latency", "e2e_request_latency")
    assert {f"jax_q4k:{name}_seconds_bucket" for name in latencies} <= named


def test_the_dashboard_can_be_imported():
    """Panels have ids of their own, do not overlap, and name the variable of the data source."""
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in panels
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    sources = [panel["datasource"] for panel in panels]
    sources += [target["datasource"] for panel in panels for target in panel["targets"]]
    assert all(source["uid"] == "${datasource}" for source in sources)
    used = set(re.findall(r"\$(\w+)", " ".join(expressions()))) - {"__rate_interval"}
    assert used <= variables.keys()


def test_the_table_of_metrics_is_complete(metrics):
    section = SERVING.split("## Metrics")[1].split("\n## ")[0]
    rows = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    shown = {name for row in rows for name in re.findall(r"`(\w+)(?:\{\w+\})?`", row)}
    exposed = {
        re.sub(r"_(bucket|sum|count)$", "", name.removeprefix("jax_q4k:"))
        for name in metrics
        if not name.endswith("_created")
    }
    assert shown == exposed
    for name, label in re.findall(r"`(\w+)\{(\w+)\}`", section):
        assert metrics[f"jax_q4k:{name}"] == {label}


def test_the_unit_starts_the_server():
    (line,) = re.findall(r"^ExecStart=(.+)", text("jax-q4k.service"), re.MULTILINE)
    program, command, *arguments = shlex.split(line)
    assert program.endswith("/bin/jax-q4k") and command == "serve"
    options = parser().parse_args(arguments)
    settings = dict(re.findall(r"^(\w+)=(.*)", text("jax-q4k.service"), re.MULTILINE))
    assert int(settings["TimeoutStopSec"]) > options.drain
    name, _ = settings["LoadCredential"].split(":")
    assert options.api_key_file == f"%d/{name}" and not options.api_key
    assert options.host == "127.0.0.1" and options.allowed_host


def test_the_container_starts_the_server():
    (words,) = re.findall(r"^ENTRYPOINT (.+)", text("Containerfile"), re.MULTILINE)
    program, command, *arguments = json.loads(words)
    assert (program, command) == ("jax-q4k", "serve")
    options = parser().parse_args([*arguments, "/models/MODEL.gguf", "--name", "MODEL"])
    assert options.api_key_file and options.host == "0.0.0.0"
    assert f"EXPOSE {options.port}\n" in text("Containerfile")
    assert re.search(r"^USER [1-9]\d*$", text("Containerfile"), re.MULTILINE)


def test_the_pods_start_the_server_and_end_after_it():
    """Checks the Deployment against the image, the server's options, routes and limits."""
    found = {one["kind"]: one for one in yaml.safe_load_all(text("kubernetes.yaml"))}
    assert found.keys() == {"Deployment", "Service", "PodDisruptionBudget"}
    deployment, service = found["Deployment"]["spec"], found["Service"]["spec"]
    pod = deployment["template"]["spec"]
    (container,) = pod["containers"]

    (words,) = re.findall(r"^ENTRYPOINT (.+)", text("Containerfile"), re.MULTILINE)
    options = parser().parse_args([*json.loads(words)[2:], *container["args"]])
    waits = int(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert options.drain > options.timeout  # no request is lost
    assert f"Before SIGTERM the pod waits {waits} s" in SCALE
    assert pod["terminationGracePeriodSeconds"] > waits + options.drain + _GRACE
    (user,) = re.findall(r"^USER (\d+)$", text("Containerfile"), re.MULTILINE)
    assert pod["securityContext"]["runAsUser"] == int(user)

    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert mounts.keys() == volumes.keys()
    assert options.api_key_file == f"{mounts['keys']}/keys" and "secret" in volumes["keys"]
    assert "--from-file=keys=" in text("kubernetes.yaml")
    assert options.model.startswith(f"{mounts['models']}/")
    assert f"XDG_CACHE_HOME={mounts['cache']}\n" in text("Containerfile")

    (port,) = container["ports"]
    assert port["containerPort"] == options.port
    assert service["ports"][0]["targetPort"] == port["name"]
    routes = {route.path for route in app().routes}
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container[name]["httpGet"]
        assert probe["path"] in routes & set(_OPEN_PATHS) and probe["port"] == port["name"]
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 600
    assert "The startup probe allows ten minutes" in SCALE
    labels = deployment["template"]["metadata"]["labels"]
    budget = found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]
    assert labels == service["selector"] == deployment["selector"]["matchLabels"] == budget


def test_options_of_comments_and_the_page_exist():
    known = {option for action in parser()._actions for option in action.option_strings}
    # Of systemctl, podman, kubectl, apt, pip, COPY, HEALTHCHECK and useradd.
    others = (
        r"--(now|read-only|tmpfs|cap-drop|security-opt|stop-timeout|build-arg|device|rm|uid|shell"
    )
    others += r"|no-(install-recommends|cache-dir|create-home)|from(-file)?|interval|start-period)"
    for page in (SERVING, *(text(file.name) for file in FOLDER.iterdir())):
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", page):
            assert option in known or re.fullmatch(others, option), option


def test_proxies_neither_buffer_nor_keep_clients_that_left():
    assert "proxy_buffering off;" in code("nginx.conf")
    assert "proxy_ignore_client_abort off;" in code("nginx.conf")
    # Caddy does not buffer event streams; -1 would also keep requests of clients that left.
    assert "flush_interval" not in code("Caddyfile")


def test_proxies_allow_what_the_server_allows():
    settings = Settings()
    assert f"client_max_body_size {settings.body_bytes >> 20}m;" in code("nginx.conf")
    assert f"max_size {settings.body_bytes >> 20}MiB" in code("Caddyfile")
    waits = re.findall(r"proxy_read_timeout (\d+)s", code("nginx.conf"))
    waits += re.findall(r"response_header_timeout (\d+)s", code("Caddyfile"))
    assert len(waits) == 2 and all(int(wait) > settings.seconds for wait in waits)
    assert "proxy_set_header Host $http_host;" in code("nginx.conf")
