"""Workers that outlive a conductor that is killed, and join the next one with the same state directory."""

import asyncio
import os
import signal
import socket
import stat
import time

import pytest
from checkpoints import sparse
from fleets import PACE, QUICK, everyone_in, undisturbed_by
from harness import GOLDENS, REPO, Server, free_port, run_to_exit, wait_for
from simulated import sampled

# Workers that a test has stopped do not count as dead.
SIM = ("--no-router", "--device", "sim", "--heartbeat-timeout", 60)
QWEN3 = ("--no-router", "--model", GOLDENS / "seed0/qwen3", "--skip-tokenizer-init", "--threads", 1)
SHAPES = {
    "two": ("--workers", 2),
    "tp": ("--workers", 2, "--tp", 2, *QWEN3),
    "disaggregated": ("--topology", REPO / "deploy/topology/disaggregated.toml"),
}
PROMPT = [7] * 512


@pytest.fixture
def state(tmp_path):
    """The flag of a state directory, which does not exist yet."""
    return "--state-directory", tmp_path / "state"


def kill(conductor):
    conductor.signal(signal.SIGKILL)
    conductor.wait()


def router_before(start, conductor):
    router = start("--conductor", f"http://{conductor.cluster}", "--skip-tokenizer-init", name="router", env=QUICK)
    everyone_in(router)
    return router


def prefilled(conductor):
    """Returns the tokens that workers have prefilled, and those among them that were cached, since their start."""
    seen = conductor.metrics()
    return seen["tutti_worker_prefill_tokens"], seen["tutti_worker_cached_tokens"]


def cached(router, **body):
    usage = router.complete(prompt=PROMPT, max_tokens=2, **body)["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_streams_survive_a_killed_conductor_and_its_workers_go_on_with_the_next(start, state, shape, figure):
    computes = "--model" in shape
    flags = (*shape, *state) if computes else (*SIM, *shape, *state)
    first = start(*flags, env=PACE)
    router = router_before(start, first)
    directory, workers = state[1], first.workers_by_rank()
    assert len(workers) == 2
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    files = [path for path in directory.iterdir() if path.name in ("record.json", "lock", "workers.sock")]
    assert len(files) == 3 and all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)
    nexts = []

    def replace():
        kill(first)
        nexts.append(start(*flags, *first.cluster_flags, env=PACE))

    if computes:
        body = dict(prompt=[5, 6, 7], max_tokens=200, temperature=0, ignore_eos=True, return_token_ids=True)
        right = router.complete(**body)["choices"][0]["token_ids"]
        replace()
        assert router.complete(**body)["choices"][0]["token_ids"] == right
    else:
        undisturbed_by(router, [*workers.values()], replace)
    (second,) = nexts
    # No process has been started again.
    assert first.workers_by_rank() == workers
    assert second.workers() == [] and second.metrics()["tutti_workers_ready"] == len(workers)
    assert second.metrics().get("tutti_worker_restarts_total", 0) == 0
    second.wait_until_idle()
    if shape == SHAPES["two"]:
        tokens, hits = prefilled(second)
        figure(f"kill -9 of a conductor whose workers outlive it: {tokens:.0f} tokens prefilled in all, {hits:.0f} cached")
        assert hits >= 0.5 * (tokens - hits), "replays found few of their pages"
    # A worker that dies later is started again, as one of the conductor's own.
    os.kill(workers[1], signal.SIGKILL)
    wait_for("a new worker", lambda: len(second.workers()) >= 1)
    wait_for("both ready", lambda: second.metrics()["tutti_workers_ready"] == 2)
    assert second.says("not known, because the conductor before started the process")
    second.stop()
    wait_for("no process left", lambda: not first.processes() and not second.processes())


