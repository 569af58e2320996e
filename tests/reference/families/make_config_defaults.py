#!/usr/bin/env python3
"""Writes tests/golden/config_defaults.json: what `transformers` makes of a config.json that lacks a key.

Needs transformers, which the test does not need; version 5.24 wrote the stored file.

For each folder of tests/golden/families, and for each key of its config.json (and of the objects of
rotary parameters in it), the configuration class reads the file without the key, and with null as its
value. Of a wrapper, these are the keys of its text_config. The file lists the keys that have another value then; "KEY.NAME" is the key NAME of an object:

    {"CASE": {"without": {"KEY": {"KEY": default, ...}}, "null": {"KEY": {...}}, "refused": ["KEY"]}}

Keys without which nothing changes are left out of "without". "null" has the keys for which the class
replaces null by a value, "refused" those without which it does not read the file.
"""

import argparse
import copy
import json
import pathlib
import tempfile

import transformers

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"
# Keys of no interest: names, and types that weights are stored in.
NAMES = {"architectures", "dtype", "torch_dtype", "model_type", "transformers_version",
         "quantization_config"}


def in_json(value):
    """Returns the value as transformers writes it: JSON has no infinity."""
    if isinstance(value, dict):
        return {key: in_json(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [in_json(part) for part in value]
    return {"__float__": "Infinity"} if value == float("inf") else value


def full(config):
    """The configuration with all keys that the class gives a value."""
    kind = transformers.CONFIG_MAPPING[config["model_type"]]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(config, file)
        file.flush()
        made = kind.from_json_file(file.name).to_dict()
    return {key: json.loads(json.dumps(in_json(value))) for key, value in made.items()
            if key not in NAMES}


def paths(config):
    """The keys of a configuration, those of objects in it as lists of two or three keys."""
    for key, value in config.items():
        if key in NAMES:
            continue
        yield [key]
        if key in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            for name, inner in value.items():
                yield [key, name]
                if isinstance(inner, dict):
                    yield from ([key, name, last] for last in inner)


def changed(config, path, null):
    out = copy.deepcopy(config)
    at = out
    for key in path[:-1]:
        at = at[key]
    if null:
        at[path[-1]] = None
    else:
        del at[path[-1]]
    return out


def patches(config):
    base = full(config)
    out = {"without": {}, "null": {}, "refused": []}
    for path in paths(config):
        name = ".".join(path)
        for kind in ("without", "null"):
            other = changed(config, path, kind == "null")
            try:
                made = full(other)
            except Exception:  # every class refuses in its own way
                if kind == "without":
                    out["refused"].append(name)
                continue
            patch = {key: made.get(key) for key in sorted(set(base) | set(made))
                     if base.get(key) != made.get(key)}
            if patch and (kind == "without" or "null" not in json.dumps(in_json(patch))):
                out[kind][name] = patch
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=GOLDEN / "config_defaults.json")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    cases = {}
    for path in sorted((GOLDEN / "families").glob("*/config.json")):
        config = json.loads(path.read_text())
        config = config.get("text_config", config)  # the decoder of a wrapper
        if config["model_type"] not in transformers.CONFIG_MAPPING or "top_p_threshold" in config:
            continue
        try:
            cases[path.parent.name] = patches(config)
        except TypeError:  # exaone_moe: the class does not take the letters that it documents
            print(f"{path.parent.name}: its class does not read it")
    lines = [f"{json.dumps(name)}: {json.dumps(in_json(case), separators=(',', ':'))}"
             for name, case in cases.items()]
    args.out.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(cases)} folders, {sum(len(c['without']) for c in cases.values())} keys with an effect")


if __name__ == "__main__":
    main()
