"""The view of the cluster: workers, steps and requests of a live cluster, under load, and while a worker dies."""

import concurrent.futures
import hashlib
import os
import re
import signal

import pytest
from harness import REPO, wait_for
from playwright.sync_api import expect

BUDGET = 256


@pytest.fixture(scope="module")
def busy(cluster):
    """Two simulated workers with a small budget and no prefix cache, so that every prompt is cut into chunks."""
    return cluster("--workers", 2, "--device", "sim", "--max-step-tokens", BUDGET, "--no-prefix-cache")


class Load:
    """A load on the cluster: long answers of 400 tokens one after another, and between them prompts of several chunks.
    """

    def __init__(self, server):
        self.server, self.going = server, True
        self.pool = concurrent.futures.ThreadPoolExecutor(6)
        self.runs = [self.pool.submit(self._run, prompt) for prompt in (8, 8, 8, 8, 700, 700)]

    def _run(self, prompt):
        done, tokens = 0, [5 + index % 90 for index in range(prompt)]
        while self.going:
            answer = self.server.complete(prompt=tokens, max_tokens=400 if prompt < 100 else 20, ignore_eos=True)
            assert answer["usage"]["prompt_tokens"] == prompt
            done += 1
        return done

    def end(self):
        """Waits for the running answers, and returns their number. Fails if one of them failed."""
        self.going = False
        with self.pool:
            return sum(run.result() for run in self.runs)


@pytest.fixture
def load(busy):
    load = Load(busy)
    yield load
    load.end()


def worker(page, rank):
    return page.get_by_role("listitem").filter(has=page.get_by_role("heading", name=f"Worker {rank}", exact=True))


def test_steps_are_drawn_as_they_were_packed(busy, load, visit):
    page = visit(busy, path="/#cluster")
    for rank in (0, 1):
        card = worker(page, rank)
        expect(card).to_contain_text("ready")
        expect(card.locator("svg rect.decode").first).to_be_attached()
        expect(card.locator("svg line.budget")).to_be_attached()
    # A chunk of a prompt takes the part of the budget that decodes leave free.
    expect(page.locator("svg rect.prefill").first).to_be_attached()
    full = f"{BUDGET} of {BUDGET} tokens"

    def packed():
        """Returns the title of a full step with prefill, and the step's blocks in drawing order, from the bottom up."""
        bars = page.locator("svg g").evaluate_all(
            "bars => bars.map(bar => [bar.querySelector('title').textContent,"
            " [...bar.querySelectorAll('rect')].map(rect => rect.getAttribute('class'))])"
        )
        return next((bar for bar in bars if full in bar[0] and "prefill" in bar[1]), None)

    title, blocks = wait_for("a full step with prefill", packed)
    shares = [int(tokens) for tokens in re.findall(r"request \d+: (\d+)", title)]
    decodes = re.search(r"decodes: (\d+)", title)
    assert sum(shares) + int(decodes[1] if decodes else 0) == BUDGET, title
    assert blocks == ["decode"] * bool(decodes) + ["prefill"] * len(shares)


def test_a_request_is_shown_by_its_number(busy, visit):
    # The page asks for a request that does not exist, and the browser logs the 404.
    page = visit(busy, path="/#cluster", expected=("Failed to load resource",))
    expect(worker(page, 0)).to_contain_text("ready")
    # The cluster keeps the chunks of a prompt only after a client has asked for steps, so the view must ask first.
    with page.expect_response("**/cluster/steps*"):
        pass
    busy.complete(prompt=[7 + index % 50 for index in range(BUDGET * 2)], max_tokens=30, ignore_eos=True)
    newest = page.locator("#requests tr").filter(has=page.get_by_role("cell", name=str(BUDGET * 2), exact=True)).first
    expect(newest).to_contain_text("finished")
    number = newest.get_attribute("data-request")
    page.get_by_label("Number of a request").fill(number)
    page.get_by_role("button", name="Show").click()
    heading = page.get_by_role("heading", name=f"Request {number}: finished")
    expect(heading).to_be_focused()
    phases = page.locator("#waterfall li")
    expect(phases.first).to_contain_text("waits for a worker")
    texts = phases.all_text_contents()
    chunks = [int(tokens) for tokens in re.findall(r"chunk of (\d+) tokens", " ".join(texts))]
    assert sum(chunks) == BUDGET * 2 and len(chunks) >= 2, texts
    assert any("decode after" in text for text in texts), texts
    page.get_by_label("Number of a request").fill("999999")
    page.keyboard.press("Enter")
    expect(page.locator("#waterfall .error")).to_contain_text("999999")


