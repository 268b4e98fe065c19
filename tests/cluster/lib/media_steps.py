"""A mixed step at work with media: four texts decode, then a picture of 1,024 tokens, 30 s of sound and a text of 4,096
tokens arrive at once. Encoders have a worker of their own, and devices are simulated (docs/simulated-device.md), so the
figures are those of scheduling and of the router's decoding, which takes long in executables without optimisation.

Three variants take turns: prompts that are never cut (`off`), prompts with media that run in one step each as if there
were no mixed steps for them (`atomic`), and chunks of everything beside the decodes (`chunked`, the default). Figures
are the TTFT of the three, and the gaps between tokens of the four while the three wait.
"""

import argparse
import concurrent.futures
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import httpx
from harness import REPO, Server, events, machine, wait_for, whole_lines
from media_model import ask, text
from omni_model import FIRST_TOKEN, TOKENS, audio, image, png, wav, write_simulated

TOPOLOGY = '[[group]]\nname = "encode"\nnodes = ["audio_encoder", "vision_encoder"]\n\n[[group]]\nname = "think"\nnodes = ["thinker"]\n'
# A picture of 256 × 256 pixels has 32 × 32 tokens. The bytes of 30 s of sound have 13 tokens per second, as in
# Qwen3-Omni.
SIDE, SECONDS, TOKENS_PER_SECOND = 256, 30, 13
LONG, DECODES, OUTPUT = 4096, 4, 1000
# Whole prompts need a step with room for them.
VARIANTS = {
    "off": ("--chunking", "off", "--max-step-tokens", 8192),
    "atomic": ("--max-step-tokens", 512, "--media-prefill", "atomic"),
    "chunked": ("--max-step-tokens", 512),
}


def read(cluster, path, body, seen):
    """Streams a request. Appends the time of each token to `seen`."""
    with httpx.Client(base_url=cluster.url, timeout=120, verify=False) as client:
        asked = {"model": cluster.model, "stream": True, "return_token_ids": True, "ignore_eos": True} | body
        with client.stream("POST", path, json=asked) as response:
            assert response.status_code == 200, response.read()
            for event in events(whole_lines(response)):
                seen += [time.monotonic()] * sum(len(choice.get("token_ids") or ()) for choice in event["choices"])


def requests():
    """Returns {name: (path, body)} of the three that arrive later."""
    chat = lambda *parts: ("/v1/chat/completions", ask(*parts, max_tokens=8))
    return {
        "picture": chat(text("What is this? "), image(png(SIDE, SIDE, 1))),
        "sound": chat(text("What is said? "), audio(wav(SECONDS * 16_000, 1))),
        "long text": ("/v1/completions", dict(prompt=[1 + n * 7 % 250 for n in range(LONG)], max_tokens=8)),
    }


