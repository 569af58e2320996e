r"""Runs the JSON Schema Test Suite (Debian package json-schema-test-suite, draft 7) against
constrained decoding.

For each schema that moeserve accepts, every valid instance must be accepted and every invalid one
refused. A schema that no value matches is refused by moeserve; all its instances must be invalid.
The other schemas that moeserve refuses are listed in REFUSED, and the test fails if the list
changes. If the package jsonschema is installed, outputs drawn from each constraint are validated.

    python3 tests/structured/schema_suite.py build/release/tests/structured/structured_cli \
        deploy/models/mh-moe
"""

import itertools
import json
import pathlib
import subprocess
import sys

try:
    import jsonschema
except ImportError:
    jsonschema = None

SUITE = pathlib.Path("/usr/share/json-schema-test-suite/tests/draft7")
DIALECT = "http://json-schema.org/draft-07/schema#"
SKIPPED = 77  # the exit status that CTest takes as skipped

# File and description of each schema that is refused, with a part of the message.
REMOTE = "must point into this schema"
REFUSED = {
    ("definitions", "valid definition"): REMOTE,
    ("definitions", "invalid definition"): REMOTE,
    ("ref", "remote ref, containing refs itself"): REMOTE,
    ("refRemote", "remote ref"): REMOTE,
    ("refRemote", "fragment within remote ref"): REMOTE,
    ("refRemote", "ref within remote ref"): REMOTE,
    ("refRemote", "base URI change"): REMOTE,
    ("refRemote", "base URI change - change folder"): REMOTE,
    ("refRemote", "base URI change - change folder in subschema"): REMOTE,
    ("refRemote", "root ref in remote ref"): REMOTE,
    ("uniqueItems", "uniqueItems validation"): "uniqueItems",
}
UNSUPPORTED_FORMATS = {"uri-template"}
# Parts of the messages for schemas that no value matches.
NOTHING_MATCHES = ("no value", "no finite value", "no array matches", "no object matches")


def spellings(value):
    """Returns JSON texts of a value: as it is, and with numbers like 1.0 written as 1. Objects are
    written with their members in every order, as far as there are few: answers have the schema's."""

    def orders(v):
        if isinstance(v, list):
            return [list(items) for items in itertools.islice(itertools.product(*map(orders, v)), 200)]
        if not isinstance(v, dict):
            return [v]
        names = itertools.islice(itertools.permutations(v), 30)
        members = {k: orders(x) for k, x in v.items()}
        return [
            dict(zip(order, values))
            for order in names
            for values in itertools.islice(itertools.product(*(members[k] for k in order)), 30)
        ][:400]

    def whole(v):
        if isinstance(v, float) and v.is_integer():
            return int(v)
        if isinstance(v, list):
            return [whole(x) for x in v]
        return {k: whole(x) for k, x in v.items()} if isinstance(v, dict) else v

    out = []
    for v in orders(value) + orders(whole(value)):
        text = json.dumps(v, ensure_ascii=False)
        if text not in out:
            out.append(text)
    return out


def unique(pairs):
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("duplicate key")
    return value


def check_drawn(schema, drawn):
    """Returns what is wrong with the outputs drawn from a constraint."""
    wrong = []
    for draw in drawn:
        try:
            assert draw["ended"], "not at its end"
            value = json.loads(draw["text"], parse_constant=lambda c: 1 / 0, object_pairs_hook=unique)
            if jsonschema is not None:
                jsonschema.Draft7Validator(schema).validate(value)
        except Exception as error:
            wrong.append(f"drawn: {draw['text'][:200]!r}: {type(error).__name__} {str(error)[:200]}")
    return wrong


def run_formats(process, wrong):
    """Checks the tests of "format". Rare spellings of a format need not be accepted."""
    counts = {"formats": 0, "valid": 0, "valid and refused": 0, "invalid": 0}
    for path in sorted((SUITE / "optional" / "format").glob("*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")):
            tests = [test for test in group["tests"] if isinstance(test["data"], str)]
            schema = {"type": "string", **group["schema"]}
            request = {"schema": schema, "instances": [json.dumps(test["data"], ensure_ascii=False) for test in tests]}
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
            if "error" in answer:
                if path.stem not in UNSUPPORTED_FORMATS:
                    wrong.append(((path.stem, group["description"]), answer["error"]))
                continue
            counts["formats"] += 1
            for test, accepted in zip(tests, answer["accepted"]):
                counts["valid" if test["valid"] else "invalid"] += 1
                counts["valid and refused"] += test["valid"] and not accepted
                if accepted and not test["valid"]:
                    wrong.append(((path.stem, group["description"]), "accepted: " + test["data"]))
    return counts


def main():
    if not SUITE.is_dir():
        print(f"skipped: {SUITE} is missing; install the package json-schema-test-suite")
        return SKIPPED
    process = subprocess.Popen(sys.argv[1:3], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8")
    wrong = []
    refused = {}
    counts = {"schemas": 0, "accepted": 0, "nothing matches": 0, "refused": 0, "instances": 0, "drawn": 0}
    for path in sorted(SUITE.glob("*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")):
            counts["schemas"] += 1
            name = (path.stem, group["description"])
            schema = group["schema"]
            if isinstance(schema, dict):
                schema = {"$schema": DIALECT, **schema}
            texts = [spellings(test["data"]) for test in group["tests"]]
            request = {"schema": schema, "instances": sum(texts, []), "walks": 3, "limit": 200, "seed": counts["schemas"]}
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                wrong.append((name, "the program ended"))
                break
            answer = json.loads(line)
            if "error" in answer:
                if any(text in answer["error"] for text in NOTHING_MATCHES):
                    counts["nothing matches"] += 1
                    if any(test["valid"] for test in group["tests"]):
                        wrong.append((name, "nothing matches: " + answer["error"]))
                else:
                    counts["refused"] += 1
                    refused[name] = answer["error"]
                continue
            counts["accepted"] += 1
            accepted = iter(answer["accepted"])
            for test, forms in zip(group["tests"], texts):
                results = [next(accepted) for _ in forms]
                counts["instances"] += 1
                if any(results) != test["valid"]:
                    wrong.append((name, ("refused: " if test["valid"] else "accepted: ") + forms[0]))
            counts["drawn"] += len(answer["drawn"])
            wrong += [(name, what) for what in check_drawn(schema, answer["drawn"])]
    formats = run_formats(process, wrong)
    process.stdin.close()
    if process.wait() != 0:
        wrong.append((("", ""), f"the program ended with status {process.returncode}"))
    for name, message in refused.items():
        if REFUSED.get(name, "\0") not in message:
            wrong.append((name, "refused: " + message))
    for name in REFUSED.keys() - refused.keys():
        wrong.append((name, "is listed as refused and is not"))
    print(counts)
    print(formats)
    for (file, description), what in wrong:
        print(f"{file}: {description}: {what}")
    print(f"{len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
