#!/usr/bin/env python3
"""Simulates a fleet of replicas, each a group of ranks whose steps take the time of scale_model.py.

    fleet.py [--model Mixtral-8x7B] [--ranks 4] [--network "10 GbE"] [--replicas 1,10,100,1000]
             [--load 0.8] [--seconds 60] [--balance least|two|turns]
    fleet.py --machines 64 --group-sizes 1,2,4,8     the same machines in groups of other sizes

Requests arrive at random times (a Poisson process) at a rate of `load` times what the replicas can
do, and go to a replica: the one with the fewest requests (least), the better of two drawn ones
(two), or each in turn (turns). A replica runs steps of up to 64 sequences: every sequence that
decodes gets a token, and the oldest waiting prompts get the other rows of a step, up to 256. All
ranks of a replica run every step, so a replica is as fast as the model says, and is lost as a
whole. Nothing here is measured.
"""

import argparse
import functools
import heapq
import random
import statistics
import sys
from collections import deque
from dataclasses import dataclass, field

import scale_model

MOST_SEQUENCES = 64
STEP_ROWS = 256
# The rows of a step from which ranks divide what treats rows alone: so many for each rank.
ROWS_TO_DIVIDE = 8


@dataclass(frozen=True)
class Machine:
    """What a rank can do."""

    bandwidth: float = 200e9  # bytes per second at which it reads weights
    operations: float = 4e12  # per second in products of many rows
    bits: int = 4  # of a weight


@dataclass(frozen=True)
class Requests:
    """Means of exponential distributions, in tokens."""

    prompt: float = 256
    output: float = 128


