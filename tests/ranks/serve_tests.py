"""Servers on several ranks answer as one process does, and end with each other."""

import json
import os
import pathlib
import re
import signal
import threading
import time

from mpi_runs import is_running, run, wait_until
from random_models import random_model
from server_test import LOST, MODELS, ServerTest, bodies, selections, value_of, without_times


class Serve(ServerTest):
    def test_answers_and_statistics_are_those_of_one_process(self):
        self.compare_with_one_process()

    def test_without_checksums(self):
        self.compare_with_one_process("--no-rank-checksums")

    def test_a_recurrent_hybrid(self):
        self.compare_with_one_process(model=random_model(self.folder.name, "lfm2-moe"))

    def test_an_encoder_and_a_decoder(self):
        self.compare_with_one_process(model=f"{MODELS}/moa-translator")

    def unequal_placement(self):
        """The path of a file that gives each routed layer's last expert to the last rank, and all
        others to the first one."""
        folder = pathlib.Path(self.folder.name)
        (folder / "text.txt").write_text("The cat sat on the mat. " * 20)
        file = folder / "placement.json"
        for words in (("save", folder / "profile", f"{MODELS}/mh-moe", "--text",
                       folder / "text.txt", "--quiet"),
                      ("place", folder / "profile", "--model", f"{MODELS}/mh-moe", "--ranks",
                       self.runs.ranks, "--output", file)):
            made = run([self.runs.program, "experts", *map(str, words)])
            self.assertEqual(made.returncode, 0, made.stderr)
        placement = json.loads(file.read_text())
        for block in placement["blocks"]:
            block["holders"] = [[0]] * (len(block["holders"]) - 1) + [[self.runs.ranks - 1]]
        file.write_text(json.dumps(placement))
        return file

    def test_answers_stay_the_same_while_experts_move(self):
        alone = self.start(self.runs.alone("serve", "--model", f"{MODELS}/mh-moe",
                                           "--draft-tokens", 0))
        expected = [without_times(text) for _, text in alone.complete(bodies())]
        self.assertIn("moeserve_placement_version 0\n", alone.call("/metrics")[1])
        self.assertEqual(alone.stop(), 0, alone.errors())
        ranked = self.start_ranked("--draft-tokens", 0, "--rebalance", 1,
                                   "--placement", self.unequal_placement())
        end = time.monotonic() + 60
        while time.monotonic() < end:
            found = [without_times(text) for _, text in ranked.complete(bodies())]
            self.assertEqual(found, expected)
            metrics = ranked.call("/metrics")[1]
            if value_of(metrics, "placement_version") >= 2:
                break
        self.assertGreaterEqual(value_of(metrics, "placement_version"), 2)
        self.assertGreater(value_of(metrics, "placement_moved_bytes_total"), 0)
        self.assertGreaterEqual(value_of(metrics, "expert_imbalance"), 1)
        self.assertLessEqual(value_of(metrics, "expert_imbalance"), self.runs.ranks)
        found = [without_times(text) for _, text in ranked.complete(bodies())]
        self.assertEqual(found, expected)
        self.assertEqual(ranked.stop(), 0, ranked.errors())
        self.expect_none_left(ranked)

    def test_a_time_out_of_few_steps_is_obeyed_with_a_warning(self):
        # No step runs after the start, so nothing is late on a slow machine.
        server = self.start_ranked("--rank-timeout", 0.5, "--max-step-tokens", 16384)
        self.assertEqual(server.stop(), 0, server.errors())
        said = re.findall("warning.*--rank-timeout: expected at least .*s, 20 times the longest step "
                          "as predicted, found 500ms", server.errors())
        self.assertEqual(len(said), 1, server.errors())
        self.expect_none_left(server)

    def test_a_drain_lets_requests_end(self):
        server = self.start_ranked()
        body = {"prompt": "Once", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
        server.process.send_signal(signal.SIGUSR1)  # begins while the requests run, or before
        for status, _ in server.complete([body] * 2):
            self.assertIn(status, (200, 503, 0))
        self.assertEqual(server.stop(), 0, server.errors())
        self.expect_none_left(server)

    def end_rank(self, rank, signal_number, seconds, running):
        """Sends a signal to a rank; the requests of others then end within `seconds`."""
        server = self.start_ranked("--rank-timeout", 4)
        body = {"prompt": "Once", "max_tokens": 8000, "temperature": 0, "ignore_eos": True}
        ended = []
        if running:
            thread = threading.Thread(target=lambda: ended.extend(server.complete([body] * 2)))
            thread.start()
            time.sleep(0.2)
        begin = time.monotonic()
        os.kill(server.pids[rank], signal_number)
        status = server.wait(seconds + 15)
        if running:
            thread.join()
            self.assertEqual(len(ended), 2)
            for code, text in ended:
                # The leader may be killed by mpirun before its last byte is sent.
                self.assertIn(code, (503, 0), text)
                if code == 503:
                    self.assertIn(f"rank {rank} on {os.uname().nodename} was lost", text)
                    self.assertIn('"engine_dead"', text)
        self.assertLess(time.monotonic() - begin, seconds + 5, server.errors())
        self.assertNotEqual(status, 0)
        if signal_number == signal.SIGSTOP:
            self.assertEqual(status, LOST, server.errors())
            os.kill(server.pids[rank], signal.SIGKILL)
        self.expect_none_left(server)

    def test_a_machine_that_stands_still_is_no_loss(self):
        server = self.start_ranked("--rank-timeout", 4)
        body = {"prompt": "Once", "max_tokens": 3000, "temperature": 0, "ignore_eos": True}
        ended = []
        thread = threading.Thread(target=lambda: ended.extend(server.complete([body] * 2)))
        thread.start()
        time.sleep(0.2)
        for signal_number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in server.pids:
                os.kill(pid, signal_number)
            # More than --rank-timeout, and than the silence after which a rank is lost.
            time.sleep(7 if signal_number == signal.SIGSTOP else 0)
        thread.join()
        self.assertEqual([code for code, _ in ended], [200, 200], ended)
        self.assertEqual(server.stop(), 0, server.errors())

    def test_a_follower_that_is_killed_ends_the_service(self):
        for running in (True, False):
            with self.subTest(running=running):
                self.end_rank(self.runs.ranks - 1, signal.SIGKILL, 1, running)

    def test_a_follower_that_is_stopped_ends_the_service(self):
        self.end_rank(self.runs.ranks - 1, signal.SIGSTOP, 6, True)

    def test_a_drain_ends_without_a_follower_that_is_stopped(self):
        server = self.start_ranked()
        os.kill(server.pids[-1], signal.SIGSTOP)
        self.assertEqual(server.stop(), LOST, server.errors())
        self.assertIn(f"rank {self.runs.ranks - 1}", server.errors())
        self.expect_none_left(server)

    def test_a_leader_that_is_killed_ends_the_followers(self):
        server = self.start_ranked()
        os.kill(server.pids[0], signal.SIGKILL)
        self.assertTrue(wait_until(lambda: not any(map(is_running, server.pids)), 5),
                        server.errors())
        self.assertNotEqual(server.wait(15), 0)
