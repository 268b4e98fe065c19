"""Runs conditions of tests/families: a third of them on each quantised checkpoint, so that two checkpoints have each
condition, and two on one model with state, so that the command does not break. The two are cached prefixes that end
after every block, and preempted requests that continue from snapshots. The memory is filled with NaN before each
request."""

import random
import subprocess

import pytest
from families import measure
from families_conditions import CONDITIONS
from families_model import FORMATS, OF_FORMATS, Model
from harness import REPO


def sampled(name):
    """Returns a third of the conditions. The commit chooses which checkpoint has which third; `tests/families --models`
    has all of them."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPO, capture_output=True, text=True)
    first = list(FORMATS).index(name) + random.Random(head.stdout).randrange(3)
    return [condition for at, condition in enumerate(CONDITIONS) if at % 3 == first % 3]


def test_a_model_with_state_under_two_conditions(figure):
    result, failures = measure("qwen3_5_moe", "seed1", ["prefixes", "snapshot"])
    assert not failures, "\n".join(failures.values())
    assert result["poisoned"]
    cells = result["cells"]
    assert set(cells) == {"whole", "prefixes", "snapshot"} and all(cell["same_bits"] for cell in cells.values())
    figure(f"seed1/qwen3_5_moe: {cells['prefixes']['proof']}, {cells['snapshot']['proof']}")


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_checkpoint_under_a_third_of_the_conditions(figure, name):
    if not Model(name, OF_FORMATS).directory.exists():
        pytest.skip("tests/formats/generate has not run")
    result, failures = measure(name, OF_FORMATS, sampled(name))
    assert not failures, "\n".join(failures.values())
    assert result["poisoned"]
    cells = {condition: cell for condition, cell in result["cells"].items() if cell}
    assert all(cell["same_bits"] for cell in cells.values())
    figure(f"{name}: " + ", ".join(f"{condition} {cell['deviation']:.1e}" for condition, cell in cells.items()))
