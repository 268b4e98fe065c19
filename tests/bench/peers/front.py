"""A minimal HTTP server for an in-process pipeline. It takes prompts of token ids. For each step that gives a request
new tokens, it sends one event. The engine's own loop runs on the main thread.

A pipeline has `add(number, prompt, max_tokens)`, `step()`, which returns [(number, new tokens)], and `busy()`.
"""

import json
import os
import queue
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Request:
    def __init__(self, body, out):
        self.prompt, self.max_tokens = body["prompt"], body["max_tokens"]
        self.out, self.sent, self.ended = out, 0, threading.Event()

    def give(self, tokens):
        """Sends an event with new tokens. The bench counts tokens and ignores their text and ids."""
        self.sent += tokens
        choice = {"index": 0, "text": "x", "token_ids": [0] * tokens}
        self.write({"choices": [choice]})
        if self.sent >= self.max_tokens:
            usage = {"prompt_tokens": len(self.prompt), "completion_tokens": self.sent}
            self.write({"choices": [], "usage": usage})
            self.write("[DONE]")
            self.ended.set()

    def write(self, event):
        text = event if isinstance(event, str) else json.dumps(event)
        try:
            self.out.write(f"data: {text}\n\n".encode())
        except OSError:
            # The client has disconnected.
            pass


def serve(port, start):
    """Calls `start` and serves the pipeline that it returns on a port of loopback, until the process is killed."""
    # Libraries print to standard output, which the bench reads. Their output goes to the log instead.
    os.dup2(2, 1)
    pipeline = start()
    coming = queue.Queue()

    class Front(BaseHTTPRequestHandler):
        # Each event is sent at once. Nagle's algorithm would delay small events.
        disable_nagle_algorithm = True

        def do_GET(self):
            # Every GET is a readiness check.
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            request = Request(body, self.wfile)
            coming.put(request)
            request.ended.wait()

        def log_message(self, *_):
            pass

    class Server(ThreadingHTTPServer):
        # Connections wait in this queue while the pipeline uses all cores.
        request_queue_size = 128

    server = Server(("127.0.0.1", port), Front)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    running, number = {}, 0
    while True:
        # Waits for requests only if there is nothing to compute.
        while not pipeline.busy() or not coming.empty():
            request = coming.get()
            number += 1
            running[number] = request
            pipeline.add(number, request.prompt, request.max_tokens)
        for which, tokens in pipeline.step():
            if tokens:
                running[which].give(tokens)
                if running[which].ended.is_set():
                    del running[which]


def port_and(*names):
    """Returns the arguments of the command line: a port, then one argument per name."""
    if len(sys.argv) != 2 + len(names):
        sys.exit(f"usage: {sys.argv[0]} PORT {' '.join(names)}")
    return int(sys.argv[1]), *sys.argv[2:]
