#!/usr/bin/env python3
"""Predicts what several ranks gain: bytes of the exchanges, and time of a step.

    scale_model.py                      the tables of engine/SCALE.md
    scale_model.py --check FILE         compares predictions with the lines of ranks_bench --json

A step takes  dense + experts x imbalance / P + blocks x (alpha + bytes / beta)  with P ranks, where
alpha is the latency of an exchange and beta the rate of a network in bytes per second. Where owners
add the results, bytes are fewer and there is one more alpha. With divided rows, the dense part that
treats rows alone is divided by P, too. Nothing here is measured but what --check reads: it predicts
the time of measured steps from that of one process and of exchanges alone, and fails if a
prediction is wrong by more than 15 %.
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


# Messages of a step beside the exchanges of its blocks: the announcement, in two parts, and the
# checks after it; with a divided head, the parts of the logits, too.
STEP_MESSAGES = 3
LARGEST_ERROR = 0.15


@dataclass(frozen=True)
class Prediction:
    """Seconds of measured steps with ranks of one thread, in parts that follow one another."""

    undivided: float  # computed by every rank
    divided: float  # a rank's share of what is divided by rows or by outputs of the head
    experts: float  # a rank's share, if all ranks had equal ones
    imbalance: float  # how much longer the rank with the most experts takes
    sharing: float  # how much longer a rank takes that shares its core with others
    latency: float  # of the exchanges
    transfer: float  # of their bytes; all ranks send and receive at once

    @property
    def seconds(self):
        return (self.undivided + self.divided + self.experts + self.imbalance + self.sharing +
                self.latency + self.transfer)


def predict(case):
    """Predicts a measured case, a line of ranks_bench --json, from what was measured beside it:
    the time of one process (alone_seconds) with its threads, and the shares of it that experts,
    what is divided by rows, the same for only as many rows as a rank has, and the head take; the
    imbalance that plans and placement give; the number of exchanges, the bytes that a rank sends,
    alpha and beta of exchanges alone. The time of the ranks (seconds) is not used. One thread is
    taken to need, for the work of one process, the sum of the times of its threads."""
    ranks = case["ranks"]
    work = case["alone_seconds"] * case["threads"]
    experts = work * case["experts_share"]
    rows = work * case["rows_share"] * case["divides_rows"]
    head = work * case["head_share"] * case["divides_head"]
    undivided = work - experts - rows - head
    # Of few rows, every rank reads the same weights that one process reads once for all rows.
    of_rows = max(rows / ranks, work * case["few_rows_share"] * case["divides_rows"])
    mean = undivided + of_rows + (head + experts) / ranks
    # A core with several ranks computes the work of all of them. They hardly change cores within a
    # block, so one core has the rank with the most experts.
    of_core = ranks / min(case["cores"], ranks)
    messages = case["exchanges"] + case["steps"] * (STEP_MESSAGES + case["divides_head"])
    return Prediction(undivided, of_rows + head / ranks, experts / ranks,
                      experts * (case["imbalance"] - 1) / ranks, (of_core - 1) * mean,
                      messages * case["alpha"], case["bytes"] / case["beta"])


def read_cases(path):
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def check(path):
    return check_cases(read_cases(path))


def check_cases(cases):
    """Prints measured and predicted times of a step; returns whether all are near enough."""
    good = bool(cases)
    for case in cases:
        found = predict(case)
        error = found.seconds / case["seconds"] - 1
        good = good and abs(error) <= LARGEST_ERROR
        parts = ", ".join(f"{name} {1e3 * getattr(found, name) / case['steps']:.2f}"
                          for name in ("undivided", "divided", "experts", "imbalance", "sharing",
                                       "latency", "transfer"))
        print(f"{case['name']}: measured {1e3 * case['seconds'] / case['steps']:.2f} ms, predicted "
              f"{1e3 * found.seconds / case['steps']:.2f} ms ({error:+.0%}): {parts}")
    return good


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
