"""Continuous batching of OpenVINO GenAI behind the HTTP server of front.py.

    python openvino_server.py PORT MODEL TYPES THREADS BUDGET

TYPES is COMPUTE:KV, the precision hint (bf16 or f32) and the type of the KV cache (f16). With `default`, OpenVINO
chooses both. Weights have the type in which the model was exported.
"""

from front import port_and, serve


def start(model, types, threads, budget):
    import numpy as np
    import openvino
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2  # GiB
    scheduler.max_num_seqs = 16
    scheduler.max_num_batched_tokens = int(budget)
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_NUM_THREADS": int(threads)}
    if types != "default":
        compute, kv = types.split(":")
        properties |= {"INFERENCE_PRECISION_HINT": compute, "KV_CACHE_PRECISION": kv}
    batching = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)

    class Pipeline:
        handles = {}

        def add(self, number, prompt, max_tokens):
            config = genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
            ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
            self.handles[number] = batching.add_request(number, ids, config)

        def step(self):
            batching.step()
            given = []
            for number, handle in list(self.handles.items()):
                if handle.can_read():
                    given.append((number, sum(len(out.generated_ids) for out in handle.read().values())))
                elif handle.get_status() != genai.GenerationStatus.RUNNING:
                    del self.handles[number]
            return given

        def busy(self):
            return batching.has_non_finished_requests()

    return Pipeline()


port, *arguments = port_and("MODEL", "TYPES", "THREADS", "BUDGET")
serve(port, lambda: start(*arguments))
