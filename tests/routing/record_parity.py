"""Compares the server's routing records with its expert counters and with the PyTorch reference.

For each model, a server in f32 with a small KV cache processes at least --tokens tokens of sampled
requests. 32 requests run at a time, and many share a prefix. Then
- the selections in the records must add up to the server's counters for each expert, without tokens
  that were reused from the prefix cache;
- the reference runs every token sequence with the recorded routes. For each row, it also selects
  experts from its own scores. A row for which the selections differ must be a near tie: a change of
  a score by less than 1e-5 would change the selection. At most one row in 10,000 may differ; such
  rows are printed. In the other rows, weights must agree within 1e-4.

  python3 record_parity.py --moeserve build/release/moeserve [--tokens 10000] MODEL...
"""

import argparse
import concurrent.futures
import json
import pathlib
import random
import re
import subprocess
import sys
import urllib.request

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "reference"))

import routed_decoder  # noqa: E402

HELDOUT = ROOT / "tests" / "data" / "heldout.txt"
CONCURRENT = 32
MARGIN = 1e-5
NEAR_TIES = 1e-4  # the largest share of rows that may differ
WEIGHT_TOLERANCE = 1e-4


class Server:
    """Runs a server for one model on free ports."""

    def __init__(self, binary: str, model: pathlib.Path, cache: str) -> None:
        self.process = subprocess.Popen(
            [binary, "serve", "--model", str(model), "--dtype", "f32", "--http", "127.0.0.1:0",
             "--grpc", "127.0.0.1:0", "--routing-records", "--max-model-len", "256",
             "--max-num-seqs", str(CONCURRENT), "--kv-cache-memory", cache],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for line in self.process.stdout:
            if found := re.match(r"http listening on (\S+)", line):
                self.url = f"http://{found.group(1)}"
                break
        else:
            raise SystemExit("the server ended before it listened")

    def call(self, path: str, body: dict | None = None) -> dict:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data,
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(self.url + "/metrics", timeout=60) as answer:
            return float(re.search(rf"^{name}{{.*}} (\S+)$", answer.read().decode(), re.M).group(1))

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


def answers(server: Server, tokens: int) -> list[tuple[list[int], dict]]:
    """Sends the requests. Returns (token ids that the model processed, routing record) for each."""
    text = HELDOUT.read_text()
    chance = random.Random(5)
    ids = server.call("/tokenize", {"prompt": text[:200_000]})["tokens"]

    def ask(i: int) -> tuple[list[int], dict]:
        shared, own = ids[i % 3 * 64:][:48], ids[1000 + 90 * i:][:lengths[i][0]]
        body = {"prompt": shared + own, "max_tokens": lengths[i][1], "seed": i, "ignore_eos": True,
                "return_routing": True, "return_token_ids": True}
        choice = server.call("/v1/completions", body)["choices"][0]
        run = choice["prompt_token_ids"] + choice["token_ids"][:-1]
        assert choice["routing"]["tokens"] == len(run), "a route for every token that was run"
        return run, choice["routing"]

    lengths = []
    while sum(own + generated for own, generated in lengths) < tokens:
        lengths.append((chance.randint(1, 80), chance.randint(20, 120)))
    with concurrent.futures.ThreadPoolExecutor(CONCURRENT) as pool:
        return list(pool.map(ask, range(len(lengths))))


def check_counters(server: Server, records: list[dict], layout: dict) -> int:
    """Checks that the selections in the records, without reused tokens, add up to the counters.
    Returns the number of tokens that were not reused."""
    counts = [[0] * block["experts"] for block in layout["blocks"]]
    block_of_row = [i for i, block in enumerate(layout["blocks"])
                    for _ in range(block["sub_tokens"])]
    own_tokens = 0
    for record in records:
        reused = {p for begin, end in record["reused"] for p in range(begin, end)}
        for t in range(record["tokens"]):
            if t in reused:
                continue
            own_tokens += 1
            for row, block in enumerate(block_of_row):
                r = t * len(block_of_row) + row
                for e in record["experts"][record["offsets"][r]:record["offsets"][r + 1]]:
                    counts[block][e] += 1
    stats = server.call("/v1/experts/stats")
    assert stats["tokens"] == own_tokens, (stats["tokens"], own_tokens)
    for block, expected in zip(stats["layers"], counts):
        assert block["counts"] == expected, (block["layer"], block["block"])
    return own_tokens


class Judge(routed_decoder.RoutedDecoder):
    """Runs the reference implementation with given routes, and compares these with the routes that
    it selects from its own scores."""

    rows = 0
    differing = 0
    worst_weight = 0.0

    def _route(self, rows: torch.Tensor, name: str, routing: dict) -> routed_decoder.Routes:
        given = super()._route(rows, name, routing)
        scores = self._scores(rows, name, routing["score"])
        own = routed_decoder.select(scores, routing,
                                    self.tensors.get(f"{name}.choice_bias"))
        self.rows += len(rows)
        for r in range(len(rows)):
            a = slice(*given.offsets[r:r + 2].tolist())
            b = slice(*own.offsets[r:r + 2].tolist())
            if given.experts[a].tolist() == own.experts[b].tolist():
                difference = (given.weights[a] - own.weights[b]).abs().max().item()
                self.worst_weight = max(self.worst_weight, difference)
                continue
            self.differing += 1
            margin = self.margin(scores[r], routing, min(a.stop - a.start, b.stop - b.start),
                                 max(a.stop - a.start, b.stop - b.start))
            print(f"  near tie: {name}, row {r}, margin {margin:.2e}: server "
                  f"{given.experts[a].tolist()}, reference {own.experts[b].tolist()}")
            assert margin < MARGIN, "the choice differs where it should not"
        return given

    @staticmethod
    def margin(scores: torch.Tensor, routing: dict, fewer: int, more: int) -> float:
        """Returns the smallest change of a score that would change the selection."""
        ranked = scores.double().sort(descending=True).values
        if fewer == more:  # the last selected score against the first score that is not selected
            return (ranked[fewer - 1] - ranked[fewer]).item()
        mass = torch.sigmoid(ranked) if routing["gate"] == "sigmoid" else ranked.softmax(0)
        cumulated = mass.cumsum(0)
        return min(abs(cumulated[n - 1].item() - routing["select"]["p"])
                   for n in range(fewer, more + 1))


def check_routes(model: pathlib.Path, texts: list[tuple[list[int], dict]], layout: dict) -> Judge:
    judge = Judge.from_folder(model)
    rows_per_token = layout["rows_per_token"]
    for tokens, record in texts:
        offsets = torch.tensor(record["offsets"])
        experts = torch.tensor(record["experts"], dtype=torch.int32)
        weights = torch.tensor(record["weights"], dtype=torch.float32)
        judge.replay = {}
        for block in layout["blocks"]:
            rows = torch.cat([torch.arange(block["sub_tokens"]) + t * rows_per_token
                              + block["first_row"] for t in range(len(tokens))])
            entries = torch.cat([torch.arange(offsets[r], offsets[r + 1]) for r in rows])
            sizes = (offsets[rows + 1] - offsets[rows]).cumsum(0)
            judge.replay[f"{block['layer']}.{block['block']}"] = routed_decoder.Routes(
                torch.nn.functional.pad(sizes, (1, 0)).to(torch.int32), experts[entries],
                weights[entries])
        with torch.no_grad():
            judge.forward(torch.tensor(tokens))
    return judge


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moeserve", required=True)
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("models", nargs="+", type=pathlib.Path)
    options = parser.parse_args()
    for model in options.models:
        # Shrinks the KV cache until sequences are preempted.
        for cache in ("4MiB", "2MiB", "1MiB", "512KiB"):
            server = Server(options.moeserve, model, cache)
            try:
                texts = answers(server, options.tokens)
                layout = server.call("/v1/experts/layout")
                run = check_counters(server, [record for _, record in texts], layout)
                preemptions = server.metric("moeserve_preemptions_total")
                hits = server.metric("moeserve_prefix_cache_hit_tokens_total")
            finally:
                server.stop()
            if preemptions > 0:
                break
        assert hits > 0 and preemptions > 0, (hits, preemptions)
        judge = check_routes(model, texts, layout)
        print(f"{model.name}: {run} tokens run, {preemptions:.0f} preemptions, {hits:.0f} tokens from "
              f"the prefix cache; counters equal the records; {judge.rows} rows, {judge.differing} "
              f"differ from the reference; weights within {judge.worst_weight:.1e}", flush=True)
        assert judge.differing <= NEAR_TIES * judge.rows
        assert judge.worst_weight <= WEIGHT_TOLERANCE


if __name__ == "__main__":
    main()
