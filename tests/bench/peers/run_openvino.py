#!/usr/bin/env python3
"""Measures OpenVINO GenAI on the CPU with its continuous batching; runner.py describes arguments
and output. The KV cache has the type that OpenVINO chooses."""

import runner


class Engine:
    def __init__(self, a):
        import numpy
        import openvino
        import openvino_genai
        self.numpy, self.tensor, self.genai = numpy, openvino.Tensor, openvino_genai
        self.vocabulary = runner.vocabulary(a.model)
        self.requests = 0
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = max([1024, a.prompt,
                                                *(b * a.context for b in a.batches)])
        scheduler.max_num_seqs = max(a.batches)
        scheduler.cache_size = 1  # GiB
        scheduler.enable_prefix_caching = False
        scheduler.dynamic_split_fuse = False
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(a.model), scheduler, "CPU",
            {"INFERENCE_NUM_THREADS": a.threads, "INFERENCE_PRECISION_HINT": "bf16",
             "PERFORMANCE_HINT": "LATENCY"}, {})

    def generate(self, sequences, context, steps):
        config = self.genai.GenerationConfig()
        config.max_new_tokens = steps + 1
        config.ignore_eos = True
        config.do_sample = False
        handles = []
        for _ in range(sequences):
            prompt = runner.random_tokens(context, self.vocabulary)
            ids = self.tensor(self.numpy.array([prompt], dtype=self.numpy.int64))
            handles.append(self.pipeline.add_request(self.requests, ids, config))
            self.requests += 1
        tokens, first = [[] for _ in handles], None
        start = runner.now()
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            for kept, handle in zip(tokens, handles):
                while handle.can_read():
                    for output in handle.read().values():
                        kept += output.generated_ids
            if first is None and all(tokens):
                first, before = runner.now(), [len(t) for t in tokens]
        end = runner.now()
        return first - start, end - first, [t[n:] for t, n in zip(tokens, before)]


def main():
    a = runner.arguments(__doc__)
    output = runner.Output()
    start = runner.now()
    engine = Engine(a)
    output.setup(["openvino", "openvino-genai"], runner.now() - start)
    runner.measure(a, output, engine.generate)
    runner.leave()


if __name__ == "__main__":
    main()
