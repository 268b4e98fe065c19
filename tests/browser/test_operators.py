"""The operator's view: rates and latencies, facts of the cluster, one request among many, its cause of failure, and a
way to cancel it."""

import concurrent.futures
import contextlib
import re

import pytest
from api_keys import line
from harness import wait_for
from playwright.sync_api import expect

REFUSED = ("Failed to load resource",)
KEYS = {"caller": "the key of somebody who calls", "oncall": "the key of somebody on call"}
NOW = 1_800_000_000_000_000


def request(number, *, took_ms, end=None, cause=None, replays=0):
    """A request as the server shows it. Without an end it runs still, and has had its first token."""
    begin = NOW + number * 1_000_000
    at = [("accepted", 0), ("launched", 1)] + [("replayed", 2)] * replays + [("first_token", 3 if end else took_ms)]
    transitions = [{"kind": kind, "at_us": begin + ms * 1000} for kind, ms in at]
    transitions[1] |= {"role": "whole", "worker": 0}
    if end:
        transitions.append({"kind": "ended", "at_us": begin + took_ms * 1000, "outcome": end, **({"cause": cause} if cause else {})})
    return {"request": number, "request_id": "", "took_us": took_ms * 1000, "prompt_tokens": 1000 - number, "generated": number * 3, "transitions": transitions}


REQUESTS = [
    request(5, took_ms=85_000),
    request(4, took_ms=700, end="finished"),
    request(3, took_ms=30_000, end="deadline", cause="the deadline of 30 s has passed"),
    request(2, took_ms=90, end="unavailable", cause="worker <b>1</b> was lost", replays=2),
    request(1, took_ms=9000, end="finished"),
]


def made_up(page, server, changes=None, requests=REQUESTS, **conductor):
    """Answers the page's requests: the server's own answers, with changes."""

    answer = server.client.get("/cluster/state").json() | (changes or {})
    answer["conductors"][0] |= conductor
    page.route("**/cluster/state", lambda route: route.fulfill(json=answer))
    page.route("**/cluster/requests?*", lambda route: route.fulfill(json={"requests": requests}))


def rows(page):
    return page.locator("#requests tr").evaluate_all("rows => rows.map(row => Number(row.dataset.request))")


def chart(page, title):
    return page.locator("#rates > li").filter(has=page.get_by_role("heading", name=title, exact=True))


def test_the_rates_are_those_of_the_metrics(cluster, visit, accessible):
    server = cluster("--workers", 2, "--device", "sim")
    page = visit(server, path="/#cluster", expected=REFUSED)
    expect(chart(page, "Tokens")).to_contain_text("output0/s")
    expect(chart(page, "Time to first token")).to_contain_text("p50none")
    expect(page.locator("#refusals")).to_contain_text("Nothing refused")
    for length in (3, 30, 300):
        server.complete(prompt=[5] * length, max_tokens=50, ignore_eos=True)
    assert server.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 0}).status_code == 400
    expect(page.locator("#refusals")).to_contain_text("invalid 1")

    def history():
        return server.client.get("/cluster/history").json()

    def total(field):
        return sum(sample[field] for sample in history()["samples"])

    metrics = server.metrics()
    wait_for("a sample of all", lambda: total("finished") == 3)
    assert total("generated_tokens") == metrics["tutti_router_generated_tokens_total"] == 150
    assert total("prompt_tokens") == 333
    counts = [sum(sample["first_token"]) for sample in history()["samples"]]
    assert sum(counts) == metrics["tutti_router_time_to_first_token_seconds_count"] == 3
    # The charts show what the samples have.
    expect(chart(page, "Tokens").locator("path.line.first").last).to_have_attribute("d", re.compile(r"^M[\d. ]+(L[\d. ]+)+"))
    expect(chart(page, "Time to first token").get_by_role("img")).to_have_attribute("aria-label", re.compile(r"at most .*(ms|µs)"))
    newest = history()["newest"]
    known = lambda process: server.client.get(f"/cluster/history?process={process}&after={newest}").json()["samples"]
    assert known("another"), "all, as of another router"
    newer = wait_for("a newer sample", lambda: known(history()["process"]))
    assert all(sample["sequence"] > newest for sample in newer)
    accessible(page)


