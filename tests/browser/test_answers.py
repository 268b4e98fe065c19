"""Answers as Markdown, and what can be done with an answer: copy it, ask for another one. The empty chat."""

import json
import random

import pytest
from playwright.sync_api import expect

# The markup that a document of all constructs becomes. Text is compared as the browser writes it out again.
DOCUMENT = """Here is **bold *both*** and `a <b> code`, ~~gone~~, snake_case_name, 2 * 3 * 4.
A second line, [a link](https://example.com/a?b=1&c=(2)) and https://example.com/x_y_z.

1. First
   - inner
   - more

     ```python
     print("<script>")
     ```
2. Second

> quoted
> > deeper

| a | b |
| --- | ---: |
| 1 | `2` |

---
## Heading **two** ##
"""
MARKUP = (
    "<p>Here is <strong>bold <em>both</em></strong> and <code>a &lt;b&gt; code</code>, <del>gone</del>, "
    "snake_case_name, 2 * 3 * 4.<br>A second line, "
    '<a href="https://example.com/a?b=1&amp;c=(2)" title="https://example.com/a?b=1&amp;c=(2)" target="_blank" '
    'rel="noopener noreferrer">a link</a> and <a href="https://example.com/x_y_z" title="https://example.com/x_y_z" '
    'target="_blank" rel="noopener noreferrer">https://example.com/x_y_z</a>.</p>'
    "<ol><li>First<ul><li>inner</li><li>more"
    '<figure class="code"><figcaption><span>python</span><button type="button" class="small">Copy code</button></figcaption>'
    '<pre tabindex="0"><code>print("&lt;script&gt;")</code></pre></figure></li></ul></li><li>Second</li></ol>'
    "<blockquote><p>quoted</p><blockquote><p>deeper</p></blockquote></blockquote>"
    '<div class="wide-table" tabindex="0"><table><thead><tr><th>a</th><th class="right">b</th></tr></thead>'
    '<tbody><tr><td>1</td><td class="right"><code>2</code></td></tr></tbody></table></div>'
    '<hr><h3 class="level-2">Heading <strong>two</strong></h3>'
)
# Renders pieces of a text, each drawn before the next comes, and returns the markup.
RENDER = """async (pieces) => {
  const { Growing } = await import("/page/markdown.js");
  const place = document.createElement("div");
  const shown = new Growing(place);
  for (const piece of pieces) {
    shown.append(piece);
    shown.draw();
  }
  return place.innerHTML;
}"""
# Texts that a model could be made to write. None may become an element or an address that runs or fetches something.
HOSTILE = [
    "<script>window.broken = 1</script>",
    "<img src=x onerror='window.broken = 1'>",
    "[x](javascript:window.broken=1)",
    "[x](JaVaScRiPt:window.broken=1) [y](data:text/html,<script>window.broken=1</script>) [z](vbscript:a)",
    "[x](java\tscript:window.broken=1) [y](&#106;avascript:window.broken=1)",
    "![picture](https://example.com/p.png)",
    "[bank](https://bank.example@evil.example/)",
    "<javascript:window.broken=1> <https://example.com/'onmouseover='window.broken=1'>",
    "[relative](/page/main.js) [blob](blob:https://example.com/1) [file](file:///etc/passwd)",
    '```"><script>window.broken = 1</script>\ncode\n```',
    "| <script>window.broken=1</script> | b |\n| --- | --- |\n| [x](javascript:window.broken=1) | c |",
]
# Texts on which a careless parser takes quadratic time or more.
LONG = ["**a " * 6000, "[" * 15000, "`" * 10000 + " " + "`a" * 4000, "> " * 8000, "- " * 8000 + "x", "[a](" * 4000, "*a_" * 6000,
        "\n".join("- " * depth + "x" for depth in range(200)), "| " * 9000, "_" * 19000, "![" * 9000, "a\n" * 20000,
        "|a" * 1000 + "\n" + "|-" * 1000 + "\n" + "|\n" * 2000, "[" * 1600 + "](x)" * 1600, "- a\n" + "\n" * 8000 + "- b",
        "#" + " " * 20000 + "\u2028"]


def ask(page, text):
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()


