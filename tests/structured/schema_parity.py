r"""Compares constrained decoding with the package jsonschema on generated schemas.

For each schema, moeserve's constrained decoding must
- accept valid instances token by token, and allow the output to end after the last token. This
  script generates the instances independently of moeserve;
- reject mutated instances that jsonschema rejects;
- lead to valid outputs within the token limit when tokens are drawn uniformly from the allowed
  ones. If no valid output fits into the limit, the drawn output must be the prefix of a valid one;
  more tokens are drawn to complete it.

    python tests/structured/schema_parity.py build/release/tests/structured/structured_cli \
        deploy/models/mh-moe
"""

import argparse
import copy
import json
import random
import string
import subprocess
import sys

import jsonschema

# Pairs of a pattern and a function that generates strings matching the pattern.
PATTERNS = [
    (r"^[a-z]{2,6}$", lambda r: "".join(r.choices(string.ascii_lowercase, k=r.randint(2, 6)))),
    (r"^[A-Z]{3}-\d{4}$", lambda r: "".join(r.choices(string.ascii_uppercase, k=3)) + f"-{r.randint(0, 9999):04}"),
    (r"foo|bar", lambda r: text(r, 5) + r.choice(["foo", "bar"]) + text(r, 5)),
    (r"^\+?[0-9]+(?:,[0-9]+)*$", lambda r: r.choice(["", "+"]) + ",".join(str(r.randint(0, 99)) for _ in range(r.randint(1, 4)))),
    (r"^(a|b|c)*x+$", lambda r: "".join(r.choices("abc", k=r.randint(0, 5))) + "x" * r.randint(1, 4)),
    (r"é", lambda r: text(r, 4) + "é" + text(r, 4)),
    (r'^"[^"\\]*"$', lambda r: '"' + "".join(r.choices("abc é\t\n/😀", k=r.randint(0, 6))) + '"'),
    (r"^[^a-z]*$", lambda r: "".join(r.choices("ABC019 \\\"\n\x01\x7fÄ€😀", k=r.randint(0, 8)))),
    (r"^.{1,3}$", lambda r: "".join(r.choices("ab\"\\é😀 ", k=r.randint(1, 3)))),
    (r"\d$", lambda r: text(r, 6) + r.choice(string.digits)),
]
FORMATS = [
    ("date", lambda r: f"{r.randint(1, 9999):04}-{r.randint(1, 12):02}-{r.randint(1, 28):02}"),
    ("uuid", lambda r: "-".join("".join(r.choices("0123456789abcdef", k=k)) for k in (8, 4, 4, 4, 12))),
    ("date-time", lambda r: f"20{r.randint(0, 99):02}-0{r.randint(1, 9)}-{r.randint(10, 28)}T{r.randint(10, 23)}:{r.randint(10, 59)}:0{r.randint(0, 9)}Z"),
    ("ipv4", lambda r: ".".join(str(r.randint(0, 255)) for _ in range(4))),
    ("email", lambda r: "".join(r.choices("abcXYZ09", k=r.randint(1, 8))) + "@example.org"),
]
NAMES = ["id", "name", "a", "b", "ab", "abc", "größe", 'q"uote', "back\\slash", "tab\tname", "😀", "x1", "x2", "", "tags", "Z\x7f"]
ALPHABET = string.ascii_letters + string.digits + " _-./:;,{}[]\"\\\n\t\r\b\f\x00\x1f\x7f" + "äßé€漢\u2028\ufeff😀🚀"


def text(r, most):
    return "".join(r.choices(ALPHABET, k=r.randint(0, most)))


