"""Ranks that exchange over TCP between network namespaces."""

import re
import threading
import time
import unittest

import namespaces
from command_tests import Commands
from server_test import MODELS, ServerTest, bodies, selections, without_times


class Network(ServerTest):
    """The same over TCP between network namespaces, and what happens to a network."""

    @classmethod
    def setUpClass(cls):
        reason = namespaces.why_not()
        if reason:
            raise unittest.SkipTest(reason)
        cls.all_runs.namespaces = namespaces.Namespaces(cls.all_runs.ranks)

    @classmethod
    def tearDownClass(cls):
        cls.all_runs.namespaces.close()
        cls.all_runs.namespaces = None

    test_generate = Commands.test_generate
    test_score_prints_every_digit = Commands.test_score_prints_every_digit
    compare = Commands.compare

    def host(self, rank):
        return self.runs.namespaces.names[rank]

    def test_answers_and_statistics_are_those_of_one_process(self):
        self.compare_with_one_process()

    def test_a_network_that_is_cut_ends_the_service(self):
        server = self.start_ranked()
        body = {"prompt": "Once", "max_tokens": 8000, "temperature": 0, "ignore_eos": True}
        ended = []
        thread = threading.Thread(target=lambda: ended.extend(server.complete([body] * 2)))
        thread.start()
        time.sleep(0.2)
        begin = time.monotonic()
        lost = self.runs.ranks - 1
        self.runs.namespaces.set_link(lost, False)
        self.addCleanup(self.runs.namespaces.mend)
        thread.join()
        self.assertLess(time.monotonic() - begin, 12, server.errors())
        for code, text in ended:
            self.assertEqual(code, 503, text)
            self.assertIn(f"rank {lost} on {self.host(lost)} was lost", text)
        # mpirun and its daemon on the lost machine may stay; the ranks do not.
        self.expect_none_left(server)
        server.process.kill()


class Limits(ServerTest):
    """Slow networks, and those that lose packets: the same answers, and no rank is lost."""

    @classmethod
    def setUpClass(cls):
        reason = namespaces.why_not()
        if reason:
            raise unittest.SkipTest(reason)

    def setUp(self):
        super().setUp()
        self.addCleanup(setattr, self.all_runs, "namespaces", None)
        alone = self.start(self.runs.alone("serve", "--model", f"{MODELS}/mh-moe",
                                           "--draft-tokens", 0))
        self.expected = [without_times(text) for _, text in alone.complete(bodies())]
        self.counted = selections(alone)
        self.assertEqual(alone.stop(), 0, alone.errors())

    def connect(self, relay_seconds=None):
        spaces = namespaces.Namespaces(self.runs.ranks, relay_seconds)
        self.addCleanup(spaces.close)
        self.runs.namespaces = spaces
        return spaces

    def compare(self):
        """Returns the seconds of a gather, in the mean."""
        server = self.start_ranked("--draft-tokens", 0)
        found = [without_times(text) for _, text in server.complete(bodies())]
        self.assertEqual(found, self.expected)
        self.assertEqual(selections(server), self.counted)
        time.sleep(7)  # more than the time after which a silent rank is lost
        metrics = server.call("/metrics")[1]
        self.assertEqual(len(re.findall(r"moeserve_rank_up\{.*\} 1\n", metrics)), self.runs.ranks)
        again = [without_times(text) for _, text in server.complete(bodies())]
        self.assertEqual(again, self.expected)
        sums = [float(re.search(rf"^moeserve_exchange_seconds_{part} (.*)$", metrics,
                                re.MULTILINE)[1]) for part in ("sum", "count")]
        self.assertEqual(server.stop(), 0, server.errors())
        self.expect_none_left(server)
        print(f"a gather takes {1000 * sums[0] / sums[1]:.2f} ms", flush=True)
        return sums[0] / sums[1]

    def limit_rate(self, rate):
        self.connect().queue("tbf", "rate", rate, "burst", "64kb", "latency", "200ms")
        self.compare()

    def test_a_gigabit_a_second(self):
        self.limit_rate("1gbit")

    def test_100_megabits_a_second(self):
        self.limit_rate("100mbit")

    def test_one_percent_of_packets_is_lost(self):
        spaces = self.connect()
        reason = spaces.lose(1)
        if reason:
            self.skipTest(reason)
        self.compare()
        self.assertGreater(spaces.lost(), 0)

    def delay(self, seconds):
        if namespaces.has_netem():
            self.connect().queue("netem", "delay", f"{seconds * 1e6 / 2:.0f}us")
        else:
            self.connect(relay_seconds=seconds)
        # What is sent by both at the same time arrives after one delay.
        self.assertGreater(self.compare(), seconds)

    def test_a_delay_of_200_microseconds(self):
        self.delay(0.0002)

    def test_a_delay_of_5_milliseconds(self):
        self.delay(0.005)
