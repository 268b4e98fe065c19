"""No policy of the scheduler changes an answer: the same bits from every mode, cold and warm, while others decode."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from harness import Server

# 150 tokens: nine pages of 16 and a part of a tenth.
PROMPT = [(i * 37 + 11) % 200 + 5 for i in range(150)]
CACHED = 144
REQUEST = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0.8, "seed": 7, "logprobs": 3, "ignore_eos": True}
MODES = [
    "",
    "--chunking=engine --max-prefill-chunk-size=7",
    "--chunking=engine --max-prefill-chunk-size=64",
    "--chunking=off",
    "--chunking=off --max-step-tokens=64",
    "--max-prefill-chunk-size=1",
    "--max-prefill-chunk-size=7 --prefill-sharing=first-come",
    "--max-prefill-chunk-size=64 --long-prefill-token-threshold=33",
    "--target-itl-ms=5",
    "--admission=optimistic",
]


def answers(cluster):
    """What the same prompt gives cold, warm, echoed, and warm again while others decode, and what those give."""

    def ask(**changes):
        answer = cluster.complete(**REQUEST | changes)
        choice, usage = answer["choices"][0], answer["usage"]
        return choice["text"], choice["logprobs"], usage["prompt_tokens_details"]["cached_tokens"]

    with ThreadPoolExecutor() as pool:
        others = [pool.submit(ask, prompt=[i + 9] * 20, max_tokens=80) for i in range(4)]
        got = [ask(), ask(), ask(echo=True), ask()]
        got += [other.result() for other in others]
    cluster.wait_until_idle()
    # Numbers as JSON spells them, to the last digit.
    return [answer[:2] for answer in got], [answer[2] for answer in got[:4]]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    cluster = Server("conductor", ["--no-prefix-cache"], tmp_path_factory.mktemp("logs")).wait_until_ready()
    try:
        got, cached = answers(cluster)
    finally:
        cluster.stop()
    assert cached == [0, 0, 0, 0]
    return got


@pytest.mark.parametrize("flags", MODES)
def test_no_policy_changes_an_answer(start, reference, flags):
    got, cached = answers(start(*flags.split()))
    assert got == reference
    # An echo needs what only computing gives.
    assert cached == [0, CACHED, 0, CACHED]


def test_a_preempted_request_gives_what_it_gives_undisturbed(start, reference):
    # Room for 17 pages of 16 KiB, for requests that come to hold up to 11 and four times 7.
    cluster = start("--admission=optimistic", "--no-prefix-cache", "--kv-cache-memory", 18 * 16 * 1024)
    assert cluster.metrics()["tutti_kv_pages_total"] == 17
    got, _ = answers(cluster)
    assert got == reference
    assert cluster.metrics()["tutti_worker_preemptions"] > 0
