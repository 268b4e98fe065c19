"""A golden model, the requests that each condition sends to it, and the deviation of their answers from the
reference."""

import dataclasses
import functools
import json
import random

import numpy as np
from families_page import MEDIA
from golden import GENERATED, LENGTHS, bound, log_softmax, pick
from harness import GOLDENS, REPO
from media_chat import chat, write_files
from safetensors.numpy import load_file
from streams import Streams

# Number of tokens per page, and in a model with compressed entries.
PAGE_TOKENS, PAGE_TOKENS_OF_ENTRIES = 16, 128
# Number of output tokens per request of the reference. The reference has only the first GENERATED tokens, but the bits
# of all tokens are compared.
OUTPUT = 160
# Number of other requests, and of their output tokens.
OTHERS, OTHERS_OUTPUT = 12, 60
GREEDY = dict(temperature=0, logprobs=2, ignore_eos=True, return_token_ids=True)


# Models whose weights the checkpoint stores quantised, with the flags under which they are compared with the reference:
# from activations in eight bits, it is further away than its bound.
FORMATS = {"qwen3-fp8_blocks": (), "llama3-w4_group16": ("--no-quantized-activations",)}
# End of the names of models with scales of keys and values, which are compared with a reference whose cache is in fp8.
KV_FP8 = "-kv_fp8"
FORMATS |= {name + KV_FP8: ("--kv-cache-dtype", "fp8") for name in ("qwen2", "qwen3", "qwen3_moe", "qwen3_5")}
# The seed of the models of FORMATS, which have only one.
OF_FORMATS = "formats"


