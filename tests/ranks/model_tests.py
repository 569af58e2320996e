"""Servers of all kinds of models on two and more ranks, over shared memory and over TCP, give the
answers and statistics of one process."""

import contextlib
import http.client
import json
import pathlib
import random
import re
import sys
import threading

import namespaces
from mpi_runs import ROOT, Runs, run, wait_until
from random_models import random_model
from server_test import MODELS, ServerTest, value_with_labels, without_times

sys.path.append(str(ROOT / "tests/support"))
# pylint: disable-next=wrong-import-position
import bundled_models

TYPES = ("f32", "bf16", "int8-channel", "int4-k")
FAMILIES = ("deepseek-v3", "gpt-oss", "lfm2-moe", "mixtral", "qwen3-moe")
TALE = ("once upon a time there was a tree and a cat was there upon a time and the dog was at the "
        "tree once when the cat ")
SCHEMA = {"type": "object", "required": ["pet"], "additionalProperties": False,
          "properties": {"pet": {"enum": ["cat", "dog"]}}}


def bodies():
    """Requests that share prefixes, draw tokens, ask for several samples, routes, log-probabilities
    of the prompt, structured output, or change their routing."""
    greedy = {"temperature": 0, "logprobs": 3, "ignore_eos": True, "return_routing": True}
    drawn = {"temperature": 0.8, "seed": 5, "logprobs": 1, "ignore_eos": True}
    return [
        {"prompt": TALE, "max_tokens": 6, **greedy},
        {"prompt": TALE + "was once there", "max_tokens": 4, "return_routing": True, **drawn},
        {"prompt": TALE + "was a dog", "max_tokens": 8, "n": 3, **drawn},
        {"prompt": "once", "max_tokens": 10, **greedy},
        {"prompt": "a cat", "max_tokens": 3, "prompt_logprobs": 2, **greedy},
        {"prompt": TALE + "was", "max_tokens": 4, "routing_control": {"top_k": 1}, **greedy},
        {"prompt": "the pet: ", "max_tokens": 40, "temperature": 0, "structured_outputs":
         {"json": SCHEMA}},
        {"prompt": TALE, "max_tokens": 6, "structured_outputs": {"choice": ["cat", "dog", "tree"]},
         "temperature": 1, "seed": 3, "n": 2},
        {"prompt": TALE + "was upon a dog", "max_tokens": 12, "repetition_penalty": 1.3, **greedy},
    ]


def long_bodies():
    """Requests that do not fit into small_cache() together."""
    return [{"prompt": TALE + start, "max_tokens": 100, "temperature": 0, "logprobs": 1,
             "ignore_eos": True} for start in ("a", "was", "the", "once")]


def content(answer):
    """An answer without what depends on the time or on other requests."""
    status, text = answer
    if status != 200:
        return answer
    known = without_times(text)
    for choice in known["choices"]:
        (choice.get("routing") or {}).pop("reused", None)
    return known


