"""A short form of tests/hostile: every attack, with fewer connections."""

import hostile


def test_attackers_are_refused_and_a_good_client_does_not_wait(figure):
    said = []
    _, results = hostile.run(hostile.options(["--seconds", "3", "--size", "0.2"]), say=said.append)
    for line in said:
        figure(f"hostile: {line}")
    problems = [(result.name, problem) for result in results for problem in result.problems]
    assert not problems

