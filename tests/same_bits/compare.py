"""Compares two recordings."""

import json
import sys

SHOWN_RECORDS = 4  # number of differing records that are printed per file
SHOWN_PATHS = 3  # number of differences that are printed per record


def differences(before, after, path=""):
    """Yields (JSON path, value before, value after)."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before:
            if key not in after:
                yield f"{path}.{key}", before[key], "(absent)"
            else:
                yield from differences(before[key], after[key], f"{path}.{key}")
        for key in after:
            if key not in before:
                yield f"{path}.{key}", "(absent)", after[key]
        if list(before) != list(after) and set(before) == set(after):
            yield f"{path} (order of keys)", list(before), list(after)
    elif isinstance(before, list) and isinstance(after, list):
        for i, (x, y) in enumerate(zip(before, after)):
            yield from differences(x, y, f"{path}[{i}]")
        if len(before) != len(after):
            yield f"{path} (length)", len(before), len(after)
    elif type(before) is not type(after) or before != after:
        yield path, before, after


def short(value, most=160):
    """Returns a value as one line of at most about `most` characters."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = text.encode("unicode_escape").decode() if not text.isprintable() else text
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def show_change(path, before, after):
    """Prints the path of one difference and the values before and after. Of long texts, it prints
    only the part around the first difference."""
    if isinstance(before, str) and isinstance(after, str) and max(len(before), len(after)) > 160:
        same = next((i for i, (x, y) in enumerate(zip(before, after)) if x != y),
                    min(len(before), len(after)))
        begin = max(0, same - 40)
        path += f" (character {same})"
        before, after = before[begin:begin + 160], after[begin:begin + 160]
    print(f"    {path.removeprefix('.')}")
    print(f"      before: {short(before)}\n      after:  {short(after)}")


def read(file):
    """Returns {key: record} for the records of a file."""
    records = {}
    with file.open() as lines:
        for line in lines:
            record = json.loads(line)
            assert record["key"] not in records, f"{file}: {record['key']} twice"
            records[record["key"]] = record
    return records


def compare_files(before, after):
    """Prints the first differences of a file. Returns the number of records that differ."""
    old, new = read(before), read(after)
    found = []
    for key, record in old.items():
        if key not in new:
            found.append((record, [("", "(recorded)", "(absent)")]))
        # The comparison as text also finds another order of keys, and 1 in place of true.
        elif json.dumps(record) != json.dumps(new[key]):
            found.append((record, list(differences(record, new[key]))))
    found += [(record, [("", "(absent)", "(recorded)")])
              for key, record in new.items() if key not in old]
    if not found:
        return 0
    print(f"{before.name}: {len(found)} of {len(old)} records differ")
    for record, changes in found[:SHOWN_RECORDS]:
        print(f"  {record['key']}: {short(record.get('request', ''), 400)}")
        for change in changes[:SHOWN_PATHS]:
            show_change(*change)
        if len(changes) > SHOWN_PATHS:
            print(f"    and {len(changes) - SHOWN_PATHS} more")
    if len(found) > SHOWN_RECORDS:
        names = ", ".join(record["key"] for record, _ in found[SHOWN_RECORDS:SHOWN_RECORDS + 20])
        print(f"  also: {short(names, 400)}")
    return len(found)


def compare(before, after, ignored):
    """Compares two folders, without files whose names contain an element of `ignored`. Returns the
    exit status."""
    names = {file.name for folder in (before, after) for file in folder.glob("*.jsonl")}
    names = sorted(name for name in names if not any(part in name for part in ignored))
    if not names:
        print(f"there is nothing to compare in {before} and {after}", file=sys.stderr)
        return 2
    different = 0
    for name in names:
        missing = [folder for folder in (before, after) if not (folder / name).exists()]
        if missing:
            print(f"{name}: not in {missing[0]}")
            different += 1
        elif compare_files(before / name, after / name):
            different += 1
    print(f"{different} of {len(names)} files differ" if different
          else f"{len(names)} files are the same")
    return 1 if different else 0
