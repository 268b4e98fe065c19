"""The conditions under which a model's answers are compared with the reference. Each condition proves that it occurred:
by the step trace, by the number of cached tokens, or by metrics."""

import dataclasses
import json
import os
import pathlib
import random
import signal

import numpy as np
from families_model import OTHERS, PAGE_TOKENS, at_once, cached, finish, one_by_one, send
from golden import LENGTHS
from harness import Server, run_to_exit, wait_for
from media_chat import SPECIAL
from padding import SHAPES
from streams import signal_all
from topologies import DISAGGREGATED, all_accepted, handovers

POISONED = "memory is filled with NaN before a request gets it"
WHOLE = ("--max-step-tokens", 2048, "--no-prefix-cache")
# Numbers of pages of PAGE_TOKENS tokens and of requests. The pages are enough for the longest request of the reference,
# but not for all running requests as they grow.
SMALL_POOL, RUNNING = 36, 6
# Number of output tokens of the requests whose worker dies, and of answers that must have begun before it dies.
LONG_OUTPUT, BEGUN = 3500, 2
# Numbers of streams and of their output tokens while the encoders' worker dies.
STREAMS, STREAM_OUTPUT = 24, 60
# The walks of a thinker. Steps of encoders have others.
THINKER = ("prefill_text", "thinker_decode")
# Number of tries. On a loaded machine, a death or a preemption may come too late.
ATTEMPTS = 8


@dataclasses.dataclass
class Cell:
    """Result of one model under one condition: the greatest deviation, whether bits are the same, and counts that prove
    the condition."""

    deviation: float
    same_bits: bool
    proof: dict


class Run:
    """The runs of one model under all conditions."""

    def __init__(self, model, directory):
        self.model, self.directory, self.count = model, pathlib.Path(directory), 0
        self.poisoned = True
        self.reference = {}

    def cluster(self, *flags):
        """Returns a cluster that serves the model and traces its steps. When it ends, it must leave no process."""
        self.count += 1
        return Cluster(self, self.directory / f"steps{self.count}", flags)

    def cell(self, answers, proof, reference=None):
        reference = reference or self.reference
        same = all(answer.equals(reference[name]) for name, answer in answers.items())
        return Cell(self.model.deviation(answers), same, proof)

    def all(self):
        return self.model.scored() | self.model.others()


class Cluster:
    def __init__(self, run, trace, flags):
        self.run, self.trace = run, trace
        common = (*run.model.serve(run.directory), "--trace-steps", trace)
        self.server = Server("conductor", [*common, *flags], run.directory)

    def __enter__(self):
        try:
            return self.server.wait_until_ready()
        except BaseException:
            self.server.destroy()
            raise

    def __exit__(self, kind, *_):
        if kind:
            return self.server.destroy()
        self.server.wait_until_idle()
        self.run.poisoned &= POISONED in self.server.log()
        self.server.stop()

    def steps(self, rank=0):
        """Returns the steps of a rank's thinker. The cluster must have stopped."""
        of_thinker = lambda step: all(row["walk"] in THINKER for row in step["rows"])
        return [step for step in self.all_steps(rank) if of_thinker(step)]

    def all_steps(self, rank):
        lines = self.trace.with_name(f"{self.trace.name}.rank{rank}").read_text().splitlines()
        return [step for step in map(json.loads, lines) if "rows" in step]


def chunks(steps):
    """Returns the lengths of all prefill rows."""
    return [end - begin for step in steps for row in step["rows"] if "prefill" in row["walk"] for begin, end in [row["range"]]]


def mixed(steps):
    """Returns the number of steps with a prefill and another request."""
    return sum(any("prefill" in row["walk"] for row in step["rows"]) and len(step["rows"]) > 1 for step in steps)


def whole(run):
    """Whole prompts, one request after another. The bits of all other conditions are compared with these answers. This
    condition compares the answers with a second run of the same requests."""
    requests = run.all() | run.model.prefixes()
    cluster = run.cluster("--workers", 1, *WHOLE)
    with cluster as server:
        run.reference = one_by_one(server, requests)
        again = one_by_one(server, run.model.scored())
    steps = cluster.steps()
    longest = max(chunks(steps))
    assert longest == LENGTHS[-1] and mixed(steps) == 0, (longest, mixed(steps))
    cell = run.cell(run.reference, {"longest_chunk": longest})
    return dataclasses.replace(cell, same_bits=run.cell(again, {}).same_bits)


