#!/usr/bin/env python3
"""Computes texts with llama.cpp (package llama_cpp) for encoders.py: reads a JSON object from the
standard input, prints the seconds and the vectors as JSON. Its argument is a GGUF file."""

import json
import sys
import time

import llama_cpp


def main():
    job = json.load(sys.stdin)
    most = max(map(len, job["ids"]))
    batch = int(sys.argv[2]) if len(sys.argv) > 2 else 256
    model = llama_cpp.Llama(sys.argv[1], embedding=True, n_ctx=batch, n_batch=batch, n_ubatch=batch,
                            n_threads=job["threads"],
                            n_threads_batch=job["threads"], verbose=False)
    assert most <= batch

    def work():
        return model.embed(job["texts"], normalize=True)

    vectors = work()
    start = time.monotonic()
    for _ in range(job["repeats"]):
        work()
    print(json.dumps({"seconds": (time.monotonic() - start) / job["repeats"], "vectors": vectors}))


if __name__ == "__main__":
    main()
