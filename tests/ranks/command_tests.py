"""Commands on several ranks print what one process prints."""

import os
import pathlib
import tempfile

from mpi_runs import run
from server_test import MODELS, RanksTest


class Commands(RanksTest):
    def compare(self, *words):
        alone = run(self.runs.alone(*words))
        self.assertEqual(alone.returncode, 0, alone.stderr)
        ranked = run(self.runs.ranked(*words))
        self.assertEqual(ranked.returncode, 0, ranked.stderr)
        self.assertEqual(ranked.stdout, alone.stdout)
        return alone, ranked

    def test_generate(self):
        for model, dtype in (("mh-moe", "f32"), ("moa", "bf16"), ("hmoe-topp", "int8-channel"),
                             ("hmoe-topp", "int4-k")):
            with self.subTest(model=model, dtype=dtype):
                alone, ranked = self.compare(
                    "generate", "--quiet", "-m", f"{MODELS}/{model}", "--prompt", "Once",
                    "--max-tokens", 16, "--temperature", 0.8, "--seed", 3, "--stats", "--dtype",
                    dtype)
                # The table of --stats; mpirun may add warnings of its own.
                self.assertIn(alone.stderr, ranked.stderr)

    def test_score_prints_every_digit(self):
        with tempfile.TemporaryDirectory() as folder:
            text = pathlib.Path(folder) / "text.txt"
            text.write_text("The cat sat on the mat. " * 20)
            for sums in ("on", "off"):
                with self.subTest(owner_sums=sums):
                    self.compare("score", "--quiet", "-m", f"{MODELS}/mh-moe", "--json",
                                 "--max-num-seqs", 1, "--text", text, "--owner-sums", sums)

    def test_the_start_fails_once_and_everywhere(self):
        good = ("generate", "--quiet", "-m", f"{MODELS}/mh-moe", "--prompt", "Once")
        missing = ("generate", "--quiet", "-m", f"{MODELS}/none", "--prompt", "Once")
        other = ("generate", "--quiet", "-m", f"{MODELS}/moa", "--prompt", "Once")
        for first, others, expected in (
                (good, (*good, "--dtype", "bf16"), "rank 1 on {}: --dtype: expected auto"),
                (good, (*good, "--no-rank-checksums"),
                 "rank 1 on {}: --no-rank-checksums: expected off"),
                (good, (*good, "--cpu-isa", "plain"), "rank 1 on {}: instruction set: expected"),
                (good, (*good, "--owner-sums", "on"), "rank 1 on {}: --owner-sums: expected auto"),
                (good, other, "rank 1 on {}: model files"),
                (good, missing, "rank 1 on {}: " + f"{MODELS}/none"),
                (missing, good, "rank 0 on {}: " + f"{MODELS}/none")):
            with self.subTest(expected=expected):
                ended = run(self.runs.different(first, others))
                self.assertEqual(ended.returncode, 1, ended.stderr)
                errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
                self.assertEqual(len(errors), 1, ended.stderr)
                self.assertIn(expected.format(os.uname().nodename), errors[0])

    def test_serve_refuses_several_models(self):
        ended = run(self.runs.ranked("serve", "--model", f"a={MODELS}/moa", "--model",
                                f"b={MODELS}/moa", count=1))
        self.assertEqual(ended.returncode, 1)
        self.assertIn("--ranks: expected one --model", ended.stderr)