def test_percentiles_are_estimated_as_prometheus_does(tiny, visit):
    page = visit(tiny)
    of = """async ([bounds, counts, share]) => (await import("/page/percentile.js")).percentile(bounds, counts, share)"""
    for counts, share, expected in [
        ([0, 0, 0], 0.5, None),
        ([10, 0, 0], 0.5, 0.5),
        ([10, 10, 0], 0.75, 2.5),
        ([10, 10, 0], 0.5, 1),
        ([0, 4, 0], 0.99, 1 + 3 * 0.99),
        ([1, 0, 9], 0.95, 4),
    ]:
        found = page.evaluate(of, [[1, 4], counts, share])
        assert found == (expected if expected is None else pytest.approx(expected)), (counts, share)
    total = "async (all) => (await import('/page/percentile.js')).total(all)"
    assert page.evaluate(total, [[1, 2], [3, 4]]) == [4, 6] and page.evaluate(total, []) is None


def test_requests_are_sorted_and_filtered(tiny, visit):
    page = visit(tiny, path="/#cluster")
    made_up(page, tiny)
    expect(page.locator("#requests tr")).to_have_count(5)
    assert rows(page) == [5, 4, 3, 2, 1]
    by_time = page.get_by_role("button", name="Time")
    by_time.click()
    assert rows(page) == [5, 3, 1, 4, 2]
    head = page.get_by_role("columnheader", name="Time")
    expect(head).to_have_attribute("aria-sort", "descending")
    by_time.click()
    assert rows(page) == [2, 4, 1, 3, 5]
    expect(head).to_have_attribute("aria-sort", "ascending")
    page.get_by_label("State", exact=True).select_option("failed or cancelled")
    assert rows(page) == [2, 3]
    page.get_by_label("With the words").fill("LOST")
    assert rows(page) == [2]
    page.get_by_label("With the words").fill("nothing has this")
    expect(page.get_by_text("No request is like that.")).to_be_visible()
    page.get_by_label("With the words").fill("")
    page.get_by_label("State", exact=True).select_option("in progress")
    assert rows(page) == [5]


def test_the_cause_of_a_failure_is_text_and_a_sorted_row_keeps_the_focus(tiny, visit):
    page = visit(tiny, path="/#cluster")
    made_up(page, tiny)
    row = page.locator('#requests tr[data-request="2"]')
    expect(row).to_contain_text("worker <b>1</b> was lost")
    expect(row.locator("td").nth(4)).to_have_text("2")
    page.get_by_role("button", name="Cause").click()
    row.get_by_role("button", name="2", exact=True).click()
    expect(page.locator("#waterfall .error")).to_have_text("worker <b>1</b> was lost")
    expect(page.locator("#waterfall li").last).to_contain_text("decode")
    row.get_by_role("button", name="2", exact=True).focus()
    # New requests come in, and the rows move.
    page.unroute("**/cluster/requests?*")
    more = [request(6, took_ms=5, end="internal", cause="a fault"), *REQUESTS]
    page.route("**/cluster/requests?*", lambda route: route.fulfill(json={"requests": more}))
    expect(page.locator("#requests tr")).to_have_count(6)
    assert rows(page)[:3] == [2, 3, 6]
    expect(row.get_by_role("button", name="2", exact=True)).to_be_focused()


def test_facts_of_the_cluster_and_groups_that_miss_workers(tiny, visit, accessible):
    page = visit(tiny, path="/#cluster")
    groups = [
        {"name": "all", "first_rank": 0, "ranks": 2, "joined": 2, "spawned": True},
        {"name": "decode", "first_rank": 2, "ranks": 4, "joined": 1, "spawned": False},
        {"name": "encode", "first_rank": 6, "ranks": 1, "joined": 0, "spawned": True},
    ]
    made_up(page, tiny, groups=groups, up_s=93_784, replays=7)
    figures = page.locator("#figures")
    for text in ("Up for1 d 2 h", "Replays7", "Restarts0", "Workers ready2 of 2"):
        expect(figures).to_contain_text(text)
    version = tiny.client.get("/cluster/state").json()["conductors"][0]["build"]
    expect(figures).to_contain_text(f"Version{version}")
    expect(page.locator("#absent li")).to_have_text(
        [
            "Group decode: 1 of 4 workers have joined; ranks 2 to 5 must be started by hand.",
            "Group encode: 0 of 1 workers have joined; the conductor starts rank 6.",
        ]
    )
    expect(page.locator("#workers > li").first).to_contain_text(re.compile(r"memory\d[\d.]* [MG]iB"))
    device = tiny.client.get("/cluster/state").json()["conductors"][0]["workers"][0]["device"]
    expect(page.locator("#workers > li").first).to_contain_text(device)
    accessible(page)


