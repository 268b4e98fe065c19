"""Fair shares of API keys. Tests that a flood of one key delays another key only by its share, and that many choices of
one prompt compute the prompt once."""

import concurrent.futures

import httpx
import pytest
from fair_shares import FLOOD, ONE, PATH, choices, expected_prefill, key_file, keyed
from harness import free_port, wait_for

FLOODED, RUNNING = 60, 4


@pytest.mark.parametrize("n", [16, 64, 128])
def test_choices_compute_their_prompt_once_and_keep_their_tokens(shared, n):
    sim = ("--workers", 1, "--device", "sim")
    cluster, uncached = shared(*sim), shared(*sim, "--no-prefix-cache")
    figures, answers = choices(cluster, n, 1000, 8, n)
    assert figures["prefill_tokens"] == expected_prefill(n, 1000)
    # Without the prefix cache, each choice computes the whole prompt. The tokens are the same.
    whole, same = choices(uncached, n, 1000, 8, n)
    assert (whole["prefill_tokens"], same) == (n * 1000, answers)


def test_a_flood_of_one_key_delays_another_by_its_share(start, tmp_path):
    flags = ("--workers", 1, "--device", "sim", "--max-running-requests", RUNNING, "--no-prefix-cache")
    cluster = start(*flags, "--api-key-file", key_file(tmp_path))
    body = {"prompt": [1] * 100, "max_tokens": 60, "ignore_eos": True}
    ended = []

    def ask(key):
        with httpx.Client(base_url=cluster.url, timeout=300, verify=False) as client:
            response = client.post(PATH, json=body, headers=keyed(key))
            assert response.status_code == 200, response.text
            ended.append(key)

    with concurrent.futures.ThreadPoolExecutor(FLOODED) as pool:
        flood = [pool.submit(ask, FLOOD) for _ in range(FLOODED)]
        waits = lambda: cluster.metrics().get("tutti_requests_waiting", 0) >= FLOODED // 2
        wait_for("a queue of the flood", waits)
        before = len(ended)
        # The other key sends two requests, one after the other, while the flood's requests wait.
        ask(ONE)
        ask(ONE)
        beside = len(ended) - before - 2
        for answer in flood:
            answer.result()
    # Each of the two requests waits at most until one running request ends, and then runs with three others.
    assert beside <= 6 * RUNNING, f"{beside} of the flood ended first: {ended}"
    assert len(ended) == FLOODED + 2


def test_a_flood_leaves_room_and_a_key_pays_for_what_it_may_use(start, tmp_path):
    limits = "concurrent=8", "tokens-per-minute=1000", "most-urgent=0"
    operations = f"127.0.0.1:{free_port()}"
    keys = key_file(tmp_path, *limits)
    cluster = start("--workers", 1, "--device", "sim", "--api-key-file", keys, "--operations", operations)

    def post(path, **body):
        return cluster.client.post(path, json=body, headers=keyed(FLOOD))

    ask = lambda **body: post(PATH, **({"prompt": [1] * 10, "max_tokens": 4} | body))
    assert ask(n=9).json()["error"]["param"] == "n"
    assert ask(priority=-1).json()["error"]["param"] == "priority"
    answer = ask(n=8, max_tokens=50, ignore_eos=True)
    assert (answer.status_code, answer.json()["usage"]["total_tokens"]) == (200, 410)
    # A request for more tokens than a key's minute allows is accepted only while the whole allowance is unused. The key
    # has used some of it, so the router asks the client to retry later.
    refused = ask(n=8, max_tokens=200)
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) <= 60, refused.text
    assert ask(ignore_eos=True).status_code == 200
    # Tokens of other routes count as well.
    counted = post("/tokenize", prompt="one two three " * 40)
    assert counted.status_code == 200
    used = f'tutti_router_key_tokens_total{{key="flood"}} {410 + 14 + counted.json()["count"]}'
    assert used in httpx.get(f"http://{operations}/metrics").text
