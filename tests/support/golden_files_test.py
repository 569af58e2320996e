"""Tests golden_files.py in folders of its own."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).with_name("golden_files.py")


class GoldenFilesTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.golden = pathlib.Path(folder.name)
        self.write("a/model.safetensors", b"weights")
        self.write("a/config.json", b"{}")
        self.write("b/c/x.gguf", b"\0" * 5000)
        self.run_script("pack")

    def write(self, path, content):
        file = self.golden / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)

    def read(self, path):
        file = self.golden / path
        return file.read_bytes() if file.exists() else None

    def run_script(self, command, status=0):
        done = subprocess.run([sys.executable, "-B", SCRIPT, command, "--golden", self.golden],
                              capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def test_files_come_back_from_a_clone(self):
        (self.golden / "packed/.unpacked.json").unlink()
        (self.golden / "a/model.safetensors").unlink()
        (self.golden / "b/c/x.gguf").unlink()
        (self.golden / "b/c").rmdir()
        self.run_script("unpack")
        self.assertEqual(self.read("a/model.safetensors"), b"weights")
        self.assertEqual(self.read("b/c/x.gguf"), b"\0" * 5000)
        self.assertEqual(self.run_script("check"), "")

    def test_packing_does_not_touch_what_did_not_change(self):
        before = self.read("packed/a.tar.xz")
        self.write("b/c/x.gguf", b"new")
        output = self.run_script("pack")
        self.assertNotIn("a.tar.xz", output)
        self.assertIn("c.tar.xz", output)
        self.assertEqual(self.read("packed/a.tar.xz"), before)

    def test_a_changed_file_is_found_and_kept(self):
        self.write("a/model.safetensors", b"other")
        self.assertIn("differs from its archive", self.run_script("check", 1))
        self.run_script("unpack")
        self.assertEqual(self.read("a/model.safetensors"), b"other")

    def test_a_new_archive_wins(self):
        kept = self.read("packed/a.tar.xz")
        self.write("a/model.safetensors", b"longer weights")
        self.write("a/more.safetensors", b"more")
        self.run_script("pack")
        self.write("packed/a.tar.xz", kept)
        self.run_script("unpack")
        self.assertEqual(self.read("a/model.safetensors"), b"weights")
        self.assertIsNone(self.read("a/more.safetensors"))

    def test_files_of_a_removed_archive_go(self):
        (self.golden / "packed/b/c.tar.xz").unlink()
        self.run_script("unpack")
        self.assertFalse((self.golden / "b/c").exists())
        self.assertEqual(self.run_script("check"), "")

    def test_unpacked_and_missing_files_are_reported(self):
        self.write("d/new.pt", b"new")
        (self.golden / "a/model.safetensors").unlink()
        output = self.run_script("check", 1)
        self.assertIn("new.pt is not packed", output)
        self.assertIn("model.safetensors is missing", output)

    def test_packing_needs_all_archives_unpacked(self):
        (self.golden / "packed/.unpacked.json").unlink()
        self.assertIn("was never unpacked", self.run_script("pack", 1))


if __name__ == "__main__":
    unittest.main()
