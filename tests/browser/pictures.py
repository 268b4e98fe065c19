"""Makes the pictures of docs/page.md: `tests/page pictures`."""

import concurrent.futures
import threading

import pytest
from conftest import REPO
from playwright.sync_api import expect

# Maximum size of a picture. Larger ones do not belong in the repository.
MOST_BYTES = 150_000
# True if the last step of each worker shows prefills above decodes.
MIXED = """() => {
  const shown = [...document.querySelectorAll("#workers svg")];
  const has = (svg, kind, least) => svg.querySelectorAll("." + kind).length >= least;
  return shown.length === 2 && shown.every((svg) => has(svg, "decode", 40) && has(svg, "prefill", 8));
}"""


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

    pictured = threading.Event()

    def keep_asking(prompt):
        while not pictured.is_set():
            ask(prompt, 12)

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        runs = [pool.submit(ask, 8 + index, 1500) for index in range(24)]
        runs += [pool.submit(keep_asking, 1000 + 200 * index) for index in range(3)]
        try:
            long = page.locator("#requests tr").filter(has=page.get_by_role("cell", name="1,400", exact=True))
            long = long.filter(has_text="finished").first
            long.get_by_role("button").click()
            expect(page.locator("#waterfall li").first).to_be_visible()
            page.wait_for_function(MIXED)
            page.get_by_role("button", name="Pause").click()
        finally:
            pictured.set()
        assert all(run.done() or run.result() is not None for run in runs[:24])
    page.evaluate("scrollTo(0, 0)")
    take(page, f"page-cluster-{scheme}.png")
