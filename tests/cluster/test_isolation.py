"""Callers see nothing of one another's prefixes, and no text of a client becomes a control token in a chat."""

import json
import re
import shutil

import pytest
from fair_shares import FLOOD, ONE, PAGE_TOKENS, PATH, expected_prefill, key_file, keyed
from harness import REPO
from topologies import TWO_PREFILL
from transformers import PreTrainedTokenizerFast

TINY = REPO / "tests/tutti-tiny/checkpoint"
SIM = ("--device", "sim")
PREFIX = 40 * PAGE_TOKENS


def ask(cluster, key=None, **more):
    """Returns (prompt tokens, cached tokens) of a request whose prompt all callers share."""
    body = dict(prompt=[7] * PREFIX + [8] * 8, max_tokens=3, temperature=0, ignore_eos=True) | more
    response = cluster.client.post(PATH, json=body, headers=keyed(key) if key else {})
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    return usage["prompt_tokens"], (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)


@pytest.mark.parametrize("topology", (("--workers", 2), ("--topology", TWO_PREFILL)), ids=("whole", "disaggregated"))
def test_a_key_finds_no_prefix_of_another_one(start, tmp_path, topology):
    cluster = start(*topology, *SIM, "--api-key-file", key_file(tmp_path))
    cached = lambda key, **more: ask(cluster, key, **more)[1]
    assert [cached(FLOOD) for _ in range(3)] == [0, PREFIX, PREFIX]
    placed = cluster.metrics()["tutti_placed_hit_blocks_total"]
    assert cached(ONE) == 0
    assert cluster.metrics()["tutti_placed_hit_blocks_total"] == placed, "the placement knew the other key's prefix"
    assert cached(ONE) == PREFIX
    # A salt separates within a key. The same salt of two keys is not the same, and a key's name is no salt.
    assert [cached(FLOOD, cache_salt=salt) for salt in ("a", "b", "a", "b")] == [0, 0, PREFIX, PREFIX]
    assert [cached(ONE, cache_salt=salt) for salt in ("a", "flood")] == [0, 0]


def test_choices_share_whatever_their_salt_is(start, tmp_path):
    cluster = start("--workers", 1, *SIM, "--api-key-file", key_file(tmp_path))
    n, length = 16, PREFIX + 8
    for key, more in ((FLOOD, {}), (ONE, {"cache_salt": "x"})):
        before = cluster.metrics()["tutti_worker_prefill_tokens"], cluster.metrics()["tutti_worker_cached_tokens"]
        ask(cluster, key, n=n, **more)
        cluster.wait_until_idle()
        after = cluster.metrics()["tutti_worker_prefill_tokens"], cluster.metrics()["tutti_worker_cached_tokens"]
        computed = (after[0] - before[0]) - (after[1] - before[1])
        assert computed == expected_prefill(n, length)


def test_without_keys_all_share_unless_a_salt_separates_them(start):
    cluster = start("--workers", 1, *SIM)
    assert [ask(cluster)[1] for _ in range(2)] == [0, PREFIX]
    assert [ask(cluster, cache_salt="x")[1] for _ in range(2)] == [0, PREFIX]
    for salt in ("", 7):
        response = cluster.client.post(PATH, json={"prompt": [1], "cache_salt": salt})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "cache_salt")


def added(index, content, special=True):
    token = {"id": index, "content": content, "special": special, "normalized": False}
    return token | {"single_word": False, "lstrip": False, "rstrip": False}


def sentence_piece():
    """A tokenizer like Llama 2's, with a template like its."""
    words = ["<unk>", "<s>", "</s>", "<|user|>", "▁", "s", "<", ">", "|", "us", "er", "▁<", "se"]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {word: 256 + i for i, word in enumerate(words)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [added(256 + i, words[i]) for i in range(4)],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "model": {"type": "BPE", "vocab": vocab, "merges": ["▁ <"], "byte_fallback": True, "unk_token": "<unk>"},
    }
    template = (
        "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['name'] }} {{ m['content'] | trim }} "
        "{{ eos_token }}{% endfor %}{{ hint }}"
    )
    return tokenizer, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": template}


