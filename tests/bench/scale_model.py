#!/usr/bin/env python3
"""Predicts what several ranks gain: bytes of the exchanges, and time of a step.

    scale_model.py                      the tables of engine/SCALE.md
    scale_model.py --check FILE         compares predictions with the lines of ranks_bench --json

A step takes  dense + experts x imbalance / P + blocks x (alpha + bytes / beta)  with P ranks, where
alpha is the latency of an exchange and beta the rate of a network in bytes per second. Where owners
add the results, bytes are fewer and there is one more alpha. With divided rows, the dense part that treats rows alone is divided by P, too. Nothing here is measured but what
--check reads.
"""

import argparse
import json
import math
import random
import sys
from dataclasses import dataclass

ACTIVATION_BYTES = 2  # bf16
# As in engine/layers/routed/owner_sums.cc: what another exchange must save.
BYTES_OF_AN_EXCHANGE = 64 << 10


@dataclass(frozen=True)
class Model:
    """The sizes on which exchanges depend. Parameters are in units."""

    name: str
    blocks: int  # routed ones
    experts: int
    chosen: int  # experts of a row
    width: int  # of a token
    layers: int
    keys_and_values: int  # elements for a token in a layer
    expert_parameters: float  # of all routed experts
    dense_parameters: float  # read for every token
    sub_tokens: int = 1


MODELS = [
    Model("Mixtral-8x7B", 32, 8, 2, 4096, 32, 2048, 45.1e9, 1.6e9),
    Model("Qwen3-235B-A22B", 94, 128, 8, 4096, 94, 1024, 227e9, 8.0e9),
    Model("DeepSeek-V3", 58, 256, 8, 7168, 61, 576, 654e9, 17.2e9),
    Model("MH-MoE, d 768, h 4, k 2", 6, 8, 2, 768, 12, 1536, 0.25e9, 0.11e9, sub_tokens=4),
    Model("JetMoE-8B", 48, 8, 2, 2048, 24, 4096, 7.7e9, 0.6e9),
]


@dataclass(frozen=True)
class Network:
    name: str
    alpha: float  # seconds for an exchange
    beta: float  # bytes per second and direction


NETWORKS = [Network("1 GbE", 60e-6, 0.117e9), Network("10 GbE", 30e-6, 1.15e9),
            Network("100 GbE", 8e-6, 11.5e9)]


def joint_bytes(model, ranks, tokens=1):
    """Bytes that a rank sends and receives for a routed block: the results of all assignments."""
    return tokens * model.chosen * model.width * ACTIVATION_BYTES * (ranks - 1) / ranks


def owner_sum_bytes(model, ranks, tokens=1):
    """The same if each rank adds the results of its rows, and f32 sums are gathered."""
    share = (ranks - 1) / ranks
    return tokens * share * (model.chosen * model.width * ACTIVATION_BYTES / ranks +
                             4 * model.width)


def owners_add(model, ranks, tokens):
    """Whether --owner-sums auto lets owners add the results of a step whose rows are not divided."""
    saved = joint_bytes(model, ranks, tokens) - owner_sum_bytes(model, ranks, tokens)
    return saved > BYTES_OF_AN_EXCHANGE


def leader_bytes(model, ranks, tokens=1):
    """The same in a layout for comparison: the leader computes all but the experts."""
    per_rank = model.experts // ranks
    none = math.comb(model.experts - per_rank, model.chosen) / math.comb(model.experts,
                                                                        model.chosen)
    sent = (ranks - 1) * (1 - none) * model.width * ACTIVATION_BYTES
    return tokens * max(sent, joint_bytes(model, ranks))


def divided_token_bytes(model, ranks, tokens=1):
    """The same in a layout for comparison: tokens and experts are divided."""
    per_rank = model.experts // ranks
    none = math.comb(model.experts - per_rank, model.chosen) / math.comb(model.experts,
                                                                        model.chosen)
    sent = (ranks - 1) * (1 - none) * model.width * ACTIVATION_BYTES
    return tokens * (sent + joint_bytes(model, ranks)) / ranks


def row_split_bytes(model, ranks, tokens=1):
    """Bytes for a layer whose rows are divided: keys and values, and the branch outputs, in f32."""
    return tokens * (4 * model.keys_and_values + 4 * model.width) * (ranks - 1) / ranks


