"""The processor time that tracing costs. Clusters with different sampling take turns under the load of `tutti-bench`.

Each round starts each cluster anew. A figure is the processor time of all processes of a cluster per output token. Two
clusters do not trace, and the ratio of their figures shows the noise. All processes run on one core, because a thread
takes longer while the core's other hyperthread is busy. They run with `SCHED_BATCH`, so that a waking thread does not
interrupt another.
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
# Steps take 10 ms, so that the load does not saturate the machine and the batches of all clusters are alike.
STEPS = {"TUTTI_SIM__FIXED_US": "10000"}
INPUT, OUTPUT = 64, 100


def clusters(endpoint):
    """Returns {name: environment} of the clusters."""
    def sampled(share):
        sampler = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": share}
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint} | sampler

    return {"off": {}, "off, too": {}, "1 %": sampled("0.01"), "all": sampled("1")}


def processor_seconds(cluster):
    """Returns the seconds of user and system time that the cluster's processes have used."""
    total = 0
    for pid in cluster.processes():
        # The name of the process may contain spaces, but ends at the last bracket.
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICKS


def load(cluster, options, log_dir):
    """Returns the microseconds of processor time per token of one run."""
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
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    collector = Collector()
    names = clusters(collector.endpoint)
    with tempfile.TemporaryDirectory() as log_dir:
        rounds = []
        for number in range(options.rounds):
            costs = {}
            # The order rotates, so that no cluster is always the first one.
            for name in itertools.islice(itertools.cycle(names), number, number + len(names)):
                environment = STEPS | names[name]
                cluster = Server("conductor", ["--workers", 1, "--device", "sim"], log_dir, environment).wait_until_ready()
                try:
                    load(cluster, options, log_dir)  # not counted
                    costs[name] = load(cluster, options, log_dir)
                finally:
                    cluster.stop()
            rounds.append(costs)
            print(json.dumps({name: round(costs[name], 2) for name in names}), flush=True)
    requests = 2 * options.rounds * options.requests
    traces = len({span.trace for span in collector.spans() if span.name != "step"})  # A step has a trace of its own.
    # One cluster traces all requests, and another one a hundredth of them.
    assert requests <= traces <= requests * 1.03, (requests, traces)
    return {
        "machine": machine(),
        "streams": options.streams,
        "tokens_per_run": options.requests * OUTPUT,
        "rounds": options.rounds,
        "microseconds_per_token": {name: round(statistics.median(r[name] for r in rounds), 2) for name in names},
        "ratio_to_off": {name: round(statistics.median(r[name] / r["off"] for r in rounds), 4) for name in names},
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
