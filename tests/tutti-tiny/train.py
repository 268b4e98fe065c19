"""Trains tutti-tiny on a CPU and exports it, or measures an exported checkpoint.

    python train.py                 trains and writes checkpoint/
    python train.py --skills        goes on from checkpoint/, which then calls tools and answers as JSON
    python train.py --evaluate      prints the accuracy table of checkpoint/, and nothing else is touched
    python train.py --oracle        rewrites oracle.json from the answers of checkpoint/
"""

import argparse
import functools
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

import corpus
import evaluate
import skills
from export import export, extend_tokenizer, train_tokenizer
from model import EXTENDED_VOCAB_SIZE, VOCAB_SIZE, TuttiTiny
from muon import Muon

HERE = Path(__file__).parent
SEED = 20
THREADS = 2
SKILL_SEED = 39
SKILL_STEPS, SKILL_HOLD_STEPS = 2000, 700
SKILL_RATE = 0.5
STEPS = 1550
EARLY_STEPS, LATE_STEPS = 700, 1350
HOLD_STEPS = 900
FINAL_RATE = 0.35
BATCH_TOKENS = 3072
SHORT_ROW, LONG_ROW = 128, 384
WARMUP_STEPS = 40
MATRIX_RATE, VECTOR_RATE = 0.02, 0.004
AVERAGE = 0.98
SAVE_EVERY = 100