class Generator:
    """Generates random schemas, each with a function that generates valid values."""

    def __init__(self, rng):
        self.r = rng
        self.defs = {}

    def schema(self, depth):
        r = self.r
        kinds = [self.null, self.boolean, self.integer, self.number, self.string, self.string, self.pattern, self.format, self.enum, self.const]
        if depth > 0:
            kinds += [self.object, self.object, self.object, self.array, self.array, self.tuple, self.any_of, self.one_of, self.ref, self.tree, self.all_of]
            kinds += [self.patterned, self.contains, self.condition, self.dependent, self.overlapping]
        else:
            kinds += [self.types, self.opposite, self.unique]
        schema, make = r.choice(kinds)(depth)
        if r.random() < 0.1:
            schema = {**schema, "description": "generated", "title": "t"}
        return schema, make

    def null(self, depth):
        return {"type": "null"}, lambda: None

    def boolean(self, depth):
        return {"type": "boolean"}, lambda: self.r.random() < 0.5

    def types(self, depth):
        names = self.r.sample(["null", "boolean", "integer", "string"], k=self.r.randint(1, 3))
        make = {"null": lambda: None, "boolean": lambda: True, "integer": lambda: self.r.randint(-99, 99), "string": lambda: text(self.r, 6)}
        return {"type": names}, lambda: make[self.r.choice(names)]()

    def integer(self, depth):
        r = self.r
        shape = r.randint(0, 5)
        low = r.randint(-1500, 1500)
        high = low + r.choice([0, 1, 7, 95, 10000])
        if shape == 0:
            return {"type": "integer"}, lambda: r.choice([0, -1, 7, r.randint(-10**18, 10**18)])
        if shape == 1:
            return {"type": "integer", "minimum": low}, lambda: low + r.choice([0, 1, 5, 1000, 10**9])
        if shape == 2:
            return {"type": "integer", "maximum": high}, lambda: high - r.choice([0, 1, 5, 1000, 10**9])
        if shape == 3:
            return {"type": "integer", "minimum": low, "maximum": high}, lambda: r.randint(low, high)
        if shape == 4:
            return {"type": "integer", "exclusiveMinimum": low - 1, "exclusiveMaximum": high + 0.5}, lambda: r.randint(low, high)
        step = r.choice([2, 3, 7, 10, 25])
        return {"type": "integer", "multipleOf": step, "minimum": -1000}, lambda: r.randint(-1000 // step + 1, 5000) * step

    def number(self, depth):
        r = self.r
        shape = r.randint(0, 3)
        low = round(r.uniform(-50, 50), r.randint(0, 3))
        high = low + r.choice([0.5, 3.0, 1e3, 1e22])
        if shape == 0:
            return {"type": "number"}, lambda: r.choice([0, 0.5, -3, r.uniform(-1e6, 1e6), r.uniform(0, 1) * 1e-9, -r.uniform(0, 1) * 1e30, 1e16, 5e-5, 1e-7])
        if shape == 1:
            return {"type": "number", "minimum": low, "maximum": high}, lambda: min(max(r.choice([low, high, r.uniform(low, high)]), low), high)
        if shape == 2:
            return {"type": "number", "exclusiveMinimum": 0}, lambda: r.choice([r.uniform(0.001, 9), 1e-7, 3e-12, 2e20, 7])
        return {"type": "number", "maximum": high, "exclusiveMinimum": low}, lambda: min(high, low + (high - low) * r.uniform(0.01, 1))

    def string(self, depth):
        r = self.r
        low = r.randint(0, 5)
        high = low + r.randint(0, 8)
        keywords = {"type": "string"}
        if r.random() < 0.5:
            keywords["minLength"] = low
        else:
            low = 0
        if r.random() < 0.5:
            keywords["maxLength"] = high
        return keywords, lambda: "".join(r.choices(ALPHABET, k=r.randint(low, high)))

    def pattern(self, depth):
        pattern, make = self.r.choice(PATTERNS)
        schema = {"type": "string", "pattern": pattern}
        if self.r.random() < 0.2:
            schema["maxLength"] = 40
        return schema, lambda: make(self.r)

    def format(self, depth):
        name, make = self.r.choice(FORMATS)
        return {"type": "string", "format": name}, lambda: make(self.r)

    def scalar(self):
        r = self.r
        return r.choice([None, True, False, r.randint(-9, 99), r.uniform(-9, 9), 1.5, 2.0, 1e-7, text(r, 8), "on", "off"])

    def enum(self, depth):
        values = [self.scalar() for _ in range(self.r.randint(1, 6))]
        if self.r.random() < 0.2:
            values.append({"k": [1, "two"], "l": None})
        return {"enum": values}, lambda: self.r.choice(values)

    def const(self, depth):
        value = self.r.choice([self.scalar(), [1, self.scalar()], {"x": self.scalar(), "y": {}}])
        return {"const": value}, lambda: value

    def object(self, depth):
        r = self.r
        names = r.sample(NAMES, k=r.randint(0, 5))
        parts = {name: self.schema(depth - 1) for name in names}
        required = [name for name in names if r.random() < 0.5]
        schema = {"type": "object", "properties": {name: part[0] for name, part in parts.items()}}
        if required:
            schema["required"] = required
        extra = r.choice(["closed", "closed", "open", "typed"])
        other = None
        if extra == "closed":
            schema["additionalProperties"] = False
        elif extra == "typed":
            schema["additionalProperties"], other = self.schema(0)
        else:
            other = self.scalar
        least = 0
        if r.random() < 0.15:
            least = r.randint(0, len(names))
            schema["minProperties"] = least

        def make():
            chosen = [name for name in names if name in required or r.random() < 0.5]
            missing = [name for name in names if name not in chosen]
            while len(chosen) < least:
                chosen.append(missing.pop())
            r.shuffle(chosen)
            value = {name: parts[name][1]() for name in chosen}
            if other is not None and r.random() < 0.5:
                for _ in range(r.randint(0, 2)):
                    key = text(r, 6)
                    if key not in names:
                        value[key] = other()
            return value

        return schema, make

    def array(self, depth):
        r = self.r
        items, make = self.schema(depth - 1)
        low = r.randint(0, 2)
        high = low + r.randint(0, 4)
        schema = {"type": "array", "items": items}
        if r.random() < 0.5:
            schema["minItems"] = low
        else:
            low = 0
        if r.random() < 0.5:
            schema["maxItems"] = high
        return schema, lambda: [make() for _ in range(r.randint(low, high))]

    def tuple(self, depth):
        r = self.r
        parts = [self.schema(depth - 1) for _ in range(r.randint(1, 3))]
        schema = {"type": "array", "prefixItems": [part[0] for part in parts], "minItems": len(parts)}
        if r.random() < 0.5:
            schema["items"] = False
            return schema, lambda: [part[1]() for part in parts]
        schema["items"], make = self.schema(0)
        return schema, lambda: [part[1]() for part in parts] + [make() for _ in range(r.randint(0, 2))]

    def any_of(self, depth):
        parts = [self.schema(depth - 1) for _ in range(self.r.randint(1, 3))]
        return {"anyOf": [part[0] for part in parts]}, lambda: self.r.choice(parts)[1]()

    def one_of(self, depth):
        parts = []
        for i in range(self.r.randint(2, 3)):
            schema, make = self.schema(depth - 1)
            parts.append((
                {"type": "object", "properties": {"kind": {"const": f"k{i}"}, "value": schema}, "required": ["value", "kind"], "additionalProperties": False},
                lambda i=i, make=make: {"kind": f"k{i}", "value": make()} if self.r.random() < 0.5 else {"value": make(), "kind": f"k{i}"},
            ))
        return {"oneOf": [part[0] for part in parts]}, lambda: self.r.choice(parts)[1]()

    def all_of(self, depth):
        first, make_first = self.schema(depth - 1)
        second, make_second = self.schema(depth - 1)
        schema = {"allOf": [
            {"type": "object", "properties": {"p": first}, "required": ["p"]},
            {"properties": {"q": second}, "maxProperties": 2},
        ]}
        return schema, lambda: {"p": make_first(), "q": make_second()} if self.r.random() < 0.5 else {"p": make_first()}

    def patterned(self, depth):
        r = self.r
        number, make_number = self.integer(0)
        other, make_other = self.schema(0)
        schema = {"type": "object", "patternProperties": {"^n_": number}, "additionalProperties": r.choice([False, other])}
        if r.random() < 0.3:
            schema["propertyNames"] = {"pattern": "^[a-z_0-9]*$"}
        if r.random() < 0.3:
            schema["minProperties"] = 1

        def make():
            value = {f"n_{r.choice('abc09')}{i}": make_number() for i in range(r.randint(1, 3))}
            if schema["additionalProperties"] is not False and r.random() < 0.5:
                value["o" + r.choice("abc")] = make_other()
            return value

        return schema, make

    def contains(self, depth):
        r = self.r
        found, make_found = self.integer(0)
        least = r.randint(1, 2)
        most = r.choice([None, least, least + 1])
        schema = {"type": "array", "contains": found, "minContains": least}
        if most:
            schema["maxContains"] = most

        def make():
            items = [make_found() for _ in range(r.randint(least, most or least + 2))]
            items += [r.choice(["a", None, True, [1], {}]) for _ in range(r.randint(0, 2))]
            r.shuffle(items)
            return items

        return schema, make

    def unique(self, depth):
        r = self.r
        if r.random() < 0.5:
            schema = {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "minItems": r.randint(0, 2)}
            return schema, lambda: list({text(r, 4) + str(i): 0 for i in range(r.randint(2, 4))})
        values = ["a", "b", 1, 2.5, None, True, "ab"]
        least = r.randint(0, 3)
        return ({"type": "array", "items": {"enum": values}, "uniqueItems": True, "minItems": least},
                lambda: r.sample(values, k=r.randint(least, len(values))))

    def opposite(self, depth):
        r = self.r
        shape = r.randint(0, 3)
        if shape == 0:
            return {"type": "string", "not": {"enum": ["a", "on", ""]}}, lambda: text(r, 5) + "!"
        if shape == 1:
            return {"type": "integer", "not": {"multipleOf": 4}}, lambda: 4 * r.randint(-999, 999) + r.randint(1, 3)
        if shape == 2:
            return {"not": {"type": ["string", "array"]}, "maximum": 5}, lambda: r.choice([None, True, 1, -2.5, {}, {"a": "b"}])
        return {"type": "string", "not": {"pattern": "[0-9]"}, "minLength": 1}, lambda: "".join(r.choices("ab é\n\"", k=r.randint(1, 5)))

    def condition(self, depth):
        r = self.r
        first, make_first = self.schema(depth - 1)
        second, make_second = self.schema(0)
        schema = {"type": "object", "properties": {"kind": {"enum": ["x", "y"]}}, "required": ["kind"],
                  "if": {"properties": {"kind": {"const": "x"}}},
                  "then": {"properties": {"v": first}, "required": ["v"]},
                  "else": {"properties": {"w": second}}}
        return schema, lambda: {"kind": "x", "v": make_first()} if r.random() < 0.5 else {"w": make_second(), "kind": "y"}

    def dependent(self, depth):
        r = self.r
        part, make = self.schema(depth - 1)
        schema = {"type": "object", "properties": {"p": part}, "dependentRequired": {"card": ["address"]},
                  "dependentSchemas": {"address": {"properties": {"zip": {"type": "integer"}}, "required": ["zip"]}}}
        return schema, lambda: r.choice([{"p": make()}, {"address": 1, "zip": 3}, {"zip": r.randint(0, 9), "card": "c", "address": None}])

    def overlapping(self, depth):
        r = self.r
        schema = {"oneOf": [{"type": "integer", "minimum": 10}, {"type": "integer", "multipleOf": 3},
                            {"type": "object", "required": ["a"]}, {"type": "object", "required": ["b"]}]}
        return schema, lambda: r.choice([{"a": 1}, {"b": [], "c": 1}, 9, 3 * r.randint(-9, 3), 10 + 3 * r.randint(0, 99)])

    def ref(self, depth):
        name = f"d{len(self.defs)}"
        self.defs[name] = None
        schema, make = self.schema(depth - 1)
        self.defs[name] = schema
        return {"$ref": f"#/$defs/{name}"}, make

    def tree(self, depth):
        r = self.r
        name = f"d{len(self.defs)}"
        self.defs[name] = None
        leaf, make_leaf = self.schema(0)
        here = {"$ref": f"#/$defs/{name}"}
        self.defs[name] = {"type": "object", "required": ["v"], "additionalProperties": False,
                           "properties": {"v": leaf, "next": here, "many": {"type": "array", "items": here}}}

        def make(levels=3):
            value = {"v": make_leaf()}
            if levels and r.random() < 0.6:
                value["next"] = make(levels - 1)
            if levels and r.random() < 0.4:
                value["many"] = [make(levels - 1) for _ in range(r.randint(0, 2))]
            return value

        return here, make


def paths(value, path=()):
    yield path
    if isinstance(value, dict):
        for key, child in value.items():
            yield from paths(child, path + (key,))
    elif isinstance(value, list):
        for i, child in enumerate(value):
            yield from paths(child, path + (i,))


def mutate(r, value):
    """Returns a copy of the value with one random change."""
    value = copy.deepcopy(value)
    path = r.choice(list(paths(value)))
    holder, parent, last = value, None, None
    for step in path:
        parent, last, holder = holder, step, holder[step]
    options = [None, True, -1, 0, 10**6, 0.25, -7.5, "", "zzz zzz zzz zzz zzz zzz", [], {}, [None] * 9, {"unknown": 1}]
    choice = r.randint(0, 3)
    if choice == 0 and isinstance(holder, dict):
        holder = dict(holder)
        if holder and r.random() < 0.5:
            holder.pop(r.choice(list(holder)))
        else:
            holder["unknown key"] = r.choice(options)
    elif choice == 0 and isinstance(holder, list):
        holder = holder[:-1] if r.random() < 0.5 else holder + [r.choice(options)]
    elif choice == 1 and isinstance(holder, str):
        holder = holder + r.choice("aZ0!\n") if r.random() < 0.5 else holder[:-1]
    elif choice == 1 and isinstance(holder, (int, float)) and not isinstance(holder, bool):
        holder = r.choice([holder + 1, -holder, holder * 1000, holder + 0.5])
    else:
        holder = r.choice(options)
    if parent is None:
        return holder
    parent[last] = holder
    return value


def dump(r, value):
    style = r.randint(0, 4)
    ascii_only = r.random() < 0.5
    if style == 0:
        return json.dumps(value, ensure_ascii=ascii_only, separators=(",", ":"))
    if style == 1:
        return json.dumps(value, ensure_ascii=ascii_only, indent=r.choice([1, 2, 4, "\t"]))
    return json.dumps(value, ensure_ascii=ascii_only)


def schema_of(seed, number):
    """Returns schema `number` for a seed, a function that generates valid instances, and the random
    number generator that both use."""
    r = random.Random(seed * 1000003 + number)
    generator = Generator(r)
    schema, make = generator.schema(r.randint(1, 4)) if r.random() < 0.15 else generator.object(r.randint(1, 4))
    if generator.defs:
        schema = {**schema, "$defs": generator.defs}
    return schema, make, r


class Order:
    """Sorts the members of values as a schema mentions their names."""

    def __init__(self, root):
        self.root = root

    def holds(self, schema, value):
        if isinstance(schema, dict):
            schema = {**schema, "$defs": self.root.get("$defs", {})}
        return jsonschema.Draft202012Validator(schema).is_valid(value)

    def parts(self, schema, value, seen=()):
        """Yields the parts of `schema` that describe `value`, in the order of the text."""
        if not isinstance(schema, dict) or id(schema) in seen:
            return
        seen = (*seen, id(schema))
        late = []
        for key, member in schema.items():
            if key == "properties":
                yield schema
            elif key == "$ref":
                target = self.root
                for step in member.removeprefix("#").split("/")[1:]:
                    target = target[step.replace("~1", "/").replace("~0", "~")]
                yield from self.parts(target, value, seen)
            elif key in ("allOf", "anyOf", "oneOf"):
                holding = [part for part in member if self.holds(part, value)]
                for part in holding if key == "allOf" else holding[:1]:
                    yield from self.parts(part, value, seen)
            elif key in ("if", "then", "else", "not"):
                late.append(member)
            elif key == "dependentSchemas":
                late += member.values()
        if "properties" not in schema:
            yield schema
        for part in late:
            yield from self.parts(part, value, seen)

    def apply(self, schemas, value):
        parts = [part for schema in schemas for part in self.parts(schema, value)]
        if isinstance(value, list):
            items = [part for part in parts if {"items", "prefixItems", "contains"} & part.keys()]
            return [self.apply([s for part in items for s in (
                part.get("prefixItems", [])[i:i + 1] or [part.get("items")]) + [part.get("contains")]], v)
                for i, v in enumerate(value)]
        if not isinstance(value, dict):
            return value
        for part in parts:  # listed values
            for listed in [part.get("const"), *part.get("enum", [])]:
                if isinstance(listed, dict) and listed == value:
                    return listed
        names = [name for part in parts for name in part.get("properties", {})]
        places = {name: names.index(name) for name in names}
        out = {}
        for name in sorted(value, key=lambda n: places.get(n, len(names))):
            below = [part["properties"][name] for part in parts if name in part.get("properties", {})]
            below += [part["additionalProperties"] for part in parts if "additionalProperties" in part]
            below += [s for part in parts for s in part.get("patternProperties", {}).values()]
            out[name] = self.apply(below, value[name])
        return out


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("cli")
    parser.add_argument("model")
    parser.add_argument("--schemas", type=int, default=500)
    parser.add_argument("--instances", type=int, default=20)
    parser.add_argument("--walks", type=int, default=1)
    parser.add_argument("--limit", type=int, default=512)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    process = subprocess.Popen([args.cli, args.model], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8")
    failures = []
    counts = {"schemas": 0, "valid": 0, "invalid": 0, "walks": 0, "limited": 0}
    answer = {}
    for number in range(args.schemas):
        schema, make, r = schema_of(args.seed, number)
        checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
        order = Order(schema)
        valid = []
        for _ in range(args.instances):
            value = order.apply([schema], make())
            checker.validate(value)
            valid.append(value)
        invalid = []
        for _ in range(100 * args.instances):
            if len(invalid) == args.instances:
                break
            value = mutate(r, r.choice(valid))
            if not checker.is_valid(value):
                invalid.append(value)
        texts = [dump(r, value) for value in valid + invalid]
        request = {"schema": schema, "strict": True, "instances": texts, "walks": args.walks, "limit": args.limit, "seed": number}
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            failures.append((number, "the program ended", schema))
            break
        answer = json.loads(line)
        counts["schemas"] += 1
        if "error" in answer:
            failures.append((number, answer["error"], schema))
            continue
        for i, accepted in enumerate(answer["accepted"]):
            if accepted != (i < len(valid)):
                failures.append((number, ("refused: " if i < len(valid) else "accepted: ") + texts[i], schema))
        counts["valid"] += len(valid)
        counts["invalid"] += len(invalid)
        for draw in answer["drawn"]:
            counts["walks"] += 1
            counts["limited"] += draw["limited"]
            drawn = draw["text"]
            try:
                assert draw["ended"], "not at its end"
                checker.validate(json.loads(drawn, parse_constant=lambda c: 1 / 0, object_pairs_hook=unique))
            except Exception as error:
                failures.append((number, f"drawn: {drawn!r}: {type(error).__name__} {str(error)[:200]}", schema))
    process.stdin.close()
    status = process.wait()
    print(counts, "mask us:", {key: round(answer[key], 1) for key in answer if key.startswith("mask")})
    for number, what, schema in failures[:10]:
        print(f"schema {number}: {what}\n  {json.dumps(schema)[:1500]}")
    print(f"{len(failures)} failures")
    return 1 if failures or status else 0


def unique(pairs):
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("duplicate key")
    return value


if __name__ == "__main__":
    sys.exit(main())
