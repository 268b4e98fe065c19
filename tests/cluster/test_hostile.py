"""A short form of tests/hostile: every attack, with fewer connections. With --sample-parameters, half of the
attacks."""

import random

import hostile
from hostile_attacks import ATTACKS


def test_attackers_are_refused_and_a_good_client_does_not_wait(figure, pytestconfig):
    said, names = [], list(ATTACKS)
    if seed := pytestconfig.getoption("--sample-parameters"):
        names = sorted(random.Random(seed).sample(names, -(-len(names) // 2)), key=names.index)
    _, results = hostile.run(hostile.options(["--seconds", "3", "--size", "0.2", "--only", *names]), say=said.append)
    for line in said:
        figure(f"hostile: {line}")
    assert {result.name for result in results} == set(names)
    problems = [(result.name, problem) for result in results for problem in result.problems]
    assert not problems
