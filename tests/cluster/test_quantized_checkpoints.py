"""`conductor quantize`. Tests that compressed-tensors and transformers read what it writes, that the errors it prints
are those of the weights, and that a cluster serves it as transformers would with the dequantised weights."""

import json
import os
import re
import subprocess

import numpy as np
import pytest
from golden import prompt_logprobs
from harness import BINARIES, GOLDENS, REPO
from safetensors.numpy import load_file, save_file

PACKAGES = REPO / "target/formats/packages"
IDS = np.arange(1, 201)

pytestmark = pytest.mark.skipif(not PACKAGES.exists(), reason="tests/formats/generate has not run")


def quantize(*flags):
    done = subprocess.run([BINARIES / "conductor", "quantize", *map(str, flags)], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


# Model, flags, and a bound of the relative error. Weights are uniformly distributed. If the largest weight of a group
# or row had the last code, errors would be above the bounds.
CASES = [
    ("seed0/qwen3", ["--scheme", "int4"], 0.0617),
    ("seed0/qwen3", ["--scheme", "int8"], 0.0038),
    ("seed0/qwen3", ["--scheme", "fp8"], 0.0228),
    ("bf16/llama3", ["--group-size", 64], 0.0637),
    ("seed0/qwen3_moe", ["--scheme", "int8"], 0.0038),
    ("seed0/qwen3_5_text_tied", ["--scheme", "int4"], 0.0617),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """For each case: the folder, what was printed, and the verdict of tests/formats/judge.py."""
    folder = tmp_path_factory.mktemp("quantised")
    printed, pairs = [], []
    for index, (model, flags, _) in enumerate(CASES):
        code, text, problem = quantize("--model", GOLDENS / model, *flags, "--out", folder / str(index))
        assert code == 0, problem
        printed.append(text)
        pairs += [GOLDENS / model, folder / str(index)]
    env = os.environ | {"PYTHONPATH": str(PACKAGES), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    judge = [REPO / "target/venv/bin/python", REPO / "tests/formats/judge.py", *pairs]
    done = subprocess.run(judge, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return list(zip(pairs[1::2], printed, json.loads(done.stdout)))


NAMES = [" ".join(map(str, [model, *flags])) for model, flags, _ in CASES]


@pytest.mark.parametrize("index", range(len(CASES)), ids=NAMES)
def test_other_readers_know_it_and_a_cluster_serves_it(start, made, index):
    model, flags, bound = CASES[index]
    out, printed, judged = made[index]
    lines = re.findall(r"^ *\d+/\d+ (\S+) \[\d+, \d+\] error (\S+) %", printed, re.M)
    seen = {name: float(error) for name, error in lines}
    # compressed-tensors rounds the weights to the type of the scales.
    rounding = 0.006 if "bf16" not in model else 0.03
    assert seen.keys() == judged["modules"].keys()
    assert all(abs(seen[name] - 100 * error) < rounding for name, error in judged["modules"].items())
    assert judged["error"] < bound
    # In bf16, readers round weights or activations once more.
    limit = 2e-4 if "bf16" not in model else 0.1
    assert judged["reading"] is None or judged["reading"] < limit

    # Weights stay as they are stored, and those of four bits would be multiplied by activations in eight bits.
    exact = [] if {"int8", "fp8"} & set(flags) else ["--no-quantized-activations"]
    cluster = start("--workers", 1, "--model", out, "--skip-tokenizer-init", *exact)
    choice = cluster.complete(prompt=IDS.tolist(), max_tokens=1, temperature=0, prompt_logprobs=0)["choices"][0]
    assert np.abs(prompt_logprobs(choice, IDS) - judged["logprobs"]).max() < limit


@pytest.mark.parametrize("flags, problem", [
    (["--out", "out"], "model: is missing"),
    (["--model", "missing", "--out", "out"], "model: is missing, which is no folder"),
    (["--model", GOLDENS / "seed0/qwen3"], "out: is missing"),
    (["--model", GOLDENS / "seed0/qwen3", "--out", "out", "--group-size", 48], "group_size: is 48, but can be 32, 64 or 128"),
    (["--model", GOLDENS / "seed0/qwen3", "--out", "out", "--scheme", "int3"], "int3"),
    (["--model", GOLDENS / "seed0/qwen3", "--out", GOLDENS], "is not empty"),
    (["--model", REPO / "target/formats/goldens/qwen3-fp8_blocks", "--out", "out"], "quantised already"),
    (["--model", GOLDENS / "seed0/qwen3_5_moe", "--out", "out"], "is a stack of experts"),
])
def test_bad_requests_are_refused_and_leave_nothing(tmp_path, monkeypatch, flags, problem):
    monkeypatch.chdir(tmp_path)
    code, printed, said = quantize(*flags)
    assert code in (1, 2) and problem in said and not printed, (code, printed, said)
    assert not list(tmp_path.iterdir())


def test_a_fault_midway_leaves_nothing(tmp_path):
    source, empty = tmp_path / "source", tmp_path / "empty"
    source.mkdir()
    empty.mkdir()
    plain = GOLDENS / "seed0/qwen3"
    tensors = load_file(plain / "model.safetensors")
    last = "model.layers.2.self_attn.v_proj.weight"
    tensors[last][5, 7] = np.nan
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text((plain / "config.json").read_text())
    for out in (tmp_path / "new", empty):
        code, printed, said = quantize("--model", source, "--out", out)
        assert code == 1 and last in said and "in row 5 that is not finite" in said, said
        assert "model.layers.0.mlp.down_proj" in printed
    assert {path.name for path in tmp_path.iterdir()} == {"source", "empty"} and not list(empty.iterdir())


def test_an_empty_folder_is_filled(tmp_path, monkeypatch):
    # A folder that exists may be the root of a volume, or the current one. Neither can be replaced.
    monkeypatch.chdir(tmp_path)
    code, _, said = quantize("--model", GOLDENS / "seed0/qwen3", "--out", ".")
    assert code == 0, said
    assert {"config.json", "model.safetensors"} <= {path.name for path in tmp_path.iterdir()} and not list(tmp_path.glob(".p*"))


def test_a_checkpoint_in_several_files_keeps_them(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    plain = GOLDENS / "seed0/qwen3"
    tensors = load_file(plain / "model.safetensors")
    (source / "config.json").write_text((plain / "config.json").read_text())
    (source / "tokenizer.json").write_text("{}")
    names, weight_map = sorted(tensors), {}
    for index, part in enumerate([names[::2], names[1::2]]):
        file = f"model-0000{index + 1}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, source / file)
        weight_map |= dict.fromkeys(part, file)
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert quantize("--model", source, "--out", tmp_path / "out")[0] == 0
    assert quantize("--model", plain, "--out", tmp_path / "single")[0] == 0
    out, single = {}, load_file(tmp_path / "single/model.safetensors")
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    for file in sorted(set(weight_map.values())):
        held = load_file(tmp_path / "out" / file)
        assert all(index["weight_map"][name] == file for name in held)
        out |= held
    assert out.keys() == single.keys() == index["weight_map"].keys() and all(np.array_equal(out[k], single[k]) for k in out)
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in out.values())
    assert (tmp_path / "out/tokenizer.json").read_text() == "{}"
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out", "single"}
