"""On every instruction path of the CPU, an answer's bits depend only on the request: not on other requests, chunks,
cached prefixes, preemptions or threads. The numbers in the JSON answers must be equal to the last digit."""

import functools
import json

import pytest
from bits import WHOLE, Cluster, check, check_preempted, check_prefixes, cut, prefills
from harness import CPU_PATHS, GOLDENS, cpu_paths

# All models have weights in bfloat16. `wide` has random weights in matrices of several superblocks of block floating
# point, and a window in the second of its two layers.
MODELS = ("qwen3", "qwen3_yarn_swa", "wide")
WIDE = dict(hidden_size=320, intermediate_size=576, num_hidden_layers=2)
WIDE |= dict(use_sliding_window=True, sliding_window=100, max_window_layers=1)
PAGE_BYTES_PER_LAYER = 4096
VARIANTS = ("batched", "two threads", "chunking off", "cut 1", "cut 2", "prefix cache", "preempted")


def each_path_and_model(paths):
    """Parametrises a test over all models on these paths. Paths that the machine does not support are reported as
    skipped. """
    have, cases = cpu_paths(), []
    for path in paths:
        marks = () if path in have else pytest.mark.skip(reason=f"this machine has no {path} instructions")
        # On the portable path, the wide model would take longer than all other tests together.
        models = [model for model in MODELS if (path, model) != ("portable", "wide")]
        cases += [pytest.param(path, model, marks=marks) for model in models]
    return pytest.mark.parametrize("path, model", cases)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Returns {model: flags that serve it}."""
    wide = tmp_path_factory.mktemp("wide")
    config = json.loads((GOLDENS / "bf16/qwen3/config.json").read_text())
    (wide / "config.json").write_text(json.dumps(config | WIDE))
    golden = {model: ["--model", GOLDENS / "bf16" / model] for model in MODELS if model != "wide"}
    return golden | {"wide": ["--model", wide, "--load-format", "dummy"]}


@pytest.fixture(scope="module")
def references(models, tmp_path_factory):
    """Returns a cached function of path and model. It returns {name: answer} of requests sent one after another, with
    whole prompts and one thread, and {name: answer} of the same requests sent at once."""

    @functools.cache
    def reference(path, model):
        directory = tmp_path_factory.mktemp("reference")
        with Cluster([*models[model], "--cpu-isa", path, "--threads", 1, *WHOLE], directory) as cluster:
            assert cluster.server.says(f"on cpu, {path}, 1 threads")
            alone, batched = cluster.alone(), cluster.at_once()
        steps = cluster.steps()
        # This checks the test itself: prompts are computed whole, and share steps with other rows when sent at once.
        assert max(size for step in steps for size in prefills(step)) == 701
        assert any(prefills(step) and len(step["rows"]) > 1 for step in steps)
        return alone, batched

    return reference


@pytest.mark.parametrize("variant", VARIANTS)
@each_path_and_model(CPU_PATHS)
def test_bits_depend_on_the_request_alone(models, references, tmp_path, path, model, variant):
    alone, batched = references(path, model)
    if variant == "batched":
        return check(alone, batched, variant)
    flags = [*models[model], "--cpu-isa", path]
    match variant:
        case "two threads":
            with Cluster([*flags, "--threads", 2, *WHOLE], tmp_path) as cluster:
                check(alone, cluster.at_once(), variant)
            assert cluster.server.says(f"on cpu, {path}, 2 threads")
        case "chunking off":
            with Cluster([*flags, "--chunking", "off", "--threads", 1], tmp_path) as cluster:
                check(alone, cluster.at_once(), variant)
            assert max(size for step in cluster.steps() for size in prefills(step)) == 701
        case "cut 1" | "cut 2":
            cuts, chunk = cut(variant, path, model)
            with Cluster([*flags, *cuts], tmp_path) as cluster:
                check(alone, cluster.at_once(), f"{variant}: {cuts}")
            assert max(size for step in cluster.steps() for size in prefills(step)) <= chunk
        case "prefix cache":
            check_prefixes(flags, alone, tmp_path)
        case "preempted":
            page_bytes = PAGE_BYTES_PER_LAYER * (WIDE["num_hidden_layers"] if model == "wide" else 3)
            check_preempted(flags, page_bytes, alone, tmp_path)


@each_path_and_model(("avx512", "avx512-vnni"))
def test_paths_that_multiply_in_integers_give_the_bits_of_avx2(references, path, model):
    """On a CPU without dot products of bfloat16, bfloat16 weights are stored in block floating point, with exact
    products."""
    check(references("avx2", model)[0], references(path, model)[0], path)
