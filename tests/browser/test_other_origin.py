"""A web page of another origin asks the API from a browser, with a key."""

import http.server
import json
import threading

import pytest
from api_keys import line

KEY = "0123456789abcdef" * 4
PAGE = b"<!doctype html><title>a page elsewhere</title>"
# Sends a request as a web page does, and returns what the page may see of the answer.
ASK = """async ([url, headers, body]) => {
    try {
        const method = body ? "POST" : "GET";
        const response = await fetch(url, { method, headers, body: body && JSON.stringify(body) });
        let text = "", chunks = 0;
        const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
        for (let part; !(part = await reader.read()).done; chunks++) text += part.value;
        return { status: response.status, text, chunks };
    } catch (error) {
        return { error: String(error) };
    }
}"""


@pytest.fixture(scope="module")
def elsewhere():
    """The origin of a web server with one empty page."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(PAGE)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def guarded(cluster, elsewhere, tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(line("page", KEY))
    env = {"TUTTI_ROUTER__ALLOWED_ORIGINS": f'["{elsewhere}"]'}
    return cluster("--api-key-file", keys, "--served-model-name", "tiny", env=env)


@pytest.fixture
def page(chromium, elsewhere):
    context = chromium.new_context()
    page = context.new_page()
    page.goto(elsewhere)
    yield page
    context.close()


def ask(page, server, path, body=None, key=KEY):
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    return page.evaluate(ASK, [f"{server.url}{path}", headers, body])


def test_an_allowed_page_reads_answers_streams_and_errors(page, guarded):
    models = ask(page, guarded, "/v1/models")
    assert models["status"] == 200 and json.loads(models["text"])["data"][0]["id"] == "tiny"
    body = {"model": "tiny", "messages": [{"role": "user", "content": "What is Tutti?"}], "stream": True, "max_tokens": 8}
    stream = ask(page, guarded, "/v1/chat/completions", body)
    assert stream["status"] == 200 and stream["text"].endswith("data: [DONE]\n\n") and stream["chunks"] > 1, stream
    # The page can tell a refusal from a broken network.
    wrong = ask(page, guarded, "/v1/models", key="f" * 64)
    assert wrong["status"] == 401 and "error" in json.loads(wrong["text"])
    bad = ask(page, guarded, "/v1/chat/completions", body | {"temperature": -1})
    assert bad["status"] == 400 and json.loads(bad["text"])["error"]["param"] == "temperature"
    unknown = ask(page, guarded, "/v1/nothing")
    assert unknown["status"] == 404


def test_a_page_of_another_origin_sees_nothing(chromium, elsewhere, guarded):
    context = chromium.new_context()
    page = context.new_page()
    # To a browser, another host name is another origin.
    page.goto(elsewhere.replace("127.0.0.1", "localhost"))
    for path, body in (("/v1/models", None), ("/v1/completions", {"model": "tiny", "prompt": "Tutti", "max_tokens": 1})):
        assert "Failed to fetch" in ask(page, guarded, path, body)["error"]
    context.close()
