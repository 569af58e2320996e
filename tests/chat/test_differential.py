"""Compares the server's chat template engine with jinja2. Both must render the same text or both
must fail.

MOESERVE_CHAT_CLI names the program (default: build/release/tests/chat/chat_template_cli). The
templates in templates/ were written for these tests and implement the formats of six model
families. MOESERVE_CHAT_TEMPLATES may name a folder with further templates (*.jinja), such as those
of published models.
"""

import json
import os
import pathlib
import random
import subprocess

import pytest
from reference_environment import NOW, Reference

HERE = pathlib.Path(__file__).resolve().parent
DEFAULT_CLI = HERE.parents[1] / "build/release/tests/chat/chat_template_cli"
CLI = pathlib.Path(os.environ.get("MOESERVE_CHAT_CLI", DEFAULT_CLI))
FAMILIES = ["chatml", "deepseek", "gemma", "llama3", "mistral", "phi3"]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TEXTS = [
    "", " ", "hello", "  lead and trail  ", "line\nbreak\n", "\n\n", "\ttab\t", "emoji 😀👩‍👩‍👧 end",
    "日本語 العربية", "<|im_end|>", "<|eot_id|><s>[INST]", "</s><|end|><end_of_turn>",
    "{{ x }} {% if %} {# no #}", "a<think>b</think>\n\nc", "'single' \"double\" \\back\\",
    "\u00a0no-break\u3000", "\r\nwindows\r\n", "x" * 3000, "%s {} {0}", "\x00\x1f control",
]
TOOLS = [
    {"type": "function", "function": {
        "name": "weather", "description": "The \"weather\", é", "parameters": {
            "type": "object", "required": ["place"],
            "properties": {"place": {"type": "string", "enum": ["a", "b"]},
                           "days": {"type": ["integer", "null"], "default": 3, "minimum": 0.5}}},
        "return": {"type": "string"}}},
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {}}},
]


def conversation(rng):
    messages = []
    if rng.random() < 0.4:
        messages.append({"role": "system", "content": rng.choice(TEXTS)})
    for i in range(rng.randint(0, 6)):
        role = "user" if i % 2 == 0 else "assistant"
        if rng.random() < 0.05:
            role = rng.choice(["user", "assistant", "system", "tool", "tool_results", "narrator"])
        message = {"role": role, "content": "".join(rng.choices(TEXTS, k=rng.randint(1, 2)))}
        if rng.random() < 0.02:
            message["content"] = rng.choice([None, 5, ["a"], {"k": "v"}])
        if role == "assistant" and rng.random() < 0.15:
            message["tool_calls"] = [
                {"id": rng.choice(["abcdefghi", "short"]), "type": "function", "function": {
                    "name": "weather", "arguments": {"place": rng.choice(TEXTS), "n": [1, 2.5, None]}}}
                for _ in range(rng.randint(1, 2))]
        if rng.random() < 0.02:
            del message[rng.choice(["role", "content"])]
        messages.append(message)
    variables = {}
    if rng.random() < 0.9:
        variables["add_generation_prompt"] = rng.random() < 0.6
    if rng.random() < 0.5:
        variables["tools"] = TOOLS if rng.random() < 0.5 else None
    if rng.random() < 0.1:
        variables["tools_in_user_message"] = False
    if rng.random() < 0.1:
        variables["builtin_tools"] = ["weather", "interpreter"]
    if rng.random() < 0.1:
        variables["date_string"] = "a date"
    return messages, variables


def ours(cases):
    """Returns the program's results for [(template, messages, variables)]."""
    if not CLI.exists() and CLI == DEFAULT_CLI:
        pytest.skip(f"{CLI} is not built")
    lines = [json.dumps({"template": template, "messages": messages, "trusted": TOKENS,
                         "untrusted": variables, "now": NOW})
             for template, messages, variables in cases]
    run = subprocess.run([CLI], input="\n".join(lines) + "\n", capture_output=True, text=True,
                         check=True)
    answers = [json.loads(line) for line in run.stdout.split("\n") if line]
    assert len(answers) == len(cases)
    return answers


def compare(cases):
    """Checks that the program and jinja2 agree on all cases. Returns the number of cases that
    rendered without an error."""
    reference = Reference()
    rendered = 0
    for (template, messages, variables), answer in zip(cases, ours(cases)):
        text, error = reference.render(template, {**TOKENS, **variables, "messages": messages})
        shown = f"{template[:300]!r}\n{messages}\n{variables}\nexpected {text!r} {error}\n{answer}"
        assert ("error" in answer) == (error is not None), shown
        if error is None:
            assert answer["text"] == text, shown
            rendered += 1
        elif error.startswith("TemplateError"):  # the template called raise_exception()
            assert answer["error"] == error.removeprefix("TemplateError: "), shown
    return rendered


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family):
    template = (HERE / f"templates/{family}.jinja").read_text()
    rng = random.Random(f"conversations of {family}")
    cases = [(template, *conversation(rng)) for _ in range(800)]
    rendered = compare(cases)
    assert 200 <= rendered <= 780, "both texts and errors should occur"


