"""A short form of tests/rolling: one upgrade of a router and one of a conductor under streams."""

import rolling


def test_an_upgrade_of_a_router_and_of_a_conductor_fails_no_request(figure):
    # Endpoints change before the signal, so that they are never late on a slow machine.
    chosen = ["--upgrades", "1", "--streams", "20", "--tokens", "40", "--step-us", "20000", "--conductors", "2", "--lame-duck", "1", "--no-late"]
    summary = rolling.run(rolling.options(chosen), say=lambda _: None)
    assert not summary["failed"] and not summary["killed"], summary
    # Requests ran before, during and after the upgrades, and clients connected to the new router.
    assert summary["requests"] >= 60 and summary["connections"] > 20, summary
    figure(f"rolling upgrades: {summary['requests']} requests, longest pause {summary['longest_pause_s']} s")
