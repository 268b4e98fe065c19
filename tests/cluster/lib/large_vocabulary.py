"""A tokenizer of 151,936 logits for the shape of Qwen3-0.6B, whose own tokenizer is not part of this repository.

Masks depend on the bytes of tokens alone. So the pieces are drawn by a seed, with the shares of kinds that large
byte-level vocabularies have: words with and without a space before them, capitals, other scripts, digits, and runs of
punctuation and of white space.
"""

import json
import random

from byte_level_model import alphabet
from harness import REPO

SHAPE = REPO / "tests/bench/qwen3-0.6b/config.json"
# Ids of Qwen3: ordinary tokens end here, and special ones follow.
ORDINARY, SPECIAL = 151_643, ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PUNCTUATION = "\"'`{}[]()<>,.:;!?-_=+*/\\|&^%$#@~"
SCRIPTS = ((0x4E00, 0x9FA5), (0x0430, 0x044F), (0x3041, 0x3096), (0xAC00, 0xD7A3), (0x0621, 0x064A), (0x00E0, 0x00FF))


def piece(draw):
    """Returns the text of a random token."""
    kind = draw.random()
    if kind < 0.70:
        word = "".join(draw.choice("bcdfghklmnprstvw") + draw.choice("aeiouy") + draw.choice(("", "", "n", "s", "r", "t")) for _ in range(draw.randint(1, 5)))
        word = word[draw.randint(0, 1) :]
        word = draw.choice((word, word, word, word.capitalize(), word.upper()))
        return draw.choice((" ", " ", "")) + word
    if kind < 0.92:
        first, last = draw.choice(SCRIPTS)
        return "".join(chr(draw.randint(first, last)) for _ in range(draw.randint(1, 4)))
    if kind < 0.98:
        return draw.choice((" ", "")) + "".join(draw.choice(PUNCTUATION) for _ in range(draw.randint(1, 5)))
    if kind < 0.99:
        return "".join(draw.choice("0123456789") for _ in range(draw.randint(1, 3)))
    return draw.choice(" \t\n\r") * draw.randint(1, 64)


def pieces(seed=39):
    """Returns the bytes of all ordinary tokens."""
    draw, known = random.Random(seed), {bytes([byte]): None for byte in range(256)}
    while len(known) < ORDINARY:
        known.setdefault(piece(draw).encode())
    return list(known)


def large_vocabulary(directory):
    """Makes a folder with the shape's config.json and a tokenizer. Returns the folder."""
    folder = directory / "qwen3-0.6b"
    folder.mkdir()
    characters = alphabet()
    spelt = ["".join(characters[byte] for byte in text) for text in pieces()]
    options = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": ORDINARY + n, "content": text} | options for n, text in enumerate(SPECIAL)]
    shape = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": {text: n for n, text in enumerate(spelt)}, "merges": []}
    tokenizer = {"version": "1.0", "added_tokens": added, "pre_tokenizer": shape, "decoder": shape, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "config.json").write_text(SHAPE.read_text())
    return folder
