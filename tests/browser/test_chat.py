"""The chat: streaming and stopping an answer, parameters, tool calls, errors and API keys."""

import hashlib
import json

import httpx
import pytest
from playwright.sync_api import expect

# The browser logs each request that is answered with an error. These tests cause such errors on purpose.
REFUSED = ("Failed to load resource",)


def ask(page, text):
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()


def set_parameter(page, label, value):
    box = page.locator("#parameters-box")
    if box.get_attribute("open") is None:
        page.get_by_text("Parameters", exact=True).click()
    page.get_by_label(label).fill(value)


def test_an_answer_and_the_next_one_that_knows_it(tiny, visit):
    page = visit(tiny)
    expect(page.locator("#model")).to_have_text(tiny.model)
    ask(page, "What is 17 + 25?")
    answers = page.locator("li.assistant")
    expect(answers.locator(".text")).to_have_text("17 + 25 = 42")
    expect(page.get_by_role("status")).to_contain_text("Answer complete: 18 + 11 tokens")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "What is Tutti?")
    roles = [message["role"] for message in sent.value.post_data_json["messages"]]
    assert roles == ["user", "assistant", "user"]
    expect(answers).to_have_count(2)
    expect(answers.nth(1).locator(".text")).to_contain_text("Tutti")


def test_a_stop_ends_the_request_in_the_cluster(simulated, visit):
    page = visit(simulated)
    set_parameter(page, "Most tokens", "3000")
    set_parameter(page, "Further parameters", '{"ignore_eos": true}')
    ask(page, "Go on")
    answer = page.locator("li.assistant")
    # Some text is shown while the answer still runs, so the answer is streamed.
    expect(answer.locator(".text")).not_to_be_empty()
    expect(page.get_by_role("status")).to_have_text("Answering")
    expect(answer).to_have_attribute("aria-busy", "true")
    page.get_by_role("button", name="Stop").click()
    expect(answer).to_have_attribute("aria-busy", "false")
    expect(answer.locator(".foot")).to_contain_text("stopped")
    simulated.wait_until_idle()
    assert simulated.metrics()["tutti_generated_tokens_total"] < 3000


def test_parameters_are_sent_and_mistakes_are_not(tiny, visit):
    page = visit(tiny)
    set_parameter(page, "System message", "Be short.")
    set_parameter(page, "Temperature", "0.5")
    set_parameter(page, "Seed", "7")
    set_parameter(page, "Stop text", "red")
    set_parameter(page, "Further parameters", '{"min_p": 0.1}')
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Reverse: red green blue")
    body = sent.value.post_data_json
    assert body["messages"][0] == {"role": "system", "content": "Be short."}
    assert {name: body[name] for name in ("temperature", "seed", "stop", "min_p")} == {
        "temperature": 0.5,
        "seed": 7,
        "stop": "red",
        "min_p": 0.1,
    }
    assert "top_p" not in body and "tools" not in body
    expect(page.get_by_role("status")).to_contain_text("Answer complete")
    requests = []
    page.on("request", lambda request: requests.append(request.url))
    set_parameter(page, "Further parameters", "{no")
    ask(page, "Again")
    more = page.get_by_label("Further parameters")
    expect(more).to_be_focused()
    expect(more).to_have_attribute("aria-invalid", "true")
    expect(page.locator("#parameter-more-error")).to_contain_text("not JSON")
    assert not requests and page.get_by_label("Message", exact=True).input_value() == "Again"


def test_the_servers_refusal_is_shown(tiny, visit):
    page = visit(tiny, expected=REFUSED)
    set_parameter(page, "Further parameters", '{"logit_bias": {"x": 1}}')
    ask(page, "Hello")
    expect(page.get_by_role("alert")).to_contain_text("logit_bias")
    expect(page.get_by_role("status")).to_have_text("The answer failed")


