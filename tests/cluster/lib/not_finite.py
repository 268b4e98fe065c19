"""A checkpoint whose numbers are not all finite."""

import json
import shutil
import struct

from harness import GOLDENS

# A token whose embedding is NaN in the poisoned checkpoint. It occurs in no undisturbed answer of these tests.
POISON = 9
NAN = {"F32": struct.pack("<f", float("nan")), "BF16": b"\xc0\x7f", "F16": b"\x00\x7e"}
ASK = dict(prompt=[5, 6, 7], temperature=0, ignore_eos=True, return_token_ids=True)


def poison(directory):
    """Writes a checkpoint in which the embedding of one token is NaN."""
    model = directory / "poisoned"
    shutil.copytree(GOLDENS / "seed0/qwen3", model)
    path = model / "model.safetensors"
    data = bytearray(path.read_bytes())
    start = 8 + struct.unpack("<Q", data[:8])[0]
    entry = json.loads(data[8:start])["model.embed_tokens.weight"]
    nan, width = NAN[entry["dtype"]], entry["shape"][1]
    row = start + entry["data_offsets"][0] + POISON * width * len(nan)
    data[row : row + width * len(nan)] = nan * width
    path.write_bytes(data)
    return model