@functools.lru_cache(maxsize=None)
def experts_and_imbalance(model, ranks, rows):
    return scale_model.read_experts_and_imbalance(model, ranks, rows, rounds=6400 // (rows + 15))


@functools.lru_cache(maxsize=None)
def step_seconds(model, ranks, rows, network, machine):
    """Time of a step with so many rows: each part as long as reading its weights or computing its
    products takes, whichever is longer; then the exchanges."""
    # Beyond this, nearly all experts are read, and the imbalance hardly changes.
    read, imbalance = experts_and_imbalance(model, ranks, min(rows, 64))
    of_weight = machine.bits / 8 / machine.bandwidth
    of_row = 2 / machine.operations

    def part(parameters_read, parameters_of_row, part_rows):
        return max(parameters_read * of_weight, parameters_of_row * part_rows * of_row)

    divides = ranks > 1 and rows >= ROWS_TO_DIVIDE * ranks
    dense = part(model.dense_parameters, model.dense_parameters,
                 rows / ranks if divides else rows)
    of_expert = model.expert_parameters / model.experts
    experts = part(of_expert * read, of_expert * model.chosen, rows)
    if ranks == 1:
        return dense + experts
    exchanges = model.blocks * (network.alpha +
                                scale_model.joint_bytes(model, ranks, rows) / network.beta)
    if divides:
        exchanges += model.layers * (
            2 * network.alpha + scale_model.row_split_bytes(model, ranks, rows) / network.beta)
    return dense + experts * imbalance / ranks + exchanges


def capacity(step, requests):
    """Requests per second that a replica can do with all its sequences busy. `step` returns the
    seconds of a step with so many rows."""
    # In the life of a request, its output takes as many steps, in which prompts of others arrive.
    prompt_rows = MOST_SEQUENCES * requests.prompt / requests.output
    rows = round(MOST_SEQUENCES + min(prompt_rows, STEP_ROWS - MOST_SEQUENCES))
    tokens = requests.prompt + requests.output
    return rows / step(rows) / tokens


@dataclass
class Replica:
    """Its sequences, of which each has got a number of tokens by a number of steps."""

    step: int = 0
    busy: bool = False
    waiting: deque = field(default_factory=deque)  # [arrival, rows left of the prompt, output]
    decoding: list = field(default_factory=list)  # heap of the steps after which sequences end

    @property
    def requests(self):
        return len(self.waiting) + len(self.decoding)


@dataclass
class Figures:
    first_tokens: list = field(default_factory=list)  # seconds from the arrival
    steps: list = field(default_factory=list)  # seconds
    tokens: int = 0  # written
    arrived: int = 0


class Fleet:
    """Runs requests on replicas; times are in seconds."""

    def __init__(self, replicas, step, requests, balance="least", seed=1):
        self.replicas = [Replica() for _ in range(replicas)]
        self.step = step
        self.requests = requests
        self.balance = balance
        self.random = random.Random(seed)
        self.turn = 0
        # Heap of requests, a number that ascends, and the replica; only its last entry counts.
        self.by_load = [(0, i, i) for i in range(replicas)]
        self.entry = list(range(replicas))  # the number of each replica's last entry
        self.entries = replicas
        self.figures = Figures()

    def choose(self):
        count = len(self.replicas)
        if self.balance == "turns":
            self.turn = (self.turn + 1) % count
            return self.turn
        if self.balance == "two":
            return min((self.random.randrange(count) for _ in range(2)),
                       key=lambda i: self.replicas[i].requests)
        while self.by_load[0][1] != self.entry[self.by_load[0][2]]:
            heapq.heappop(self.by_load)
        return self.by_load[0][2]

    def note_load(self, i):
        if self.balance == "least":
            self.entry[i] = self.entries
            self.entries += 1
            heapq.heappush(self.by_load, (self.replicas[i].requests, self.entry[i], i))

    def rows_of_step(self, replica):
        """Gives rows to prompts; returns all rows, and the prompts that are complete."""
        rows = len(replica.decoding)
        complete = []
        while (replica.waiting and rows < STEP_ROWS and
               len(replica.decoding) + len(complete) < MOST_SEQUENCES):
            request = replica.waiting[0]
            taken = min(request[1], STEP_ROWS - rows)
            request[1] -= taken
            rows += taken
            if request[1] > 0:
                break
            complete.append(replica.waiting.popleft())
        return rows, complete

    def run(self, rate, seconds):
        """Requests arrive at `rate` per second. Figures are of the last three quarters."""
        events = [(self.random.expovariate(rate), -1, [])]
        begin = seconds / 4

        def start(now, i):
            replica = self.replicas[i]
            rows, complete = self.rows_of_step(replica)
            replica.busy = rows > 0
            if rows == 0:
                return
            took = self.step(rows)
            if now >= begin:
                self.figures.steps.append(took)
            heapq.heappush(events, (now + took, i, complete))

        while events:
            now, i, complete = heapq.heappop(events)
            if now > seconds:
                break
            if i < 0:
                i = self.choose()
                prompt = 1 + int(self.random.expovariate(1 / self.requests.prompt))
                output = 1 + int(self.random.expovariate(1 / self.requests.output))
                self.replicas[i].waiting.append([now, prompt, output])
                self.figures.arrived += 1
                heapq.heappush(events, (now + self.random.expovariate(rate), -1, []))
            else:
                self.end_step(now, self.replicas[i], complete, now >= begin)
            self.note_load(i)
            if not self.replicas[i].busy:
                start(now, i)
        return self.figures

    def end_step(self, now, replica, complete, counts):
        replica.step += 1
        replica.busy = False
        if counts:
            self.figures.tokens += len(replica.decoding) + len(complete)
        while replica.decoding and replica.decoding[0] <= replica.step:
            heapq.heappop(replica.decoding)
        for arrival, _, output in complete:
            if counts:
                self.figures.first_tokens.append(now - arrival)
            if output > 1:
                heapq.heappush(replica.decoding, replica.step + output - 1)


def percentile(values, share):
    return sorted(values)[min(int(len(values) * share), len(values) - 1)] if values else 0.0


def simulate(replicas, ranks, arguments):
    model = next(m for m in scale_model.MODELS if m.name == arguments.model)
    network = next(n for n in scale_model.NETWORKS if n.name == arguments.network)
    requests = Requests(arguments.prompt, arguments.output)
    machine = Machine()

    def step(rows):
        return step_seconds(model, ranks, rows, network, machine)

    rate = arguments.load * replicas * capacity(step, requests)
    fleet = Fleet(replicas, step, requests, arguments.balance)
    figures = fleet.run(rate, arguments.seconds)
    counted = arguments.seconds * 3 / 4
    return {"replicas": replicas, "ranks": ranks, "rate": rate,
            "tokens_per_second": figures.tokens / counted,
            "tokens_per_second_and_machine": figures.tokens / counted / replicas / ranks,
            "first_token_p50": percentile(figures.first_tokens, 0.5),
            "first_token_p99": percentile(figures.first_tokens, 0.99),
            "step_median": statistics.median(figures.steps) if figures.steps else 0.0,
            "waiting": sum(len(r.waiting) for r in fleet.replicas)}


def print_table(rows):
    print("| replicas | ranks of each | requests/s | tokens/s | per machine | step, ms | "
          "first token p50 / p99, s | waiting at the end |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(f"| {row['replicas']} | {row['ranks']} | {row['rate']:.1f} | "
              f"{row['tokens_per_second']:.0f} | {row['tokens_per_second_and_machine']:.1f} | "
              f"{1e3 * row['step_median']:.1f} | {row['first_token_p50']:.2f} / "
              f"{row['first_token_p99']:.2f} | {row['waiting']} |")


def parse(words):
    def numbers(text):
        return [int(word) for word in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="Mixtral-8x7B",
                        choices=[m.name for m in scale_model.MODELS])
    parser.add_argument("--network", default="10 GbE",
                        choices=[n.name for n in scale_model.NETWORKS])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--replicas", type=numbers, default=[1, 10, 100, 1000])
    parser.add_argument("--machines", type=int, help="divided into groups of --group-sizes")
    parser.add_argument("--group-sizes", type=numbers, default=[1, 2, 4, 8])
    parser.add_argument("--load", type=float, default=0.8)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--prompt", type=float, default=256)
    parser.add_argument("--output", type=float, default=128)
    parser.add_argument("--balance", default="least", choices=["least", "two", "turns"])
    return parser.parse_args(words)


def main(words):
    arguments = parse(words)
    if arguments.machines is None:
        print_table([simulate(n, arguments.ranks, arguments) for n in arguments.replicas])
    else:
        print_table([simulate(arguments.machines // p, p, arguments)
                     for p in arguments.group_sizes])


if __name__ == "__main__":
    main(sys.argv[1:])
