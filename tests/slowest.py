#!/usr/bin/env python3
"""Prints the slowest tests of JUnit files: slowest.py COUNT FILE..."""

import pathlib
import sys
import xml.etree.ElementTree as ElementTree


def main():
    tests = []
    for path in map(pathlib.Path, sys.argv[2:]):
        for case in ElementTree.parse(path).iter("testcase"):
            # ctest writes its name of a test twice.
            place = case.get("classname", "")
            name = case.get("name", "") if place in ("", case.get("name")) \
                else f"{place}.{case.get('name')}"
            tests.append((float(case.get("time") or 0), name))
    for seconds, name in sorted(tests, reverse=True)[:int(sys.argv[1])]:
        print(f"{seconds:7.1f} s  {name}")


if __name__ == "__main__":
    main()
