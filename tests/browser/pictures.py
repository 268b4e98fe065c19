"""Makes the pictures of docs/page.md: `tests/page pictures`."""

import concurrent.futures
import hashlib
import threading

import pytest
from conftest import REPO
from playwright.sync_api import expect
from test_answers import answers

# Maximum size of a picture. Larger ones do not belong in the repository.
MOST_BYTES = 150_000
MARKDOWN = """Start it with **two workers** on this machine:

```bash
conductor --workers 2
```

1. It loads the model into each worker.
2. `/ready` says when a request would be served.
   - See [the docs](https://example.com/docs) for *all* settings.

| device | tokens per second |
| --- | ---: |
| one core | 120 |
| eight cores | 840 |
"""
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


@pytest.mark.timeout(400)
def test_cluster(cluster, visit, tmp_path):
    key = "the key of the pictures"
    keys = tmp_path / "keys"
    keys.write_text(f"oncall {hashlib.sha256(key.encode()).hexdigest()} operator\n")
    flags = ["--workers", 2, "--device", "sim", "--max-step-tokens", 512, "--no-prefix-cache", "--api-key-file", keys]
    server = cluster(*flags)
    headers = {"authorization": f"Bearer {key}"}
    server.client.headers.update(headers)
    page = visit(server, path="/#cluster", width=800, height=1180, expected=("Failed to load resource",))
    page.get_by_label("API key", exact=True).fill(key)
    page.keyboard.press("Enter")
    with page.expect_response("**/cluster/steps*"):
        pass

    def ask(prompt, most):
        tokens = [5 + index % 90 for index in range(prompt)]
        return server.complete(prompt=tokens, max_tokens=most, ignore_eos=True)

    pictured = threading.Event()

    def keep_asking(prompt, most=12):
        while not pictured.is_set():
            ask(prompt, most)

    def samples():
        return server.client.get("/cluster/history").json()["newest"]

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        # Waves of load, so that the charts have a shape.
        for wave in range(4):
            waited = samples() + 5
            while samples() < waited:
                list(pool.map(lambda index: ask(8 + 40 * index, 20 + 5 * index), range(4 + 6 * (wave % 2))))
        server.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 0})
        runs = [pool.submit(keep_asking, 8 + index, 1500) for index in range(24)]
        runs += [pool.submit(keep_asking, 1000 + 200 * index) for index in range(3)]
        try:
            long = page.locator("#requests tr").filter(has=page.get_by_role("cell", name="1,400", exact=True))
            long = long.filter(has_text="finished").first
            page.wait_for_function(MIXED)
            long.get_by_role("button").first.click()
            expect(page.locator("#waterfall li").first).to_be_visible()
            page.wait_for_function(MIXED)
            page.get_by_role("button", name="Pause").click()
        finally:
            pictured.set()
        assert all(run.result() is None for run in runs)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": 800, "height": 1180})
        page.evaluate("scrollTo(0, 0)")
        take(page, f"page-cluster-{scheme}.png")
        page.set_viewport_size({"width": 800, "height": 760})
        page.get_by_role("heading", name="Last requests").evaluate("heading => heading.scrollIntoView()")
        take(page, f"page-requests-{scheme}.png")
    page.set_viewport_size({"width": 360, "height": 740})
    page.evaluate("scrollTo(0, 0)")
    take(page, "page-phone-cluster.png")


def test_answers(tiny, visit):
    """The shipped model writes no Markdown, so the answer is made up."""
    page = visit(tiny, width=800, height=620)
    answers(page, MARKDOWN)
    page.get_by_label("Message", exact=True).fill("How do I start a cluster?")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Regenerate")).to_be_visible()
    take(page, "page-markdown.png")
    page = visit(tiny, width=360, height=740, scheme="dark")
    expect(page.get_by_role("heading", name="Chat with")).to_be_visible()
    take(page, "page-phone-chat.png")
