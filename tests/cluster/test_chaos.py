"""A minute of tests/chaos on each kind of cluster, always with the same choices."""

import chaos
import pytest


@pytest.mark.parametrize("shapes", (chaos.TOGETHER, ("sim-apart", "cpu-apart")), ids=("together", "apart"))
def test_a_minute_of_chaos_loses_nothing(figure, tmp_path, shapes):
    chosen = [word for shape in shapes for word in ("--shape", shape)]
    options = chaos.options(["--seed", "4", "--minutes", "1", "--log", str(tmp_path / "log.jsonl"), *chosen])
    said = []
    fine = chaos.run(options, say=said.append)
    for line in said:
        figure(f"chaos, {' and '.join(shapes)}: {line}")
    assert fine, (said, [line for line in options.log.read_text().splitlines() if '"bad"' in line][:3])
