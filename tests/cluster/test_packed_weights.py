"""--packed-weights. Tests that later starts and further workers map the file that the first worker wrote, and that
answers are bit-identical."""

import pytest
from harness import GOLDENS, cpu_paths, run_to_exit

PROMPT = {"prompt": list(range(1, 40)), "max_tokens": 12, "temperature": 0, "logprobs": 3}
MODEL = GOLDENS / "bf16" / "qwen3"


def answer(cluster):
    return cluster.complete(**PROMPT)["choices"][0]


def test_a_later_start_maps_the_file_of_an_earlier_one(start, tmp_path):
    flags = ("--model", MODEL, "--skip-tokenizer-init")
    packed = answer(start("--workers", 1, *flags))
    kept = (*flags, "--packed-weights", tmp_path)
    for expected in ("written for the next start", "mapped from a file"):
        cluster = start("--workers", 1, *kept)
        assert answer(cluster) == packed
        assert cluster.says(expected)
        cluster.stop()
    # A run with another setting writes a separate file. Two workers share one file.
    start("--workers", 1, *kept, "--quantize", "int8").stop()
    assert len(list(tmp_path.glob("*.bin"))) == 2
    cluster = start("--workers", 2, *kept)
    assert {answer(cluster)["text"] for _ in range(4)} == {packed["text"]}
    assert cluster.says("mapped from a file", 2)


def test_each_instruction_path_has_its_own_file(start, tmp_path):
    flags = ("--model", MODEL, "--skip-tokenizer-init", "--packed-weights", tmp_path)
    paths = cpu_paths()
    if len(paths) == 1:
        pytest.skip("this machine has one path")
    answers = {}
    for expected in ("written for the next start", "mapped from a file"):
        for path in paths:
            cluster = start("--workers", 1, "--cpu-isa", path, *flags)
            assert cluster.says(expected)
            assert answers.setdefault(path, answer(cluster)) == answer(cluster)
            cluster.stop()
    assert len(list(tmp_path.glob("*.bin"))) == len(paths)


def test_a_missing_directory_is_refused(tmp_path):
    code, log = run_to_exit("conductor", ["--packed-weights", tmp_path / "missing"], tmp_path)
    assert code == 64 and "packed_weights" in log and "missing" in log, log
