"""Names and sums of metrics. Tests that docs/metrics.md lists each name, and that sums over workers, conductors and
routers agree."""

import collections
import re

import httpx
from api_keys import line
from harness import REPO, free_port, wait_for
from streams import Streams
from topologies import TOPOLOGIES

SIM = ("--device", "sim", "--no-router")


def scraped(server):
    """Returns the metrics of a process, from its address for operators if it has one."""
    return httpx.get(f"http://{server.scraped_at}/metrics").text


def families(server):
    """Returns {name: type} of the metrics that a process describes, without the suffixes of samples."""
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", scraped(server), re.M))


def samples(server):
    """Yields (name, {label: value}, number) for each sample."""
    for name, labels, value in re.findall(r"^(\w+)(?:\{(.*)\})? (\S+)$", scraped(server), re.M):
        yield name, dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value)


def total(server, wanted, *by, **match):
    """Returns the sum of a metric over its series with the labels `match`, by the values of the labels `by`."""
    sums = collections.Counter()
    for name, labels, value in samples(server):
        if name == wanted and match.items() <= labels.items():
            sums[tuple(labels[label] for label in by)] += value
    return dict(sums) if by else sums[()]


def test_each_metric_has_its_line_in_the_docs_and_sums_agree(start, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(line("alice", "one") + line("bob", "two", "requests-per-minute=1"))
    disaggregated = ("--topology", TOPOLOGIES / "disaggregated.toml")
    quick = {"TUTTI_SIM__FIXED_US": "500"}
    conductors = [start(*SIM, *flags, env=quick) for flags in (("--workers", 2, "--chunk-shapes", "64,512"), disaggregated)]
    reach = [flag for conductor in conductors for flag in ("--conductor", f"http://{conductor.cluster}")]
    operations = f"127.0.0.1:{free_port()}"
    router = start(*reach, "--api-key-file", keys, "--operations", operations, name="router")
    router.client.headers["authorization"] = "Bearer one"
    tokens, prompts = 30, [[number % 5 + 1] * (20 + number) for number in range(24)]
    for prompt in prompts:
        choice = router.complete(prompt=prompt, max_tokens=tokens, ignore_eos=True)
        assert choice["usage"]["completion_tokens"] == tokens
    assert httpx.get(f"{router.url}/v1/models").status_code == 401
    # Some metrics do not exist before their first count. These requests make the last of them exist.
    limited = [httpx.get(f"{router.url}/v1/models", headers={"authorization": "Bearer two"}).status_code for _ in range(2)]
    assert limited == [200, 429]
    for conductor in conductors:
        conductor.wait_until_idle()

    # Routers count the tokens sent to clients. Conductors count the tokens that workers report. Workers count the rows
    # that their steps compute.
    generated, asked = tokens * len(prompts), sum(map(len, prompts))
    assert total(router, "tutti_router_generated_tokens_total") == generated
    assert total(router, "tutti_router_prompt_tokens_total") == asked
    assert total(router, "tutti_router_generations_total", outcome="finished") == len(prompts)
    # One more request asked for the model's name.
    assert total(router, "tutti_router_key_requests_total", key="alice") == len(prompts) + 1
    assert total(router, "tutti_router_key_tokens_total", key="alice") == generated + asked
    of_all = lambda name, **match: sum(total(conductor, name, **match) for conductor in conductors)
    assert of_all("tutti_generated_tokens_total") == generated
    assert of_all("tutti_prompt_tokens_total") == asked
    assert of_all("tutti_requests_total", outcome="finished") == len(prompts)
    picks = total(router, "tutti_router_conductor_picks_total", "conductor")
    assert picks == {(f"http://{c.cluster}",): total(c, "tutti_requests_total") for c in conductors}
    assert all(picks.values()), "a conductor got no request, so its sums say nothing"
    # The last row of a prompt samples the first token. Decode rows sample the other tokens.
    rows = lambda conductor: sum(total(conductor, "tutti_step_rows_total", kind=kind) for kind in ("decode", "last_prefill"))
    for conductor in conductors:
        wait_for("rows of all steps", lambda: rows(conductor) == total(conductor, "tutti_generated_tokens_total"))
        steps = total(conductor, "tutti_worker_steps", "worker")
        for counted in ("tutti_step_seconds_count", "tutti_step_budget_fill_count"):
            seen = total(conductor, counted, "worker")
            assert seen == {worker: number for worker, number in steps.items() if number}, counted
        handed = total(conductor, "tutti_worker_transfers", outcome="handed_over")
        assert handed == total(conductor, "tutti_request_handovers_total")
    assert total(conductors[1], "tutti_request_handovers_total") > 0

    described = {}
    for process in (*conductors, router):
        described |= families(process)
    lines = re.findall(r"^\| `(tutti_\w+)(?:\{.*?\})?` \| (\w+) \|", (REPO / "docs/metrics.md").read_text(), re.M)
    documented = {name.removesuffix("_total") if kind == "counter" else name: kind for name, kind in lines}
    assert len(lines) == len(documented), "a metric has two lines in docs/metrics.md"
    own = {name: kind for name, kind in described.items() if name.startswith("tutti_")}
    # The first of these metrics exists only for a model with experts, and the second only with a certificate. The page
    # must list both.
    assert documented == own | {"tutti_worker_expert_imbalance": "gauge", "tutti_certificate_expiry_seconds": "gauge"}
    # Names that follow other projects' conventions may be documented on any page.
    pages = "".join(page.read_text() for page in (REPO / "docs").glob("*.md"))
    assert all(name in pages for name in described.keys() - own.keys()), described.keys() - own.keys()


def test_totals_of_a_conductor_are_the_sums_over_its_workers_under_load(start):
    cluster = start("--device", "sim", "--workers", 2, "--max-running-requests", 2, "--kv-cache-memory", "64KiB")
    body = {"max_tokens": 600, "ignore_eos": True, "return_token_ids": True}
    streams = Streams(cluster, "/v1/completions", [body | {"prompt": [seed + 1] * 40} for seed in range(8)])
    # Totals and parts are compared within one scrape, in which they come from the same reports.
    per_worker = ("tutti_requests_running", "tutti_requests_waiting", "tutti_kv_pages_used", "tutti_kv_pages_total")

    def busy():
        seen = cluster.metrics()
        parts = [seen.get(name, 0) for name in per_worker]
        # A report may arrive during a scrape, between two of its lines. So a scrape only counts if the next one has the
        # same parts.
        again = [cluster.metrics().get(name, 0) for name in per_worker]
        return seen if parts == again and all(parts) else None

    seen = wait_for("requests in steps and in queues", busy)
    assert seen["tutti_conductor_requests_running"] == seen["tutti_requests_running"] == 4
    assert seen["tutti_conductor_requests_waiting"] == seen["tutti_requests_waiting"] == 4
    assert seen["tutti_conductor_kv_utilization"] == seen["tutti_kv_pages_used"] / seen["tutti_kv_pages_total"]
    assert seen["tutti_ready"] == seen["tutti_build_info"] == seen["tutti_config_info"] == 1
    assert seen["tutti_workers_expected"] == seen["tutti_workers_ready"] == 2
    streams.results()
    cluster.wait_until_idle()
