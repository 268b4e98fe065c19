"""vLLM's engine for CPUs behind the HTTP server of front.py.

    python vllm_server.py PORT MODEL DTYPE THREADS BUDGET

The engine runs in this process, not in a separate engine process. On a machine without bf16 instructions, DTYPE must be
float32: oneDNN has no bf16 product there, and vLLM's fallback is several times slower.
"""

import os

from front import port_and, serve


def start(model, dtype, threads, budget):
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # In GiB. Sixteen requests of 576 tokens in f32, in blocks of 128, take 2.2 GiB.
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{int(threads) - 1}",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "OMP_NUM_THREADS": threads,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    import vllm

    llm = vllm.LLM(
        model=model,
        dtype=dtype,
        max_model_len=8192,
        max_num_seqs=16,
        max_num_batched_tokens=int(budget),
        enable_chunked_prefill=True,
        enable_prefix_caching=False,
        # Compilation adds a minute to the start and, without Triton, gains no speed.
        enforce_eager=True,
        disable_log_stats=True,
    )
    engine = llm.llm_engine

    class Pipeline:
        given = {}

        def add(self, number, prompt, max_tokens):
            self.given[number] = 0
            greedy = vllm.SamplingParams(
                temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
            )
            engine.add_request(str(number), {"prompt_token_ids": prompt}, greedy)

        def step(self):
            new = []
            for output in engine.step():
                # The engine may append a suffix to the request's number.
                number, tokens = int(output.request_id.split("-")[0]), len(output.outputs[0].token_ids)
                new.append((number, tokens - self.given[number]))
                self.given[number] = tokens
            return new

        def busy(self):
            return engine.has_unfinished_requests()

    return Pipeline()


if __name__ == "__main__":
    port, *arguments = port_and("MODEL", "DTYPE", "THREADS", "BUDGET")
    serve(port, lambda: start(*arguments))