def beside_others(run):
    cluster = run.cluster("--workers", 1, *WHOLE)
    with cluster as server:
        answers = at_once(server, run.all())
    count = mixed(cluster.steps())
    assert count > 0, "no prefill shared a step"
    return run.cell(answers, {"mixed_steps": count})


def single_tokens(run):
    cluster = run.cluster("--workers", 1, "--max-prefill-chunk-size", 1, "--no-prefix-cache")
    with cluster as server:
        answers = at_once(server, run.all())
    lengths = chunks(cluster.steps())
    assert set(lengths) == {1} and len(lengths) >= sum(LENGTHS)
    return run.cell(answers, {"chunks": len(lengths)})


def random_slicings(run):
    rng, cells, seen = random.Random(f"{run.model.seed}/{run.model.name}/cuts"), [], set()
    for _ in range(3):
        step = rng.randint(20, 200)
        chunk = rng.randint(3, step)
        flags = ["--max-step-tokens", step, "--max-prefill-chunk-size", chunk]
        flags += ["--long-prefill-token-threshold", rng.randint(2, chunk)]
        flags += ["--prefill-sharing", rng.choice(("shortest-first", "fair", "first-come")), "--no-prefix-cache"]
        cluster = run.cluster("--workers", 1, *flags)
        with cluster as server:
            cells.append(run.cell(at_once(server, run.all()), {}))
        lengths = chunks(cluster.steps())
        assert max(lengths) <= chunk
        seen |= set(lengths)
    assert len(seen) > 10, "the slices are all alike"
    return merge(cells, {"lengths_of_chunks": len(seen)})


def merge(cells, proof):
    return Cell(max(cell.deviation for cell in cells), all(cell.same_bits for cell in cells), proof)


def ranks(run, *flags):
    """Two ranks. Sums over ranks are rounded differently, so the bits are compared with a run on the same ranks that
    gets one request at a time."""
    cluster = run.cluster("--workers", 2, "--tp", 2, *flags, "--max-step-tokens", 64, "--no-prefix-cache")
    with cluster as server:
        requests = run.all()
        alone = one_by_one(server, requests)
        answers = at_once(server, requests)
    count = mixed(cluster.steps())
    assert count > 0, "no prefill shared a step"
    return run.cell(alone | answers, {"mixed_steps": count}, alone)


def tensor_parallel(run):
    return ranks(run)


def expert_parallel(run):
    if run.model.has_experts:
        return ranks(run, "--ep")
    flags = ("--workers", 2, "--tp", 2, "--ep", *run.model.serve(run.directory))
    code, log = run_to_exit("conductor", [*flags, "--http=127.0.0.1:0", "--grpc=127.0.0.1:0"], run.directory)
    assert code == 64 and "experts" in log, f"a model without experts is served with --ep: {code}, {log}"
    return None


def resumed(steps, last):
    """Returns the positions at which preempted requests continued. Considers only the `last` requests that arrived
    last."""
    ends, found = {}, {}
    for step in steps:
        for row in step["rows"]:
            begin, end = row["range"]
            if begin < ends.get(row["request"], 0):
                found.setdefault(row["request"], []).append(begin)
            ends[row["request"]] = end
    arrived = sorted(ends)[-last:]
    return [begin for request, begins in found.items() if request in arrived for begin in begins]


