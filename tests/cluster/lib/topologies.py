"""Paths of the topologies in deploy/topology, and helpers that count the requests that a prefill worker hands over to a
decode worker."""

from golden import LENGTHS, answers
from harness import REPO, wait_for

TOPOLOGIES = REPO / "deploy/topology"
DISAGGREGATED, TWO_PREFILL = TOPOLOGIES / "disaggregated.toml", TOPOLOGIES / "two-prefill.toml"
TP_2_TO_1, TP_2_DISAGGREGATED = TOPOLOGIES / "tp2-to-tp1.toml", TOPOLOGIES / "tp2-disaggregated.toml"


def handovers(cluster):
    return cluster.metrics().get("tutti_request_handovers_total", 0)


def all_accepted(cluster, bodies, length=lambda body: len(body["prompt"])):
    """Waits until all requests are accepted. No request is accepted while a role has no worker. `length` returns the
    number of tokens of a request's prompt."""
    prompts = sum(map(length, bodies))
    wait_for("all accepted", lambda: cluster.metrics().get("tutti_prompt_tokens_total", 0) >= prompts, every=0.005)


def served_by(start, golden, *arguments):
    """Returns the answers of a cluster. Checks that no page and no request is left afterwards, and that each
    disaggregated request was handed over."""
    cluster = start(*arguments)
    got = answers(cluster, golden)
    cluster.wait_until_idle()
    assert handovers(cluster) == (len(LENGTHS) if "--topology" in arguments else 0)
    cluster.stop()
    return got
