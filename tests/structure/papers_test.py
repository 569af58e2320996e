"""Checks the pages of the papers, and that planted faults are found."""

import pathlib
import tempfile
import unittest

import papers

ROOT = pathlib.Path(__file__).parents[2]


class PapersTest(unittest.TestCase):
    def check_planted(self, text):
        """Returns the faults of a tree with one page about MoA beside a source file."""
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            page = root / papers.PAGES / "moa.md"
            page.parent.mkdir(parents=True)
            page.write_text(text, encoding="utf-8")
            (root / "engine").mkdir()
            (root / "engine/a.h").write_text("int Route(int row);\n", encoding="utf-8")
            return [fault.partition("moa.md: ")[2] for fault in papers.check(root)]

    def test_product(self):
        self.assertEqual("\n".join(papers.check(ROOT)), "")

    def test_the_product_is_read(self):
        text = (ROOT / papers.PAGES / "moa.md").read_text(encoding="utf-8")
        self.assertGreater(len(papers.NAMED.findall(text)), 40)

    def test_ranges_and_lists(self):
        self.assertEqual(papers.numbers_of("eq. 4 to 6, 9"), ("eq.", [4, 5, 6, 9]))
        self.assertEqual(papers.numbers_of("fig. 2 (a), (b)"), ("fig.", [2]))
        self.assertEqual(papers.numbers_of("section 3.1"), ("section", []))

    def test_missing_items(self):
        text = "| eq. 1 to 11, 13 to 20 | x |\n| fig. 1 (a), 3, 4 | x |\n| table 1 to 7 | x |\n"
        self.assertEqual(
            [fault for fault in self.check_planted(text) if fault],
            ["no row about eq. 12", "no row about fig. 2"],
        )

    def test_paths(self):
        faults = self.check_planted("`engine/a.h`, `engine/b.h`, `engine/c`, `other/d.cc`, `a/b`")
        self.assertEqual(
            faults[-3:],
            ["engine/b.h does not exist", "engine/c does not exist", "other/d.cc does not exist"],
        )

    def test_names(self):
        faults = self.check_planted("`engine/a.h` (`Route`, `Rout`, `row`), `engine/a.h` (`Row`)")
        self.assertEqual(
            faults[-2:], ["engine/a.h does not contain Rout", "engine/a.h does not contain Row"]
        )

    def test_links(self):
        faults = self.check_planted("[a](moa.md#x), [b](../b.md), [c](https://example.com/c)")
        self.assertEqual(faults[-1], "the link ../b.md leads nowhere")


if __name__ == "__main__":
    unittest.main()