def preempted(run, *flags):
    """Requests whose output needs more pages than a small pool has. The requests of the reference come last, so that
    these requests are preempted."""
    pages = -(-SMALL_POOL * PAGE_TOKENS // run.model.page_tokens)
    if pages * run.model.page_bytes < run.model.slot_bytes:
        return None  # the memory of one slot more or less is a larger pool than this one
    memory = (1 + 2 * RUNNING) * run.model.slot_bytes + (1 + pages) * run.model.page_bytes
    small = ("--admission", "optimistic", "--max-running-requests", RUNNING, "--kv-cache-memory", memory)
    cells = []
    for _ in range(ATTEMPTS):
        cluster = run.cluster("--workers", 1, *small, *flags)
        with cluster as server:
            others, last = run.model.others(), run.model.plain()
            before = send(server, others)
            all_accepted(server, list(others.values()), run.model.length)
            answers = at_once(server, last)
            answers |= finish(others, before)
            preemptions = server.metrics()["tutti_worker_preemptions"]
        cells.append(run.cell(answers, {}))
        positions = resumed(cluster.steps(), len(last))
        if "--no-prefix-cache" in flags:
            assert not any(positions), f"resumed at {positions} without a cache"
        if preemptions > 0 and (any(positions) or positions and "--no-prefix-cache" in flags):
            return merge(cells, {"preemptions": int(preemptions), "resumed_at": sorted(set(positions))})
    raise AssertionError(f"{preemptions} preemptions, requests of the reference resumed at {positions}")


def preempted_to_snapshot(run):
    return preempted(run)


def preempted_to_nothing(run):
    return preempted(run, "--no-prefix-cache")


def prefixes(run):
    """Prompts that share a prefix with a cached prompt and diverge from it after each of its blocks. In the first
    round, the cached prompt grows by one block per request. In the second round, the whole prompt is cached. Between
    two prompts, another request uses the slot and the pages that the earlier prompt has freed."""
    answers, hits, others = [], [], list(run.model.others().values())
    with run.cluster("--workers", 1) as server:
        for turn in range(2):
            for index, (name, body) in enumerate(run.model.prefixes().items()):
                answer, hit = cached(server, body)
                assert hit == (index + turn) * run.model.page_tokens, f"{name}: {hit} cached tokens"
                answers.append((name, answer))
                hits.append(hit)
                another = others[index % OTHERS]
                server.complete(**another | dict(prompt=[turn, index, *another["prompt"]], max_tokens=2))
        name, body = f"t{LENGTHS[-1]}", run.model.plain()[f"t{LENGTHS[-1]}"]
        answer, hit = cached(server, body)
        answers.append((name, answer))
        assert hit == LENGTHS[-1] // run.model.page_tokens * run.model.page_tokens
        boundaries = len(set(hits) - {0})
        answers += chats_behind_prefixes(server, run)
    return merge([run.cell({name: answer}, {}) for name, answer in answers], {"boundaries": boundaries})


def chats_behind_prefixes(server, run):
    """Sends each chat when nothing of it is cached, then its text with other media, then the chat again. Returns the
    answers. Other media are no hit, and the same media are."""
    others, answers = run.model.others(), []
    for name, body in run.model.chats().items():
        other = f"other {name}"
        asked = [(name, body), (other, others[other]), (name, body)]
        found = [cached(server, body) for _, body in asked]
        first = int(np.argmax(run.model.golden[f"{name}.input_ids"] >= min(SPECIAL)))
        hits, whole = [hit for _, hit in found], run.model.length(body) // run.model.page_tokens * run.model.page_tokens
        assert hits[1] <= first and hits[2] == whole, f"{name}: {hits} cached tokens, media begin at {first}"
        answers += [(name, answer) for (name, _), (answer, _) in zip(asked, found)]
    return answers


def separate_encoders(run, *walks):
    """Returns the path of a topology whose encoders have a worker of their own, the first. The thinker has one worker,
    or one for each of these walks."""
    path = run.directory / f"apart{len(walks)}.toml"
    groups = [f'nodes = ["thinker"]\nwalks = ["{walk}"]\n' for walk in walks] or ['nodes = ["thinker"]\n']
    groups = [f"nodes = {json.dumps(run.model.encoders)}\n", *groups]
    path.write_text("\n".join(f'[[group]]\nname = "group{at}"\n{group}' for at, group in enumerate(groups)))
    return path


def encoders_apart(run):
    """Encoders on a worker of their own."""
    if not run.model.takes_media:
        return None
    cluster = run.cluster("--topology", separate_encoders(run), "--max-step-tokens", 64)
    with cluster as server:
        answers = at_once(server, run.all())
    walks = [{row["walk"] for step in cluster.all_steps(rank) for row in step["rows"]} for rank in range(2)]
    assert walks[0] and not walks[0] & set(THINKER) and walks[1] == set(THINKER), walks
    encoded = sum(len(step["rows"]) for step in cluster.all_steps(0))
    return run.cell(answers, {"encoded": encoded})


def encoders_killed(run):
    """The encoders' worker is killed under many streams, some of which have begun while others wait for it."""
    if not run.model.takes_media:
        return None
    chats = run.model.chats(STREAM_OUTPUT)
    names = {f"other stream {at}": list(chats)[at % len(chats)] for at in range(STREAMS)}
    requests = {stream: chats[name] for stream, name in names.items()}
    expected, cells = {stream: run.reference[name] for stream, name in names.items()}, []
    kept = ("--no-prefix-cache", "--encoder-cache-memory", 0)
    with run.cluster("--topology", separate_encoders(run), "--heartbeat-timeout", 20, *kept) as server:
        for turn in range(ATTEMPTS):
            pid, streams = server.workers_by_rank()[0], send(server, requests)
            wait_for("some that have begun", lambda: sum(seen > 0 for seen in streams.seen) >= BEGUN, every=0.002)
            # A stopped worker encodes nothing more, and counts as alive for as long as all need to be accepted.
            os.kill(pid, signal.SIGSTOP)
            all_accepted(server, list(requests.values()) * (1 + turn), run.model.length)
            waiting = streams.seen.count(0)
            os.kill(pid, signal.SIGKILL)
            cells.append(run.cell(finish(requests, streams), {}, expected))
            wait_for("a replacement", lambda: server.workers_by_rank().get(0, pid) != pid and server.metrics()["tutti_workers_ready"] == 2)
            if waiting:
                return merge(cells, {"streams": STREAMS, "waiting": waiting})
    raise AssertionError(f"in {ATTEMPTS} attempts, no stream waited for the encoders")


def disaggregated(run):
    topology = separate_encoders(run, *THINKER) if run.model.takes_media else DISAGGREGATED
    with run.cluster("--topology", topology, "--max-step-tokens", 64) as server:
        requests = run.all()
        answers = at_once(server, requests)
        count = int(handovers(server))
    assert count == len(requests), f"{count} hand-overs"
    return run.cell(answers, {"hand_overs": count})


def padded(run):
    shapes = ("--chunk-shapes", ",".join(map(str, SHAPES)))
    cluster = run.cluster("--workers", 1, "--max-step-tokens", 64, *shapes)
    with cluster as server:
        answers = at_once(server, run.all())
    steps = cluster.steps()
    padding = sum(step["padding_tokens"] for step in steps)
    assert padding > 0 and {step["tokens"] + step["padding_tokens"] for step in steps} <= set(SHAPES)
    return run.cell(answers, {"padding_tokens": padding})


def replayed(run):
    """Both workers are killed in the middle of outputs, again and again, until there have been as many replays as
    requests."""
    # The heartbeat timeout is long, so that a stopped worker does not count as dead.
    with run.cluster("--workers", 2, "--max-replays", 4, "--heartbeat-timeout", 60) as server:
        requests = run.model.plain(LONG_OUTPUT)
        undisturbed, cells, replays = at_once(server, requests), [], 0
        for _ in range(ATTEMPTS):
            # All requests begin at the same time, so that none ends before another begins.
            victims, known = server.workers(), list(requests.values()) * (2 + len(cells))
            signal_all(victims, signal.SIGSTOP)
            streams = send(server, requests)
            all_accepted(server, known, run.model.length)
            signal_all(victims, signal.SIGCONT)
            streams.stop_in_the_middle(victims, BEGUN)
            signal_all(victims, signal.SIGKILL)
            cells.append(run.cell(finish(requests, streams), {}, undisturbed))
            wait_for("replacements", lambda: not set(victims) & set(server.workers()) and server.metrics()["tutti_workers_ready"] == 2)
            replays = int(server.metrics().get("tutti_request_replays_total", 0))
            if replays >= len(requests):
                return merge([run.cell(undisturbed, {}), *cells], {"replays": replays})
    raise AssertionError(f"{replays} replays in {ATTEMPTS} attempts")


# The conditions by their names in the JSON. The bits of all conditions are compared with those of the first one.
CONDITIONS = {
    "whole": whole,
    "mixed": beside_others,
    "single": single_tokens,
    "random": random_slicings,
    "tp2": tensor_parallel,
    "ep2": expert_parallel,
    "snapshot": preempted_to_snapshot,
    "nothing": preempted_to_nothing,
    "prefixes": prefixes,
    "disaggregated": disaggregated,
    "apart": encoders_apart,
    "killed": encoders_killed,
    "padded": padded,
    "replayed": replayed,
}
