"""The throughput that snapshots of state cost. Two conductors, one without a prefix cache, serve the same prompts
in turns.

No two prompts begin with the same tokens, so that snapshots are saved and never used. Both conductors run all the time.
A figure is the number of tokens of prompts and outputs per second.
"""

import argparse
import json
import pathlib
import statistics
import sys
import tempfile

from harness import REPO, Server, machine, run_to_exit

FLAGS = {"with": [], "without": ["--no-prefix-cache"]}
MEMORY = 2 << 30


def load(conductor, options, seed, log_dir):
    """Returns the tokens per second of one turn."""
    report = pathlib.Path(log_dir) / "report.json"
    flags = ["--url", conductor.url, "--concurrency", options.streams, "--requests", options.requests, "--warm-up", 0,
             "--seed", seed, "--input-tokens", options.input_tokens, "--output-tokens", options.output_tokens, "--json", report]
    code, text = run_to_exit("tutti-bench", flags, log_dir, seconds=600)
    assert code == 0, text
    found = json.loads(report.read_text())["throughput"]
    return found["prompt_tokens_per_s"] + found["output_tokens_per_s"]


def measure(options):
    with tempfile.TemporaryDirectory() as log_dir:
        common = ["--workers", 1, "--device", "cpu", "--model", options.model, "--load-format", "dummy", "--skip-tokenizer-init",
                  "--kv-cache-memory", MEMORY]
        running = {name: Server("conductor", common + flags, log_dir) for name, flags in FLAGS.items()}
        try:
            for conductor in running.values():
                conductor.wait_until_ready()
                run_to_exit("tutti-bench", ["--url", conductor.url, "--requests", 1, "--input-tokens", 64], log_dir)
            turns = []
            for turn in range(options.turns):
                # The order alternates, so that neither conductor is always the first.
                names = list(running)[:: 1 if turn % 2 == 0 else -1]
                turns.append({name: round(load(running[name], options, turn + 2, log_dir), 2) for name in names})
                print(json.dumps(turns[-1]), flush=True)
        finally:
            for conductor in running.values():
                conductor.stop()
    return {
        "machine": machine(),
        "model": str(options.model.relative_to(REPO)),
        "streams": options.streams,
        "input_tokens": options.input_tokens,
        "output_tokens": options.output_tokens,
        "tokens_per_s": {name: [turn[name] for turn in turns] for name in FLAGS},
        "ratio": round(statistics.median(turn["with"] / turn["without"] for turn in turns), 4),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, default=REPO / "tests/bench/qwen3.5-0.8b", help="folder of a config.json")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--streams", type=int, default=1, help="requests in flight")
    parser.add_argument("--requests", type=int, default=1, help="requests per turn and conductor")
    parser.add_argument("--input-tokens", type=int, default=1024)
    parser.add_argument("--output-tokens", type=int, default=1)
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures")
    options = parser.parse_args()
    figures = measure(options)
    text = json.dumps(figures, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
