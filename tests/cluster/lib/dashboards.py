"""Checks the chart's dashboards and rules with a real Prometheus, and the alerts by injecting their faults."""

import argparse
import json
import math
import pathlib
import re
import sys
import tempfile
import threading
import time

import httpx
from alert_faults import FAULTS
from api_keys import line
from certificates import ROLES, Authority
from harness import REPO, Server, free_port, wait_for
from prometheus import RULES, Prometheus, promtool

DASHBOARDS = REPO / "deploy/helm/tutti/files/dashboards"
TOPOLOGY = REPO / "deploy/topology/disaggregated.toml"
UNIT_TESTS = REPO / "tests/prometheus/rules.test.yaml"

# Values for Grafana's variables: all processes, and a rate window of several scrapes.
VARIABLES = {"$job": ".*", "$instance": ".*", "$__rate_interval": "15s"}

# Metrics in panels that a simulated cluster does not have, with the reason.
ELSEWHERE = {"tutti_worker_expert_imbalance": "the simulated model has no experts"}

# Seconds within which an expression must have a value. On a machine under load, scrapes may be late.
ANSWER_S = 90


def expressions():
    """Yields (dashboard and panel, expression) for each expression of each panel."""
    for file in sorted(DASHBOARDS.glob("*.json")):
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel.get("targets", ()):
                expression = target["expr"]
                for name, value in VARIABLES.items():
                    expression = expression.replace(name, value)
                assert "$" not in expression, f"{file.name}: unknown variable in {expression}"
                yield f"{file.name}, {panel['title']}", expression


class Load:
    """Continuous requests from a few threads. They repeat two prompts, under two API keys without a limit and one with
    a limit. A fourth, unknown key comes so rarely that the alert about such keys stays silent."""

    def __init__(self, server):
        self.server, self.ended = server, threading.Event()
        self.threads = [threading.Thread(target=self.send, args=(index,), daemon=True) for index in range(4)]
        for thread in self.threads:
            thread.start()

    def send(self, index):
        key = ("one", "two", "three", "none")[index]
        body = {"prompt": [index % 2 + 1] * 400, "max_tokens": 20, "ignore_eos": True}
        with httpx.Client(base_url=self.server.url, timeout=60) as client:
            while not self.ended.is_set():
                status = client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}).status_code
                assert status in {"one": [200], "two": [200], "three": [200, 429], "none": [401]}[key], (key, status)
                self.ended.wait(4 if key == "none" else 0.05)

    def stop(self):
        self.ended.set()
        for thread in self.threads:
            thread.join()


def check_expressions(prometheus, directory):
    """Checks that each expression of each panel has a value, and that each rule is evaluated, while clusters of all
    kinds serve."""
    keys = directory / "keys"
    keys.write_text(line("alice", "one") + line("bob", "two") + line("carol", "three", "requests-per-minute=1"))
    authority, servers = Authority(directory), []
    cert, key = authority.issue("some", *ROLES.values(), days=90)
    tls = ["--cluster-tls-cert", cert, "--cluster-tls-key", key, "--cluster-tls-ca", authority.ca]
    try:
        for flags in (("--workers", 2, "--chunk-shapes", "64,512"), ("--topology", TOPOLOGY)):
            servers.append(Server("conductor", ["--device", "sim", "--no-router", *tls, *flags], directory).wait_until_ready())
        operations = f"127.0.0.1:{free_port()}"
        reach = [flag for server in servers for flag in ("--conductor", f"http://{server.cluster}")]
        servers.append(Server("router", [*reach, *tls, "--api-key-file", keys, "--operations", operations], directory).wait_until_ready())
        load = Load(servers[-1])
        try:
            prometheus.watch(*servers)
            count = 0
            for place, expression in expressions():
                if any(name in expression for name in ELSEWHERE):
                    prometheus.query(expression)
                    continue
                real = lambda: any(not math.isnan(value) for _, value in prometheus.query(expression))
                wait_for(f"{place}: a value of {expression}", real, ANSWER_S, every=0.5)
                count += 1
            for rule in prometheus.rules():
                wait_for(f"an evaluation of {rule['name']}", lambda: health(prometheus, rule["name"]) != "unknown")
                assert health(prometheus, rule["name"]) == "ok", rule
                if rule["type"] == "recording":
                    wait_for(f"a value of {rule['name']}", lambda: prometheus.query(rule["name"]), ANSWER_S, every=0.5)
                    count += 1
            known = {name for series in prometheus.query('{__name__=~"tutti_.+"}') for name in [series[0]["__name__"]]}
            used = {name for rule in prometheus.rules() for name in re.findall(r"\btutti_\w+", rule["query"])}
            assert used <= known, f"alerts use metrics that no process has: {used - known}"
            firing = prometheus.firing(*servers)
            assert not firing, f"an undisturbed cluster raises alerts: {firing}"
            return count
        finally:
            load.stop()
    finally:
        for server in reversed(servers):
            server.destroy()


def health(prometheus, name):
    return next(rule["health"] for rule in prometheus.rules() if rule["name"] == name)


def check_faults(prometheus, directory, only):
    """Checks that each alert is silent before its fault and fires after it. Returns {alert: seconds}."""
    seconds = {}
    for fault in FAULTS:
        if only and not re.search(only, fault.__name__):
            continue
        with fault.cluster(directory) as servers:
            prometheus.watch(*servers)
            quiet = prometheus.firing(*servers)
            assert not quiet, f"{fault.__name__}: alerts before the fault: {quiet}"
            began = time.monotonic()
            for alert in fault(*servers):
                alert, *about = alert if isinstance(alert, tuple) else (alert,)
                fired = lambda: prometheus.firing(*(about or servers)).get(alert)
                annotations = wait_for(f"{fault.__name__}: alert {alert}", fired, 120, every=0.2)
                assert "error" not in annotations["summary"].lower() and "<no value>" not in annotations["summary"], annotations
                seconds[alert] = round(time.monotonic() - began, 1)
                print(f"  {alert} after {seconds[alert]} s: {annotations['summary']}", flush=True)
    return seconds


def main():
    # This folder has the generated gRPC client.
    sys.path.insert(0, str(REPO / "target/stubs"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="check rules and expressions, and inject no faults")
    parser.add_argument("--only", help="inject the faults that this regular expression names")
    options = parser.parse_args()
    promtool("check", "rules", *RULES.glob("*.yaml"))
    promtool("test", "rules", UNIT_TESTS)
    alerts = set(re.findall(r"alert: (\w+)", "".join(file.read_text() for file in RULES.glob("*.yaml"))))
    tested = set(re.findall(r"alertname: (\w+)", UNIT_TESTS.read_text()))
    fired = {alert for fault in FAULTS for alert in fault.alerts}
    assert alerts == tested == fired, f"alerts without a unit test: {alerts - tested}, without a fault: {alerts - fired}"
    with tempfile.TemporaryDirectory() as directory:
        prometheus = Prometheus(directory)
        try:
            if not options.only:
                count = check_expressions(prometheus, pathlib.Path(directory))
                print(f"{len(alerts)} alerts pass their unit tests; {count} expressions have values in a live cluster", flush=True)
            if not options.short:
                seconds = check_faults(prometheus, pathlib.Path(directory), options.only)
                print(f"{len(seconds)} alerts fired by their faults")
        finally:
            prometheus.stop()


if __name__ == "__main__":
    main()
