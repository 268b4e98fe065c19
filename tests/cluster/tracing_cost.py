"""Processor time of tracing: clusters that differ in their sampling take turns under the load of `tutti-bench`.

All clusters run from the start to the end, and each round loads one after the other. A figure is the processor time of
all processes of a cluster per output token. Two clusters do not trace: the ratio of their figures is the noise.
"""

import argparse
import itertools
import json
import os
import pathlib
import statistics
import sys
import tempfile

from collector import Collector
from harness import Server, machine, run_to_exit

TICKS = os.sysconf("SC_CLK_TCK")
# Steps of 10 ms, so that the load does not saturate the machine and batches are alike in all clusters.
STEPS = {"TUTTI_SIM__FIXED_US": "10000"}
INPUT, OUTPUT = 64, 100


def clusters(endpoint):
    """{name: environment} of the clusters."""
    def sampled(share):
        sampler = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": share}
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint} | sampler

    return {"off": {}, "off, too": {}, "1 %": sampled("0.01"), "all": sampled("1")}


def processor_seconds(cluster):
    """Seconds of user and system time that the cluster's processes have taken."""
    total = 0
    for pid in cluster.processes():
        # The name of the process may contain spaces, but ends at the last bracket.
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICKS


def load(cluster, options, log_dir):
    """Microseconds of processor time per token of one run."""
    report = pathlib.Path(log_dir) / "report.json"
    flags = ["--url", cluster.url, "--concurrency", options.streams, "--requests", options.requests, "--seed", options.seed,
             "--input-tokens", INPUT, "--output-tokens", OUTPUT, "--json", report]
    before = processor_seconds(cluster)
    code, text = run_to_exit("tutti-bench", flags, log_dir)
    took = processor_seconds(cluster) - before
    assert code == 0, text
    found = json.loads(report.read_text())
    assert found["requests"]["served"] == options.requests, found["requests"]
    return took / (options.requests * OUTPUT) * 1e6


def measure(options):
    collector = Collector()
    with tempfile.TemporaryDirectory() as log_dir:
        running = {
            name: Server("conductor", ["--workers", 2, "--device", "sim"], log_dir, STEPS | env).wait_until_ready()
            for name, env in clusters(collector.endpoint).items()
        }
        try:
            for cluster in running.values():
                load(cluster, options, log_dir)  # not counted
            rounds = []
            for number in range(options.rounds):
                # No cluster is always the first one.
                names = itertools.islice(itertools.cycle(running), number, number + len(running))
                rounds.append({name: load(running[name], options, log_dir) for name in names})
                print(json.dumps({name: round(cost, 2) for name, cost in sorted(rounds[-1].items())}), flush=True)
        finally:
            for cluster in running.values():
                cluster.stop()
    requests = (options.rounds + 1) * options.requests
    traces = len({span.trace for span in collector.spans()})
    # All requests of one cluster are traced, and a hundredth of another's.
    assert requests <= traces <= requests * 1.03, (requests, traces)
    return {
        "machine": machine(),
        "streams": options.streams,
        "tokens_per_run": options.requests * OUTPUT,
        "rounds": options.rounds,
        "microseconds_per_token": {name: round(statistics.median(r[name] for r in rounds), 2) for name in running},
        "ratio_to_off": {name: round(statistics.median(r[name] / r["off"] for r in rounds), 4) for name in running},
        "spans_per_traced_request": round(len(collector.spans()) / traces, 1),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--streams", type=int, default=64, help="requests in flight")
    parser.add_argument("--requests", type=int, default=320, help="requests per run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures")
    options = parser.parse_args()
    figures = measure(options)
    text = json.dumps(figures, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
