"""A minute of tests/chaos, always with the same choices."""

import chaos


def test_a_minute_of_chaos_loses_nothing(figure, tmp_path):
    options = chaos.options(["--seed", "4", "--minutes", "1", "--log", str(tmp_path / "log.jsonl")])
    said = []
    fine = chaos.run(options, say=said.append)
    for line in said:
        figure(f"chaos: {line}")
    assert fine, (said, [line for line in options.log.read_text().splitlines() if '"bad"' in line][:3])
