"""Runs conditions of tests/families: all of them on quantised checkpoints, and two on one model with state, so that the
command does not break. The two are cached prefixes that end after every block, and preempted requests that continue
from snapshots. The memory is filled with NaN before each request."""

import pytest
from families import measure
from families_conditions import CONDITIONS
from families_model import FORMATS, OF_FORMATS, Model


def test_a_model_with_state_under_two_conditions(figure):
    result, failures = measure("qwen3_5_moe", "seed1", ["prefixes", "snapshot"])
    assert not failures, "\n".join(failures.values())
    assert result["poisoned"]
    cells = result["cells"]
    assert set(cells) == {"whole", "prefixes", "snapshot"} and all(cell["same_bits"] for cell in cells.values())
    figure(f"seed1/qwen3_5_moe: {cells['prefixes']['proof']}, {cells['snapshot']['proof']}")


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_checkpoint_under_every_condition(figure, name):
    if not Model(name, OF_FORMATS).directory.exists():
        pytest.skip("tests/formats/generate has not run")
    result, failures = measure(name, OF_FORMATS, list(CONDITIONS))
    assert not failures, "\n".join(failures.values())
    assert result["poisoned"]
    cells = {condition: cell for condition, cell in result["cells"].items() if cell}
    assert all(cell["same_bits"] for cell in cells.values())
    figure(f"{name}: " + ", ".join(f"{condition} {cell['deviation']:.1e}" for condition, cell in cells.items()))
