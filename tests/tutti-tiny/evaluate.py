"""Measures an exported checkpoint with transformers: bf16 weights, f32 arithmetic, greedy decoding.

Everything is read from the exported folder, with the template and the tokenizer, so that the measured model is the
served model.
"""

import json

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import corpus
import skills

BATCH = 100
SLACK = 8
LONGEST_ANSWER = 320
CLEAR_MARGIN = 1.0

ORACLE_CHATS = [
    [{"role": "user", "content": "Hello!"}],
    [{"role": "user", "content": "Who are you?"}],
    [{"role": "user", "content": "What is Tutti?"}],
    [{"role": "user", "content": "What does the conductor do?"}],
    [{"role": "user", "content": "What does the router do?"}],
    [{"role": "user", "content": "What language is Tutti written in?"}],
    [{"role": "user", "content": "What can you do?"}],
    [{"role": "user", "content": "Thank you!"}],
    [{"role": "user", "content": "What is 12 + 30?"}],
    [{"role": "user", "content": "47+38"}],
    [{"role": "user", "content": "90 minus 4"}],
    [{"role": "user", "content": "What is 20 - 50?"}],
    [{"role": "user", "content": "17 minus 45"}],
    [{"role": "user", "content": "Count from 4 to 8."}],
    [{"role": "user", "content": "Count down from 10 to 1"}],
    [{"role": "user", "content": "Count to 5"}],
    [{"role": "user", "content": "Count to 9"}],
    [{"role": "user", "content": "Count to 20."}],
    [{"role": "user", "content": "Repeat: red green blue"}],
    [{"role": "user", "content": "Say hello world"}],
    [{"role": "user", "content": "Reverse: red green blue"}],
    [{"role": "user", "content": "Reverse the words: sun moon star river hill"}],
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": "What is 20 + 22?"}],
    [{"role": "user", "content": "Hi, I am Ada."}, {"role": "assistant", "content": "Nice to meet you, Ada!"},
     {"role": "user", "content": "What is 7 plus 8?"}, {"role": "assistant", "content": "7 + 8 = 15"},
     {"role": "user", "content": "What is my name?"}],
]
ORACLE_PROMPTS = ["12 + 30 = ", "47 + 38 =", "20 - 50 =", "Tutti is", "The conductor", "The router is", "1 2 3"]


class Checkpoint:
    def __init__(self, folder):
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def chat_prompt(self, messages):
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    @torch.inference_mode()
    def complete(self, prompts, right_answers):
        """Returns the greedy continuation of each prompt. It stops at an ending token, or some tokens past the length
        of the longest right answer."""
        longest = max(len(ids) for ids in self.tokenizer(right_answers).input_ids) + SLACK
        answers = []
        for start in range(0, len(prompts), BATCH):
            inputs = self.tokenizer(prompts[start:start + BATCH], return_tensors="pt", padding=True)
            output = self.model.generate(**inputs, max_new_tokens=longest, do_sample=False)
            answers += self.tokenizer.batch_decode(output[:, inputs.input_ids.shape[1]:], skip_special_tokens=True)
        return answers

    def complete_fields(self, items):
        """Returns the fields of answers whose keys are given, one after the other, as a grammar would force them. A
        value ends where it is complete JSON and a comma or a brace follows."""
        texts, answers = [prompt for prompt, _ in items], [{} for _ in items]
        for at in range(max(len(fields) for _, fields in items)):
            open_ones = [index for index, (_, fields) in enumerate(items) if at < len(fields)]
            for index in open_ones:
                texts[index] += ("{" if at == 0 else ", ") + json.dumps(list(items[index][1])[at]) + ":"
            values = [skills.dumps(list(items[index][1].values())[at]) for index in open_ones]
            for index, text in zip(open_ones, self.complete([texts[index] for index in open_ones], values)):
                key = list(items[index][1])[at]
                try:
                    value, end = json.JSONDecoder().raw_decode(text.strip())
                except ValueError:
                    value, end = None, 0
                answers[index][key] = value
                texts[index] += " " + text.strip()[:end]
        return answers

    @torch.inference_mode()
    def complete_with_margin(self, prompt):
        """Returns the greedy continuation, whether it ended by itself, and the least lead of a chosen token over the
        second-best token."""
        inputs = self.tokenizer(prompt, return_tensors="pt")
        start = inputs.input_ids.shape[1]
        output = self.model.generate(**inputs, max_new_tokens=LONGEST_ANSWER, do_sample=False)[0]
        logits = self.model(output[None]).logits[0, start - 1:-1]
        best = logits.topk(2).values
        ended = output[-1].item() in self.model.generation_config.eos_token_id
        text = self.tokenizer.decode(output[start:], skip_special_tokens=True)
        return text, ended, (best[:, 0] - best[:, 1]).min().item()


def messages_of(history, turn):
    messages = []
    for past in history:
        messages += [{"role": "user", "content": past.question}, {"role": "assistant", "content": past.answer}]
    return [*messages, {"role": "user", "content": turn.question}]


def print_row(task, wrong, total):
    print(f"| {task} | {total} | {100 * (total - len(wrong)) / total:.1f} % |", flush=True)


def print_accuracy(folder):
    """Prints the table of the model card, then every wrong answer."""
    checkpoint = Checkpoint(folder)
    misses = []
    print("| task | held-out items | right |\n| --- | --- | --- |")
    for task, items in corpus.test_sets().items():
        prompts = [checkpoint.chat_prompt(messages_of(*item)) for item in items]
        answers = checkpoint.complete(prompts, [turn.answer for _, turn in items])
        wrong = [(turn.question, turn.answer, answer) for (_, turn), answer in zip(items, answers) if answer != turn.answer]
        print_row(task, wrong, len(items))
        misses += wrong
    pairs = corpus.plain_test_set()
    completions = checkpoint.complete([prompt for prompt, _ in pairs], [right for _, right in pairs])
    wrong = [(prompt, right, got) for (prompt, right), got in zip(pairs, completions) if got != right]
    print_row("add or subtract, plain completion", wrong, len(pairs))
    misses += wrong
    for name, items in skills.test_sets().items():
        answers = checkpoint.complete([prompt for prompt, _ in items], [right for _, right in items])
        wrong = [(prompt, right, got) for (prompt, right), got in zip(items, answers) if got != right]
        print_row(name, wrong, len(items))
        misses += wrong
    items = skills.constrained_test_set()
    answers = checkpoint.complete_fields(items)
    wrong = [(prompt, right, got) for (prompt, right), got in zip(items, answers) if got != right]
    print_row("JSON, keys forced", wrong, len(items))
    for question, right, got in misses + wrong:
        print(f"miss: {question!r} wanted {right!r} got {got!r}")


def write_oracle(folder, path):
    """Writes prompts and answers. Keeps only prompts for which every chosen token leads by more than ``CLEAR_MARGIN``,
    so that every correct implementation gives the same answer."""
    checkpoint = Checkpoint(folder)
    items = []
    for messages in ORACLE_CHATS:
        items.append(({"messages": messages}, "answer", checkpoint.chat_prompt(messages)))
    for prompt in ORACLE_PROMPTS:
        items.append(({"prompt": prompt}, "completion", prompt))
    kept = []
    for item, key, prompt in items:
        text, ended, margin = checkpoint.complete_with_margin(prompt)
        print(f"{margin:6.2f} {'ended' if ended else 'CUT'} {prompt!r} -> {text!r}")
        if ended and margin > CLEAR_MARGIN:
            kept.append({**item, key: text})
    path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n")
