"""Runs the commands and the Python examples of one page as they are written, in a network of their own.

    python docs_session.py PAGE CLONE WORK

Each of them runs in the folder WORK, or in CLONE, a copy of the tree, if it names a file there. A command that serves
runs until the page's end, or until another one needs its address or reads its step trace. The next command starts once
it is ready. Needs a network namespace, in which nothing else uses the addresses of the page. Prints each command and
what it said, and exits with 1 at the first that fails.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from docs_checks import Cargo
from docs_commands import blocks, commands

HTTP = "127.0.0.1:8000"
# Commands that print an answer.
CLIENTS = ("curl", "python examples/", "conductor status", "conductor trace")
# Deadlines in seconds, chosen for machines under load.
START_S, STOP_S, ANSWER_S = 120, 60, 300
QUESTION = {"messages": [{"role": "user", "content": "What is Tutti?"}], "max_tokens": 8}


def cargo(words):
    """Stands for `cargo`: `cargo run` runs what tests/run has built."""
    command = Cargo(["cargo", *words])
    if command.subcommand != "run":
        sys.exit(f"cargo {command.subcommand} is not run here")
    example = command.values("--example")
    name = f"examples/{example[0]}" if example else command.values("--bin")[0]
    program = os.path.join(os.environ["BUILT"], name)
    os.execv(program, [program, *command.arguments])


def served_at(command):
    """Returns the address at which a command serves HTTP, or None if it ends by itself."""
    words = shlex.split(command)
    if words[0] == "cargo" and words[1] == "run" and "--bin" in words:
        words = [words[words.index("--bin") + 1], *words[words.index("--") + 1 :]]
    if words[0] not in ("conductor", "router") or len(words) > 1 and words[1] in ("status", "trace", "drain", "kernels"):
        return None
    if "--version" in words or "--help" in words or "--print-config" in words:
        return None
    return option(command, "--http", HTTP)


def option(command, name, otherwise=None):
    """Returns the value of a flag of a command."""
    words = shlex.split(command)
    return words[words.index(name) + 1] if name in words else otherwise


def ask(address, path, body=None):
    """Returns the status of an answer, or None if there is none."""
    request = urllib.request.Request(f"http://{address}{path}", body and json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


class Session:
    """The commands of one page, run in their order."""

    def __init__(self, page, clone, work):
        self.page, self.clone, self.work = page, clone, work
        # Commands and processes, by address.
        self.servers = {}
        self.state = work.parent / "state"
        # Cargo makes this folder, which git does not see.
        (clone / "target").mkdir(exist_ok=True)
        self.tops = {path.name for path in clone.iterdir()}

    def folder(self, text):
        """Returns the folder in which a command runs: the clone, if it is cargo's or names a path there."""
        first = re.findall(r"(?:^|[ =/])([\w.-]+)/", text)
        return self.clone if text.startswith("cargo ") or self.tops.intersection(first) else self.work

    def start(self, command, folder, output=subprocess.PIPE):
        """Starts a command in a shell that knows the variables which the page has exported so far."""
        script = f'if [ -e "$STATE" ]; then . "$STATE"; fi\n{command}'
        return subprocess.Popen(
            ["bash", "-uo", "pipefail", "-c", script],
            cwd=folder,
            env=os.environ | {"STATE": str(self.state)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, command):
        if address := served_at(command):
            return self.serve(command, address)
        self.stop([address for address, (server, _) in self.servers.items() if option(server, "--trace-steps", "\n") in command])
        keeping = f'{command}\nstatus=$?; export -p | grep -v " [A-Z]*PWD=" >"$STATE"; exit $status'
        self.finish(self.start(keeping, self.folder(command)), command, speaks=command.startswith(CLIENTS))
        if command.startswith("conductor drain --all"):
            drained = option(command, "--conductor", "").removeprefix("http://")
            self.wait([address for address, (server, _) in self.servers.items() if option(server, "--cluster-grpc") == drained])

    def example(self, text):
        self.finish(self.start(f"python -c {shlex.quote(text)}", self.work), text, speaks=True)

    def finish(self, process, what, speaks=False):
        print(f"$ {what}", flush=True)
        said, _ = process.communicate(timeout=ANSWER_S)
        print(said, flush=True)
        if process.returncode or '"error"' in said or speaks and not said.strip():
            sys.exit(f"failed with {process.returncode}: {what}")

    def serve(self, command, address):
        self.stop([address])
        print(f"$ {command}", flush=True)
        process = self.start(f"exec {command}", self.folder(command), output=None)
        self.servers[address] = command, process
        deadline = time.monotonic() + START_S
        while ask(address, "/ready") != 200:
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"not ready, exit code {process.returncode}: {command}")
            time.sleep(0.05)
        # Later commands look at a request. A conductor without a router answers 404.
        if ask(address, "/v1/chat/completions", QUESTION) not in (200, 404):
            sys.exit(f"no answer: {command}")

    def stop(self, addresses):
        """Stops servers with Ctrl-C."""
        for address in addresses:
            if address in self.servers:
                self.servers[address][1].send_signal(signal.SIGINT)
                self.wait([address])

    def wait(self, addresses):
        """Waits for servers to end. Each must end with 0."""
        for address in addresses:
            _, process = self.servers.pop(address)
            if process.wait(STOP_S):
                sys.exit(f"the server at {address} ended with {process.returncode}")

    def play(self):
        listed = [command for command in commands(self.page) if command.as_written]
        for number, (language, text) in enumerate(blocks(self.page)):
            if language == "python":
                self.example(text)
            for command in listed:
                if command.block == number:
                    self.run(command.text)
        self.stop(list(reversed(self.servers)))


def main():
    page, clone, work = map(Path, sys.argv[1:])
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    Session(page, clone, work).play()


if __name__ == "__main__":
    main()
