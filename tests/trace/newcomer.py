#!/usr/bin/env python3
"""Four requests decode on a simulated device, then a long prompt comes, and a short one behind it: what each waits for.

    target/venv/bin/python tests/trace/newcomer.py DIRECTORY

Runs it once with each way to cut prompts, on the executables that tests/cluster uses, prints the times that clients saw
as JSON, and leaves the step traces and their pictures in the directory.
"""

import json
import pathlib
import subprocess
import sys
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "cluster"))
from harness import Server  # noqa: E402

WAYS = {
    "off": ["--chunking", "off"],
    "engine": ["--chunking", "engine"],
    "scheduler": ["--chunking", "scheduler"],
    "scheduler-12ms": ["--chunking", "scheduler", "--target-itl-ms", 12],
}
DECODING, LONG, SHORT = 4, 4000, 64


def arrivals(server, prompt, max_tokens, into):
    """Appends the milliseconds from sending to each event."""
    began = time.monotonic()
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    for _ in server.stream("/v1/completions", **body):
        into.append((time.monotonic() - began) * 1e3)


def measure(server):
    times = [[] for _ in range(DECODING + 2)]
    prompts = [([i + 1] * 40, 90) for i in range(DECODING)] + [([9] * LONG, 8), ([5] * SHORT, 8)]
    threads = [threading.Thread(target=arrivals, args=(server, *prompt, into)) for prompt, into in zip(prompts, times)]
    for thread in threads[:DECODING]:
        thread.start()
    while min(map(len, times[:DECODING])) < 20:
        time.sleep(0.001)
    threads[DECODING].start()
    time.sleep(0.01)
    threads[DECODING + 1].start()
    for thread in threads:
        thread.join()
    gaps = sorted(b - a for each in times[:DECODING] for a, b in zip(each, each[1:]))
    return {
        "ttft_ms_of_long": round(times[DECODING][0], 1),
        "ttft_ms_of_short": round(times[DECODING + 1][0], 1),
        "itl_ms_of_decoding": {"samples": len(gaps), "p50": round(gaps[len(gaps) // 2], 1), "p99": round(gaps[len(gaps) * 99 // 100], 1), "max": round(gaps[-1], 1)},
    }


def main(directory):
    directory.mkdir(parents=True, exist_ok=True)
    found = {}
    for way, flags in WAYS.items():
        trace = directory / way
        server = Server("conductor", ["--device", "sim", "--max-step-tokens", 512, "--trace-steps", trace, *flags], directory)
        try:
            server.wait_until_ready()
            found[way] = measure(server)
            server.stop()
        finally:
            server.destroy()
        title = f"{way}: {DECODING} decode, then a prompt of {LONG} tokens and one of {SHORT}"
        picture = subprocess.run([HERE / "draw.py", f"{trace}.rank0", "--title", title], capture_output=True, check=True)
        trace.with_suffix(".svg").write_bytes(picture.stdout)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
