"""Requests that together use every sampling parameter."""


def sampling_zoo():
    """Yields requests that together use every parameter that a replay must preserve."""
    long = dict(prompt=[5, 6, 7, 8] * 9, max_tokens=1500, ignore_eos=True, return_token_ids=True)
    yield long | dict(temperature=0, logprobs=3)
    yield long | dict(temperature=1, seed=11, presence_penalty=1.5, frequency_penalty=0.7, repetition_penalty=1.3)
    yield long | dict(temperature=0.8, seed=12, top_p=0.9, top_k=20, min_p=0.01, logprobs=2)
    yield long | dict(temperature=1.2, seed=13, logit_bias={"9": 5, "10": -100}, n=3)
    # min_tokens keeps the stop tokens from ending the output before the workers die.
    yield long | dict(temperature=1, seed=14, min_tokens=1300, stop_token_ids=list(range(100, 160)))
    yield long | dict(temperature=1, seed=15, prompt_logprobs=2, echo=True, logprobs=1)
