"""Pictures, recordings and frames on the CUDA device over HTTP. Tests that the answers are those of the CPU, whose
encoders are those of the reference, and have the same digits however prompts are cut and whatever is cached. Runs under
emulated-gpu/run, or on a GPU."""

import pytest
from golden import BOUND
from gpus import has_driver
from media_model import ask, text
from omni_model import audio, image, png, video, wav, write

pytestmark = pytest.mark.skipif(not has_driver(), reason="no libcuda.so.1: run under emulated-gpu/run")


def chats():
    """Yields chats with media of each kind, one with several, and one without."""
    more = dict(logprobs=True, top_logprobs=1, return_token_ids=True, max_tokens=8)
    yield ask(text("What is this? "), image(png(40, 24, 1)), text("And why?"), **more)
    yield ask(audio(wav(6_500, 1)), audio(wav(9_000, 2)), text("Which is longer?"), **more)
    yield ask(video([png(32, 24, n) for n in range(3)], 2), text("What happens?"), **more)
    yield ask(audio(wav(4_000, 1)), image(png(64, 64, 3)), audio(wav(8_000, 4)), text("all"), **more)
    yield ask(text("no media"), **more)


def answers(cluster):
    got = [cluster.chat(**body)["choices"][0] for body in chats()]
    cluster.wait_until_idle()
    return got


def logprobs(choices):
    return [entry["logprob"] for choice in choices for entry in choice["logprobs"]["content"]]


def test_media_have_the_answers_of_the_cpu_however_prompts_are_cut(start, figure, tmp_path):
    model = write(tmp_path / "checkpoint")
    cpu = start("--device", "cpu", "--no-prefix-cache", *model)
    expected = answers(cpu)
    cpu.stop()
    assert len({str(choice) for choice in expected}) == len(expected)
    whole = None
    for cuts in ((), ("--max-step-tokens", 16), ("--max-step-tokens", 16, "--media-prefill", "atomic")):
        cluster = start("--device", "cuda", *cuts, *model)
        got = answers(cluster)
        whole = whole or got
        assert got == whole, cuts
        # The prefix cache contains the prompts now, and the encoders' cache the embeddings.
        assert answers(cluster) == whole, cuts
        cluster.stop()
    assert [choice["token_ids"] for choice in whole] == [choice["token_ids"] for choice in expected]
    worst = max(abs(gpu - cpu) for gpu, cpu in zip(logprobs(whole), logprobs(expected), strict=True))
    figure(f"cuda Qwen3-Omni with media: greatest |logprob - the CPU's| {worst:.1e}, bound {BOUND:.0e}")
    assert worst <= BOUND