def test_prefixes_stay_cached_and_a_second_successor_is_refused(start, state, tmp_path):
    flags = (*SIM, "--workers", 1, *state)
    first = start(*flags)
    router = router_before(start, first)
    assert cached(router) == 0 and cached(router) > 0
    code, log = run_to_exit("conductor", [*flags, "--http=127.0.0.1:0", "--grpc=127.0.0.1:0"], tmp_path)
    assert code == 64 and f"belongs to the running conductor with pid {first.pid}" in log, log
    kill(first)
    # A request that comes while there is no conductor waits for the next one.
    asked = asyncio.run(ask_meanwhile(router, lambda: start(*flags, *first.cluster_flags)))
    assert asked["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert asked["choices"][0]["token_ids"] == sampled(PROMPT, 0, 0, 8)


async def ask_meanwhile(router, begin):
    """Returns the answer to a request that is sent before `begin` starts a conductor."""
    body = dict(prompt=PROMPT, max_tokens=8, temperature=0, ignore_eos=True, return_token_ids=True)
    asking = asyncio.create_task(asyncio.to_thread(router.complete, **body))
    waits = lambda: router.metrics()["tutti_router_requests_in_flight"] == 1
    await asyncio.to_thread(wait_for, "the request waits", waits)
    await asyncio.to_thread(begin)
    return await asking


def test_another_model_and_other_flags_end_the_workers_by_name(start, state):
    first = start(*SIM, "--workers", 1, *state)
    (worker,) = first.workers()
    kill(first)
    assert first.workers() == [worker]
    second = start(*SIM, "--workers", 1, "--max-step-tokens", 256, *state)
    assert second.says("max_step_tokens was 512, and is 256") and second.says("ending the workers of the conductor before")
    assert first.processes() == {} and len(second.workers()) == 1
    kill(second)
    third = start(*SIM, "--workers", 1, "--model", GOLDENS / "seed0/qwen3", "--skip-tokenizer-init", *state)
    assert third.says("seed0/qwen3") and third.says("model was ") and second.processes() == {}


def test_workers_without_a_successor_end_by_themselves(start, state):
    first = start(*SIM, "--workers", 2, "--successor-timeout", 2, *state)
    kill(first)
    first.wait_until_all_gone()
    assert first.says("no conductor has come for 2 s, so this worker ends", 2)


def test_a_worker_that_died_with_the_conductor_is_started_anew(start, state):
    first = start(*SIM, "--workers", 2, *state)
    workers = first.workers_by_rank()
    # The conductor is stopped, so that it starts no other worker.
    first.signal(signal.SIGSTOP)
    os.kill(workers[0], signal.SIGKILL)
    kill(first)
    second = start(*SIM, "--workers", 2, *state)
    assert [*first.workers_by_rank()] == [1] and [*second.workers_by_rank()] == [0]


def test_the_rest_of_a_group_that_has_lost_a_rank_is_started_anew_at_once(start, state):
    flags = (*SHAPES["tp"], *state)
    first = start(*flags)
    workers = first.workers_by_rank()
    # The conductor is stopped, so that it starts no other worker.
    first.signal(signal.SIGSTOP)
    os.kill(workers[1], signal.SIGKILL)
    kill(first)
    second = start(*flags)
    assert first.processes() == {} and len(second.workers()) == 2
    assert second.says("ending a worker whose group has lost a rank")
    # Neither rank has joined in vain.
    assert "worker process ended" not in second.log() and second.metrics().get("tutti_worker_restarts_total", 0) == 0


def test_a_port_in_use_leaves_the_workers_to_the_next_conductor(start, state, tmp_path):
    flags = (*SIM, "--workers", 1, *state)
    first = start(*flags)
    (worker,) = first.workers()
    kill(first)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = [f"--http=127.0.0.1:{other.getsockname()[1]}", "--grpc=127.0.0.1:0"]
        # Workers with this flag would hold something else, so that its conductor would end those of the first.
        code, log = run_to_exit("conductor", [*flags, "--max-step-tokens", 256, *taken], tmp_path)
    assert code == 64 and "http" in log and "ending the workers" not in log, log
    assert first.workers() == [worker]
    second = start(*flags)
    assert first.workers() == [worker] and second.workers() == []


def test_a_group_that_is_still_loading_meets_under_the_next_conductor(start, state, tmp_path):
    folder = tmp_path / "large"
    folder.mkdir()
    (folder / "config.json").write_text((GOLDENS / "seed0/qwen3/config.json").read_text())
    sparse(folder, layers=24, hidden=1024, intermediate=4096)
    flags = ("--workers", 2, "--tp", 2, "--no-router", "--model", folder, "--skip-tokenizer-init", "--threads", 1)
    flags = (*flags, "--kv-cache-memory", 64 << 20, *state)
    first = Server("conductor", flags, tmp_path)
    try:
        # They have met for sums, and read their weights. They meet again when they have them.
        first.says('what="data"', 2)
        kill(first)
        workers = first.workers_by_rank()
        assert len(workers) == 2 and 'what="plans"' not in first.log(), "the model loads too fast for this test"
        second = start(*flags)
        assert first.workers_by_rank() == workers and second.workers() == []
        first.says('what="plans"', 2)
        second.stop()
        first.wait_until_all_gone()
    finally:
        first.destroy()


@pytest.mark.parametrize("used", [False, True], ids=["idle", "used"])
def test_a_group_ends_at_once_with_its_conductor(start, state, used):
    conductor = start(*SHAPES["tp"], *state)
    if used:
        router_before(start, conductor).complete(prompt=[5, 6, 7], max_tokens=2)
    began = time.monotonic()
    conductor.stop()
    # A worker that does not leave is killed after five seconds.
    assert time.monotonic() - began < 4 and "killing a worker" not in conductor.log()


def test_without_a_state_directory_workers_die_with_their_conductor(start):
    first = start(*SIM, "--workers", 2)
    kill(first)
    first.wait_until_all_gone()


def test_a_directory_that_others_may_enter_is_refused(tmp_path):
    open_to_all = tmp_path / "open"
    open_to_all.mkdir(mode=0o755)
    flags = [*SIM, "--state-directory", open_to_all, "--http=127.0.0.1:0", "--grpc=127.0.0.1:0"]
    code, log = run_to_exit("conductor", flags, tmp_path)
    assert code == 64 and "has mode 755" in log and "0700" in log, log
    flags = [*SIM, "--state-directory", tmp_path / "new", "--worker-listen", "127.0.0.1:0"]
    code, log = run_to_exit("conductor", [*flags, "--http=127.0.0.1:0", f"--grpc=127.0.0.1:{free_port()}"], tmp_path)
    assert code == 64 and "worker_listen: has port 0" in log, log
