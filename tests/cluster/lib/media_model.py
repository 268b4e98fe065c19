"""A checkpoint with an audio encoder: the shipped model's tokenizer and chat template, and random weights.

Only executables that are built with `--features media-test-model` can load it. tests/run builds them with this feature.
"""

import base64
import json
import random

from harness import REPO

SHIPPED = REPO / "tests/tutti-tiny/checkpoint"
# The placeholder of audio is <|endoftext|>, which occurs in no chat.
PLACEHOLDER, PLACEHOLDER_TEXT = 1021, "<|endoftext|>"
BYTES_PER_TOKEN = 32


def write(directory, **changes):
    """Writes the checkpoint. Returns the arguments of a conductor that serves it."""
    directory.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (directory / name).symlink_to(SHIPPED / name)
    config = json.loads((SHIPPED / "config.json").read_text())
    config |= {"architectures": ["TuttiMediaTestForCausalLM"], "model_type": "tutti_media_test", "torch_dtype": "float32"}
    # With random embeddings tied to the LM head, every output token would repeat the token before it.
    config |= {"tie_word_embeddings": False}
    config |= {"audio_token_id": PLACEHOLDER, "audio_bytes_per_token": BYTES_PER_TOKEN} | changes
    (directory / "config.json").write_text(json.dumps(config))
    return "--model", directory, "--load-format", "dummy"


def sound(seed, tokens):
    """Returns bytes for this many tokens. The last token is incomplete."""
    return random.Random(seed).randbytes(tokens * BYTES_PER_TOKEN - 3)


def audio(data):
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}


def text(line):
    return {"type": "text", "text": line}


def ask(*parts, **more):
    """The body of a chat with one message."""
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 24, "ignore_eos": True, "temperature": 0} | more
