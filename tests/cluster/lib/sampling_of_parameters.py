"""A sample of each test's parameters, and of tests, for a short run."""

import random


def sampled(items, seed, third=False):
    """(kept, left out) tests: of each function, one in six of its tests, at least one. With `third`, only of a third of
    the functions. `seed` chooses them."""
    functions = {}
    for item in items:
        functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    if third:
        chosen = random.Random(seed).sample(sorted(functions), -(-len(functions) // 3))
        functions = {name: functions[name] for name in chosen}
    kept = set()
    for name, tests in functions.items():
        kept.update(random.Random(f"{seed} {name}").sample(tests, -(-len(tests) // 6)))
    return [item for item in items if item in kept], [item for item in items if item not in kept]