@pytest.fixture(scope="module")
def keyed(cluster, tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(line("caller", KEYS["caller"]) + line("oncall", KEYS["oncall"], "operator"))
    # A long request takes minutes, however slow the browser is.
    return cluster("--workers", 1, "--device", "sim", "--api-key-file", keys, env={"TUTTI_SIM__FIXED_US": "50000"})


@contextlib.contextmanager
def long_request(server):
    """Keeps a caller's request running, and gives its answer, which comes when somebody has cancelled it."""

    def call():
        body = {"prompt": [5, 6, 7], "max_tokens": 3000, "ignore_eos": True}
        headers = {"authorization": f"Bearer {KEYS['caller']}"}
        return server.client.post("/v1/completions", json=body, headers=headers, timeout=300)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        yield pool.submit(call)


def enter(page, name):
    field = page.get_by_label("API key", exact=True)
    expect(field).to_be_visible()
    field.fill(KEYS[name])
    field.press("Enter")


def test_an_operator_cancels_a_request_of_somebody_else(keyed, visit, accessible):
    with long_request(keyed) as answer:
        page = visit(keyed, path="/#cluster", expected=REFUSED)
        enter(page, "oncall")
        row = page.locator("#requests tr").first
        cancel = row.get_by_role("button", name="Cancel request")
        cancel.click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("Its client gets an error.")
        accessible(page)
        dialog.get_by_role("button", name="Let it run").click()
        expect(dialog).to_be_hidden()
        expect(cancel).to_be_focused()
        cancel.click()
        dialog.get_by_role("button", name="Cancel the request").click()
        expect(page.locator("#cancel-status")).to_contain_text("is cancelled")
        refused = answer.result()
    assert refused.status_code == 499
    assert refused.json()["error"]["message"] == "an operator has cancelled the request"
    expect(row).to_contain_text("cancelled")
    expect(row).to_contain_text("an operator has cancelled the request")
    expect(cancel).to_be_hidden()


def test_a_caller_sees_requests_and_cannot_cancel_them(keyed, visit):
    with long_request(keyed) as answer:
        page = visit(keyed, path="/#cluster", expected=REFUSED)
        enter(page, "caller")
        running = page.locator("#requests tr").filter(has_text="decodes")
        expect(running).to_be_visible()
        expect(page.get_by_text("can cancel requests here")).to_be_visible()
        expect(page.get_by_role("button", name="Cancel request")).to_have_count(0)
        number = running.get_by_role("button").first.text_content()
        cancel = lambda name: keyed.client.post(f"/cluster/requests/{number}/cancel", headers={"authorization": f"Bearer {KEYS[name]}"})
        assert cancel("caller").status_code == 403
        assert cancel("oncall").status_code == 204
        assert answer.result().status_code == 499


def test_a_cancellation_names_the_request_by_its_time_and_shows_the_refusal(tiny, visit):
    page = visit(tiny, path="/#cluster", expected=REFUSED)
    made_up(page, tiny, {"may_cancel": True})
    row = page.locator('#requests tr[data-request="5"]')
    row.get_by_role("button", name="Cancel request 5").click()
    with page.expect_request("**/cancel?*") as sent:
        page.get_by_role("button", name="Cancel the request").click()
    accepted = REQUESTS[0]["transitions"][0]["at_us"]
    assert f"/cluster/requests/5/cancel?conductor=embedded&accepted_us={accepted}" in sent.value.url
    expect(page.locator("#cancel-status")).to_contain_text("Request 5 is not cancelled: only an API key")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1100])
def test_the_operators_view_is_accessible(tiny, visit, accessible, width, scheme):
    page = visit(tiny, path="/#cluster", width=width, scheme=scheme)
    made_up(page, tiny, {"may_cancel": True})
    expect(page.locator("#requests tr")).to_have_count(5)
    page.locator('#requests tr[data-request="2"] button.link').click()
    accessible(page)
    page.get_by_role("button", name="Cancel request 5").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    accessible(page)
