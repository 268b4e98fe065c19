"""The table in docs/families.md, made from the JSON that tests/families writes. Only needs the standard library,
because tests/check-docs imports it."""

import json
import pathlib
import re

REPO = pathlib.Path(__file__).resolve().parents[3]
RESULTS = REPO / "tests/bench/results"
PAGE = REPO / "docs/families.md"
END = "<!-- end of table -->"
BOTH_SEEDS = ("seed0", "seed1")
# End of the names of golden models that are served with their encoders.
MEDIA = "-media"
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
# The same of golden models that are served with their encoders.
WITH_MEDIA = {
    f"qwen3_vl{MEDIA}": "Qwen3-VL",
    f"qwen3_vl_moe{MEDIA}": "Qwen3-VL-MoE",
    f"qwen3_5{MEDIA}": "Qwen3.5",
    f"qwen3_5_moe{MEDIA}": "Qwen3.5-MoE",
    f"qwen3_omni{MEDIA}": "Qwen3-Omni's thinker",
}
# Names of golden models with compressed entries, whose pages have more tokens.
WITH_ENTRIES = {
    "deepseek_v4": "DeepSeek-V4, layers of all kinds",
    "v4_sliding": "windows alone",
    "v4_hca": "windows and all entries of 128 tokens",
    "v4_csa_all": "windows and all entries of 4 tokens",
    "v4_hash": "windows, experts by token id",
}
# {name of a table: its models}. The name is that of the file with the results, too.
TABLES = {"families": MODELS, "families_media": WITH_MEDIA, "families_entries": WITH_ENTRIES}
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
COLUMNS_OF_MEDIA = {"apart": "encoders apart", "killed": "encoders killed"}


def cell(seeds, condition):
    cells = [seeds[seed]["cells"][condition] for seed in BOTH_SEEDS]
    if not all(cells):
        return "–"
    worst = f"{max(one['deviation'] for one in cells):.1e}".replace("e-0", "e-")
    return worst + (" =" if all(one["same_bits"] for one in cells) else "")


def table(name, results):
    """Yields the lines of a table: one row per model, one column per condition."""
    models = results["models"]
    assert set(models) == set(TABLES[name]), "tests/families ran on other models"
    columns = COLUMNS | (COLUMNS_OF_MEDIA if TABLES[name] is WITH_MEDIA else {})
    yield f"| model | {' | '.join(columns.values())} |"
    yield "|---" * (1 + len(columns)) + "|"
    for model, title in TABLES[name].items():
        yield f"| {title} | {' | '.join(cell(models[model], condition) for condition in columns)} |"
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


def results_of(name):
    """Path of the results of a table."""
    return RESULTS / f"{name}.json"


def lines(name):
    """Returns the lines of a table, or a line that says that no whole run has written it."""
    if not results_of(name).exists():
        return ["No whole run of these models has been kept yet."]
    return list(table(name, json.loads(results_of(name).read_text())))


def with_tables(page):
    """Returns the page with the tables of all results."""
    for name in TABLES:
        begin = f"<!-- table: {name} of tests/families -->"
        head, _, rest = page.partition(begin)
        _, _, tail = rest.partition(END)
        assert tail, f"docs/families.md has no {begin} … {END}"
        page = f"{head}{begin}\n" + "\n".join(lines(name)) + f"\n{END}{tail}"
    return page


def write_page():
    PAGE.write_text(with_tables(PAGE.read_text()))


def problems():
    """Yields problems for tests/check-docs: a golden model that the table lacks, or a page that differs from the JSON.
    """
    generated = " ".join(re.findall(r'^models\+?="(.*)"', (REPO / "tests/goldens/generate").read_text(), re.M)).split()
    compared = {name.removesuffix(MEDIA) for models in TABLES.values() for name in models}
    for name in compared ^ set(generated):
        yield f"tests/cluster/lib/families_page.py: {name} is either in no table or not in tests/goldens/generate"
    page = PAGE.read_text()
    if page != with_tables(page):
        yield "docs/families.md: a table is not that of tests/bench/results/families*.json; tests/families writes both"
