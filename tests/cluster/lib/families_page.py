"""The table in docs/families.md, made from the JSON that tests/families writes. Only needs the standard library,
because tests/check-docs imports it."""

import json
import pathlib
import re

REPO = pathlib.Path(__file__).resolve().parents[3]
RESULTS = REPO / "tests/bench/results/families.json"
PAGE = REPO / "docs/families.md"
BEGIN, END = "<!-- table: tests/families -->", "<!-- end of table -->"
BOTH_SEEDS = ("seed0", "seed1")
# {golden model: the published model of which it is a small version}
MODELS = {
    "qwen3": "Qwen3",
    "qwen3_tied": "Qwen3, tied embeddings",
    "qwen3_yarn_swa": "Qwen3, YaRN and sliding window",
    "qwen3_embedding": "Qwen3-Embedding's shape",
    "llama3": "Llama 3.x, scaled rope",
    "smollm": "SmolLM",
    "qwen2": "Qwen2.5, sliding window",
    "mistral": "Mistral, sliding window",
    "qwen3_moe": "Qwen3-MoE",
    "qwen3_moe_nonorm": "Qwen3-MoE, weights not normalised",
    "qwen3_5": "Qwen3.5",
    "qwen3_5_text_tied": "Qwen3.5, text alone, tied",
    "qwen3_5_moe": "Qwen3.5-MoE",
    "qwen3_5_moe_text": "Qwen3.5-MoE, text alone",
}
COLUMNS = {
    "whole": "whole prompt",
    "mixed": "mixed",
    "single": "chunks of 1",
    "random": "random slicings",
    "tp2": "TP 2",
    "ep2": "EP 2",
    "snapshot": "preempted, from snapshot",
    "nothing": "preempted, from nothing",
    "prefixes": "warm prefixes",
    "disaggregated": "disaggregated",
    "padded": "padded",
    "replayed": "replayed",
}


def cell(seeds, condition):
    cells = [seeds[seed]["cells"][condition] for seed in BOTH_SEEDS]
    if not all(cells):
        return "–"
    worst = f"{max(one['deviation'] for one in cells):.1e}".replace("e-0", "e-")
    return worst + (" =" if all(one["same_bits"] for one in cells) else "")


def table(results):
    """Yields the lines of the table: one row per model, one column per condition."""
    models = results["models"]
    assert set(models) == set(MODELS), "tests/families ran on other models"
    yield f"| model | {' | '.join(COLUMNS.values())} |"
    yield "|---" * (1 + len(COLUMNS)) + "|"
    for name, title in MODELS.items():
        yield f"| {title} | {' | '.join(cell(models[name], condition) for condition in COLUMNS)} |"
    poisoned = all(run["poisoned"] for seeds in models.values() for run in seeds.values())
    counts = [run["cells"] for seeds in models.values() for run in seeds.values()]
    total = lambda condition, count: sum(cells[condition]["proof"][count] for cells in counts)
    yield ""
    yield (
        f"In this run there were {total('snapshot', 'preemptions') + total('nothing', 'preemptions')} preemptions, "
        f"{total('replayed', 'replays')} replays, {total('disaggregated', 'hand_overs')} hand-overs and "
        f"{total('padded', 'padding_tokens')} tokens of padding. Memory was {'' if poisoned else 'not '}filled with NaN before "
        f"a request got it. Instructions: {results['machine']['instructions']}."
    )


def with_table(page, results):
    """Returns the page with the table of these results."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    assert tail, f"docs/families.md has no {BEGIN} … {END}"
    return f"{head}{BEGIN}\n" + "\n".join(table(results)) + f"\n{END}{tail}"


def write_page():
    PAGE.write_text(with_table(PAGE.read_text(), json.loads(RESULTS.read_text())))


def problems():
    """Yields problems for tests/check-docs: a golden model that the table lacks, or a page that differs from the JSON.
    """
    generated = " ".join(re.findall(r'^models\+?="(.*)"', (REPO / "tests/goldens/generate").read_text(), re.M)).split()
    for name in set(MODELS) ^ set(generated):
        yield f"tests/cluster/lib/families_page.py: {name} is either not in MODELS or not in tests/goldens/generate"
    page = PAGE.read_text()
    if page != with_table(page, json.loads(RESULTS.read_text())):
        yield "docs/families.md: the table is not that of tests/bench/results/families.json; tests/families writes both"
