"""Makes the pictures of docs/page.md: `tests/page pictures`."""

import concurrent.futures

import pytest
from conftest import REPO
from playwright.sync_api import expect

# Above it, a picture is too large for the repository.
MOST_BYTES = 150_000


def take(page, name):
    path = REPO / "docs" / name
    page.screenshot(path=path)
    assert path.stat().st_size < MOST_BYTES, f"{name} has {path.stat().st_size} bytes"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_chat(tiny, visit, scheme):
    page = visit(tiny, width=800, height=520, scheme=scheme)
    for count, question in enumerate(["What is 17 + 25?", "What is Tutti?"], 1):
        page.get_by_label("Message", exact=True).fill(question)
        page.keyboard.press("Enter")
        expect(page.locator("li.assistant .foot")).to_have_count(count)
        expect(page.locator("li.assistant .foot").last).to_contain_text("tokens")
    take(page, f"page-chat-{scheme}.png")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_cluster(cluster, visit, scheme):
    flags = ["--workers", 2, "--device", "sim", "--max-step-tokens", 512, "--no-prefix-cache"]
    server = cluster(*flags)
    page = visit(server, path="/#cluster", width=800, height=1000, scheme=scheme)
    with page.expect_response("**/cluster/steps*"):
        pass

    def ask(prompt, most):
        tokens = [5 + index % 90 for index in range(prompt)]
        return server.complete(prompt=tokens, max_tokens=most, ignore_eos=True)

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        runs = [pool.submit(ask, 8 + index, 250 + 10 * index) for index in range(16)]
        runs += [pool.submit(ask, 900 + 100 * index, 12) for index in range(6)]
        done = [run for run in runs if run.result()]
    assert len(done) == len(runs)
    long = page.locator("#requests tr").filter(has=page.get_by_role("cell", name="1,400", exact=True))
    expect(long).to_contain_text("finished")
    long.get_by_role("button").click()
    expect(page.locator("#waterfall li").first).to_be_visible()
    page.evaluate("scrollTo(0, 0)")
    take(page, f"page-cluster-{scheme}.png")
