"""The good client during an attack. It sends one short request after another, each on a new connection.

It is a separate process, so that an attack's work does not delay its clock. Prints one JSON object: the seconds to the
first token of each answer, and the failures.
"""

import argparse
import json
import random
import socket
import sys
import time

PATIENCE_S = 30


def ask(port, body, key):
    """Returns the seconds from connecting to the first event. Fails unless the answer is complete."""
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as peer:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        head += f"authorization: Bearer {key}\r\n\r\n"
        peer.sendall(head.encode() + body)
        answer, first = b"", None
        while piece := peer.recv(1 << 16):
            answer += piece
            if first is None and b"data: " in answer:
                first = time.monotonic() - began
    if not answer.startswith(b"HTTP/1.1 200") or b"data: [DONE]" not in answer:
        raise OSError(answer[:200].decode(errors="replace"))
    return first


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--http", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--key", default="none")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--prompt", type=int, required=True, help="tokens per prompt")
    options = parser.parse_args()
    seconds, failures = [], []
    end = time.monotonic() + options.seconds
    while time.monotonic() < end:
        # Prompts are random, so that the prefix cache shortens no prefill.
        prompt = [random.randrange(1, 250) for _ in range(options.prompt)]
        body = json.dumps({"model": options.model, "prompt": prompt, "max_tokens": 2, "stream": True, "ignore_eos": True})
        try:
            seconds.append(ask(options.http, body.encode(), options.key))
        except OSError as problem:
            failures.append(repr(problem))
    json.dump({"seconds": seconds, "failures": failures}, sys.stdout)


if __name__ == "__main__":
    main()
