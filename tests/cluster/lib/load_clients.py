"""Points the load generators that people use at a conductor with an API key: guidellm, aiperf and the client of `vllm
bench serve`, with chats and completions of the shipped model.

Each must report that every request succeeded, and as many tokens as it asked for. Prints what they report. The exit
code is 1 if one fails.
"""

import argparse
import json
import os
import pathlib
import secrets
import subprocess
import sys
import tempfile
import time

from api_keys import line
from harness import REPO, Server

CLIENTS = REPO / "target/load-clients"
MODEL, TOKENIZER = "tutti-tiny", REPO / "tests/tutti-tiny/checkpoint"
PROMPT_TOKENS, TOKENS, AT_ONCE = 40, 12, 4
TIMEOUT_S = 600


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=24, help="requests of each client and route (default: 24)")
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(RUNS)} (default: all)")
    asked = parser.parse_args()
    if unknown := set(asked.clients) - set(RUNS):
        parser.error(f"no client {', '.join(unknown)}; there are {', '.join(RUNS)}")
    return asked


class Failed(Exception):
    """A client reported something else than success."""


class Target:
    """A served model, the key for it, and a folder for the clients' reports."""

    def __init__(self, server, key, folder, requests):
        self.url, self.model, self.key = server.url, MODEL, key
        self.folder, self.requests = folder, requests

    def run(self, client, *command, env=None):
        """Runs a client to its end. Fails if it does."""
        log = self.folder / f"{client}.log"
        with open(log, "wb") as out:
            status = subprocess.run(
                [str(word) for word in command],
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=self.folder,
                env=os.environ | (env or {}),
                timeout=TIMEOUT_S,
            ).returncode
        if status:
            raise Failed(f"exit code {status}\n{log.read_text()[-4000:]}")


def guidellm(target, kind, route):
    report = target.folder / f"guidellm-{kind}.json"
    backend = f"kind=openai_http,target={target.url},model={target.model},api_key={target.key},request_format={route}"
    target.run(
        "guidellm",
        *(CLIENTS / "guidellm/bin/guidellm", "run", "--disable-console-interactive"),
        *("--backend", backend, "--profile", f"kind=concurrent,streams={AT_ONCE}"),
        *("--constraint", f"kind=max_requests,count={target.requests}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={TOKENS}"),
        *("--tokenizer", f"kind=hf_auto,model={TOKENIZER}", "--output", f"kind=json,path={report}"),
    )
    metrics = json.loads(report.read_text())["benchmarks"][0]["metrics"]
    mean = {name: metrics[name]["successful"]["mean"] for name in ("time_to_first_token_ms", "output_token_count")}
    return metrics["request_totals"]["successful"], mean["output_token_count"], mean["time_to_first_token_ms"]


def aiperf(target, kind):
    folder = target.folder / f"aiperf-{kind}"
    target.run(
        "aiperf",
        *(CLIENTS / "aiperf/bin/aiperf", "profile", "--ui", "none", "--artifact-dir", folder, "--streaming"),
        *("--url", target.url, "--model", target.model, "--api-key", target.key, "--tokenizer", TOKENIZER),
        *("--endpoint-type", kind, "--concurrency", AT_ONCE, "--request-count", target.requests),
        *("--synthetic-input-tokens-mean", PROMPT_TOKENS, "--output-tokens-mean", TOKENS),
        *("--extra-inputs", "ignore_eos:true", "--use-server-token-count"),
    )
    report = json.loads((folder / "profile_export_aiperf.json").read_text())
    mean = {name: report[name]["avg"] for name in ("request_count", "output_sequence_length", "time_to_first_token")}
    return mean["request_count"], mean["output_sequence_length"], mean["time_to_first_token"]


def vllm_bench(target, backend, route):
    report = target.folder / f"vllm-bench-{backend}.json"
    start = (
        "import sys\n"
        "from vllm.benchmarks.serve import add_cli_args, main\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "parser = FlexibleArgumentParser()\n"
        "add_cli_args(parser)\n"
        "main(parser.parse_args())\n"
    )
    target.run(
        "vllm-bench",
        *(CLIENTS / "vllm-bench/bin/python", "-c", start, "--backend", backend, "--endpoint", route),
        *("--base-url", target.url, "--model", target.model, "--tokenizer", TOKENIZER),
        *("--dataset-name", "random", "--random-input-len", PROMPT_TOKENS, "--random-output-len", TOKENS),
        *("--num-prompts", target.requests, "--max-concurrency", AT_ONCE, "--ignore-eos"),
        *("--save-result", "--result-dir", target.folder, "--result-filename", report.name),
        env={"OPENAI_API_KEY": target.key, "PYTHONPATH": str(CLIENTS / "vllm")},
    )
    figures = json.loads(report.read_text())
    tokens = figures["total_output_tokens"] / max(figures["completed"], 1)
    return figures["completed"], tokens, figures["mean_ttft_ms"]


# Runs of each client. A run returns the number of requests that succeeded, the mean of their generated tokens, and the
# mean time to the first token in milliseconds.
RUNS = {
    "guidellm": {
        "completions": lambda target: guidellm(target, "completions", "/v1/completions"),
        "chat": lambda target: guidellm(target, "chat", "/v1/chat/completions"),
    },
    "aiperf": {
        "completions": lambda target: aiperf(target, "completions"),
        "chat": lambda target: aiperf(target, "chat"),
    },
    "vllm-bench": {
        "completions": lambda target: vllm_bench(target, "openai", "/v1/completions"),
        "chat": lambda target: vllm_bench(target, "openai-chat", "/v1/chat/completions"),
    },
}


def judge(report, requests):
    """Returns whether a client's report is right, and its figures as text."""
    succeeded, tokens, first_ms = report
    text = f"{succeeded:.0f} of {requests} requests, {tokens:.2f} of {TOKENS} tokens, first token after {first_ms:.1f} ms"
    return succeeded == requests and tokens == TOKENS, text


def main():
    asked = options()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        key = secrets.token_hex(32)
        keys = folder / "keys"
        keys.write_text(line("load-clients", key))
        server = Server("conductor", ("--served-model-name", MODEL, "--api-key-file", keys), folder).wait_until_ready()
        target = Target(server, key, folder, asked.requests)
        try:
            for client in asked.clients or RUNS:
                for kind, run in RUNS[client].items():
                    began = time.monotonic()
                    try:
                        is_right, report = judge(run(target), asked.requests)
                    except (Failed, LookupError, TypeError, ValueError, OSError, subprocess.TimeoutExpired) as problem:
                        is_right, report = False, f"{type(problem).__name__}: {problem}"
                    failed |= not is_right
                    verdict = "ok" if is_right else "FAILED"
                    print(f"{verdict:6} {client:10} {kind:11} {report} ({time.monotonic() - began:.0f} s)", flush=True)
        finally:
            server.stop()
    return failed


if __name__ == "__main__":
    sys.exit(main())