def test_a_worker_that_is_killed_is_seen_to_go_and_to_come_back(busy, load, visit):
    page = visit(busy, path="/#cluster")
    card = worker(page, 1)
    expect(card.locator("svg rect.decode").first).to_be_attached()
    before = busy.workers_by_rank()[1]
    expect(card).to_contain_text(f"process {before}")
    os.kill(before, signal.SIGKILL)
    after = wait_for("another process", lambda: busy.workers_by_rank().get(1, before) != before and busy.workers_by_rank()[1])
    expect(card).to_contain_text(f"process {after}")
    expect(card).to_contain_text("ready")
    expect(card.locator("svg rect.decode").first).to_be_attached()
    # The steps of the dead process are no longer shown, so these steps are those of the new one. No answer was lost.
    assert load.end() >= 6
    assert busy.metrics()["tutti_request_replays_total"] > 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1100])
def test_the_view_is_accessible(busy, load, visit, accessible, width, scheme):
    page = visit(busy, path="/#cluster", width=width, scheme=scheme)
    expect(page.locator("svg rect.prefill").first).to_be_attached()
    page.locator("#requests button").first.click()
    expect(page.locator("#waterfall li").first).to_be_visible()
    accessible(page)


def test_the_keyboard_reaches_a_request(busy, visit):
    busy.complete(prompt=[9, 9, 9], max_tokens=2, ignore_eos=True)
    page = visit(busy)
    link = page.get_by_role("link", name="Cluster")
    for _ in range(10):
        page.keyboard.press("Tab")
        if link.evaluate("(element) => document.activeElement === element"):
            break
    page.keyboard.press("Enter")
    expect(link).to_have_attribute("aria-current", "page")
    first = page.locator("#requests button").first
    expect(first).to_be_visible()
    for _ in range(20):
        page.keyboard.press("Tab")
        if first.evaluate("(element) => document.activeElement === element"):
            break
    expect(first).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#waterfall h3")).to_be_focused()


def test_a_paused_view_asks_nothing(busy, visit):
    page = visit(busy, path="/#cluster")
    expect(worker(page, 0)).to_contain_text("ready")
    page.clock.install()
    pause = page.get_by_role("button", name="Pause")
    pause.click()
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.clock.run_for(10_000)
    assert not asked
    with page.expect_request("**/cluster/state"):
        pause.click()


def test_data_need_a_key_where_keys_are_set(cluster, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(f"page {hashlib.sha256(b'secret').hexdigest()} requests-per-minute=1\n")
    server = cluster("--workers", 1, "--device", "sim", "--api-key-file", keys)
    paths = ["/cluster/state", "/cluster/steps", "/cluster/requests", "/cluster/requests/1"]
    assert [server.client.get(path).status_code for path in paths] == [401] * 4
    assert server.client.get("/").status_code == 200
    # Reading these pages does not count against the key's limit of requests.
    headers = {"authorization": "Bearer secret"}
    assert [server.client.get(path, headers=headers).status_code for path in paths * 2] == [200, 200, 200, 404] * 2
    answer = server.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers)
    assert answer.status_code == 200


def test_a_disaggregated_request_shows_its_hand_over(cluster, visit):
    topology = REPO / "deploy/topology/disaggregated.toml"
    server = cluster("--topology", topology, "--device", "sim")
    page = visit(server, path="/#cluster")
    expect(worker(page, 0)).to_contain_text("group prefill · prefill")
    expect(worker(page, 1)).to_contain_text("group decode · decode")
    server.complete(prompt=[5, 6, 7, 8], max_tokens=20, ignore_eos=True)
    row = page.locator("#requests tr").first
    expect(row).to_contain_text("finished")
    row.get_by_role("button").click()
    phases = page.locator("#waterfall li")
    for text in ("room for the decode, worker 1", "queue and prefill, worker 0", "decode after", "handed over"):
        expect(phases.filter(has_text=text)).to_have_count(1)