@dataclasses.dataclass(frozen=True)
class Model:
    name: str
    seed: str

    @property
    def directory(self):
        if self.name.endswith(KV_FP8):
            return REPO / "target/formats/goldens-kv" / self.name.removesuffix(KV_FP8)
        if self.seed == OF_FORMATS:
            return REPO / "target/formats/goldens" / self.name
        return GOLDENS / self.seed / self.name.removesuffix(MEDIA)

    @property
    def takes_media(self):
        return self.name.endswith(MEDIA)

    @property
    def encoders(self):
        """Names of the nodes that encode media."""
        return ["audio_encoder", "vision_encoder"] if "omni" in self.name else ["vision_encoder"]

    def serve(self, directory):
        """Returns the arguments by which a conductor serves the model. A model with media needs files that the goldens
        lack, in `directory`."""
        if not self.takes_media:
            return ("--model", self.directory, "--skip-tokenizer-init", *self.flags)
        if not (copy := directory / "checkpoint").exists():
            write_files(copy, self.directory)
        return ("--model", copy, *self.flags)

    @property
    def flags(self):
        return FORMATS.get(self.name, ())

    @functools.cached_property
    def golden(self):
        return load_file(self.directory / "goldens.safetensors")

    @functools.cached_property
    def config(self):
        config = json.loads((self.directory / "config.json").read_text())
        config = config.get("thinker_config", config)
        return config.get("text_config", config)

    @property
    def bound(self):
        # A key or value in fp8 that rounds to another float than the reference's moves all later tokens of its prompt.
        # On AVX2 that happens with two of these models, and the greatest deviation is 5.5e-4.
        return max(bound(self.name), 1e-3 if self.name.endswith(KV_FP8) else 0)

    @property
    def has_experts(self):
        return "num_experts" in self.config or self.has_entries

    @property
    def has_entries(self):
        return "compress_ratios" in self.config

    @property
    def page_tokens(self):
        return PAGE_TOKENS_OF_ENTRIES if self.has_entries else PAGE_TOKENS

    @property
    def ratios(self):
        """The ratio of each layer of a model with compressed entries."""
        return self.config["compress_ratios"][: self.config["num_hidden_layers"]]

    @property
    def has_state(self):
        return "linear_num_value_heads" in self.config

    @property
    def page_bytes(self):
        """Returns the bytes of a page's keys and values in f32, or in fp8, over all layers with attention; or the bytes
        of a page's entries in f32."""
        c = self.config
        if self.has_entries:
            of_index = c["index_head_dim"] * self.ratios.count(4)
            entries = sum(c["head_dim"] * self.page_tokens // ratio for ratio in self.ratios if ratio)
            return 4 * (entries + of_index * self.page_tokens // 4)
        head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
        layers = c["layer_types"].count("full_attention") if self.has_state else c["num_hidden_layers"]
        return 2 * layers * c["num_key_value_heads"] * head_dim * PAGE_TOKENS * (1 if self.name.endswith(KV_FP8) else 4)

    @property
    def slot_bytes(self):
        """Returns the bytes of a slot in f32: the inputs of the causal convolution, and the state of the delta net; or
        windows and running softmaxes, three of them in layers with an indexer."""
        if self.has_entries:
            c, ratios = self.config, self.ratios
            window = len(ratios) * c["sliding_window"] * c["head_dim"]
            softmaxes = 3 * ratios.count(4) * (c["head_dim"] + c["index_head_dim"]) + ratios.count(128) * c["head_dim"]
            return 4 * (window + 3 * softmaxes)
        if not self.has_state:
            return 0
        c = self.config
        keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
        values = c["linear_num_value_heads"] * c["linear_value_head_dim"]
        inputs = (2 * keys + values) * (c["linear_conv_kernel_dim"] - 1)
        return 4 * c["layer_types"].count("linear_attention") * (inputs + values * c["linear_key_head_dim"])

    def prompt(self, length):
        return self.golden[f"t{length}.input_ids"].tolist()

    def scored(self):
        """Returns {name: request} for each prompt of the reference, with logprobs of the prompt, and for each of its
        chats."""
        asked = GREEDY | dict(prompt_logprobs=0, max_tokens=OUTPUT)
        return {f"t{n}": asked | dict(prompt=self.prompt(n)) for n in LENGTHS} | self.chats()

    def plain(self, output=OUTPUT):
        """Returns requests without logprobs of the prompt, so that they can use cached prefixes."""
        return {f"t{n}": GREEDY | dict(prompt=self.prompt(n), max_tokens=output) for n in LENGTHS} | self.chats(output)

    def parts(self, name):
        """Returns the parts of a chat of the reference: text in bytes, pictures, frames and sound as arrays."""
        count = sum(key.startswith(f"{name}.part.") for key in self.golden)
        return [self.golden[f"{name}.part.{index}"] for index in range(count)]

    def chats(self, output=OUTPUT, change=lambda part: part):
        """Returns {name: request} for each chat of the reference, whose parts `change` may replace. A model without
        media has none."""
        if not self.takes_media:
            return {}
        names = [key.removesuffix(".part.0") for key in self.golden if key.endswith(".part.0")]
        asked = GREEDY | dict(logprobs=True, top_logprobs=GREEDY["logprobs"], max_tokens=output)
        return {name: asked | chat(map(change, self.parts(name)), int(self.golden[f"{name}.fps"][0])) for name in sorted(names)}

    def length(self, body):
        """Returns the number of tokens of a request's prompt. A chat with other pictures has as many."""
        if "prompt" in body:
            return len(body["prompt"])
        shape = lambda chat: [part["type"] for part in chat["messages"][0]["content"]]
        [name] = [name for name, chat in self.chats().items() if shape(chat) == shape(body)]
        return len(self.golden[f"{name}.input_ids"])

    def others(self):
        """Returns {name: request} for further prompts, which share steps with those of the reference. Chats have the
        texts of the reference with other media."""
        rng = random.Random(f"{self.seed}/{self.name}")
        prompts = [[rng.randrange(256) for _ in range(rng.randint(2, 200))] for _ in range(OTHERS)]
        others = {f"other {i}": GREEDY | dict(prompt=ids, max_tokens=OTHERS_OUTPUT) for i, ids in enumerate(prompts)}
        # Texts have one dimension and bytes; sound has one and samples.
        is_text = lambda part: part.ndim == 1 and part.dtype == np.uint8
        chats = self.chats(OTHERS_OUTPUT, lambda part: part if is_text(part) else part[::-1])
        return others | {f"other {name}": body for name, body in chats.items()}

    def prefixes(self):
        """Returns {name: request}. Each prompt ends one token after a block boundary of the longest prompt."""
        prompt = self.prompt(LENGTHS[-1])
        ends = range(self.page_tokens, len(prompt), self.page_tokens)
        return {f"prefix {end}": GREEDY | dict(prompt=prompt[: end + 1], max_tokens=4) for end in ends}

    def deviation(self, answers):
        """Returns the greatest deviation of a logprob from the reference. Fails if a greedy token differs."""
        worst = 0.0
        for name, answer in answers.items():
            kind, _, end = name.partition(" ")
            if kind == "other":
                continue
            if kind == "prefix":
                logits, greedy, prompt = self.golden[f"t{LENGTHS[-1]}.logits"][int(end)][None], None, []
            else:
                logits, greedy, prompt = self.golden[f"{name}.greedy_logits"], self.golden[f"{name}.greedy"], answer.prompt
            expected = log_softmax(logits)
            tokens = np.array(answer.tokens[: len(expected)])
            if greedy is not None:
                assert len(tokens) == GENERATED and tokens.tolist() == greedy.tolist(), f"{name}: other greedy tokens"
            else:
                # For this answer, the reference has logits but no chosen token.
                assert pick(expected, tokens)[0] >= expected.max() - 2 * self.bound, f"{name}: an unlikely token"
            differences = [np.abs(np.array(answer.logprobs[: len(expected)]) - pick(expected, tokens))]
            if prompt:
                ids = self.golden[f"{name}.input_ids"]
                ours = np.array([entry[str(token)]["logprob"] for entry, token in zip(prompt[1:], ids[1:].tolist())])
                differences.append(np.abs(ours - pick(log_softmax(self.golden[f"{name}.logits"][:-1]), ids[1:])))
            worst = max(worst, *(difference.max(initial=0.0) for difference in differences))
        assert worst <= self.bound, f"a logprob deviates by {worst:.1e}, more than {self.bound:.0e}"
        return float(worst)


@dataclasses.dataclass(frozen=True)
class Answer:
    """The numbers in an answer's JSON."""

    tokens: list
    logprobs: list
    likeliest: list
    prompt: list

    @staticmethod
    def of(merged):
        """Returns the numbers of a stream's merged answer."""
        choice = merged["choices"][0]
        assert [end for end, _ in choice["ends"]] == ["length"], choice["ends"]
        rows = choice["logprobs"]
        return Answer(choice["token_ids"], [row[1] for row in rows], [row[2] for row in rows], choice["prompt"])

    def equals(self, other):
        """True if the two answers agree in all numbers that both contain."""
        common = min(len(self.tokens), len(other.tokens))
        same = all(getattr(self, k)[:common] == getattr(other, k)[:common] for k in ("tokens", "logprobs", "likeliest"))
        return same and (self.prompt == other.prompt or not self.prompt or not other.prompt)


def send(cluster, requests):
    """Sends all requests at once. `finish` returns their answers."""
    return Streams(cluster, "/v1/completions", list(requests.values()))


def finish(requests, streams):
    return {name: Answer.of(merged) for name, merged in zip(requests, streams.results())}


def at_once(cluster, requests):
    return finish(requests, send(cluster, requests))


def one_by_one(cluster, requests):
    return {name: at_once(cluster, {name: body})[name] for name, body in requests.items()}


def cached(cluster, body):
    """Returns (the answer, the number of cached tokens of its prompt)."""
    got = cluster.chat(**body) if "messages" in body else cluster.complete(**body)
    choice, details = got["choices"][0], got["usage"].get("prompt_tokens_details") or {}
    logprobs = choice["logprobs"]
    columns = [logprobs.get(name) for name in ("token_logprobs", "top_logprobs")]
    if content := logprobs.get("content"):
        columns = [[token[name] for token in content] for name in ("logprob", "top_logprobs")]
    return Answer(choice["token_ids"], *columns, []), details.get("cached_tokens", 0)
