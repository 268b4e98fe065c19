"""A model that is larger than the memory is refused before it is loaded, and a kill while loading is recognised."""

import json
import socket

import pytest
from checkpoints import sparse
from control_groups import ControlGroup, missing
from harness import GOLDENS, Process

MIB = 1 << 20
GRPC = ("--skip-tokenizer-init", "--device", "cpu", "--grpc", "127.0.0.1:0")
SKIP = (*GRPC, "--http", "127.0.0.1:0")


def model(directory, name, **changes):
    """A folder with the config of a Qwen3, for weights that are given by the config alone. Returns the folder."""
    folder = directory / name
    folder.mkdir()
    fields = json.loads((GOLDENS / "seed0/qwen3/config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def ended(args, tmp_path, under=()):
    """Runs a conductor that must end by itself. Returns its exit code and its log."""
    process = Process("conductor", args, tmp_path, under=under)
    try:
        code = process.wait(90)
        process.wait_until_all_gone()
        return code, process.log()
    finally:
        process.destroy()


def memory(name):
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))


@pytest.fixture
def group():
    """A function that makes a control group with a limit."""
    if reason := missing():
        pytest.skip(reason)
    groups = []

    def make(limit):
        groups.append(ControlGroup(limit))
        return groups[-1]

    yield make
    for group in groups:
        group.remove()


def test_weights_beyond_the_machines_memory_are_refused_before_a_port_is_bound(tmp_path):
    folder = model(tmp_path, "large")
    # Above the whole memory, free or not, and with few layers also on a large machine.
    layers = max(8, 4 * memory("MemTotal:") // (3 * 4096 * 32768 * 4))
    size = sparse(folder, layers, hidden=4096, intermediate=32768)
    assert size > memory("MemTotal:")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        http = f"127.0.0.1:{taken.getsockname()[1]}"
        code, log = ended(["--model", folder, *GRPC, "--http", http], tmp_path)
    assert code == 64, log
    unit, name = (1 << 40, "TiB") if size >= 1 << 40 else (1 << 30, "GiB")
    assert f"model: the weights take {size / unit:.1f} {name}" in log, log
    assert "are free" in log and "--quantize int8" in log and len(log.splitlines()) == 1, log
    # As many workers as do not fit together are refused, though each fits.
    small = sparse(folder, layers // 8, hidden=4096, intermediate=32768)
    assert small < memory("MemTotal:")
    code, log = ended(["--model", folder, *SKIP, "--workers", "16"], tmp_path)
    assert code == 64 and "the weights of 16 workers take" in log and "--workers" in log, log


@pytest.mark.parametrize("inside", (False, True), ids=("own", "nested"))
def test_the_limit_of_a_real_control_group_counts(tmp_path, group, inside):
    limited = group(512 * MIB)
    folder = model(tmp_path, "model")
    size = sparse(folder, 8, hidden=2048, intermediate=8192)
    assert size > 512 * MIB
    path = limited.nested() if inside else limited.path
    code, log = ended(["--model", folder, *SKIP], tmp_path, under=limited.command(path))
    assert code == 64, log
    assert f"under the limit of 512.0 MiB of the control group {limited.path}" in log, log
    assert f"the weights take {size / (1 << 30):.1f} GiB" in log and len(log.splitlines()) == 1, log


def test_without_the_check_a_model_is_loaded_with_a_warning(tmp_path, group):
    limited = group(512 * MIB)
    folder = model(tmp_path, "model")
    sparse(folder, 8, hidden=2048, intermediate=8192)
    conductor = Process("conductor", ["--model", folder, *SKIP, "--no-memory-check"], tmp_path, under=limited.command(limited.path))
    try:
        conductor.says("no_memory_check is set, so the model is loaded although the weights take")
        # Once by the conductor, before it starts a worker, and once by the worker, before it loads.
        conductor.says("are free under the limit of 512.0 MiB", times=2)
    finally:
        conductor.destroy()


def test_a_kill_while_loading_is_named_and_not_repeated_for_ever(tmp_path, group):
    # The weights fit by their figures, and loading dummy weights takes a copy of each matrix besides.
    folder = model(tmp_path, "model", num_hidden_layers=1, hidden_size=1024, vocab_size=40_000)
    limited = group(420 * MIB)
    args = ["--model", folder, *SKIP, "--load-format", "dummy", "--no-screened-head", "--threads", 1]
    code, log = ended(args, tmp_path, under=limited.command(limited.path))
    assert code == 64, log
    assert log.count("worker was killed while loading the model, likely for memory") == 3, log
    [last] = [line for line in log.splitlines() if line.startswith("conductor: ")]
    assert "model: worker 0 was killed while loading (signal 9), likely for memory" in last, log
    assert "--quantize int8" in last and "under the limit of 420.0 MiB" in last, log


def test_planes_that_are_smaller_than_the_context_lower_it(start, tmp_path):
    folder = model(tmp_path, "model")
    cluster = start("--model", folder, *GRPC[:3], "--load-format", "dummy", "--kv-cache-memory", "64KiB")
    most = cluster.client.get("/v1/models").json()["data"][0]["max_model_len"]
    assert 16 <= most < 4096 and most % 16 == 0
    said = "the planes of a worker hold fewer tokens than the model's context"
    assert cluster.says(f"max_model_len={most}") and cluster.log().count(said) == 1, cluster.log()
    request = {"prompt": [1] * (most - 4), "ignore_eos": True}
    answer = cluster.client.post("/v1/completions", json=request | {"max_tokens": 4})
    assert answer.status_code == 200, answer.text
    answer = cluster.client.post("/v1/completions", json=request | {"max_tokens": 5})
    assert answer.status_code == 400 and f"at most {most}" in answer.json()["error"]["message"], answer.text
