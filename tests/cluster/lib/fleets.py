"""A stand-alone router before conductors: its settings in tests, and streams that faults must not disturb."""

import asyncio
import random
import signal

from harness import ANSWER_S, START_S, wait_for
from simulated import EOS, VOCAB, sampled, stream
from streams import give_way, signal_all

# Short intervals in the router's `fleet` settings make the tests fast.
QUICK = {"TUTTI_FLEET__POLL_MS": "100", "TUTTI_FLEET__RECOVERY_MS": "90000", "TUTTI_FLEET__KEEP_ALIVE_MS": "500"}
# Slow enough that streams are running when a fault happens.
PACE = {"TUTTI_SIM__FIXED_US": "8000"}


def remarks(router):
    return router.client.get("/ready").json().get("remarks", [])


def everyone_in(router):
    wait_for("every conductor in use", lambda: router.client.get("/ready").status_code == 200 and not remarks(router), START_S)


def long_requests(count):
    """Yields requests of all kinds that run for at least two seconds, with the expected answers."""
    rng = random.Random(11)
    for _ in range(count):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice((1, 16, 17, 200)))]
        seed, temperature, length = rng.randrange(2**63), rng.choice((0, 0.8)), rng.randint(200, 400)
        tokens = sampled(prompt, seed, temperature, length)
        body = {"prompt": prompt, "seed": seed, "temperature": temperature, "max_tokens": length}
        body |= {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
        if rng.random() < 0.5:
            yield body | {"ignore_eos": True}, (tokens, "length")
            continue
        # The output does not end in its first half, and has a stop token near the end.
        least = length // 2
        stops = EOS | {tokens[-5]}
        ends = [i for i, token in enumerate(tokens) if i >= least and token in stops]
        # Stop tokens are not sampled before min_tokens. `simulated.generate` does not model this, so such requests
        # ignore stop tokens.
        if any(token in stops for token in tokens[:least]):
            yield body | {"ignore_eos": True}, (tokens, "length")
        else:
            yield body | {"min_tokens": least, "stop_token_ids": sorted(stops)}, (tokens[: ends[0] + 1], "stop")


def undisturbed_by(router, workers, disturb, count=40):
    """Runs streams, calls `disturb` when they have some tokens, and checks that the answers are the expected ones.
    `workers` are the process ids of all workers. They are stopped until every stream is in flight, so that the first
    stream does not end before the fault, even if this process is slow."""
    bodies, expected = zip(*long_requests(count))
    give_way(workers)
    signal_all(workers, signal.SIGSTOP)

    async def reached(name, least):
        while (seen := await asyncio.to_thread(router.metrics)).get(name, 0) < least:
            await asyncio.sleep(0.01)
        return seen

    async def main():
        streams = [asyncio.create_task(stream(router.http_port, router.model, body)) for body in bodies]
        try:
            await reached("tutti_router_requests_in_flight", count)
        finally:
            signal_all(workers, signal.SIGCONT)
        seen = await reached("tutti_router_generated_tokens_total", 20 * count)
        assert seen["tutti_router_requests_in_flight"] == count, "some streams had ended before the fault"
        await asyncio.to_thread(disturb)
        return await asyncio.wait_for(asyncio.gather(*streams), ANSWER_S)

    wrong = [row for row in zip(bodies, asyncio.run(main()), expected) if row[1] != row[2]]
    assert not wrong, (len(wrong), wrong[0])
    assert router.metrics()["tutti_router_requests_in_flight"] == 0
