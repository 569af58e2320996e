"""Checks the #include lines of the product, and that planted faults are found."""

import pathlib
import tempfile
import unittest

import includes

ROOT = pathlib.Path(__file__).parents[2]


def check_planted(files):
    """Returns the faults of a tree with `files`, a map from a path to the paths it includes."""
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for name, included in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f'#include "{i}"\n' for i in included), encoding="utf-8")
        return includes.check(root)


class IncludesTest(unittest.TestCase):
    def test_product(self):
        self.assertEqual(includes.check(ROOT), [])

    def test_the_product_is_read(self):
        self.assertGreater(len(includes.read_includes(ROOT)), 2000)

    def test_arrow_between_top_folders(self):
        faults = check_planted({"kernels/a.h": ["engine/b.h"], "engine/b.h": []})
        self.assertEqual(
            faults, ["upward: kernels/a.h includes engine/b.h: kernels/ is below engine/"]
        )

    def test_arrow_between_rooms(self):
        faults = check_planted({"engine/step/a.h": ["engine/run/b.h"], "engine/run/b.h": []})
        self.assertEqual(
            faults, ["upward: engine/step/a.h includes engine/run/b.h: step/ is below run/"]
        )

    def test_text_includes_only_base(self):
        faults = check_planted({"engine/text/a.h": ["kernels/b.h"], "kernels/b.h": []})
        self.assertEqual(faults, ["forbidden: engine/text/a.h includes kernels/b.h"])

    def test_circle_of_folders(self):
        files = {
            "server/http/one/a.h": ["server/http/two/b.h"],
            "server/http/two/b.h": ["server/http/c.h"],
            "server/http/c.h": ["server/http/one/a.h"],
        }
        (fault,) = check_planted(files)
        self.assertEqual(fault.split("\n")[0], "circle in server/http: c, one/, two/")
        self.assertIn("  server/http/two/b.h includes server/http/c.h", fault)

    def test_header_and_implementation_may_form_a_circle(self):
        files = {
            "base/a.h": [],
            "base/a.cc": ["base/a.h", "base/detail.h"],
            "base/detail.h": ["base/a.h"],
        }
        self.assertEqual(check_planted(files), [])

    def test_unknown_folder(self):
        faults = check_planted({"engine/attic/a.h": ["engine/text/b.h"], "engine/text/b.h": []})
        self.assertIn("engine/attic/ has no floor", faults[0])


if __name__ == "__main__":
    unittest.main()
