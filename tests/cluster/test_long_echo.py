"""An echo of 12,000 tokens with logprobs. Tests that memory stays within the announced maximum, and that other requests
decode in every step."""

import json
import pathlib
import re
import threading

import pytest
from harness import ANSWER_S, cpu_paths

PROMPT, VOCABULARY, DECODERS, TOP = 12_000, 151_936, 3, 5
PAGE_TOKENS, BUDGET = 16, 512
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 16_384,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
MIB = 1 << 20


def memory(pid, name):
    """Returns the value of a line in /proc/PID/status, in bytes."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) * 1024


def begin_peak(pid):
    pathlib.Path(f"/proc/{pid}/clear_refs").write_text("5")
    return memory(pid, "VmRSS")


def memory_said(cluster):
    """Returns {kind: bytes}: the maximum memory that the worker announces in its metrics."""
    lines = cluster.client.get("/metrics").text
    return {kind: int(size) for kind, size in re.findall(r'tutti_worker_memory_bytes\{.*kind="(\w+)".*\} (\d+)', lines)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("wide")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


def test_a_long_echo_takes_bounded_memory_and_delays_no_decode(start, checkpoint, figure, tmp_path):
    trace = tmp_path / "steps"
    model = ["--model", checkpoint, "--load-format", "dummy", "--skip-tokenizer-init", "--max-model-len", 12_288]
    cluster = start(*model, "--max-step-tokens", BUDGET, "--trace-steps", trace, "--no-prefix-cache")
    cluster.complete(prompt=[1, 2, 3], max_tokens=1)
    [worker] = cluster.workers()
    said = memory_said(cluster)
    before = {pid: begin_peak(pid) for pid in (worker, cluster.pid)}

    # The decoders run until the echo is answered.
    begun, enough = [threading.Event() for _ in range(DECODERS)], threading.Event()

    def decode(number):
        body = {"prompt": [number], "max_tokens": 12_000, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        for _ in cluster.stream("/v1/completions", **body):
            begun[number].set()
            if enough.is_set():
                return

    threads = [threading.Thread(target=decode, args=(number,)) for number in range(DECODERS)]
    for thread in threads:
        thread.start()
    try:
        assert all(event.wait(ANSWER_S) for event in begun)
        prompt = [(i * 7919 + 13) % VOCABULARY for i in range(PROMPT)]
        answer = cluster.complete(prompt=prompt, max_tokens=1, echo=True, logprobs=TOP, temperature=0, return_token_ids=True)
        peak = {pid: memory(pid, "VmHWM") for pid in before}
    finally:
        enough.set()
        for thread in threads:
            thread.join()
    cluster.wait_until_idle()
    cluster.stop()

    # The answer is complete: it has a logprob for every token except the first.
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == PROMPT + 1
    assert logprobs["tokens"][:PROMPT] == [f"token_id:{token}" for token in prompt]
    assert all(-100 < logprob < 0 for logprob in logprobs["token_logprobs"][1:])
    assert all(TOP <= len(top) <= TOP + 1 for top in logprobs["top_logprobs"][1:])

    check_steps(trace)

    taken = {pid: peak[pid] - before[pid] for pid in before}
    pages = (PROMPT // PAGE_TOKENS + 1) * said["kv"] // steps_of(trace)[0]["kv_pages"][1]
    figure(
        f"an echo of {PROMPT} tokens over a vocabulary of {VOCABULARY}: the worker took {taken[worker] / MIB:.1f} MiB, "
        f"said {said['step'] / MIB:.1f} MiB and {pages / MIB:.1f} MiB of KV pages; the conductor {taken[cluster.pid] / MIB:.1f} MiB"
    )
    assert 0 < said["step"] and 0 < said["kv"]
    marks, rounded = corrections()
    assert said["weights"] - 2 * weights() - screen() - marks in rounded
    assert taken[worker] <= said["step"] + pages
    # A worker that held all logits at once would exceed the limit above: they take over 50 times as many bytes.
    all_logits = PROMPT * VOCABULARY * 4
    assert (said["step"] + pages) * 50 < all_logits
    # Conductor and router hold the answer, which takes some hundred bytes per token and alternative.
    assert taken[cluster.pid] < PROMPT * (TOP + 2) * 1024


def steps_of(trace):
    return [json.loads(line) for line in trace.with_name("steps.rank0").read_text().splitlines()[1:]]


def check_steps(trace):
    """Checks that every step from the echo's first row to its last one has a row of every decoder and a chunk of the
    echo. """
    steps = steps_of(trace)
    assert [step["step"] for step in steps] == list(range(len(steps)))
    ends = {row["request"]: row["range"][1] for step in steps for row in step["rows"] if "prefill" in row["walk"]}
    [echo] = [request for request, end in ends.items() if end == PROMPT]
    during = [step for step in steps if any(row["request"] == echo for row in step["rows"])]
    assert [step["step"] for step in during] == list(range(during[0]["step"], during[-1]["step"] + 1))
    computed = 0
    decoders = {row["request"] for row in during[0]["rows"]} - {echo}
    assert len(decoders) == DECODERS
    for step in during:
        [own] = [row for row in step["rows"] if row["request"] == echo]
        others = [row for row in step["rows"] if row["request"] != echo]
        assert {row["request"] for row in others} == decoders
        assert all(row["terminal"] and row["range"][1] - row["range"][0] == 1 for row in others)
        assert own["range"][0] == computed and step["tokens"] <= BUDGET
        computed = own["range"][1]
        assert own["terminal"] == (computed == PROMPT)
    assert computed == PROMPT
    # The echo has as few chunks as possible: each step's budget without the decoders' rows, cut at a page boundary.
    chunk = (BUDGET - DECODERS) // PAGE_TOKENS * PAGE_TOKENS
    assert len(during) == -(-PROMPT // chunk)


def weights():
    """Returns the number of elements in the model's weights: embedding, one layer, and norms."""
    hidden, mlp, head = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
    layer = 4 * hidden * head + 3 * hidden * mlp + 2 * hidden + 2 * head
    return VOCABULARY * hidden + layer + hidden


def screen():
    """Returns the bytes of the LM head's int8 copy, with which a CPU finds greedy tokens faster. Per sixteen outputs
    these are sixteen scales, one byte per weight, and two norms, which are stored twice: packed and as numbers."""
    return VOCABULARY // 16 * (16 * 4 + 16 * CONFIG["hidden_size"] + 2 * 2 * 4)


def corrections():
    """Returns the bytes of the marks of rounded weights, and the possible bytes of the corrections for these weights.
    The embedding is also the LM head. On paths without bf16 dot products, the LM head's products round some weights.
    The marks show which weights are rounded, and each rounded weight has a correction of two bytes."""
    if "avx512-bf16" in cpu_paths():
        return 0, range(1)
    hidden = CONFIG["hidden_size"]
    return VOCABULARY * 8 * (1 + -(-hidden // 64)), range(2, VOCABULARY * hidden // 4, 2)
