"""Trains and extends the tokenizer, and writes a checkpoint folder that transformers and Tutti load unmodified."""

import collections
import itertools
import json
import re

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

import model
from corpus import END_OF_TEXT, IM_END, IM_START

CONTEXT_LENGTH = 4096
SPECIAL_TOKENS = [END_OF_TEXT, IM_START, IM_END]

# Qwen's own splitting pattern. Each digit is a separate token, because the model could not learn sums otherwise.
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
         r"|\s+(?!\S)|\s+")

# ChatML, as Qwen's. Tools stand in the system message, one per line. Calls have Hermes' format.
CHAT_TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}"
    "{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] + '\\n' }}{%- endif %}"
    "{{- 'Tools:' }}"
    "{%- for tool in tools %}{{- '\\n' + tool['function'] | tojson }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'tool' %}"
    "{{- '<|im_start|>user\\n<tool_response>\\n' + message['content'] + '\\n</tool_response><|im_end|>\\n' }}"
    "{%- elif not (tools and loop.first and message['role'] == 'system') %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}"
    "{%- for call in message['tool_calls'] or [] %}"
    "{%- if message['content'] or not loop.first %}{{- '\\n' }}{%- endif %}"
    "{{- '<tool_call>\\n{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{{- call['function']['arguments'] | tojson }}{{- '}\\n</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def train_tokenizer(texts):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(vocab_size=model.VOCAB_SIZE - len(SPECIAL_TOKENS), show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    assert tokenizer.get_vocab_size() == model.VOCAB_SIZE
    return tokenizer


def pieces(tokenizer, texts):
    """Returns the words of texts, each as a list of tokens, with how often it occurs."""
    words = collections.Counter()
    specials = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))
    for text in texts:
        for part in specials.split(text):
            words.update(piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(part))
    return [([token.value for token in tokenizer.model.tokenize(word)], count) for word, count in words.items()]


def extend_tokenizer(tokenizer, texts, kept_texts, size):
    """Returns a tokenizer with merges of more tokens, up to a vocabulary of ``size``. A model goes on with it: existing
    tokens keep their ids, and ``kept_texts`` their tokens.

    Also returns, by the id of each new token, the ids of the two tokens that it joins.
    """
    described = json.loads(tokenizer.to_str())
    vocabulary, merges = described["model"]["vocab"], described["model"]["merges"]
    # Special tokens get their ids from the vocabulary. Without it they would get the ids behind its last token.
    vocabulary |= {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    kept = {pair for tokens, _ in pieces(tokenizer, kept_texts) for pair in itertools.pairwise(tokens)}
    words, joined = pieces(tokenizer, texts), {}
    while len(vocabulary) < size:
        pairs = collections.Counter()
        for tokens, count in words:
            for pair in itertools.pairwise(tokens):
                pairs[pair] += count
        candidates = (pair for pair in pairs if pair not in kept and "".join(pair) not in vocabulary)
        left, right = max(candidates, key=lambda pair: (pairs[pair], pair))
        joined[len(vocabulary)] = (vocabulary[left], vocabulary[right])
        vocabulary[left + right] = len(vocabulary)
        merges.append([left, right])
        for tokens, _ in words:
            at = 0
            while at + 1 < len(tokens):
                if (tokens[at], tokens[at + 1]) == (left, right):
                    tokens[at:at + 2] = [left + right]
                at += 1
    return Tokenizer.from_str(json.dumps(described)), joined


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n")


def export(folder, weights, tokenizer):
    """Writes the weights, rounded to bf16. The head shares the embedding's weights, so it is not written."""
    folder.mkdir(parents=True, exist_ok=True)
    end, pad = tokenizer.token_to_id(IM_END), tokenizer.token_to_id(END_OF_TEXT)
    write_json(folder / "config.json", {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": end,
        "head_dim": model.HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": model.HIDDEN_SIZE,
        "initializer_range": 0.02,
        "intermediate_size": model.MLP_SIZE,
        "max_position_embeddings": CONTEXT_LENGTH,
        "max_window_layers": model.LAYERS,
        "model_type": "qwen3",
        "num_attention_heads": model.QUERY_HEADS,
        "num_hidden_layers": model.LAYERS,
        "num_key_value_heads": model.KEY_VALUE_HEADS,
        "rms_norm_eps": model.NORM_EPSILON,
        "rope_scaling": None,
        "rope_theta": model.ROPE_THETA,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": weights["model.embed_tokens.weight"].shape[0],
    })
    write_json(folder / "generation_config.json", {"do_sample": False, "eos_token_id": [end, pad], "pad_token_id": pad})
    write_json(folder / "tokenizer_config.json", {
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(token)): {"content": token, "lstrip": False, "normalized": False, "rstrip": False,
                                                "single_word": False, "special": True}
            for token in SPECIAL_TOKENS
        },
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": IM_END,
        "model_max_length": CONTEXT_LENGTH,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    })
    tokenizer.save(str(folder / "tokenizer.json"))
    rounded = {name: weight.to(torch.bfloat16).contiguous() for name, weight in weights.items()}
    save_file(rounded, folder / "model.safetensors", metadata={"format": "pt"})
