#!/usr/bin/env python3
"""Measures vLLM's CPU backend; runner.py describes arguments and output.

vLLM uses the kernels of the package zentorch by itself if Python can import it and the processor is
AMD's, and its own kernels without a word otherwise. So --kernels states what must be measured; the
script fails if vLLM decided otherwise."""

import importlib.metadata

import runner


def environment(a):
    cache = str(a.cache)
    return {
        "OMP_NUM_THREADS": str(a.threads),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, a.cpus)),
        "VLLM_CPU_KVCACHE_SPACE": "1",           # GiB
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",   # the engine runs in this process
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
        "VLLM_CACHE_ROOT": cache + "/vllm", "TORCHINDUCTOR_CACHE_DIR": cache + "/inductor",
        "TRITON_CACHE_DIR": cache + "/triton"}


def installed(*packages):
    """Returns those of the packages that this Python has."""
    found = []
    for package in packages:
        try:
            importlib.metadata.version(package)
            found.append(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def zentorch():
    """Returns whether Python can import zentorch, in words."""
    try:
        import zentorch as package
        return f"zentorch {package.__version__} can be imported"
    except (ImportError, OSError) as error:
        return f"zentorch cannot be imported ({error})"


class Engine:
    def __init__(self, a):
        from vllm import LLM, SamplingParams
        from vllm.platforms import current_platform
        kernels = "zentorch" if current_platform.is_zen_cpu() else "plain"
        if kernels != a.kernels:
            raise RuntimeError(f"expected {a.kernels} kernels, found {kernels}: {zentorch()}")
        self.parameters = SamplingParams
        self.vocabulary = runner.vocabulary(a.model)
        self.requests = 0
        steps = max([1024, a.prompt, *(b * a.context for b in a.batches)])
        self.engine = LLM(
            model=str(a.model), skip_tokenizer_init=True, dtype="bfloat16",
            max_model_len=a.longest, max_num_seqs=max(a.batches), max_num_batched_tokens=steps,
            enable_prefix_caching=False, disable_log_stats=True, async_scheduling=False,
            seed=0).llm_engine

    def generate(self, sequences, context, steps):
        parameters = self.parameters(temperature=0.0, max_tokens=steps + 1, ignore_eos=True,
                                     detokenize=False)
        tokens, first = {}, None
        for _ in range(sequences):
            self.requests += 1
            prompt = {"prompt_token_ids": runner.random_tokens(context, self.vocabulary)}
            self.engine.add_request(str(self.requests), prompt, parameters)
        start = runner.now()
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                tokens[output.request_id] = list(output.outputs[0].token_ids)
            if first is None and len(tokens) == sequences:
                first, before = runner.now(), {r: len(t) for r, t in tokens.items()}
        end = runner.now()
        return first - start, end - first, [t[before[r]:] for r, t in tokens.items()]


def main():
    a = runner.arguments(__doc__, lambda parser: parser.add_argument(
        "--kernels", choices=["plain", "zentorch"], required=True))
    runner.restart(environment(a), runner.libraries("vllm-cpu"))
    output = runner.Output()
    start = runner.now()
    engine = Engine(a)
    output.setup(installed("vllm-cpu", "vllm", "torch", "zentorch"), runner.now() - start)
    runner.measure(a, output, engine.generate)
    runner.leave()


if __name__ == "__main__":
    main()
