#!/usr/bin/env python3
"""Computes texts with transformers for encoders.py: reads a JSON object from the standard input,
prints the seconds and the vectors as JSON. Its argument is a folder."""

import json
import sys
import time

import torch
import transformers

BATCH = 16


def main():
    job = json.load(sys.stdin)
    torch.set_num_threads(job["threads"])
    model = transformers.AutoModel.from_pretrained(sys.argv[1], dtype=torch.bfloat16,
                                                   attn_implementation="sdpa").eval()
    order = sorted(range(len(job["ids"])), key=lambda i: len(job["ids"][i]))

    @torch.inference_mode()
    def work():
        out = [None] * len(order)
        for begin in range(0, len(order), BATCH):
            part = order[begin:begin + BATCH]
            longest = max(len(job["ids"][i]) for i in part)
            ids = torch.zeros(len(part), longest, dtype=torch.long)
            mask = torch.zeros(len(part), longest, dtype=torch.long)
            for row, i in enumerate(part):
                ids[row, :len(job["ids"][i])] = torch.tensor(job["ids"][i])
                mask[row, :len(job["ids"][i])] = 1
            rows = model(ids, attention_mask=mask).last_hidden_state.float()
            means = (rows * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            means = torch.nn.functional.normalize(means, dim=-1)
            for row, i in enumerate(part):
                out[i] = means[row].tolist()
        return out

    vectors = work()
    start = time.monotonic()
    for _ in range(job["repeats"]):
        work()
    print(json.dumps({"seconds": (time.monotonic() - start) / job["repeats"], "vectors": vectors}))


if __name__ == "__main__":
    main()
