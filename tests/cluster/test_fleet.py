"""A stand-alone router with two conductors. Tests the router's choice of a conductor, and the loss of one conductor."""

import asyncio
import os
import signal

from fleets import PACE, QUICK, everyone_in, long_requests, remarks, undisturbed_by
from harness import free_port, wait_for
from simulated import sampled, stream
from streams import Streams, signal_all

# Workers that a test has stopped do not count as dead.
SIM = ("--no-router", "--workers", 2, "--device", "sim", "--heartbeat-timeout", 60)


def fleet(start, count=2):
    """Returns a router that is ready, and its conductors."""
    conductors = [start(*SIM, env=PACE) for _ in range(count)]
    flags = [part for conductor in conductors for part in ("--conductor", f"http://{conductor.cluster}")]
    router = start(*flags, name="router", env=QUICK)
    everyone_in(router)
    return router, *conductors


def served(conductor):
    """Returns the number of requests that a conductor has ended."""
    return conductor.metrics().get("tutti_requests_total", 0)


def test_a_shared_prefix_stays_with_one_and_the_rest_is_spread(start):
    router, *conductors = fleet(start)
    shared = [7] * 512
    for last in range(8):
        router.complete(prompt=[*shared, last], max_tokens=2)
    assert sorted(map(served, conductors)) == [0, 8]
    for kind in range(20):
        router.complete(prompt=[100 + kind] * 512, max_tokens=2)
    # The router's last poll of a conductor may still count a request that has since ended. So the requests need not
    # alternate between the conductors.
    assert all(6 <= count <= 22 for count in map(served, conductors)), [*map(served, conductors)]
    seen = router.metrics()
    assert seen["tutti_router_conductor_up"] == 2 and seen["tutti_router_conductor_picks_total"] == 28
    assert seen["tutti_router_prefix_hit_blocks_total"] == 7 * 32


def test_kill_9_of_a_whole_conductor_costs_no_stream_and_it_is_used_again(start, spawn, figure):
    router, first, second = fleet(start)

    def kill():
        first.signal(signal.SIGKILL)

    undisturbed_by(router, [*first.workers(), *second.workers()], kill)
    first.wait()
    first.wait_until_all_gone()
    seen = router.metrics()
    moved = seen.get("tutti_router_conductor_replays_total", 0), seen.get("tutti_router_conductor_retries_total", 0)
    figure(f"kill -9 of a conductor under 40 streams: {moved[0]:.0f} replayed, {moved[1]:.0f} retried, none lost")
    assert sum(moved) >= 10, router.explain(f"the killed one had no share: {seen}")
    second.wait_until_idle()
    wait_for("a remark about it", lambda: any(f"http://{first.cluster}: " in line for line in remarks(router)))
    assert router.client.get("/ready").status_code == 200 and router.metrics()["tutti_router_conductor_up"] == 1

    port = free_port()
    spawn("conductor", *SIM, "--http", f"127.0.0.1:{port}", "--grpc", first.grpc, *first.cluster_flags)
    everyone_in(router)
    before = router.metrics()["tutti_router_conductor_picks_total"], served(second)
    for kind in range(10):
        router.complete(prompt=[200 + kind] * 64, max_tokens=2)
    picks = router.metrics()["tutti_router_conductor_picks_total"] - before[0]
    assert picks == 10 and 2 <= served(second) - before[1] <= 8


def test_a_replay_is_the_same_in_every_bit_with_a_real_model(start):
    # The workers are stopped for as long as this process needs, which must not look like a death.
    conductors = [start("--no-router", "--workers", 1, "--heartbeat-timeout", 60) for _ in range(2)]
    router = start(*(part for c in conductors for part in ("--conductor", f"http://{c.cluster}")), name="router", env=QUICK)
    everyone_in(router)
    body = dict(prompt="Tutti is", n=2, seed=5, temperature=0.9, top_p=0.95, max_tokens=1900, min_tokens=1800, logprobs=3)
    body |= dict(presence_penalty=0.3, frequency_penalty=0.1, repetition_penalty=1.05, echo=True, stop=["\n\n\n", "zq"])
    body |= dict(return_token_ids=True)
    right = Streams(router, "/v1/completions", [body]).results()
    for conductor in conductors:
        conductor.wait_until_idle()
    workers = {pid: conductor for conductor in conductors for pid in conductor.workers()}
    streams = Streams(router, "/v1/completions", [body], stopped=workers)
    streams.stop_in_the_middle(workers, 1, tokens=50)
    # Only the conductor with requests in flight is killed, because the router may have sent the choices to either one.
    busy = next(c for c in conductors if c.metrics()["tutti_requests_in_flight"] > 0)
    busy.signal(signal.SIGKILL)
    busy.wait()
    signal_all((pid for pid, conductor in workers.items() if conductor is not busy), signal.SIGCONT)
    assert streams.results() == right
    assert router.metrics()["tutti_router_conductor_replays_total"] >= 1


def test_a_stopped_conductor_counts_as_dead_and_does_no_harm_when_it_continues(start):
    router, first, second = fleet(start)

    def stop():
        for pid in first.processes():
            os.kill(pid, signal.SIGSTOP)

    try:
        undisturbed_by(router, [*first.workers(), *second.workers()], stop, count=16)
        wait_for("a remark about it", lambda: any(first.cluster in line for line in remarks(router)))
    finally:
        for pid in first.processes():
            os.kill(pid, signal.SIGCONT)
    everyone_in(router)
    # The first conductor's requests are cancelled, because their streams moved to the second one.
    first.wait_until_idle()
    second.wait_until_idle()
    body, right = next(long_requests(1))
    assert asyncio.run(stream(router.http_port, router.model, body)) == right


def test_the_only_conductor_continues_its_streams_when_it_is_back(start, spawn):
    router, only = fleet(start, 1)

    def replace():
        only.signal(signal.SIGKILL)
        only.wait()
        spawn("conductor", *SIM, "--http", f"127.0.0.1:{free_port()}", "--grpc", only.grpc, *only.cluster_flags)

    undisturbed_by(router, only.workers(), replace, count=8)


def test_conductors_behind_a_name(start):
    conductor = start(*SIM)
    port = conductor.cluster.rpartition(":")[2]
    router = start("--discover", f"localhost:{port}", name="router", env=QUICK)
    tokens = router.complete(prompt=[1, 2], max_tokens=5, temperature=0, ignore_eos=True, return_token_ids=True)
    assert tokens["choices"][0]["token_ids"] == sampled([1, 2], 0, 0, 5)
    # On this machine, the name may have further addresses where no conductor listens. The router sends no requests
    # there, and reports each such address as a remark.
    assert all(line.startswith("http://[::1]:") for line in remarks(router))


def test_a_failed_lookup_is_reported(start):
    router = start("--discover", "nowhere.invalid:50051", "--insecure-plaintext", name="router", ready=False)
    named = lambda: "nowhere.invalid" in router.client.get("/ready").text
    wait_for("the name in /ready", lambda: "listening" in router.log() and named())
    assert router.client.get("/health").status_code == 200
