"""Runs two conditions of tests/families on one model with state, so that the command does not break. The conditions are
cached prefixes that end after every block, and preempted requests that continue from snapshots. The memory is filled
with NaN before each request."""

from families import measure


def test_a_model_with_state_under_two_conditions(figure):
    result, failures = measure("qwen3_5_moe", "seed1", ["prefixes", "snapshot"])
    assert not failures, "\n".join(failures.values())
    assert result["poisoned"]
    cells = result["cells"]
    assert set(cells) == {"whole", "prefixes", "snapshot"} and all(cell["same_bits"] for cell in cells.values())
    figure(f"seed1/qwen3_5_moe: {cells['prefixes']['proof']}, {cells['snapshot']['proof']}")