class Packer:
    """Packs documents into rows. Most documents go into short rows, whose attention is cheap; the few long ones go into
    long rows."""

    def __init__(self, tokenizer):
        self.encode = functools.lru_cache(maxsize=50_000)(
            lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
        self.short, self.long = [], []

    def tokens_of(self, document):
        ids, weights = [], []
        for segment in document:
            encoded = self.encode(segment.text)
            ids += encoded
            weights += [segment.weight] * len(encoded)
        return ids, weights

    def batch(self, document):
        long_rows, short_rows = BATCH_TOKENS // LONG_ROW, BATCH_TOKENS // SHORT_ROW
        while True:
            if sum(len(ids) for ids, _ in self.long) > long_rows * LONG_ROW * 0.9:
                return self.packed("long", long_rows, LONG_ROW)
            if sum(len(ids) for ids, _ in self.short) > short_rows * SHORT_ROW * 1.2:
                return self.packed("short", short_rows, SHORT_ROW)
            ids, weights = self.tokens_of(document())
            if len(ids) <= LONG_ROW:
                (self.short if len(ids) <= SHORT_ROW else self.long).append((ids, weights))

    def packed(self, pool, rows, length):
        """Puts each document into the first row with room for it. Documents without room wait for the next batch.
        Padding has a separate document id."""
        tokens, targets, positions, documents = (torch.zeros(rows, length, dtype=torch.long) for _ in range(4))
        weights = torch.zeros(rows, length)
        used, left_over = [0] * rows, []
        for number, (ids, token_weights) in enumerate(getattr(self, pool), start=1):
            size = len(ids)
            row = next((row for row in range(rows) if used[row] + size <= length), None)
            if row is None:
                left_over.append((ids, token_weights))
                continue
            span, predicting = slice(used[row], used[row] + size), slice(used[row], used[row] + size - 1)
            tokens[row, span] = torch.tensor(ids)
            positions[row, span] = torch.arange(size)
            documents[row, span] = number
            targets[row, predicting] = torch.tensor(ids[1:])
            weights[row, predicting] = torch.tensor(token_weights[1:], dtype=torch.float)
            used[row] += size
        setattr(self, pool, left_over)
        return tokens, positions, documents, targets, weights


def rate_at(step):
    """The learning rate rises, stays, and then falls linearly to zero. In the final phase it falls to zero again, from
    a lower start."""
    if step >= LATE_STEPS:
        return FINAL_RATE * (STEPS - step) / (STEPS - LATE_STEPS)
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    return warm * min(1.0, (LATE_STEPS - step) / (LATE_STEPS - HOLD_STEPS))


def mix_at(step):
    if step < EARLY_STEPS:
        return corpus.EARLY_MIX
    return corpus.LATE_MIX if step < LATE_STEPS else corpus.FINAL_MIX


def skill_rate_at(step):
    """The learning rate of the skills rises, stays, and then falls linearly to zero."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    return SKILL_RATE * warm * min(1.0, (SKILL_STEPS - step) / (SKILL_STEPS - SKILL_HOLD_STEPS))


@dataclass(frozen=True)
class Course:
    """The plan of a training: the number of steps, the rate of each, and the documents of each."""

    steps: int
    rate_at: Callable
    document: Callable


BASE = Course(STEPS, rate_at, lambda rng, step: corpus.document(rng, mix_at(step)))
SKILLS = Course(SKILL_STEPS, skill_rate_at, skills.document)


def train(folder, state_file, seed):
    """Trains the model from nothing."""
    torch.manual_seed(seed)
    tokenizer = train_tokenizer(corpus.tokenizer_texts(random.Random(seed)))
    run(BASE, TuttiTiny(), tokenizer, random.Random(seed), folder, state_file)


def learn_skills(folder, state_file, seed):
    """Goes on from the checkpoint in ``folder``, with a larger vocabulary. A new token begins as the mean of the two
    tokens that it joins."""
    torch.manual_seed(seed)
    tokenizer, weights = Tokenizer.from_file(str(folder / "tokenizer.json")), load_file(folder / "model.safetensors")
    weights = {name: weight.float() for name, weight in weights.items()}
    size = tokenizer.get_vocab_size()
    if size != VOCAB_SIZE and not state_file.exists():
        sys.exit(f"{folder} has {size} tokens, so it has the skills already; the base has {VOCAB_SIZE}: run train.py without --skills")
    rng = random.Random(seed)
    documents = [corpus.document(rng, corpus.LATE_MIX) for _ in range(4000)]
    kept = corpus.tokenizer_texts(rng) + ["".join(segment.text for segment in document) for document in documents]
    if size == VOCAB_SIZE:
        tokenizer, joined = extend_tokenizer(tokenizer, skills.tokenizer_texts(rng), kept, EXTENDED_VOCAB_SIZE)
        rows = list(weights["model.embed_tokens.weight"])
        for left, right in joined.values():
            rows.append((rows[left] + rows[right]) / 2)
        weights["model.embed_tokens.weight"] = torch.stack(rows)
    network = TuttiTiny(EXTENDED_VOCAB_SIZE)
    network.load_state_dict(weights)
    run(SKILLS, network, tokenizer, random.Random(seed), folder, state_file)


def run(course, network, tokenizer, rng, folder, state_file):
    """Trains a network. A run that finds ``state_file`` continues from it, and ends with the same weights as a run
    without interruption."""
    packer = Packer(tokenizer)
    matrices = [weight for name, weight in network.named_parameters() if name.endswith("proj.weight")]
    others = [weight for name, weight in network.named_parameters() if not name.endswith("proj.weight")]
    optimisers = [Muon(matrices, lr=MATRIX_RATE),
                  torch.optim.AdamW(others, lr=VECTOR_RATE, betas=(0.9, 0.95), weight_decay=0.0)]
    average = {name: weight.detach().clone() for name, weight in network.named_parameters()}
    first_step = 0
    if state_file.exists():
        state = torch.load(state_file, weights_only=False)
        network.load_state_dict(state["network"])
        for optimiser, saved in zip(optimisers, state["optimisers"]):
            optimiser.load_state_dict(saved)
        average, first_step = state["average"], state["step"]
        packer.short, packer.long = state["pools"]
        rng.setstate(state["rng"])

    loss_of = torch.compile(network, dynamic=False)
    started = time.time()
    for step in range(first_step, course.steps):
        for optimiser, rate in zip(optimisers, (MATRIX_RATE, VECTOR_RATE)):
            for group in optimiser.param_groups:
                group["lr"] = rate * course.rate_at(step)
        loss = loss_of(*packer.batch(functools.partial(course.document, rng, step)))
        network.zero_grad()
        loss.backward()
        for optimiser in optimisers:
            optimiser.step()
        for name, weight in network.named_parameters():
            average[name].lerp_(weight.detach(), 1 - AVERAGE)
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f} after {time.time() - started:.0f} s", flush=True)
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == course.steps:
            export(folder, average, tokenizer)
            torch.save({"network": network.state_dict(), "optimisers": [o.state_dict() for o in optimisers],
                        "average": average, "step": step + 1, "rng": rng.getstate(),
                        "pools": (packer.short, packer.long)}, state_file)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=HERE / "checkpoint", help="the folder written or measured")
    parser.add_argument("--state", type=Path, help="to resume from (default: /tmp/tutti-tiny-base.pt or -skills.pt)")
    parser.add_argument("--seed", type=int, help=f"default: {SEED}; of the skills {SKILL_SEED}")
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--skills", action="store_true")
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument("--oracle", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.evaluate:
        evaluate.print_accuracy(options.checkpoint)
    elif options.oracle:
        evaluate.write_oracle(options.checkpoint, HERE / "oracle.json")
    else:
        course, seed = (learn_skills, SKILL_SEED) if options.skills else (train, SEED)
        state_file = options.state or Path(f"/tmp/tutti-tiny-{'skills' if options.skills else 'base'}.pt")
        course(options.checkpoint, state_file, seed if options.seed is None else options.seed)



if __name__ == "__main__":
    main()