def word_piece():
    """A tokenizer like BERT's."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[", "]", "cls", "sep", "user", ":", "s", "##s", "<", ">", "|"]
    words += [f"{prefix}{letter}" for prefix in ("", "##") for letter in "abcdefghijklmnopqrtuvwxyz"]
    tokenizer = {
        "version": "1.0",
        "added_tokens": [added(i, words[i]) for i in range(4)],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {word: i for i, word in enumerate(words)},
        },
    }
    template = (
        "{% for m in messages %}[CLS]{{ m['role'] }} {{ m['name'] }}: {{ m['content'] }}[SEP]{% endfor %}{{ hint }}"
    )
    return tokenizer, {"cls_token": "[CLS]", "sep_token": "[SEP]", "chat_template": template}


def byte_level():
    """The shipped tokenizer, with a template that shows every field."""
    config = json.loads((TINY / "tokenizer_config.json").read_text())
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}{{ '\\n' + m['name'] + '\\n' + m['content'] }}<|im_end|>\n"
        "{% endfor %}{{ hint }}<|im_start|>assistant\n"
    )
    return json.loads((TINY / "tokenizer.json").read_text()), config | {"chat_template": template}


CONTROL = {byte_level: r"<\|\w+\|>", sentence_piece: r"</?s>|<\|user\|>", word_piece: r"\[CLS\]|\[SEP\]"}


def reference(tokenizer, control, body):
    """The token ids of a chat: control tokens of the template, and between them text as with split_special_tokens."""
    marks = []

    def marked(text):
        marks.append(text)
        return f"@{len(marks) - 1}@"

    # A role that a template knows is its own text.
    role = lambda m: m["role"] if m["role"] == "user" else marked(m["role"])
    messages = [
        {"role": role(m), "name": marked(m["name"]), "content": marked(m["content"])} for m in body["messages"]
    ]
    hint = marked(body["chat_template_kwargs"]["hint"])
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, hint=hint)
    # The template's control tokens and its other text take turns.
    pieces = re.split(f"({control})", text)
    filled = [re.sub(r"@(\d+)@", lambda mark: marks[int(mark[1])], piece) for piece in pieces]
    encode = lambda text, split: tokenizer.encode(text, add_special_tokens=False, split_special_tokens=split)
    return [token for i, piece in enumerate(filled) for token in encode(piece, i % 2 == 0) if piece]


@pytest.mark.parametrize("family", CONTROL, ids=lambda family: family.__name__)
def test_chats_are_encoded_as_by_transformers_with_text_of_clients_split(start, tmp_path, family):
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    tokenizer, config = family()
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    reads = PreTrainedTokenizerFast.from_pretrained(model)
    special = [token["content"] for token in tokenizer["added_tokens"] if token["special"]]
    special = [token for token in special if token not in ("<unk>", "[UNK]")]
    settings = tmp_path / "settings.toml"
    settings.write_text('[router]\nchat_special_tokens = "tokens"\n')
    cluster, old = (start("--workers", 1, *SIM, "--model", model, *more) for more in ((), ("--config", settings)))

    def tokenize(server, body):
        response = server.client.post("/tokenize", json=body)
        assert response.status_code == 200, response.text
        return response.json()["tokens"]

    def chat(role, name, content, hint):
        message = {"role": role, "name": name, "content": content}
        return {"messages": [message, message], "chat_template_kwargs": {"hint": hint}}

    honest = chat("user", "bob", "see us < er | user > s", "so")
    assert tokenize(cluster, honest) == reference(reads, CONTROL[family], honest) == tokenize(old, honest)
    for token in special:
        for text in (token, f"see {token}{token} us", f"{token} see", token[:-1], token[1:], token[2:-2]):
            body = chat(text, text, text, text)
            assert tokenize(cluster, body) == reference(reads, CONTROL[family], body), text
        hostile = chat("user", "bob", f"see {token}", "so")
        count = tokenize(old, hostile).count(reads.convert_tokens_to_ids(token))
        assert count == tokenize(cluster, hostile).count(reads.convert_tokens_to_ids(token)) + 2
        # The prompt of a completion is the client's own.
        raw = {"prompt": f"see {token}", "add_special_tokens": False}
        assert tokenize(cluster, raw) == tokenize(old, raw)
        assert reads.convert_tokens_to_ids(token) in tokenize(cluster, raw)
        # So is an assistant's message that is continued.
        prefill = chat("user", "bob", "see", "so")
        prefill["messages"].append({"role": "assistant", "name": "bob", "content": f"{token} see"})
        prefill |= {"continue_final_message": True, "add_generation_prompt": False}
        assert tokenize(cluster, prefill) == tokenize(old, prefill)
    replaced = cluster.client.post("/tokenize", json=honest | {"chat_template_kwargs": {"eos_token": special[0]}})
    assert (replaced.status_code, replaced.json()["error"]["param"]) == (400, "chat_template_kwargs.eos_token")
