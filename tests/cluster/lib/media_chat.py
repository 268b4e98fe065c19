"""Chats with the media of golden models, and the files beside a golden checkpoint that serving them needs."""

import base64
import io
import json
import wave

from byte_level_model import alphabet
from PIL import Image

# The ids of the golden models.
SPECIAL = {300: "<|audio_pad|>", 301: "<|image_pad|>", 302: "<|video_pad|>", 303: "<|vision_start|>"}
SPECIAL |= {304: "<|vision_end|>", 305: "<|audio_start|>", 306: "<|audio_end|>"}
# A chat's prompt is its parts alone.
TEMPLATE = """{%- for message in messages %}{%- if message['content'] is string %}{{- message['content'] }}
{%- else %}{%- for part in message['content'] %}{%- if part['type'] == 'text' %}{{- part['text'] }}
{%- elif part['type'] == 'image' or part['type'] == 'image_url' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part['type'] == 'video' %}{{- '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- elif part['type'] == 'audio' %}{{- '<|audio_start|><|audio_pad|><|audio_end|>' }}
{%- endif %}{%- endfor %}{%- endif %}{%- endfor %}"""


def write_files(directory, golden):
    """Makes a checkpoint of a golden model that takes chats: links to its files, a tokenizer with one token per byte, a
    template, and the preprocessing of the reference."""
    directory.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (directory / name).symlink_to(golden / name)
    characters = alphabet()
    flags = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": token, "content": text} | flags for token, text in SPECIAL.items()]
    shape = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    # Ids between the bytes and the sentinels have texts that no prompt is divided into.
    vocabulary = {characters[byte]: byte for byte in range(256)} | {f"<{token}>": token for token in range(256, min(SPECIAL))}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    tokenizer = {"version": "1.0", "added_tokens": added, "pre_tokenizer": shape, "decoder": shape, "model": model}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"chat_template": TEMPLATE, "added_tokens_decoder": {str(token): {"content": text} | flags for token, text in SPECIAL.items()}}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    preprocessor = dict(patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=64, max_pixels=65536, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    preprocessor |= dict(feature_extractor_type="WhisperFeatureExtractor", feature_size=16)
    (directory / "preprocessor_config.json").write_text(json.dumps(preprocessor))


def png(pixels):
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


def wav(samples):
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1), file.setsampwidth(2), file.setframerate(16_000)
        file.writeframes(samples.tobytes())
    return base64.b64encode(out.getvalue()).decode()


def part(value, fps):
    """Returns the part of a message that sends an array: samples of 16 bits, text in bytes, a picture or frames."""
    if value.dtype.itemsize == 2:
        return {"type": "input_audio", "input_audio": {"data": wav(value), "format": "wav"}}
    if value.ndim == 1:
        return {"type": "text", "text": value.tobytes().decode()}
    if value.ndim == 3:
        return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + png(value)}}
    return {"type": "video_url", "video_url": {"url": "data:video/png;base64," + ",".join(map(png, value)), "fps": fps}}


def chat(parts, fps):
    """Returns the body of a chat with one message."""
    return {"messages": [{"role": "user", "content": [part(value, fps) for value in parts]}]}
