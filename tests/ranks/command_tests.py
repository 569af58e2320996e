"""Commands on several ranks print what one process prints."""

import os
import pathlib
import re
import shutil
import tempfile

from mpi_runs import ROOT, program_of_another_commit, run
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
        model = ("generate", "--quiet", "--prompt", "Once", "-m")
        good = (*model, f"{MODELS}/mh-moe")
        ranks = self.runs.ranks
        with tempfile.TemporaryDirectory() as folder:
            damaged = pathlib.Path(folder) / "damaged"
            shutil.copytree(f"{ROOT}/{MODELS}/mh-moe", damaged)
            os.truncate(damaged / "model.safetensors", 1000)
            cases = [((*good, "--dtype", "bf16"), "--dtype: expected {}auto{}, found {}bf16"),
                     ((*good, "--no-rank-checksums"),
                      "--no-rank-checksums: expected {}off{}, found {}on"),
                     ((*good, "--cpu-isa", "plain"), "instruction set: expected "),
                     ((*good, "--owner-sums", "on"), "--owner-sums: expected {}auto{}, found {}on"),
                     ((*model, f"{MODELS}/moa"), "model files"),
                     ((*model, f"{MODELS}/none"), f"{MODELS}/none"),
                     ((*model, damaged), "model.safetensors: ")]
            other = program_of_another_commit(self.runs.program, folder)
            if other is not None:
                cases.append(((other, *good), "commit: expected "))
            for words, expected in cases:
                for who in (0, ranks - 1):
                    with self.subTest(expected=expected, who=who):
                        every = [words if r == who else good for r in range(ranks)]
                        self.expect_one_error(every, who, expected)

    def expect_one_error(self, every, who, expected):
        """Starts ranks of which one differs, or cannot start."""
        ended = run(self.runs.different(every))
        self.assertEqual(ended.returncode, 1, ended.stderr)
        errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
        self.assertEqual(len(errors), 1, ended.stderr)
        host = os.uname().nodename
        differs = "expected " in expected or expected == "model files"
        # The others are compared with rank 0.
        named = 1 if differs and who == 0 else who
        self.assertIn(f"error: rank {named} on {host}: ", errors[0])
        if "{" in expected:
            found = re.search(": expected (.*) as rank 0 on .*, found (.*)$", errors[0])
            values = re.search("expected {}(.*){}, found {}(.*)$", expected).groups()
            self.assertEqual(found.groups(), values if who > 0 else values[::-1], errors[0])
            expected = expected.split("{")[0]
        self.assertIn(expected, errors[0])

    def test_serve_refuses_several_models(self):
        ended = run(self.runs.ranked("serve", "--model", f"a={MODELS}/moa", "--model",
                                f"b={MODELS}/moa", count=1))
        self.assertEqual(ended.returncode, 1)
        self.assertIn("--ranks: expected one --model", ended.stderr)
