"""Pictures and recordings in the chat: choosing, showing, sending and refusing them."""

import json

import pytest
from omni_model import png, wav, write
from playwright.sync_api import expect
from test_chat import REFUSED, ask, set_parameter

PICTURE = {"name": "roof.png", "mimeType": "image/png", "buffer": png(40, 24, 1)}
RECORDING = {"name": "voice.wav", "mimeType": "audio/wav", "buffer": wav(6_500, 1)}
BROKEN = {"name": "broken.png", "mimeType": "image/png", "buffer": b"no picture"}


@pytest.fixture(scope="session")
def omni(cluster, tmp_path_factory):
    """A model with random weights that takes pictures and recordings."""
    return cluster("--workers", 1, *write(tmp_path_factory.mktemp("omni") / "checkpoint"))


@pytest.fixture
def page(omni, visit):
    page = visit(omni, expected=REFUSED)
    expect(page.get_by_role("button", name="Attach a picture or recording")).to_be_visible()
    set_parameter(page, "Most tokens", "4")
    return page


def attach(page, *files):
    page.locator("#files").set_input_files(files)


def test_a_model_of_text_is_offered_no_files(tiny, visit):
    page = visit(tiny)
    expect(page.locator("#model")).to_have_text(tiny.model)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.locator("#attach")).to_be_hidden()


def test_files_are_shown_and_sent_in_front_of_the_text(page):
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Attach").click()
    assert ".webp" in page.locator("#files").get_attribute("accept")
    chooser.value.set_files([PICTURE, RECORDING])
    attached = page.get_by_role("list", name="Attached files")
    expect(attached.get_by_role("listitem")).to_have_count(2)
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "What are these?")
    picture, recording, text = sent.value.post_data_json["messages"][0]["content"]
    assert picture["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
    assert recording["input_audio"]["format"] == "wav" and recording["input_audio"]["data"].startswith("UklGR")
    assert text == {"type": "text", "text": "What are these?"}
    expect(page.get_by_role("status")).to_contain_text("Answer complete")
    said = page.locator("li.user")
    expect(said.get_by_alt_text("roof.png")).to_be_visible()
    assert said.get_by_alt_text("roof.png").evaluate("(image) => image.naturalWidth") == 40
    expect(said.get_by_label("voice.wav")).to_be_visible()
    page.wait_for_function("document.querySelector('li.user audio').duration > 0.4")
    expect(attached.get_by_role("listitem")).to_have_count(0)
    # The next request has the files again, and needs no text.
    attach(page, PICTURE)
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Send").click()
    messages = sent.value.post_data_json["messages"]
    assert [part["type"] for part in messages[0]["content"]] == ["image_url", "input_audio", "text"]
    assert [part["type"] for part in messages[-1]["content"]] == ["image_url"]
    expect(page.get_by_role("status")).to_contain_text("Answer complete")


def test_wrong_and_large_files_are_refused_before_they_are_sent(omni, page):
    requests = []
    page.on("request", lambda request: requests.append(request.url))
    alert = page.get_by_role("alert")
    attach(page, PICTURE, {"name": "film.mp4", "mimeType": "video/mp4", "buffer": b"film"})
    expect(alert).to_have_text("film.mp4 is not attached: the model takes png, jpeg, webp, wav, mp3, flac.")
    expect(page.get_by_role("button", name="Remove roof.png")).to_be_visible()
    page.get_by_role("button", name="Remove roof.png").click()
    expect(page.locator("#attached li")).to_have_count(0)
    assert not [url for url in requests if not url.startswith("blob:")]
    # The limit is that of the whole request.
    served = omni.client.get("/v1/models").json()
    served["data"][0]["max_body_bytes"] = (64 << 10) + 5_000
    page.route("**/v1/models", lambda route: route.fulfill(json=served))
    page.reload()
    attach(page, PICTURE)
    expect(page.locator("#attached li")).to_have_count(1)
    attach(page, RECORDING)
    expect(alert).to_contain_text("voice.wav is not attached: it takes 17 KiB of a request, and the conversation's files")
    expect(alert).to_contain_text("the limit is 69 KiB")
    expect(page.locator("#attached li")).to_have_count(1)
    assert not [url for url in requests if "completions" in url]


def test_a_refused_file_is_explained_and_leaves_the_conversation(page):
    attach(page, BROKEN)
    ask(page, "What is this?")
    expect(page.locator("li.assistant").get_by_role("alert")).to_contain_text("image_url")
    expect(page.locator("li.user .foot")).to_contain_text("not part of the conversation")
    # The message is back for another try, without the file.
    expect(page.get_by_label("Message", exact=True)).to_have_value("What is this?")
    page.get_by_role("button", name="Remove broken.png").click()
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Send").click()
    assert json.loads(sent.value.post_data)["messages"] == [{"role": "user", "content": "What is this?"}]
    expect(page.get_by_role("status")).to_contain_text("Answer complete")


@pytest.mark.parametrize("width", [360, 1100])
def test_attached_files_are_accessible(omni, visit, accessible, width):
    page = visit(omni, width=width)
    expect(page.locator("#attach")).to_be_visible()
    set_parameter(page, "Most tokens", "4")
    attach(page, PICTURE, RECORDING)
    expect(page.locator("#attached li")).to_have_count(2)
    accessible(page)
    ask(page, "What are these?")
    expect(page.get_by_role("status")).to_contain_text("Answer complete")
    accessible(page)
