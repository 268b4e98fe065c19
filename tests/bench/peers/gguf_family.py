"""Converts the checkpoint of any family to a GGUF file, by llama.cpp's own converter.

    python gguf_family.py LLAMA_CPP CHECKPOINT FILE TYPE

LLAMA_CPP is llama.cpp's source tree, and TYPE is bf16 or f16. Needs torch and transformers.
"""

import runpy
import sys

source, checkpoint, file, weights = sys.argv[1:]
sys.path[:0] = [source, f"{source}/gguf-py"]

from conversion.base import TextModel

# The converter recognises a tokenizer by a hash of its output. It does not know this tokenizer, which was trained here
# and splits words as Qwen2's does.
TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"

# For some families, the converter expects layers for multi-token prediction (MTP). This checkpoint has no such layers.
TextModel.no_mtp = True

sys.argv = ["convert_hf_to_gguf.py", "--outtype", weights, "--outfile", file, checkpoint]
runpy.run_path(f"{source}/convert_hf_to_gguf.py", run_name="__main__")
