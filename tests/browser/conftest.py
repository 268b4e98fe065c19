"""Fixtures: clusters, a headless Chromium, and pages whose test fails if they log an error or send a request to another
host."""

import os
import pathlib
import sys

import axe_playwright_python
import pytest
from playwright.sync_api import expect, sync_playwright

REPO = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "tests/cluster/lib"))

from harness import Server  # noqa: E402

BROWSER = REPO / "target/browser"
AXE = pathlib.Path(axe_playwright_python.__file__).parent / "axe.min.js"
# Time limit in milliseconds until the page shows something, for machines under load.
SHOWN_MS = 60_000
expect.set_options(timeout=SHOWN_MS)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """Starts a conductor with these arguments. The conductor is stopped at the end of the session."""
    logs, started = tmp_path_factory.mktemp("cluster"), []

    def start(*args, env=None):
        server = Server("conductor", args, logs, env)
        started.append(server)
        return server.wait_until_ready()

    yield start
    problems = []
    for server in reversed(started):
        try:
            server.stop()
        except AssertionError as problem:
            problems.append(str(problem))
    assert not problems, "\n".join(problems)


@pytest.fixture(scope="session")
def tiny(cluster):
    """The shipped model on two workers."""
    return cluster("--workers", 2)


@pytest.fixture(scope="session")
def simulated(cluster):
    """Two simulated workers, with steps of some milliseconds and answers of any requested length."""
    return cluster("--workers", 2, "--device", "sim")


@pytest.fixture(scope="session")
def chromium():
    libraries = BROWSER / "chromium/usr/lib/x86_64-linux-gnu"
    env = os.environ | {
        "LD_LIBRARY_PATH": f"{libraries}:{libraries}/pulseaudio",
        "FONTCONFIG_FILE": str(BROWSER / "fonts.conf"),
    }
    with sync_playwright() as playwright:
        path = BROWSER / "chromium/usr/lib/chromium/chromium-headless-shell"
        browser = playwright.chromium.launch(executable_path=path, env=env)
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium):
    """Opens the page of a server. The test fails if the page logs an error that is not in `expected`, or sends a
    request to another host."""
    opened = []

    def visit(server, path="/", width=1100, height=760, scheme="light", expected=()):
        context = chromium.new_context(color_scheme=scheme, viewport={"width": width, "height": height})
        context.set_default_timeout(SHOWN_MS)
        page = context.new_page()
        problems = []
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))

        def logged(message):
            if message.type in ("error", "warning") and not any(text in message.text for text in expected):
                problems.append(f"{message.type}: {message.text}")

        def asked(request):
            # A file that the page shows has a URL of the page's own origin behind `blob:`.
            if not request.url.removeprefix("blob:").startswith(server.url + "/"):
                problems.append(f"asks elsewhere: {request.url}")

        page.on("console", logged)
        page.on("request", asked)
        opened.append((context, problems))
        page.goto(server.url + path)
        return page

    yield visit
    found = [problem for _, problems in opened for problem in problems]
    for context, _ in opened:
        context.close()
    assert not found, "\n".join(found)


@pytest.fixture
def accessible():
    """Fails if axe-core finds a serious or critical problem, or if text is wider than the page."""

    def accessible(page):
        page.evaluate(AXE.read_text())
        result = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        assert result["passes"], "axe has checked nothing"
        serious = [
            f"{rule['id']}: {node['html'][:200]} {node['failureSummary']}"
            for rule in result["violations"]
            if rule["impact"] in ("serious", "critical")
            for node in rule["nodes"]
        ]
        assert not serious, "\n".join(serious)
        sizes = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert sizes[0] <= sizes[1], f"the page is {sizes[0]} wide, and the window {sizes[1]}"

    return accessible
