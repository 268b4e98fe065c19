"""A real Prometheus that scrapes processes under test once per second."""

import json
import pathlib
import re
import subprocess

import httpx
from harness import REPO, free_port, wait_for

PROGRAMS = REPO / "target/prometheus/usr/bin"
RULES = REPO / "deploy/helm/tutti/files/rules"

CONFIG = """
global: {{ scrape_interval: 1s, evaluation_interval: 1s }}
rule_files: ["{rules}/*.yaml"]
scrape_configs:
  - job_name: tutti
    file_sd_configs: [{{ files: ["{targets}"], refresh_interval: 1s }}]
"""


def promtool(*args):
    """Runs promtool. Fails with promtool's output if promtool fails."""
    done = subprocess.run([PROGRAMS / "promtool", *map(str, args)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def hasty(rules):
    """Returns the rules with `for` set to 0, so that alerts fire as soon as their expressions hold."""
    text, changed = re.subn(r"^( +for:) \w+$", r"\1 0s", rules, flags=re.M)
    assert changed, "no rule waits"
    return text


class Prometheus:
    """A Prometheus process with its targets and rules. The rules are the chart's rules with `for` set to 0."""

    def __init__(self, directory):
        self.directory = pathlib.Path(directory)
        rules, self.targets = self.directory / "rules", self.directory / "targets.json"
        rules.mkdir()
        for file in RULES.glob("*.yaml"):
            (rules / file.name).write_text(hasty(file.read_text()))
        self.watched = set()
        self.targets.write_text("[]")
        config = self.directory / "prometheus.yaml"
        config.write_text(CONFIG.format(rules=rules, targets=self.targets))
        self.address = f"127.0.0.1:{free_port()}"
        self.log = (self.directory / "prometheus.log").open("wb")
        storage = f"--storage.tsdb.path={self.directory / 'data'}"
        flags = (f"--config.file={config}", storage, f"--web.listen-address={self.address}")
        self.child = subprocess.Popen([PROGRAMS / "prometheus", *flags], stdout=self.log, stderr=self.log)
        self.client = httpx.Client(base_url=f"http://{self.address}", timeout=60)
        wait_for("Prometheus", self.is_ready, 60)

    def is_ready(self):
        assert self.child.poll() is None, (self.directory / "prometheus.log").read_text()
        try:
            return self.client.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def watch(self, *servers):
        """Also scrapes these servers. Returns once each has been scraped twice."""
        self.watched |= {server.scraped_at for server in servers}
        text = self.directory / "targets.new"
        text.write_text(json.dumps([{"targets": sorted(self.watched)}]))
        text.rename(self.targets)
        for server in servers:
            wait_for(f"two scrapes of {server.url}", lambda: self.scrapes(server) >= 2, 60)

    def scrapes(self, server):
        instance = server.scraped_at
        return self.value(f'count_over_time(up{{instance="{instance}"}}[5m]) and last_over_time(up{{instance="{instance}"}}[5m]) == 1') or 0

    def query(self, expression):
        """Returns [(labels, value)] of an expression now. Fails if Prometheus refuses it."""
        answer = self.client.post("/api/v1/query", data={"query": expression}).json()
        assert answer["status"] == "success", f"{expression}: {answer}"
        return [(series["metric"], float(series["value"][1])) for series in answer["data"]["result"]]

    def value(self, expression):
        """Returns the value of an expression with one series, or None."""
        found = self.query(expression)
        return found[0][1] if found else None

    def rules(self):
        groups = self.client.get("/api/v1/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def firing(self, *servers):
        """Returns {alert: its annotations} for the alerts that fire for these servers."""
        instances = {server.scraped_at for server in servers}
        alerts = self.client.get("/api/v1/alerts").json()["data"]["alerts"]
        return {
            alert["labels"]["alertname"]: alert["annotations"]
            for alert in alerts
            if alert["state"] == "firing" and alert["labels"].get("instance") in instances
        }

    def stop(self):
        self.child.terminate()
        self.child.wait(60)
        self.client.close()
        self.log.close()
