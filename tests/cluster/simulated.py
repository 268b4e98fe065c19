"""The tokens of `--device sim`: a second implementation of worker/models/src/sim/digest.rs."""

MASK = 2**64 - 1


def mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def extend(digest, token):
    return mix(digest ^ ((token + 1) * 0x9E3779B97F4A7C15 & MASK))


def generate(prompt, seed, vocab_size, count):
    """The next `count` tokens after the prompt if nothing ends the sequence. Greedy requests have seed 0."""
    digest, tokens = 0, []
    for token in prompt:
        digest = extend(digest, token)
    while len(tokens) < count:
        tokens.append(mix(digest ^ mix(seed)) % vocab_size)
        digest = extend(digest, tokens[-1])
    return tokens
