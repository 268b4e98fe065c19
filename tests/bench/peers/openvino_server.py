"""OpenVINO GenAI's continuous batching behind [front]: `python openvino_server.py PORT MODEL KV_TYPE THREADS BUDGET`.

KV_TYPE is bf16, f16 or `default`, which is what OpenVINO chooses (int8). Weights are of the type in which the model was
exported; machines without bf16 instructions compute in f32 either way.
"""

from front import port_and, serve


def start(model, kv_type, threads, budget):
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
    if kv_type != "default":
        properties |= {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": kv_type}
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


port, *arguments = port_and("MODEL", "KV_TYPE", "THREADS", "BUDGET")
serve(port, lambda: start(*arguments))