class ModelTest(ServerTest):
    """What the tests below share."""

    LENGTH = 192  # prompts and what follows them are shorter

    @classmethod
    def setUpClass(cls):
        reason = namespaces.why_not()
        if reason:
            print(f"no TCP between network namespaces: {reason}", flush=True)
        cls.spaces = None if reason else namespaces.Namespaces(cls.all_runs.ranks)

    @classmethod
    def tearDownClass(cls):
        if cls.spaces is not None:
            cls.spaces.close()

    def setUp(self):
        super().setUp()
        self.preemptions = self.hits = 0

    def all_ways(self):
        """How ranks run: two and as many as the test has, over memory and TCP."""
        for spaces in (None, self.spaces) if self.spaces is not None else (None,):
            for ranks in sorted({2, self.all_runs.ranks}):
                yield Runs(self.all_runs.mpiexec, self.all_runs.program, ranks, spaces)

    def small_cache(self, model, words):
        """Options of a cache that has room for two sequences only."""
        wanted = ("--max-model-len", self.LENGTH, "--kv-cache-memory")
        refused = run(self.runs.alone("serve", "--model", model, *words, *wanted, "1KiB", "--http",
                                      "127.0.0.1:0", "--grpc", "127.0.0.1:0"))
        needed = re.search(r"needs (\d+) bytes", refused.stderr)
        self.assertIsNotNone(needed, refused.stderr)
        return (*wanted, 2 * int(needed[1]))

    def record(self, server):
        """The answers to one request after the other, and what was counted."""
        answers = [server.call("/v1/completions", body) for body in bodies()]
        known = [(status, without_times(text) if status == 200 else text)
                 for status, text in answers]
        return answers, known, json.loads(server.call("/v1/experts/stats")[1])

    def storm(self, server, answers, long_answers):
        """Sends all requests at once, beside others that are cancelled all the time."""
        ended = threading.Event()

        def cancel(seed):
            draw = random.Random(seed)
            while not ended.is_set():
                body = {"prompt": TALE + "was a " + "cat " * draw.randrange(20), "max_tokens": 90,
                        "n": 1 + draw.randrange(3), "seed": 1, "stream": draw.random() < 0.5,
                        "ignore_eos": True}
                connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
                with contextlib.suppress(OSError):
                    connection.request("POST", "/v1/completions", json.dumps(body),
                                       {"Content-Type": "application/json"})
                    ended.wait(draw.random() * 0.1)
                connection.close()

        threads = [threading.Thread(target=cancel, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        try:
            wanted, expected = bodies(), answers
            if self.runs.namespaces is None:  # where steps take little time
                wanted, expected = wanted + long_bodies(), expected + long_answers
            found = server.complete(wanted, timeout=600)  # large models on few cores
            self.assertEqual([content(answer) for answer in found],
                             [content(answer) for answer in expected])
        finally:
            ended.set()
            for thread in threads:
                thread.join()
        self.assertTrue(wait_until(lambda: value_with_labels(
            server.call("/metrics")[1], "requests_running") == 0, 20))
        metrics = server.call("/metrics")[1]
        self.hits += value_with_labels(metrics, "prefix_cache_hit_tokens_total")
        self.preemptions += value_with_labels(metrics, "preemptions_total")

    @contextlib.contextmanager
    def running(self, *words):
        """A server on ranks, which must end without an error."""
        server = self.start(self.runs.ranked(*words))
        try:
            self.assertEqual(len(server.pids), self.runs.ranks)
            yield server
            self.assertEqual(server.stop(), 0, server.errors())
            self.expect_none_left(server)
        finally:
            server.kill()  # or the next server would find its processes

    def compare_ways(self, model, *words, drafts=0):
        """Compares all ways to run ranks with one process. Statistics are not compared if there are
        drafts: how many there are depends on the time."""
        # By default, the rows of prompts in a step depend on the time.
        common = ("serve", "--model", model, "--routing-records", "--routing-control",
                  "--max-prompt-rows", 40, *words, *self.small_cache(model, words))
        counted = ("--draft-tokens", drafts)
        alone = self.start(self.all_runs.alone(*common, *counted))
        answers, expected, statistics = self.record(alone)
        long_answers = alone.complete(long_bodies(), timeout=600)
        self.assertEqual(alone.stop(), 0, alone.errors())
        self.assertGreater(sum(status == 200 for status, _ in expected), 6, expected)
        for number, self.runs in enumerate(self.all_ways()):
            over = "memory" if self.runs.namespaces is None else "TCP"
            sums = ("on", "off", "auto")[number % 3]
            with self.subTest(ranks=self.runs.ranks, over=over, owner_sums=sums):
                with self.running(*common, *counted, "--owner-sums", sums, "--rebalance",
                                  1) as server:
                    _, found, counts = self.record(server)
                    self.assertEqual(found, expected)
                    if drafts == 0:
                        self.assertEqual(counts, statistics)
                    self.storm(server, answers, long_answers)
        if drafts > 0:
            return
        # Drafts change how many rows steps have, not what is answered.
        self.runs = random.Random(f"{model} {words}").choice(list(self.all_ways()))
        with self.subTest(ranks=self.runs.ranks, drafts=True):
            with self.running(*common, "--draft-tokens", 4, "--split-rows", "on") as server:
                self.assertEqual([content(answer) for answer in self.record(server)[0]],
                                 [content(answer) for answer in answers])

    def compare_types(self, model, types=TYPES, reuses=True):
        """`reuses`: whether pages of the cache are few and prefixes in it used again."""
        for dtype in types:
            with self.subTest(model=str(model), dtype=dtype):
                self.compare_ways(model, "--dtype", dtype)
        print(f"{pathlib.Path(model).name}: {self.preemptions:.0f} preemptions, {self.hits:.0f} "
              "cached tokens", flush=True)
        if reuses:
            self.assertGreater(min(self.preemptions, self.hits), 0)


class Models(ModelTest):
    """Each test has a model, all types of weights and all ways to run ranks."""

    def test_an_encoder_and_a_decoder(self):
        # Its sources are not cached, and its answers are short.
        self.compare_types(f"{MODELS}/moa-translator", reuses=False)

    def test_prediction_layers(self):
        self.compare_ways(random_model(self.folder.name, "deepseek-v3-mtp"), "--draft-mtp",
                          drafts=2)


def add_test(name, test):
    setattr(Models, "test_" + name.replace("-", "_"), test)


for path in bundled_models.folders():
    add_test(path.name, lambda self, name=path.name: self.compare_types(f"{MODELS}/{name}"))
for family in FAMILIES:
    add_test(family, lambda self, name=family: self.compare_types(
        random_model(self.folder.name, name)))


class LargeModels(ModelTest):
    """Models with random weights whose steps have enough work to be divided. The program that
    writes them is beside the tests of the build."""

    LENGTH = 320  # a token for each byte

    def compare_shape(self, shape, types):
        program = pathlib.Path(self.all_runs.program).parent / "tests/bench/write_synthetic"
        model = pathlib.Path(self.folder.name) / shape
        made = run([program, "--synthetic", shape, "--native", model])
        self.assertEqual(made.returncode, 0, made.stderr)
        for dtype in types:
            with self.subTest(dtype=dtype):
                self.compare_ways(model, "--dtype", dtype, "--packed-cache", "off")

    def test_small(self):
        self.compare_shape("small", ("bf16", "int4-k"))

    def test_medium(self):
        self.compare_shape("medium", ("bf16", "int4-k"))
