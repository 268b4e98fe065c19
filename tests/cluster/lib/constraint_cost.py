"""The cost of constraints: streams whose output follows a schema, beside as many streams without a constraint.

Two processes of `tutti-bench` load one worker at the same time, each with the same number of streams. In the run `free`
neither has a constraint. In the run `constrained` one has a schema whose texts do not end. Both runs take turns on one
cluster. The model has the shape of Qwen3-0.6B, random weights and a vocabulary of 151,936 tokens.

Figures of each run: gaps between tokens (ITL) of both groups, and processor time of the worker per token. Of the masks:
time per mask, which is the commit of a token and the next mask, late rows, and the time of a compilation.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

import harness
from harness import Server, machine, wait_for
from large_vocabulary import ORDINARY, large_vocabulary
from tracing_cost import TICKS

# A list that a random model does not end within the tokens of a stream, with free text, numbers and choices.
MEMBERS = {
    "name": {"type": "string", "minLength": 10, "maxLength": 400},
    "kind": {"enum": ["small", "medium", "large"]},
    "count": {"type": "integer", "minimum": 0, "maximum": 1000000},
    "when": {"type": "string", "format": "date-time"},
}
ITEM = {"type": "object", "properties": MEMBERS, "required": list(MEMBERS), "additionalProperties": False}
SCHEMA = {"type": "array", "minItems": 1000, "items": ITEM}
PROMPT = 32
# Flags and environment of the worker by device.
DEVICES = {
    "sim": (("--device", "sim"), {}),
    "sim-two-steps": (("--device", "sim"), {"TUTTI_SIM__STEPS_IN_FLIGHT": "2"}),
    "cpu": (("--device", "cpu", "--load-format", "dummy", "--kv-cache-memory", 1 << 30), {}),
}


def workload(directory, name, requests, tokens, constrained):
    """Writes the requests of one group. Returns the file."""
    file = pathlib.Path(directory) / f"{name}.jsonl"
    body = {"temperature": 1, **({"structured_outputs": {"json": SCHEMA}} if constrained else {})}
    lines = []
    for number in range(requests):
        prompt = [(number * 7919 + index * 131 + len(name)) % ORDINARY for index in range(PROMPT)]
        lines.append(json.dumps({"prompt": prompt, "max_tokens": tokens, "body": body | {"seed": number}}))
    file.write_text("\n".join(lines) + "\n")
    return file


def worker_seconds(server):
    """Returns the seconds of processor time that the worker has used."""
    (pid,) = server.workers()
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def counts(server):
    names = ("masks", "mask_us", "masks_late", "constraints_compiled", "constraint_compile_us")
    metrics = server.metrics()
    return {name: metrics.get(f"tutti_worker_{name}", 0) for name in names}


def load(server, directory, streams, requests, tokens, constrained):
    """Runs both groups at the same time. Returns the figures of the run."""
    groups = {"beside": False, "measured": constrained}
    before, masks = worker_seconds(server), counts(server)
    running = {}
    for name, has_schema in groups.items():
        file = workload(directory, name, requests, tokens, has_schema)
        report = pathlib.Path(directory) / f"{name}.json"
        # The runs that are not counted warm up.
        command = [harness.BINARIES / "tutti-bench", "--url", server.url, "--warm-up", 0, "--concurrency", streams, "--requests", requests, "--workload", file, "--json", report]
        running[name] = report, subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    figures = {}
    for name, (report, process) in running.items():
        text, _ = process.communicate()
        assert process.returncode == 0, text
        found = json.loads(report.read_text())
        assert found["requests"]["served"] == requests, found["requests"]
        itl = found["latency"]["itl_ms"]
        figures[name] = {"itl_ms_p50": itl["p50"], "itl_ms_p99": itl["p99"], "itl_ms_max": itl["max"]}
    took = worker_seconds(server) - before
    # The worker reports its counts several times per second.
    total = 2 * requests * tokens
    if constrained:
        wait_for("the counts of all masks", lambda: counts(server)["masks"] - masks["masks"] >= requests * (tokens - 1), 20)
    after = counts(server)
    spent = {name: after[name] - masks[name] for name in after}
    figures["cpu_us_per_token"] = took / total * 1e6
    if constrained:
        figures["mask_us"] = spent["mask_us"] / max(spent["masks"], 1)
        figures["late_rows_per_1000_masks"] = 1000 * spent["masks_late"] / max(spent["masks"], 1)
    return figures


def medians(rounds):
    """Returns the medians of figures of equal shape."""
    first = rounds[0]
    if isinstance(first, dict):
        return {name: medians([one[name] for one in rounds]) for name in first}
    return round(statistics.median(rounds), 3)


def measure_device(device, model, options, directory):
    flags, env = DEVICES[device]
    flags = ["--workers", 1, "--model", model, "--max-running-requests", 2 * max(options.streams), *flags]
    server = Server("conductor", flags, directory, env).wait_until_ready()
    try:
        before = counts(server)
        # The first constraint reads the vocabulary and compiles. The second one is known.
        for _ in range(2):
            server.complete(prompt=[1] * 8, max_tokens=2, structured_outputs={"json": SCHEMA})
        wait_for("the compilation's count", lambda: counts(server)["constraints_compiled"] > before["constraints_compiled"], 20)
        after = counts(server)
        compilations = after["constraints_compiled"] - before["constraints_compiled"]
        compile_ms = (after["constraint_compile_us"] - before["constraint_compile_us"]) / compilations / 1e3
        found = {"compile_and_first_mask_ms": round(compile_ms, 3)}
        for streams in options.streams:
            tokens, requests = options.tokens[device], streams * options.requests_per_stream
            runs = {"free": [], "constrained": []}
            load(server, directory, streams, streams, tokens, True)  # not counted
            for number in range(options.rounds):
                # The order changes, so that neither run is always the first one.
                for name in sorted(runs, reverse=number % 2 == 0):
                    runs[name].append(load(server, directory, streams, requests, tokens, name == "constrained"))
            free, constrained = (medians(runs[name]) for name in ("free", "constrained"))
            ratio = {
                f"{group}_itl_{part}": round(constrained[group][f"itl_ms_{part}"] / free[group][f"itl_ms_{part}"], 3)
                for group in ("measured", "beside")
                for part in ("p50", "p99")
            }
            found[f"{streams}_and_{streams}_streams"] = {"free": free, "constrained": constrained, "constrained_to_free": ratio}
            print(json.dumps({device: {streams: found[f"{streams}_and_{streams}_streams"]}}), flush=True)
        return found
    finally:
        server.stop()


def options(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="*", choices=list(DEVICES), default=list(DEVICES))
    parser.add_argument("--streams", nargs="*", type=int, default=[1, 16, 64], help="constrained streams, and as many others")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests-per-stream", type=int, default=2)
    parser.add_argument("--short", action="store_true", help="few tokens, one round; 1 and 16 streams")
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures")
    chosen = parser.parse_args(words)
    chosen.tokens = {"sim": 200, "sim-two-steps": 200, "cpu": 64}
    if chosen.short:
        chosen.tokens, chosen.rounds, chosen.requests_per_stream = {"sim": 60, "sim-two-steps": 60, "cpu": 12}, 1, 1
        chosen.streams = [1, 16]
    return chosen


def main():
    chosen = options()
    with tempfile.TemporaryDirectory() as directory:
        model = large_vocabulary(pathlib.Path(directory))
        figures = {"machine": machine(), "rounds": chosen.rounds, "tokens": chosen.tokens}
        for device in chosen.devices:
            figures[device] = measure_device(device, model, chosen, directory)
    text = json.dumps(figures, indent=1)
    print(text)
    if chosen.json:
        chosen.json.write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