def run(cluster, asked):
    """Returns the figures of one run, in milliseconds."""
    with concurrent.futures.ThreadPoolExecutor(DECODES + len(asked)) as pool:
        texts, later = [[] for _ in range(DECODES)], {name: [] for name in asked}
        short = lambda n: dict(prompt=[1 + n] * 16, max_tokens=OUTPUT)
        running = [pool.submit(read, cluster, "/v1/completions", short(n), seen) for n, seen in enumerate(texts)]
        wait_for("the four to decode", lambda: all(len(seen) > 20 for seen in texts), every=0.002)
        began = time.monotonic()
        running += [pool.submit(read, cluster, *asked[name], seen) for name, seen in later.items()]
        for done in running:
            done.result()
    first = {name: seen[0] for name, seen in later.items()}
    until = max(first.values())
    assert all(seen[-1] > until for seen in texts), "the four ended before the three had begun"
    gaps = sorted(b - a for seen in texts for a, b in zip(seen, seen[1:]) if b > began and a < until)
    itl = {"p50": gaps[len(gaps) // 2], "p99": gaps[len(gaps) * 99 // 100], "max": gaps[-1]}
    ms = lambda figures: {name: round(1000 * seconds, 1) for name, seconds in figures.items()}
    return {"ttft_ms": ms({name: at - began for name, at in first.items()}), "itl_ms": ms(itl)}


def medians(rounds):
    return {part: {name: statistics.median(one[part][name] for one in rounds) for name in rounds[0][part]} for part in rounds[0]}


def ratios(to, of):
    """Returns how many times as long the figures `to` are as the figures `of`."""
    return {part: {name: round(to[part][name] / max(of[part][name], 1e-3), 2) for name in of[part]} for part in of}


def draw(trace, asked, picture):
    """Draws the steps of the thinker from shortly before the first of the three until shortly behind their prefills."""
    steps = [json.loads(line) for line in trace.read_text().splitlines()]
    steps = [step for step in steps if "rows" in step]
    prefills = [(step["start_us"], row["request"]) for step in steps for row in step["rows"] if row["walk"] == "prefill_text"]
    arrived = list(dict.fromkeys(request for _, request in prefills))[-len(asked) :]
    times = [(start - steps[0]["start_us"]) / 1000 for start, request in prefills if request in arrived]
    lengths = {}
    for step in steps:
        for row in step["rows"]:
            if row["walk"] == "prefill_text":
                lengths[row["request"]] = max(lengths.get(row["request"], 0), row["range"][1])
    names = dict(zip(sorted(arrived, key=lengths.get), sorted(asked, key=["sound", "picture", "long text"].index)))
    labels = [part for request, name in names.items() for part in ("--label", f"{request}={name}")]
    window = ("--from-ms", min(times) - 30, "--until-ms", max(times) + 40)
    title = "four texts, a picture, 30 s of sound and a text of 4,096 tokens"
    command = [REPO / "tests/tools/draw-steps", trace, *window, *labels, "--title", title]
    picture.write_text(subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout)


def options():
    parser = argparse.ArgumentParser(prog="tests/media-steps", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures")
    parser.add_argument("--draw", type=pathlib.Path, help="file for a picture of the steps of the variant chunked")
    return parser.parse_args()


def measure(rounds, picture=None):
    """Returns the figures of each variant, and of the others relative to the default."""
    asked = requests()
    with tempfile.TemporaryDirectory() as directory:
        directory = pathlib.Path(directory)
        bytes_per_token = -(-len(wav(SECONDS * 16_000, 1)) // (SECONDS * TOKENS_PER_SECOND))
        placeholder = FIRST_TOKEN + TOKENS.index("<|audio_pad|>")
        model = write_simulated(directory / "checkpoint", audio_token_id=placeholder, audio_bytes_per_token=bytes_per_token)
        topology, trace = directory / "topology.toml", directory / "steps"
        topology.write_text(TOPOLOGY)
        # Prompts repeat, so nothing may be cached.
        uncached = ("--no-prefix-cache", "--encoder-cache-memory", 0)
        clusters, found = {}, {name: [] for name in VARIANTS}
        try:
            for name, flags in VARIANTS.items():
                traced = ("--trace-steps", trace.with_name(f"steps-{name}"))
                clusters[name] = Server("conductor", ("--topology", topology, *model, *flags, *uncached, *traced), directory)
            for cluster in clusters.values():
                cluster.wait_until_ready()
                run(cluster, asked)  # not counted
            for number in range(rounds):
                for name in sorted(clusters, reverse=number % 2 == 1):
                    found[name].append(run(clusters[name], asked))
            for cluster in clusters.values():
                cluster.stop()
        finally:
            for cluster in clusters.values():
                cluster.destroy()
        if picture:
            draw(trace.with_name("steps-chunked.rank1"), asked, picture)
    figures = {name: medians(of_variant) for name, of_variant in found.items()}
    to_default = {name: ratios(figures[name], figures["chunked"]) for name in VARIANTS if name != "chunked"}
    return {"machine": machine(), "rounds": rounds, "variants": figures, "times_as_long_as_chunked": to_default}


def main():
    chosen = options()
    written = json.dumps(measure(chosen.rounds, chosen.draw), indent=1)
    print(written)
    if chosen.json:
        chosen.json.write_text(written + "\n")


if __name__ == "__main__":
    sys.exit(main())
