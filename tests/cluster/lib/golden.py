"""The comparison with golden models: the answers of a running cluster over HTTP against Hugging Face transformers."""

import concurrent.futures
import re

import numpy as np

MODELS = ("qwen3", "qwen3_tied", "qwen3_yarn_swa")
LENGTHS = (1, 7, 37, 125, 300)
GENERATED = 16
BOUND = 2e-4


def bound(model):
    """Returns the greatest allowed deviation of a logprob. The reference computes a delta net in two ways, which differ
    by up to 1.2e-4."""
    return 1e-3 if model.startswith("qwen3_5") else BOUND


def answers(cluster, golden):
    """Returns {prompt length: choice}. All requests are sent at once, so that their rows share steps."""

    def ask(length):
        answer = cluster.complete(
            prompt=golden[f"t{length}.input_ids"].tolist(),
            max_tokens=GENERATED,
            temperature=0,
            logprobs=1,
            prompt_logprobs=0,
            return_token_ids=True,
        )
        assert answer["usage"]["prompt_tokens"] == length
        assert answer["usage"]["completion_tokens"] == GENERATED
        return answer["choices"][0]

    with concurrent.futures.ThreadPoolExecutor(len(LENGTHS)) as pool:
        return dict(zip(LENGTHS, pool.map(ask, LENGTHS)))


def prompt_logprobs(choice, ids):
    """Returns the logprob of each prompt token except the first, from {token id: {logprob, rank, decoded_token}}
    objects. """
    first, *rest = choice["prompt_logprobs"]
    assert first is None and len(rest) == len(ids) - 1
    return np.array([entry[str(token)]["logprob"] for entry, token in zip(rest, ids[1:].tolist())])


def log_softmax(logits):
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def pick(logprobs, ids):
    return np.take_along_axis(logprobs, ids[:, None], -1)[:, 0]


def greatest_deviation(golden, got):
    """Returns the greatest deviation of a logprob from the reference. Checks that the tokens are equal."""
    worst = 0.0
    for length, choice in got.items():
        ids, greedy = golden[f"t{length}.input_ids"], golden[f"t{length}.greedy"]
        assert choice["token_ids"] == greedy.tolist(), f"t{length}"
        prompt = pick(log_softmax(golden[f"t{length}.logits"][:-1]), ids[1:])
        sampled = pick(log_softmax(golden[f"t{length}.greedy_logits"]), greedy)
        ours = np.array(choice["logprobs"]["token_logprobs"])
        for difference in (np.abs(prompt_logprobs(choice, ids) - prompt), np.abs(ours - sampled)):
            worst = max(worst, difference.max(initial=0.0))
    return worst


def mean_deviations(golden, got):
    """Returns the mean deviation of a prompt's logprobs from the f32 reference: of our run, and of the reference's own
    bf16 run."""
    ours, theirs = [], []
    for length in LENGTHS[1:]:
        ids = golden[f"t{length}.input_ids"]
        exact = pick(log_softmax(golden[f"t{length}.logits"][:-1]), ids[1:])
        ours.append(np.abs(prompt_logprobs(got[length], ids) - exact))
        theirs.append(np.abs(pick(log_softmax(golden[f"t{length}.logits_bf16"][:-1]), ids[1:]) - exact))
    return np.concatenate(ours).mean(), np.concatenate(theirs).mean()


def check_balance(cluster, layers):
    """Checks that only the leader reports the balance of experts, and for exactly these layers, since all ranks route
    the same tokens. Each token is routed to 3 of 8 experts."""
    balance = re.findall(r'tutti_worker_expert_imbalance{worker="(\d)",layer="(\d+)"} (\S+)', cluster.client.get("/metrics").text)
    assert sorted((int(worker), int(layer)) for worker, layer, _ in balance) == [(0, layer) for layer in layers]
    assert all(1 <= float(value) <= 8 / 3 for *_, value in balance), balance
