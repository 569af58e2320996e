"""Checks the use of mutexes in the product, and that planted faults are found.

    locks_test.py BUILD

BUILD is a build folder with the generated protobuf headers. Exits with status 77 if there is no
clang++.
"""

import pathlib
import shutil
import sys
import tempfile
import unittest

import locks

ROOT = pathlib.Path(__file__).parents[2]
BUILD = pathlib.Path()
COUNTER = """
#include "base/mutex.h"
class Counter {
 public:
  void Add() { %s ++count_; }
  void AddLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { ++count_; }
 private:
  moeserve::Mutex mutex_;
  int count_ ABSL_GUARDED_BY(mutex_) = 0;
};
"""


def compile_planted(text):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "planted.cc")
        path.write_text(text, encoding="utf-8")
        return locks.compile_all(ROOT, [str(path)], BUILD)


class LocksTest(unittest.TestCase):
    def test_product(self):
        self.assertEqual("\n".join(locks.check(ROOT, BUILD)), "")

    def test_the_product_is_read(self):
        sources = locks.sources_to_compile(locks.read_sources(ROOT))
        self.assertGreater(len(sources), 50)
        self.assertIn("engine/run/engine_step.cc", sources)

    def test_locked(self):
        self.assertEqual(compile_planted(COUNTER % "moeserve::MutexLock lock(mutex_);"), [])

    def test_missing_lock(self):
        faults = compile_planted(COUNTER % "")
        self.assertIn("writing variable 'count_' requires holding mutex 'mutex_'", faults[0])

    def test_unlocked_too_early(self):
        faults = compile_planted(COUNTER % "moeserve::MutexLock lock(mutex_); lock.unlock();")
        self.assertIn("writing variable 'count_' requires holding mutex 'mutex_'", faults[0])

    def test_call_without_lock(self):
        faults = compile_planted(COUNTER % "AddLocked();")
        self.assertIn("calling function 'AddLocked' requires holding mutex 'mutex_'", faults[0])

    def test_mutex_that_guards_nothing(self):
        faults = locks.faults_of_declarations({"server/a.h": "  mutable Mutex mutex_;\n  int n_;\n"})
        self.assertEqual(faults, ["server/a.h: no member is declared as guarded by mutex_"])

    def test_mutex_that_clang_does_not_know(self):
        faults = locks.faults_of_declarations({"server/a.h": "  std::mutex mutex_;\n"})
        self.assertEqual(faults, ["server/a.h: std::mutex is not checked; use base/mutex.h"])


if __name__ == "__main__":
    if not shutil.which(locks.CLANG):
        print(f"skipped: there is no {locks.CLANG}")
        sys.exit(77)
    BUILD = pathlib.Path(sys.argv.pop(1))
    unittest.main()