def test_tool_calls_are_shown_as_they_come(tiny, visit):
    """The test makes up the answer, since no shipped model calls tools."""
    pieces = [
        {"role": "assistant", "content": ""},
        {"tool_calls": [{"index": 0, "id": "call_1", "function": {"name": "weather", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"Graz"}'}}]},
        {"tool_calls": [{"index": 1, "id": "call_2", "function": {"name": "<b>time</b>", "arguments": "{}"}}]},
    ]
    events = [{"choices": [{"index": 0, "delta": piece, "finish_reason": None}]} for piece in pieces]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    page = visit(tiny)
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    set_parameter(page, "Tools", '[{"type": "function", "function": {"name": "weather"}}]')
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "How is the weather?")
    assert sent.value.post_data_json["tools"][0]["function"]["name"] == "weather"
    calls = page.get_by_role("region", name="Tool call")
    expect(calls).to_have_count(2)
    expect(calls.nth(0)).to_contain_text("Calls weather")
    expect(calls.nth(0).locator("pre")).to_have_text('{"city": "Graz"}')
    # The page shows a name as text, even if it contains HTML.
    expect(calls.nth(1)).to_contain_text("Calls <b>time</b>")
    expect(page.get_by_role("status")).to_contain_text("tool_calls")


def test_a_key_is_asked_for_and_used(cluster, visit, tmp_path):
    key = "a key of the page's test, which is long enough"
    keys = tmp_path / "keys"
    keys.write_text(f"page {hashlib.sha256(key.encode()).hexdigest()}\n")
    server = cluster("--workers", 1, "--device", "sim", "--api-key-file", keys)
    page = visit(server, expected=REFUSED)
    field = page.get_by_label("API key", exact=True)
    expect(field).to_be_focused()
    field.fill("another key")
    field.press("Enter")
    expect(page.locator("#model")).to_contain_text("not known")
    field.fill(key)
    field.press("Enter")
    expect(field).to_be_hidden()
    expect(page.locator("#model")).to_have_text("tutti-tiny")
    set_parameter(page, "Most tokens", "4")
    ask(page, "Hello")
    expect(page.get_by_role("status")).to_contain_text("Answer complete")
    assert key not in page.url and not page.evaluate("Object.values(localStorage).join()").count(key)


def test_files_of_the_page_are_cached_by_their_tags(tiny):
    with httpx.Client(base_url=tiny.url) as client:
        first = client.get("/")
        assert first.status_code == 200 and first.headers["cache-control"] == "no-cache"
        policy = first.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        again = client.get("/", headers={"if-none-match": first.headers["etag"]})
        assert again.status_code == 304 and not again.content
        assert client.get("/page/none.js").status_code == 404


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1100])
def test_the_chat_is_accessible(tiny, visit, accessible, width, scheme):
    page = visit(tiny, width=width, scheme=scheme)
    ask(page, "What is Tutti?")
    set_parameter(page, "Temperature", "1")
    page.get_by_role("button", name="API key").click()
    expect(page.get_by_role("status")).to_contain_text("Answer complete")
    accessible(page)


def test_the_colours_follow_the_system_until_they_are_chosen(tiny, visit):
    page = visit(tiny, scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    button = page.get_by_role("button", name="Colours")
    button.click()
    expect(button).to_have_text("Colours: light")
    light = page.evaluate(background)
    assert light != dark
    page.reload()
    expect(button).to_have_text("Colours: light")
    assert page.evaluate(background) == light
    button.click()
    button.click()
    expect(button).to_have_text("Colours: auto")
    assert page.evaluate(background) == dark


def tab_to(page, target):
    """Presses Tab until the element has the focus."""
    for _ in range(40):
        if page.evaluate("(element) => document.activeElement === element", target.element_handle()):
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"Tab does not reach {target}")


def test_the_keyboard_is_enough(simulated, visit):
    page = visit(simulated)
    expect(page.locator("#model")).not_to_be_empty()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip")).to_be_focused()
    tab_to(page, page.locator("summary"))
    page.keyboard.press("Enter")
    tab_to(page, page.get_by_label("Most tokens"))
    page.keyboard.type("3000")
    tab_to(page, page.get_by_label("Further parameters"))
    page.keyboard.type('{"ignore_eos": true}')
    tab_to(page, page.get_by_label("Message", exact=True))
    page.keyboard.type("Go on")
    page.keyboard.press("Enter")
    answer = page.locator("li.assistant")
    expect(answer.locator(".text")).not_to_be_empty()
    page.keyboard.press("Escape")
    expect(answer.locator(".foot")).to_contain_text("stopped")
    tab_to(page, page.get_by_role("button", name="New chat"))
    page.keyboard.press("Enter")
    expect(answer).to_have_count(0)
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    simulated.wait_until_idle()