@pytest.mark.skipif("MOESERVE_CHAT_TEMPLATES" not in os.environ,
                    reason="MOESERVE_CHAT_TEMPLATES names no folder of further templates")
def test_other_templates():
    folder = pathlib.Path(os.environ["MOESERVE_CHAT_TEMPLATES"])
    for path in sorted(folder.rglob("*.jinja")):
        rng = random.Random(f"conversations of {path.name}")
        template = path.read_text()
        rendered = compare([(template, *conversation(rng)) for _ in range(200)])
        print(f"{path.relative_to(folder)}: {rendered} of 200 render, the others are refused alike")


def test_language():
    templates = (HERE / "language.txt").read_text().splitlines()
    messages = [{"role": "user", "content": "hi"}]
    assert compare([(template, messages, {}) for template in templates]) > 60


def test_white_space():
    pieces = ["a", " ", "\n", "  \n", "\t", "{% if 1 %}", "{%- if 1 -%}", "{%+ if 1 +%}", "{% endif %}",
              "{%- endif %}", "{% endif -%}", "{%+ endif %}", "{{ 'x' }}", "{{- 'y' }}", "{{ 'z' -}}",
              "{# c #}", "{#- c -#}", "{#+ c +#}", "\r\n", "\r", "{% raw %} {{ {% endraw %}",
              "{%- raw -%}\n r \n{%- endraw -%}", "{% raw %}\n  {%+ endraw +%}", "\u00a0", "é\n"]
    rng = random.Random("white space")
    cases = [("".join(rng.choices(pieces, k=rng.randint(1, 12))), [], {}) for _ in range(4000)]
    assert compare(cases) > 400


def test_random_expressions():
    """Applies operators, filters and tests to values of all types; most combinations are errors."""
    values = ["1", "-2", "2.5", "true", "none", "'Ab c'", "''", "'é😀'", "[1, 'b', none]", "[]", "(1, 2)",
              "{'a': 1, 'b': [2]}", "{}", "missing", "messages", "messages[0]", "'3'"]
    binary = ["+", "-", "*", "/", "//", "%", "~", "==", "!=", "<", ">=", "in", "not in", "and", "or"]
    filters = ["length", "first", "last", "upper", "title", "trim", "string", "list", "int", "float",
               "tojson", "sort", "reverse | list", "default(7)", "default(7, true)", "join('-')", "abs",
               "unique | list", "map('string') | list", "select | list", "min", "max", "round",
               "capitalize", "replace('b', 'X')", "dictsort", "items | list", "sum", "indent(1)",
               "reject('none') | list", "tojson(indent=1)", "e"]
    tests = ["defined", "none", "string", "mapping", "iterable", "sequence", "number", "integer", "true",
             "odd", "even", "in [1, 'b']", "eq 1", "boolean", "float", "lower", "upper", "callable"]
    tails = ["[0]", "[-1]", "['a']", ".a", "[1:]", "[::-1]", ".get('a')", ".strip()", ".split()",
             ".items() | list", ".upper()", ".b.c", "[1:2]"]
    rng = random.Random("expressions")
    cases = []
    for _ in range(6000):
        # The values are in variables, because jinja2 folds constants when it compiles.
        names = "".join("{%% set %s = %s %%}" % (n, rng.choice(values)) for n in "vwu")
        value, other = "v", "w"
        kind = rng.random()
        if kind < 0.35:
            expression = f"{value} {rng.choice(binary)} {other}"
        elif kind < 0.65:
            expression = f"{value} | {rng.choice(filters)}"
        elif kind < 0.8:
            expression = f"{value} is {rng.choice(tests)}"
        else:
            expression = f"({value}){rng.choice(tails)}"
        if rng.random() < 0.3:
            expression = f"({expression}) {rng.choice(binary)} u"
        cases.append((names + "{{ " + expression + " }}", [{"role": "user", "content": "hi"}], {}))
    assert compare(cases) > 2000


def test_only_the_template_is_trusted():
    """The messages consist of private-use characters. Exactly these characters must be reported as
    untrusted in the rendered text."""
    rng = random.Random("trust")
    cases = []
    for family in FAMILIES:
        template = (HERE / f"templates/{family}.jinja").read_text()
        for _ in range(50):
            messages = [{"role": "user" if i % 2 == 0 else "assistant",
                         "content": "".join(chr(rng.randint(0xE000, 0xE0FF))
                                            for _ in range(rng.randint(0, 9)))}
                        for i in range(rng.randint(1, 5))]
            cases.append((template, messages, {"add_generation_prompt": True, "tools": None}))
    seen = 0
    for answer in ours(cases):
        data = answer["text"].encode()
        trusted = bytearray(len(data))
        for begin, end in answer["trusted"]:
            assert begin < end
            trusted[begin:end] = b"\1" * (end - begin)
        at = 0
        for character in answer["text"]:
            size = len(character.encode())
            private = 0xE000 <= ord(character) <= 0xE0FF
            seen += private
            assert trusted[at:at + size] == (b"\0" if private else b"\1") * size
            at += size
    assert seen > 1000