def read_experts_and_imbalance(model, ranks, tokens, rounds=400):
    """Experts that a step with uniform routing reads, and the largest part of a rank / the mean."""
    draw = random.Random(1)
    read, ratio = 0.0, 0.0
    for _ in range(rounds):
        rows = set()
        for _ in range(tokens * model.sub_tokens):
            rows.update(draw.sample(range(model.experts), model.chosen))
        parts = [0] * ranks
        for expert in rows:
            parts[expert % ranks] += 1
        read += len(rows)
        ratio += max(parts) * ranks / len(rows)
    return read / rounds, ratio / rounds


def decode_seconds(model, ranks, tokens, network, bits=4, bandwidth=200e9):
    """Time of a decoding step that is bound by reading weights."""
    read, imbalance = read_experts_and_imbalance(model, ranks, tokens)
    dense = model.dense_parameters * bits / 8 / bandwidth
    experts = model.expert_parameters * read / model.experts * bits / 8 / bandwidth
    if ranks == 1:
        return dense + experts
    if owners_add(model, ranks, tokens):
        exchange = 2 * network.alpha + owner_sum_bytes(model, ranks, tokens) / network.beta
    else:
        exchange = network.alpha + joint_bytes(model, ranks, tokens) / network.beta
    return dense + experts * imbalance / ranks + model.blocks * exchange


def print_tables(ranks):
    print(f"KB for a token, rank and direction, {ranks} ranks, all layers together:\n")
    print("| model | joint | owner sums | experts at others | tokens divided | rows divided |")
    print("|---|---|---|---|---|---|")
    for m in MODELS:
        blocks = [m.blocks * f(m, ranks) / 1e3 for f in (joint_bytes, owner_sum_bytes,
                                                        leader_bytes, divided_token_bytes)]
        rows = m.layers * row_split_bytes(m, ranks) / 1e3
        print(f"| {m.name} | " + " | ".join(f"{b:.0f}" for b in blocks) + f" | {rows:.0f} |")
    print(f"\nDecoding with {ranks} ranks, times as fast as one, 4-bit weights read at 200 GB/s by "
          "each rank, 1 and 16 sequences:\n")
    print("| model | " + " | ".join(n.name for n in NETWORKS) + " |")
    print("|---|" + "---|" * len(NETWORKS))
    for m in MODELS:
        cells = []
        for network in NETWORKS:
            gains = [decode_seconds(m, 1, t, None) / decode_seconds(m, ranks, t, network)
                     for t in (1, 16)]
            cells.append(" / ".join(f"{g:.2f}" for g in gains))
        print(f"| {m.name} | " + " | ".join(cells) + " |")


def predict(measured):
    """The predicted seconds of a measured case. Its fields: ranks, alone_seconds (one process with
    as many threads as ranks), dense_share and divided_share (of the time of one process: what is
    no experts, and the part of it that is divided), imbalance, exchanges, bytes, alpha, beta."""
    alone, ranks = measured["alone_seconds"] * measured["ranks"], measured["ranks"]
    experts = alone * (1 - measured["dense_share"])
    divided = alone * measured["divided_share"]
    rest = alone * measured["dense_share"] - divided
    # One thread computes what `ranks` threads did in `alone_seconds`.
    return (rest + divided / ranks + experts * measured["imbalance"] / ranks +
            measured["exchanges"] * measured["alpha"] + measured["bytes"] / measured["beta"])


def check(path):
    worst = 0.0
    with open(path, encoding="utf-8") as file:
        for line in file:
            case = json.loads(line)
            predicted = predict(case)
            error = predicted / case["seconds"] - 1
            worst = max(worst, abs(error))
            print(f"{case['name']}: measured {case['seconds'] * 1e3:.1f} ms, predicted "
                  f"{predicted * 1e3:.1f} ms ({error:+.0%})")
    return worst <= 0.15


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--check", metavar="FILE")
    arguments = parser.parse_args()
    if arguments.check is None:
        print_tables(arguments.ranks)
        return 0
    return 0 if check(arguments.check) else 1


if __name__ == "__main__":
    sys.exit(main())
