"""Topology files. Tests that valid ones are served, and that invalid ones are refused with an error that names the
fault. """

import re

import httpx
import media_model
import pytest
from harness import GOLDENS, run_to_exit, wait_for
from topologies import TOPOLOGIES

SIM = ("--device", "sim")
GROUP = "[[group]]\nname = 'g'\n"


def groups(cluster):
    """Returns {role: number of groups that accept requests}, from /metrics."""
    text = cluster.client.get("/metrics").text
    counts = re.findall(r'^tutti_groups_ready\{role="(\w+)"\} (\d+)', text, re.M)
    return {role: int(count) for role, count in counts if count != "0"}


@pytest.mark.parametrize(
    "name, workers, expected",
    [
        ("all-in-one", 2, {"whole": 2}),
        ("disaggregated", 2, {"prefill": 1, "decode": 1}),
        ("two-prefill", 3, {"prefill": 2, "decode": 1}),
        ("tp2-to-tp1", 3, {"prefill": 1, "decode": 1}),
        ("tp2-disaggregated", 4, {"prefill": 1, "decode": 1}),
        ("encoders-disaggregated", 3, {"encode": 1, "whole": 2}),
        ("encoders-prefill-disaggregated", 3, {"encode": 1, "prefill": 1, "decode": 1}),
    ],
)
def test_each_example_serves(start, tmp_path, name, workers, expected):
    model = media_model.write(tmp_path / "checkpoint") if "encode" in expected else ()
    cluster = start("--topology", TOPOLOGIES / f"{name}.toml", *SIM, *model)
    assert len(cluster.workers()) == workers and groups(cluster) == expected
    alone = start("--workers", 1, *SIM, *model)
    ask = dict(prompt=[1, 2, 3], max_tokens=12, ignore_eos=True, temperature=1, seed=5, return_token_ids=True)
    assert cluster.complete(**ask)["choices"] == alone.complete(**ask)["choices"]
    cluster.wait_until_idle()


def test_every_example_is_tried():
    # tests/cluster/lib/hosts.py starts the topology whose workers join by hand.
    tried = ["all-in-one", "disaggregated", "encoders-disaggregated", "encoders-prefill-disaggregated", "tp2-disaggregated", "tp2-to-tp1", "two-prefill", "two-prefill-by-hand"]
    assert sorted(path.stem for path in TOPOLOGIES.iterdir()) == tried


def refused(tmp_path, text, ending=".toml", *more):
    path = tmp_path / f"topology{ending}"
    path.write_text(text)
    arguments = ("--topology", path, *SIM, *more, "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0")
    code, log = run_to_exit("conductor", arguments, tmp_path)
    assert code == 64, log
    return log


@pytest.mark.parametrize(
    "text, words",
    [
        (GROUP + "wlaks = ['prefill_text']", "wlaks"),
        (GROUP + "ranks = 3\ntp = 2", 'group "g": ranks: is 3, which tp 2 does not divide'),
        (GROUP + "walks = ['prefill_txt']", "walks: the model has no walk"),
        (GROUP + "nodes = ['talker']", "nodes: the model has no node"),
        (GROUP + "walks = ['prefill_text']", "no other group runs only thinker_decode"),
        (GROUP + "walks = ['thinker_step']", "only batches others"),
    ],
)
def test_an_invalid_topology_is_refused_at_start(tmp_path, text, words):
    log = refused(tmp_path, text)
    assert words in log, log


def test_yaml_is_read_and_refused_like_toml(tmp_path):
    assert "wlaks" in refused(tmp_path, "group:\n- name: g\n  wlaks: [prefill_text]\n", ".yaml")


def test_a_file_and_workers_contradict_each_other(tmp_path):
    log = refused(tmp_path, GROUP, ".toml", "--workers", 2)
    assert "workers: is for the topology file to say" in log, log


def test_a_group_may_join_by_hand(start, spawn, tmp_path):
    path, socket, secret = tmp_path / "topology.toml", tmp_path / "socket", tmp_path / "secret"
    secret.write_text("open sesame")
    joining = ("--join-token-file", secret)
    path.write_text(
        "[[group]]\nname = 'far'\nwalks = ['thinker_decode']\nspawn = false\n"
        "[[group]]\nname = 'near'\nwalks = ['prefill_text']\n"
    )
    near = ("--topology", path, "--worker-listen", f"unix:{socket}", *joining)
    cluster = start(*near, *SIM, "--model", GOLDENS / "seed0/qwen3", "--skip-tokenizer-init", ready=False)
    not_ready = wait_for("the prefill group", lambda: (r := reason(cluster)) and "none of them a decode group" in r and r)
    assert "1 of 1 workers have loaded the model" in not_ready
    # The topology has only the ranks 0 and 1, and rank 0 is spawned.
    assert socket.stat().st_mode & 0o777 == 0o600, "others than this user may join"
    # If the operator chooses the socket's path, a worker needs the secret.
    nobody = spawn("worker", "--conductor", f"unix:{socket}", "--rank", 1)
    assert nobody.wait() == 64 and "join_token_file: " in nobody.log()
    stranger = spawn("worker", "--conductor", f"unix:{socket}", "--rank", 2, *joining)
    assert stranger.wait() == 64 and "rank: is 2, the limit is 1" in stranger.log()
    spawn("worker", "--conductor", f"unix:{socket}", "--rank", 1, *joining)
    cluster.wait_until_ready()
    ask = dict(prompt=[1, 2, 3], max_tokens=5, ignore_eos=True, return_token_ids=True)
    assert len(cluster.complete(**ask)["choices"][0]["token_ids"]) == 5


def reason(cluster):
    """Returns the reason why the cluster is not ready, or None if it does not answer."""
    try:
        return cluster.client.get("/ready").text
    except httpx.TransportError:
        return None
