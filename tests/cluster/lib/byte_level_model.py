"""A golden model with a byte-level tokenizer: random weights that answer in text."""

import json
import shutil

from harness import GOLDENS

# Pieces of several bytes that cross the tokens of JSON, as vocabularies in use have them.
PIECES = (
    '{"', '":', '",', '"}', '": "', '", "', "},", "]}", "[]", "{}", "[{", "null", "true", "false", ' "', "  ", "name",
    "value", "12", "0.", "00", "-1", "the", " the", "\\n", '\\"', "2024-", "\n\n", "é", "日", "ab", "},\n", "://", "example",
)  # fmt: skip
END = "<|end|>"


def alphabet():
    """Returns the characters of GPT-2's byte-level alphabet, by byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return {byte: chr(byte if byte in printable else next(others)) for byte in range(256)}


def tokenizer(vocabulary):
    """Returns (tokenizer.json, the id of the end token) for a model of this many logits. Some logits have no token."""
    characters = alphabet()
    spelt = [characters[byte] for byte in range(256)]
    spelt += ["".join(characters[byte] for byte in piece.encode()) for piece in PIECES]
    end = len(spelt)
    assert end < vocabulary
    added = {"id": end, "content": END, "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    shape = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": {text: n for n, text in enumerate(spelt)}, "merges": []}
    return {"version": "1.0", "added_tokens": [added], "pre_tokenizer": shape, "decoder": shape, "model": model}, end


def byte_level_model(directory, model="seed0/qwen3"):
    """Copies a golden model and gives it a tokenizer and an end token. Returns the copy's folder."""
    copy = directory / "byte-level"
    shutil.copytree(GOLDENS / model, copy)
    config = json.loads((copy / "config.json").read_text())
    files, end = tokenizer(config["vocab_size"])
    (copy / "tokenizer.json").write_text(json.dumps(files))
    (copy / "config.json").write_text(json.dumps(config | {"eos_token_id": end}))
    generation = copy / "generation_config.json"
    generation.write_text(json.dumps(json.loads(generation.read_text()) | {"eos_token_id": end}))
    return copy
