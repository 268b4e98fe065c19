"""Streams that are read concurrently. Their events are merged, so that answers can be compared."""

import concurrent.futures
import os
import signal
import time

import httpx
from harness import events, wait_for, whole_lines


class Streams:
    """Streams that are read concurrently, each on a separate thread. Chats go to their own path. `stopped` are process
    ids of workers. These workers stay stopped until `stop_in_the_middle`, so that no answer can end before that call.
    """

    def __init__(self, cluster, path, bodies, stopped=()):
        self.cluster, self.path = cluster, path
        signal_all(stopped, signal.SIGSTOP)
        give_way(stopped)
        self.seen = [0] * len(bodies)
        self.pool = concurrent.futures.ThreadPoolExecutor(len(bodies))
        self.answers = [self.pool.submit(self._read, index, body) for index, body in enumerate(bodies)]

    def _read(self, index, body):
        answer = {}
        # TLS verification is off, because reading the system's certificates takes longer than many answers.
        with httpx.Client(base_url=self.cluster.url, timeout=120, verify=False) as client:
            body = {"model": self.cluster.model, "stream": True, "stream_options": {"include_usage": True}} | body
            path = "/v1/chat/completions" if "messages" in body else self.path
            with client.stream("POST", path, json=body) as response:
                assert response.status_code == 200, response.read()
                for event in events(whole_lines(response)):
                    assert "error" not in event, event
                    merge(answer, event)
                    self.seen[index] = max((len(c["token_ids"]) for c in answer["choices"].values()), default=0)
        return answer

    def wait_for_tokens(self, count):
        """Waits until each stream has this many tokens or has ended."""
        wait_for(f"{count} tokens", lambda: all(s >= count or a.done() for s, a in zip(self.seen, self.answers)), every=0.002)

    def stop_in_the_middle(self, workers, begun, tokens=1):
        """Stops the workers, by their process ids, when `begun` answers have this many tokens. Until then, the workers
        only run for some milliseconds at a time, so that no answer ends even if this process is slow."""

        def stopped():
            signal_all(workers, signal.SIGSTOP)
            # Tokens that the workers sent before they were stopped may still arrive.
            enough = sum(seen >= tokens for seen in self.seen) >= begun
            if not enough:
                signal_all(workers, signal.SIGCONT)
                # Lets the workers run for a short time. This waits for no event.
                time.sleep(0.004)
                signal_all(workers, signal.SIGSTOP)
            return enough

        wait_for(f"{tokens} tokens of {begun} answers", stopped, every=0.005)

    def results(self):
        return [answer.result() for answer in self.answers]


def signal_all(processes, number):
    for pid in processes:
        os.kill(pid, number)


def give_way(processes):
    """Gives all threads of these processes the lowest priority, so that other processes run in time even on a loaded
    machine."""
    for pid in processes:
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread), 19)


def merge(answer, event):
    """Adds an event to a stream's merged answer. The merged answer does not depend on how the stream was divided into
    events."""
    choices = answer.setdefault("choices", {})
    if event.get("usage"):
        answer["usage"] = {k: v for k, v in event["usage"].items() if isinstance(v, int)}
    for choice in event.get("choices", ()):
        merged = choices.setdefault(choice["index"], {"text": "", "token_ids": [], "logprobs": [], "prompt": [], "ends": []})
        merged["text"] += choice.get("text") or ""
        merged["token_ids"] += choice.get("token_ids") or []
        if choice.get("finish_reason"):
            merged["ends"].append((choice["finish_reason"], choice.get("stop_reason")))
        merged["prompt"] += choice.get("prompt_logprobs") or []
        logprobs = choice.get("logprobs") or {}
        if content := logprobs.get("content"):
            merged["logprobs"] += [[token["token"], token["logprob"], token["top_logprobs"]] for token in content]
        elif logprobs:
            columns = [logprobs[k] for k in ("tokens", "token_logprobs", "top_logprobs", "text_offset") if logprobs.get(k)]
            merged["logprobs"] += [list(row) for row in zip(*columns)]
