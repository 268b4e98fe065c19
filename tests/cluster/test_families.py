"""Runs conditions of tests/families: a third of them on each quantised checkpoint, so that two checkpoints have each
condition, two on each of two models with media, and two on each of two models with state, so that the command does not
break. The last are cached prefixes that end after every block, and preempted requests that continue from snapshots. The
memory is filled with NaN before each request."""

import random
import subprocess

import pytest
from families import measure
from families_conditions import CONDITIONS
from families_model import FORMATS, OF_FORMATS, Model
from families_page import WITH_MEDIA
from harness import REPO


def of_commit():
    """Returns a generator that the commit seeds. `tests/families --models` has all that it leaves out."""
    return random.Random(subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPO, capture_output=True, text=True).stdout)


def sampled(name):
    """Returns a third of the conditions. The commit chooses which checkpoint has which third."""
    first = list(FORMATS).index(name) + of_commit().randrange(3)
    return [condition for at, condition in enumerate(CONDITIONS) if at % 3 == first % 3]


def sampled_with_media(at):
    """Returns one of two models with media that the commit chooses, its seed, and two conditions."""
    rng = of_commit()
    names, conditions = rng.sample(list(WITH_MEDIA), 2), rng.sample([name for name in CONDITIONS if name != "whole"], 4)
    return names[at], rng.choice(("seed0", "seed1")), conditions[2 * at :][:2]


@pytest.mark.parametrize("name", ("qwen3_5_moe", "deepseek_v4"))
def test_a_model_with_state_under_two_conditions(figure, name):
    result, failures = measure(name, "seed1", ["prefixes", "snapshot"])
    assert not failures, "\n".join(failures.values())
    assert result["poisoned"]
    cells = result["cells"]
    assert set(cells) == {"whole", "prefixes", "snapshot"} and all(cell["same_bits"] for cell in cells.values())
    figure(f"seed1/{name}: {cells['prefixes']['proof']}, {cells['snapshot']['proof']}")


@pytest.mark.parametrize("at", range(2))
def test_models_with_media_under_two_conditions(figure, at):
    name, seed, conditions = sampled_with_media(at)
    result, failures = measure(name, seed, conditions)
    assert not failures, f"{seed}/{name}\n" + "\n".join(failures.values())
    cells = {condition: cell for condition, cell in result["cells"].items() if cell}
    assert result["poisoned"] and all(cell["same_bits"] for cell in cells.values())
    figure(f"{seed}/{name}: " + ", ".join(f"{condition} {cell['deviation']:.1e}" for condition, cell in cells.items()))


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
