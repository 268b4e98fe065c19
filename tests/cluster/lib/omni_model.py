"""A small Qwen3-Omni with random weights, the shipped model's tokenizer and a template that writes sentinels."""

import base64
import json
import math
import struct
import wave
import io
import zlib

from harness import REPO

SHIPPED = REPO / "tests/tutti-tiny/checkpoint"
TOKENS = ("<|audio_pad|>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|audio_start|>", "<|audio_end|>")
# The tokens of media follow those of the shipped model.
FIRST_TOKEN = json.loads((SHIPPED / "config.json").read_text())["vocab_size"]
PATCH, MERGE = 4, 2

TEMPLATE = """{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string %}{{- message['content'] }}{%- else %}{%- for part in message['content'] %}
{%- if part['type'] == 'text' %}{{- part['text'] }}
{%- elif part['type'] == 'image' or part['type'] == 'image_url' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part['type'] == 'video' %}{{- '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- elif part['type'] == 'audio' %}{{- '<|audio_start|><|audio_pad|><|audio_end|>' }}
{%- endif %}{%- endfor %}{%- endif %}{{- '<|im_end|>' + '\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def write_texts(directory):
    """Makes the directory, and writes the tokenizer and the template. Returns the ids of the media's tokens by name."""
    directory.mkdir()
    tokenizer = json.loads((SHIPPED / "tokenizer.json").read_text())
    added = [tokenizer["added_tokens"][0] | {"id": FIRST_TOKEN + n, "content": name} for n, name in enumerate(TOKENS)]
    tokenizer["added_tokens"] += added
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((SHIPPED / "tokenizer_config.json").read_text())
    settings["added_tokens_decoder"] |= {str(token["id"]): {k: v for k, v in token.items() if k != "id"} for token in added}
    settings["chat_template"] = TEMPLATE
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "generation_config.json").symlink_to(SHIPPED / "generation_config.json")
    return {name.strip("<|>"): FIRST_TOKEN + n for n, name in enumerate(TOKENS)}


def write_preprocessor(directory):
    preprocessor = dict(patch_size=PATCH, merge_size=MERGE, temporal_patch_size=2, min_pixels=64, max_pixels=65536, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    preprocessor |= dict(feature_extractor_type="WhisperFeatureExtractor", feature_size=16)
    (directory / "preprocessor_config.json").write_text(json.dumps(preprocessor))


def write_simulated(directory, **more):
    """Writes a checkpoint for the simulated device, which takes pictures, and files of sound as they are. Returns the
    arguments of a conductor that serves it."""
    ids = write_texts(directory)
    config = dict(architectures=["Qwen3OmniMoeForConditionalGeneration"], vocab_size=FIRST_TOKEN + 16, max_position_embeddings=16384, eos_token_id=1023)
    config |= dict(vision_config=dict(patch_size=PATCH, spatial_merge_size=MERGE, out_hidden_size=64), image_token_id=ids["image_pad"])
    (directory / "config.json").write_text(json.dumps(config | more))
    write_preprocessor(directory)
    return "--device", "sim", "--model", directory


def write(directory):
    """Writes the checkpoint. Returns the arguments of a conductor that serves it."""
    ids = write_texts(directory)
    text = dict(vocab_size=FIRST_TOKEN + 16, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    text |= dict(intermediate_size=96, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, max_position_embeddings=4096)
    text |= dict(eos_token_id=1023, rope_scaling=dict(rope_type="default", mrope_section=[8, 4, 4]))
    vision = dict(depth=3, hidden_size=32, intermediate_size=48, num_heads=2, patch_size=PATCH, num_position_embeddings=36, out_hidden_size=64, deepstack_visual_indexes=[0, 2])
    audio = dict(d_model=32, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=48, downsample_hidden_size=8, num_mel_bins=16, output_dim=64)
    thinker = dict(text_config=text, vision_config=vision, audio_config=audio, dtype="float32", position_id_per_seconds=13)
    thinker |= dict(audio_token_id=ids["audio_pad"], image_token_id=ids["image_pad"], video_token_id=ids["video_pad"])
    thinker |= dict(vision_start_token_id=ids["vision_start"], vision_end_token_id=ids["vision_end"])
    thinker |= dict(audio_start_token_id=ids["audio_start"], audio_end_token_id=ids["audio_end"])
    config = dict(architectures=["Qwen3OmniMoeForConditionalGeneration"], thinker_config=thinker)
    (directory / "config.json").write_text(json.dumps(config))
    write_preprocessor(directory)
    return "--model", directory, "--load-format", "dummy"


def png(width, height, seed):
    """A PNG of noise-like colours."""
    row = lambda y: b"\0" + bytes((x * 7 + y * 13 + c * 31 + seed * 101) * 37 % 251 for x in range(width) for c in range(3))
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"".join(map(row, range(height))))) + chunk(b"IEND", b"")


def wav(samples, seed, rate=16_000):
    """A WAV of a tone."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1), file.setsampwidth(2), file.setframerate(rate)
        file.writeframes(b"".join(struct.pack("<h", round(9000 * math.sin(n * (seed + 3) / 40))) for n in range(samples)))
    return out.getvalue()


def image(data):
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(data).decode()}}


def video(frames, fps):
    data = ",".join(base64.b64encode(frame).decode() for frame in frames)
    return {"type": "video_url", "video_url": {"url": "data:video/png;base64," + data, "fps": fps}}


def audio(data):
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}