def answers(page, *texts):
    """Makes up the answers to the next requests."""
    left = list(texts)

    def answer(route):
        text = left.pop(0)
        pieces = [{"role": "assistant"}, *({"content": text[at : at + 5]} for at in range(0, len(text), 5))]
        events = [{"choices": [{"index": 0, "delta": piece, "finish_reason": None}]} for piece in pieces]
        events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        route.fulfill(content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", answer)


def test_every_construct_becomes_its_element(tiny, visit):
    page = visit(tiny)
    assert page.evaluate(RENDER, [DOCUMENT]) == MARKUP
    # It is shown in the chat, too.
    answers(page, DOCUMENT)
    ask(page, "Show all")
    expect(page.get_by_role("status")).to_contain_text("Answer complete")
    assert page.locator("li.assistant .text").inner_html() == MARKUP


def test_a_streamed_answer_ends_as_the_whole_one(tiny, visit):
    page = visit(tiny)
    source = random.Random(7)
    words = ["a", "b c", "\n", "\n\n", "- ", "* ", "1. ", "> ", "**", "*", "_", "`", "```", "|", "---", "# ", "  ", "~~",
             "[x](https://e.com)", "\\", "| --- | --- |", "    ", "<i>", "\r\n"]
    texts = [DOCUMENT, *("".join(source.choices(words, k=40)) for _ in range(150))]
    for text in texts:
        pieces = list(text) if source.random() < 0.5 else [text[at : at + 7] for at in range(0, len(text), 7)]
        assert page.evaluate(RENDER, pieces) == page.evaluate(RENDER, [text]), repr(text)


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_of_a_model_runs_or_fetches_anything(tiny, visit, text):
    """The fixture fails the test if the page sends a request to another host or breaks its policy."""
    page = visit(tiny)
    answers(page, text)
    ask(page, "Be evil")
    expect(page.get_by_role("status")).to_contain_text("Answer complete")
    shown = page.locator("li.assistant .text")
    links = shown.locator("a").evaluate_all("links => links.map(({ href, rel }) => [href, rel])")
    assert all(href.startswith("https://example.com/") and rel == "noopener noreferrer" for href, rel in links), links
    names = shown.evaluate("place => [...place.querySelectorAll('*')].map(it => it.localName)")
    assert not {"script", "img", "iframe", "svg", "style", "form", "input"} & set(names), names
    assert page.evaluate("window.broken") is None
    attributes = shown.evaluate("place => [...place.querySelectorAll('*')].flatMap(it => it.getAttributeNames())")
    assert not [name for name in attributes if name.startswith("on") or name in ("src", "style")], attributes


def test_a_long_answer_of_marks_takes_no_long_time(tiny, visit):
    """The test has no limit of its own: a parser that tries all pairs of marks would run into the one of all tests."""
    page = visit(tiny)
    for text in LONG:
        assert page.evaluate(RENDER, [text])


def test_an_answer_is_copied_as_it_was_written(tiny, visit):
    page = visit(tiny)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    text = "Run **this**:\n\n```\ncargo build\n  --bins\n```"
    answers(page, text)
    ask(page, "How?")
    page.get_by_role("button", name="Copy", exact=True).click()
    expect(page.get_by_role("status")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == text
    page.get_by_role("button", name="Copy code").click()
    expect(page.get_by_role("figure").get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == "cargo build\n  --bins"


def test_another_answer_takes_the_place_of_the_last_one(tiny, visit):
    page = visit(tiny, expected=("Failed to load resource",))
    answers(page, "one", "two", "three")
    ask(page, "First")
    again = page.get_by_role("button", name="Regenerate")
    expect(again).to_be_visible()
    ask(page, "Second")
    items = page.locator("li.assistant")
    expect(items).to_have_count(2)
    expect(items.nth(1).locator(".text")).to_have_text("two")
    with page.expect_request("**/v1/chat/completions") as sent:
        again.click()
    roles = [(message["role"], message["content"]) for message in sent.value.post_data_json["messages"]]
    assert roles == [("user", "First"), ("assistant", "one"), ("user", "Second")]
    expect(items.nth(1).locator(".text")).to_have_text("three")
    expect(items).to_have_count(2)
    # The button stands below the last answer alone, and the new answer has the focus of the old one's button.
    expect(items.nth(1).get_by_role("button", name="Regenerate")).to_be_visible()
    expect(again).to_have_count(1)
    expect(items.nth(1)).to_be_focused()
    # After a failure, too.
    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=503, json={"error": {"message": "full"}}))
    again.click()
    expect(page.get_by_role("alert")).to_contain_text("full")
    page.unroute("**/v1/chat/completions")
    answers(page, "four")
    again.click()
    expect(items.nth(1).locator(".text")).to_have_text("four")
    expect(page.get_by_role("alert")).to_have_count(0)


def test_the_empty_chat_says_what_the_shipped_model_can_do_and_it_can(tiny, visit):
    page = visit(tiny)
    welcome = page.locator("#welcome")
    expect(welcome.get_by_role("heading")).to_have_text("Chat with tutti-tiny")
    # The page has the words of the model itself.
    ask(page, "What can you do?")
    text = page.locator("li.assistant .text")
    expect(page.get_by_role("status")).to_contain_text("Answer complete")
    own = text.inner_text().strip()
    expect(welcome).to_be_hidden()
    page.get_by_role("button", name="New chat").click()
    expect(welcome).to_contain_text(own)
    right = {"What is 17 + 25?": "42", "Count from 3 to 9": "3", "Reverse: red green blue": "blue green red"}
    questions = welcome.get_by_role("listitem").all_inner_texts()
    assert set(right) < set(questions), questions
    for question in questions:
        welcome.get_by_role("button", name=question).click()
        expect(page.get_by_role("status")).to_contain_text("Answer complete")
        expect(text).to_contain_text(right.get(question, "Tutti" if "Tutti" in question else "worker"))
        page.get_by_role("button", name="New chat").click()


def test_another_model_is_described_by_its_name_and_context(tiny, visit, accessible):
    page = visit(tiny)
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": "a/<b>model</b>", "max_model_len": 32768}]}))
    page.reload()
    welcome = page.locator("#welcome")
    expect(welcome).to_contain_text("a/<b>model</b>, which reads up to 32,768 tokens")
    expect(welcome.get_by_role("button")).to_have_count(0)
    accessible(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1100])
def test_answers_are_accessible(tiny, visit, accessible, width, scheme):
    page = visit(tiny, width=width, scheme=scheme)
    accessible(page)
    answers(page, DOCUMENT)
    ask(page, "Show all")
    expect(page.get_by_role("button", name="Regenerate")).to_be_visible()
    accessible(page)


def test_the_end_of_an_answer_stays_in_view(tiny, visit):
    page = visit(tiny, height=500)
    answers(page, "\n\n".join(f"Paragraph {number}." for number in range(60)))
    ask(page, "Much")
    again = page.get_by_role("button", name="Regenerate")
    expect(again).to_be_visible()
    # Not only inside the window: the field for the next message hides nothing.
    page.wait_for_function("document.documentElement.scrollHeight - scrollY - innerHeight < 2")
    again.click(trial=True)
