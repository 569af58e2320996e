#!/usr/bin/env python3
"""Measures transformers on the CPU with grouped products of the experts; runner.py describes
arguments and output."""

import runner


class Engine:
    def __init__(self, a):
        import torch
        import transformers
        transformers.logging.set_verbosity_error()
        torch.set_num_threads(a.threads)
        self.torch = torch
        self.vocabulary = runner.vocabulary(a.model)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            str(a.model), dtype=torch.bfloat16, experts_implementation="grouped_mm",
            attn_implementation="sdpa").eval()

    def step(self, ids, cache):
        """Returns the most probable next token of every sequence and the cache."""
        done = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return done.logits[:, -1].argmax(-1, keepdim=True), done.past_key_values

    def generate(self, sequences, context, steps):
        with self.torch.inference_mode():
            prompt = self.torch.randint(self.vocabulary, (sequences, context))
            start = runner.now()
            ids, cache = self.step(prompt, None)
            first = runner.now()
            decoded = []
            for _ in range(steps):
                ids, cache = self.step(ids, cache)
                decoded.append(ids.flatten().tolist())
            return first - start, runner.now() - first, [list(t) for t in zip(*decoded)]


def main():
    a = runner.arguments(__doc__)
    runner.restart({"OMP_NUM_THREADS": str(a.threads), "HF_HUB_OFFLINE": "1"},
                   runner.libraries("torch"))
    output = runner.Output()
    start = runner.now()
    engine = Engine(a)
    output.setup(["transformers", "torch"], runner.now() - start)
    runner.measure(a, output, engine.generate)
    runner.leave()


if __name__ == "__main__":
    main()
