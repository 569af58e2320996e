"""Small valid inputs for the fuzz targets of the server. make_seeds.py calls write()."""

import gzip
import hashlib
import json
import pathlib
import random
import struct

TEMPLATES = pathlib.Path("tests/chat/templates")


def varint(number):
    out = b""
    number &= (1 << 64) - 1
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


def field(number, value):
    """A field of a Protobuf message: bytes, a text, an integer or a double."""
    if isinstance(value, str):
        value = value.encode()
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    if isinstance(value, float):
        return varint(number << 3 | 1) + struct.pack("<d", value)
    return varint(number << 3) + varint(value)


def http():
    get = "GET /v1/experts/stats?window=5&model=a%20b HTTP/1.1\r\nHost: localhost:8080\r\n\r\n"
    post = ("POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\n"
            "Content-Length: 14\r\nAuthorization: Bearer key\r\nOrigin: http://localhost\r\n\r\n"
            '{"prompt":"a"}')
    chunked = ("POST /v2/models/m/infer HTTP/1.1\r\nhost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n"
               "Expect: 100-continue\r\nInference-Header-Content-Length: 5\r\n\r\n"
               "5;name=value\r\nhello\r\n3\r\nabc\r\n0\r\nTrailer: value\r\n\r\n")
    old = "HEAD / HTTP/1.0\r\nConnection: keep-alive\r\nAccept: text/plain;q=0.5\r\n\r\n"
    traced = ("GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAccept: application/openmetrics-text\r\n"
              "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n\r\n")
    for step, text in enumerate([get, post, chunked, old, traced, "\r\n" + get + post, chunked + get,
                                 post + post + old]):
        yield bytes([7 * step]) + text.encode()
    # Lines of the longest length, and longer ones, in pieces that end inside them.
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    yield bytes([100]) + head + b"0" * 9000 + b"3\r\nabc\r\n0\r\n\r\n"
    yield bytes([100]) + head + b"3\r\nabc\r\n0\r\nTrailer: " + b"a" * 9000 + b"\r\n\r\n"
    yield bytes([105]) + b"GET /a HTTP/1.1\r\nHost: " + b"a" * 506 + b"\r\n\r\n"


def request_json():
    sampling = {"max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3,
                "n": 2, "stop": ["a", "b"], "stop_token_ids": [1], "presence_penalty": 0.5,
                "frequency_penalty": -0.5, "repetition_penalty": 1.1, "logit_bias": {"5": 1.5},
                "bad_words": ["bad"], "min_tokens": 1, "ignore_eos": True, "priority": 1}
    messages = [{"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Hello <|im_end|>"}], "name": "n"}]
    completions = [
        {"model": "mh-moe", "prompt": "In the beginning", **sampling},
        {"prompt": [[1, 2, 3], [4]], "max_tokens": 1, "stream": True,
         "stream_options": {"include_usage": True}, "logprobs": 2, "truncate_prompt_tokens": -1},
        {"prompt": ["a", "b"], "echo": True, "max_tokens": 0, "prompt_logprobs": 1, "user": "u"},
        {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {
            "name": "s", "strict": True, "schema": {"type": "object"}}}},
        {"prompt": "x", "guided_regex": "[a-z]+", "cache_salt": "s"},
        {"prompt": "x", "structured_outputs": {"choice": ["yes", "no"]}},
        {"prompt": "x", "guided_json": {"type": "integer"}, "max_tokens": 3},
        {"prompt": "x", "return_routing": True, "return_token_ids": True, "routing_control": {
            "top_k": 1, "masked_experts": [{"layer": 1, "experts": [3, 5]}],
            "biased_experts": [{"layer": 1, "expert": 7, "bias": 2.5, "block": "feed_forward"}]}},
    ]
    for body in completions:
        yield b"c\0" + json.dumps(body).encode()
    yield b"c\x4f" + json.dumps(completions[0]).encode()
    for body in [{"messages": messages, "max_completion_tokens": 4, "logprobs": True, "top_logprobs": 2},
                 {"messages": messages + [{"role": "assistant", "content": "Yes"}],
                  "add_generation_prompt": False, "continue_final_message": True},
                 {"messages": messages, "chat_template": "{{ messages[0]['content'] }}",
                  "chat_template_kwargs": {"a": 1}}]:
        yield b"t\x10" + json.dumps(body).encode()
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {
        "type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": \"b\"}"}}
    history = messages + [{"role": "assistant", "content": None, "tool_calls": [call],
                           "reasoning_content": "why"},
                          {"role": "tool", "tool_call_id": "1", "content": "c"}]
    for choice in ("auto", "required", {"type": "function", "function": {"name": "f"}},
                   {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool]}}):
        yield b"t\0" + json.dumps({"messages": history, "tools": [tool], "tool_choice": choice,
                                   "parallel_tool_calls": False, "reasoning_effort": "none"}).encode()
    yield b"r\0" + json.dumps({
        "instructions": "Be brief.", "max_output_tokens": 4, "tool_choice": "auto",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                  {"type": "reasoning", "summary": [{"type": "summary_text", "text": "why"}]},
                  {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                  {"type": "function_call_output", "call_id": "1", "output": "c"}],
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "text": {"format": {"type": "json_schema", "name": "s", "schema": {"type": "object"}}}}).encode()
    yield b"r\0" + json.dumps({"input": "a", "reasoning": {"effort": "none"}, "truncation": "auto",
                               "include": ["message.output_text.logprobs"]}).encode()
    options = {"num_predict": 4, "temperature": 0.5, "repeat_penalty": 1.1, "seed": -1, "stop": ["a"],
               "num_ctx": 8, "mirostat": 0, "num_gpu": 1}
    yield b"o\0" + json.dumps({"messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "thinking": "why", "tool_calls": [{"function": {
            "name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "c", "tool_name": "f"}], "tools": [tool], "options": options,
        "format": {"type": "object"}, "think": "low", "keep_alive": "5m"}).encode()
    for kind in (b"p\0", b"p\x20"):
        for more in ({"system": "Be brief."}, {"raw": True}, {"format": "json", "think": False}):
            yield kind + json.dumps({"prompt": "a", "stream": False, "options": options, **more,
                                     "logprobs": True, "top_logprobs": 1}).encode()
    yield b"m\0" + json.dumps({
        "max_tokens": 4, "system": [{"type": "text", "text": "Be brief."}], "stop_sequences": ["a"],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "messages": [{"role": "user", "content": "a"},
                     {"role": "assistant", "content": [
                         {"type": "thinking", "thinking": "why", "signature": ""},
                         {"type": "text", "text": "b"},
                         {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]},
                     {"role": "user", "content": [
                         {"type": "tool_result", "tool_use_id": "1", "content": "c"},
                         {"type": "text", "text": "d"}]}]}).encode()
    yield b"k\0" + json.dumps({"prompt": "a text", "add_special_tokens": False}).encode()
    yield b"k\x10" + json.dumps({"messages": messages, "return_token_strs": True}).encode()
    yield b"d\0" + json.dumps({"tokens": [5, 6, 4095]}).encode()
    tensors = [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["Once"]},
               {"name": "stream", "datatype": "BOOL", "shape": [1, 1], "data": [[True]]},
               {"name": "sampling_parameters", "datatype": "BYTES", "shape": [1],
                "data": ['{"temperature": 0.5, "max_tokens": 3}']}]
    yield b"i\0" + json.dumps({"id": "1", "inputs": [tensors[0], tensors[2]], "parameters": {"seed": 4},
                               "outputs": [{"name": "text_output",
                                            "parameters": {"binary_data": True}}]}).encode()
    binary = {"name": "text_input", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 8}}
    flag = {"name": "exclude_input_in_output", "datatype": "BOOL", "shape": [1],
            "parameters": {"binary_data_size": 1}}
    yield (b"i\0" + json.dumps({"inputs": [binary, flag],
                                "parameters": {"binary_data_output": True}}).encode() +
           b"\n\n\n\x04\0\0\0text\x01")
    yield b"g\0" + json.dumps({"text_input": "Once", "max_tokens": 3, "stream": True,
                               "parameters": {"temperature": 0.5, "stop": ["a"]}}).encode()
    yield b"b\x01\x02" + b"\x01\0\0\0a\x02\0\0\0bc"
    yield b"b\0\x02" + b"\x01\0\0\0\xff\0\0\0"


def answer_splitter():
    answers = ["<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>commentary "
               "to=functions.f <|constrain|>json<|message|>{\"a\": 1}<|call|>",
               "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[ARGS]{\"a\": \"}\"}",
               "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {}}, {\"name\": \"g\", \"arguments\": {}}]",
               "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {}}]",
               "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```"
               "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
               "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
               "Yes.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>\nNo.",
               "{\"name\": \"f\", \"parameters\": {}}; {\"name\": \"g\", \"parameters\": {}}",
               "[{\"name\": \"f\", \"arguments\": {\"a\": [\"\\\"\"]}}]"]
    for i, answer in enumerate(answers):
        yield bytes([i, 0, 3, 1, 2, 7]) + answer.encode()
        yield bytes([i, 2, 0]) + b"<think>why</think>\n" + answer.encode()
        yield bytes([i, 6, 0]) + b"why</think>" + answer.encode()


def grpc_messages():
    bias = field(1, 5) + varint(2 << 3 | 5) + struct.pack("<f", 1.5)
    sampling = (field(1, 0.5) + field(2, 0.9) + field(3, 5) + field(4, 0.1) + field(5, 7) + field(6, 4) +
                field(7, "stop") + field(8, varint(1)) + field(11, 1) + field(12, 0.5) + field(14, 1.1) +
                field(15, bias) + field(17, "bad") + field(18, 1))
    expert = field(1, 1) + field(2, "feed_forward") + field(3, 5) + field(4, 2.5)
    control = field(1, 1) + field(3, expert) + field(3, field(1, 1) + field(3, 3))
    yield b"g\0" + field(1, "mh-moe") + field(2, "In the beginning") + field(5, sampling) + field(6, 2)
    yield (b"g\0" + field(3, field(1, varint(5) + varint(6))) + field(7, 2) + field(8, 1) + field(13, 1) +
           field(14, control) + field(9, "id-1") + field(10, 3) + field(11, "salt"))
    yield b"g\0" + field(2, "x") + field(12, field(1, '{"type": "object"}') + field(5, 1))
    yield b"g\0" + field(2, "x") + field(4, 0) + field(12, field(2, "[a-z]+"))
    yield b"g\0" + field(2, "x") + field(12, field(3, field(1, "yes") + field(1, "no")))
    yield b"g\0" + field(2, "x") + field(14, field(2, 0.5))
    yield b"s\0" + field(2, "a text") + field(5, 3)
    yield b"t\0" + field(2, "a text") + field(4, 1)
    yield b"d\0" + field(2, varint(5) + varint(4000))
    text = field(1, "text_input") + field(2, "BYTES") + field(3, varint(1))
    tokens = field(1, "max_tokens") + field(2, field(2, 4))
    output = field(1, "text_output")
    yield (b"i\0" + field(1, "mh-moe") + field(3, "7") + field(4, tokens) +
           field(5, text + field(5, field(8, "Once"))) + field(6, output))
    stream = field(1, "stream") + field(2, "BOOL") + field(3, varint(1))
    yield b"i\x01" + field(5, text) + field(5, stream) + field(7, b"\x04\0\0\0text") + field(7, b"\x01")


def frame(kind, flags, stream, payload=b""):
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def events(*items):
    """Events of targets/frame_guard_fuzz.cc: ("c", bytes), ("s", bytes) or ("t", tenths of seconds)."""
    out = b"\x01"
    for kind, value in items:
        if kind == "t":
            out += bytes([3, value])
        else:
            for at in range(0, len(value), 255):
                part = value[at:at + 255]
                out += bytes([0 if kind == "c" else 2, len(part)]) + part
    return out


def frame_guard():
    settings, ack = frame(4, 0, 0), frame(4, 1, 0)
    headers = frame(1, 4, 1, b"h" * 20)
    data = frame(0, 1, 1, b"d" * 30)
    answer = frame(1, 4, 1, b"h") + frame(0, 0, 1, b"a") + frame(1, 5, 1, b"t")
    yield events(("c", settings), ("s", settings + ack), ("c", ack + headers + data), ("s", answer))
    yield events(("c", settings + frame(1, 0, 1, b"h") + frame(9, 0, 1, b"c") + frame(9, 4, 1, b"e")),
                 ("t", 30), ("c", frame(3, 0, 1, b"\0\0\0\x08")))
    yield events(("c", settings + headers), ("s", frame(3, 0, 1, b"\0\0\0\x02")), ("t", 25),
                 ("c", frame(1, 4, 3, b"h")), ("c", frame(8, 0, 0, b"\0\0\0\x01")))
    many = b"".join(frame(1, 4, 2 * i + 1, b"h") for i in range(6))
    yield events(("c", settings + many), ("t", 5),
                 ("c", b"".join(frame(3, 0, 2 * i + 1, b"\0\0\0\x08") for i in range(6))), ("t", 30),
                 ("c", frame(1, 4, 21, b"h") + frame(0, 0, 21, b"d" * 200)))
    yield events(("s", settings), ("c", settings), ("t", 255), ("t", 255))


def chat_template():
    variables = {"messages": [{"role": "system", "content": "Be brief."},
                              {"role": "user", "content": "Hello"},
                              {"role": "assistant", "content": " Hi "}, {"role": "user", "content": "?"}],
                 "add_generation_prompt": True, "tools": [{"name": "f", "parameters": {"a": [1, 2.5]}}]}
    context = b"\n\n\n" + json.dumps(variables).encode()
    # Some templates refuse system messages.
    turns = b"\n\n\n" + json.dumps({**variables, "messages": variables["messages"][1:]}).encode()
    for path in sorted(TEMPLATES.glob("*.jinja")):
        yield path.read_bytes() + context
        yield path.read_bytes() + turns
    for text in ("{% macro m(a, b=2) %}{{ a ~ b }}{% endmacro %}{{ m(1) }}{% call m(1) %}x{% endcall %}",
                 "{% set ns = namespace(n=0) %}{% for m in messages if m.role == 'user' %}"
                 "{% set ns.n = ns.n + loop.index %}{{ loop.last }}{% else %}none{% endfor %}{{ ns.n }}",
                 "{{ tools | tojson(indent=2) }}{{ messages | map(attribute='content') | join(', ') | "
                 "upper | trim | replace('A', 'b') }}{{ messages[::-1][0]['content'][1:3] }}",
                 "{{ '%s %d' | format('a', 3) }}{{ range(5) | list }}{{ 7 // 2 ** 2 % 3 }}{{ {'a': 1}.items() }}"
                 "{{ raise_exception('no') if false else strftime_now('%Y') }}{# note #}",
                 "{%- filter upper -%} a {%- endfilter -%}{% generation %}x{% endgeneration %}",
                 "{% for a, b in {'x': 1}.items() %}{{ a.startswith('x') and b is defined }}"
                 "{% break %}{% endfor %}{{ messages[0].content.split(' ') | length }}"):
        yield text.encode() + context


def json_schema():
    schemas = [{"type": "object", "properties": {"a": {"type": "integer", "minimum": 1, "maximum": 20},
                                                 "b": {"type": "string", "maxLength": 4}},
                "required": ["a"], "additionalProperties": False},
               {"type": "array", "items": {"enum": ["x", 1, None, True]}, "minItems": 1, "maxItems": 3},
               {"anyOf": [{"type": "number", "multipleOf": 0.5}, {"const": {"k": [1]}}]},
               {"$defs": {"t": {"type": "object", "properties": {"n": {"$ref": "#/$defs/t"}}}},
                "$ref": "#/$defs/t"},
               {"type": "string", "pattern": "^a[bc]{1,3}$"}, {"type": "string", "format": "date-time"},
               {"allOf": [{"type": "object", "patternProperties": {}}, {"minProperties": 1}]},
               {"prefixItems": [{"type": "boolean"}, {"type": "null"}], "items": False},
               {"oneOf": [{"type": "string"}, {"type": "integer"}], "title": "t"},
               {"oneOf": [{"type": "integer", "multipleOf": 3}, {"minimum": 2}], "not": {"enum": [7, "a"]}},
               {"type": "object", "patternProperties": {"^a": {"type": "integer"}, "b$": True},
                "propertyNames": {"maxLength": 3}, "dependentRequired": {"a": ["ab"]}},
               {"type": "object", "if": {"required": ["k"]}, "then": {"minProperties": 2}, "else": {"$ref": "#x"},
                "$defs": {"y": {"$anchor": "x", "maxProperties": 1}}},
               {"type": "array", "contains": {"const": 1}, "maxContains": 2, "minItems": 3},
               {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "minItems": 2}]
    for i, schema in enumerate(schemas):
        yield (b"S" if i % 2 else b"s") + json.dumps(schema).encode() + b'\n\n\n{"a": 12, "b": "x"}'
    for pattern in ("[a-z]+\\d{2,3}", "(yes|no)(, (yes|no))*", "\\w+@[^.]+\\.(com|org)", "(?:a|b)?c*.\\u00e9"):
        yield b"r" + pattern.encode() + b"\n\n\nabc12"
    yield b"cyes\nno\nyes, no\n\n\nyes"
    for grammar in ('root ::= sum\nsum ::= val ("+" val)* # c\nval ::= [0-9]{1,3} | "(" sum ")" | \'x\' val?',
                    'root ::= root "a" | .{2} | "\\u00e9"', 'start: (WORD | "["i start "]")+\nWORD: /[a-z]+/\n'
                    '%import common.WS -> X\n%ignore X', 'start: a~1..2 -> b\n?a.2: "a".."c" [a]'):
        yield b"g" + grammar.encode() + b"\n\n\n(12+3)"
    yield b"t<a>\t[0-9]*\t</a>\n<ab\t\\w+\t>\n\n\nx <a>12</a> <"
    yield b'o\n\n\n{"a": [1, 2], "b": {"c": "\\u00e9"}}'


def key_file():
    yield b"# keys\nfirst-key-of-a-list\nsecond-key-of-a-list\n"
    keys = [{"name": "team-a", "key": "the-key-itself-0123456789", "scopes": ["generate", "statistics"],
             "limits": {"requests_per_minute": 600, "tokens_per_minute": 100000, "models": ["mh-moe"],
                        "max_concurrent_requests": 4, "min_priority": -5}, "cache_group": "g"},
            {"name": "operator", "sha256": "0f" * 32, "scopes": ["admin", "routing"],
             "expires": "2030-12-31T00:00:00Z"}]
    yield json.dumps({"keys": keys}).encode()


def packed_cache():
    for bank in (0, 1, 2, 3, 4, 7, 12, 15, 28, 31):
        yield bytes([bank, 6])
    yield bytes([1, 6]) + struct.pack("<HB", 4096, 9)
    yield bytes([1, 4]) + struct.pack("<HB", 4096, 9)
    yield bytes([1, 14]) + struct.pack("<HB", 4096, 9)
    yield bytes([4, 4]) + struct.pack("<HB", 12, 1) + bytes([20])
    yield bytes([0, 1]) + b"moepack\n"


def profile():
    arrays, data = {}, b""

    def add(name, kind, values, shape=None):
        nonlocal data
        code = {"I64": "q", "U64": "Q", "F64": "d", "U32": "I", "F32": "f", "I32": "i", "U16": "H"}[kind]
        part = struct.pack(f"<{len(values)}{code}", *values)
        arrays[name] = {"dtype": kind, "shape": shape or [len(values)],
                        "data_offsets": [len(data), len(data) + len(part)]}
        data += part

    experts = 2
    add("model.shape", "I64", [3, 1, 1, 100])
    add("model.counters", "U64", [1] * 60)
    add("model.diversity_histogram", "U64", [0, 3])
    add("blocks.0.shape", "I64", [0, 1, experts, 1, 0, 1])
    for name in ("selections", "decode_selections", "touching_tokens", "visits", "recomputed_selections",
                 "rejected_selections", "router.selections"):
        add(f"blocks.0.{name}", "U64", [2, 1])
    for name in ("weight_sums", "router.probability_sums"):
        add(f"blocks.0.{name}", "F64", [1.5, 0.5])
    add("blocks.0.distinct_histogram", "U64", [0, 3])
    add("blocks.0.expert_parameters", "I64", [10, 20])
    add("blocks.0.expert_widths", "I32", [4, 8])
    add("blocks.0.counters", "U64", [2, 1, 2, 1, 0, 0, 0, 0, 0, 3])
    add("blocks.0.router.sums", "F64", [0.5, 2.0])
    add("blocks.0.token_counts", "U32", [1, 0, 1, 0, 0, 1], [3, experts])
    add("blocks.0.hidden.rows", "F32", [0.5, 1.0], [1, 2])
    add("blocks.0.hidden.experts", "I32", [1])
    add("blocks.0.hidden.counters", "U64", [1, 4])
    add("blocks.0.routes.top1", "U16", [0, 1, 0])
    add("blocks.0.routes.offsets", "U64", [0, 1, 2, 3])
    add("blocks.0.routes.experts", "U16", [0, 1, 0])
    add("routes.tokens", "I32", [0, 2, 1])
    arrays["__metadata__"] = {"format": "moeserve-expert-profile", "version": "1", "model": "m"}
    header = json.dumps(arrays).encode()
    yield struct.pack("<Q", len(header)) + header + data


def tokenizer_text():
    texts = ["In the beginning God created the heaven and the earth.", "caf\u00e9 \u6f22\u5b57 \U0001F600 e\u0301",
             "a<|endoftext|>b  \n\n\tc 1234567", "It's we'll I'M \u00a0\u2003x", "text te 12 <s> ##xt"]
    for i, text in enumerate(texts):
        yield bytes([i % 3, 20]) + text.encode()
        yield bytes([0, 5]) + text.encode()


def text_requests():
    # By route: embeddings, pooling, classify, score, rerank, fill-mask; TEI's embed, embed_all,
    # predict, rerank, similarity; vectors and labels of the Open Inference Protocol.
    texts = [{"input": "rose"}, {"input": ["a", "", "rose"], "dimensions": 8, "normalize": True},
             {"input": [[1, 2], [3]], "encoding_format": "base64", "token_type_ids": [[0, 1], [0]]},
             {"input": [{"text": "a", "text_pair": "b"}], "truncate_prompt_tokens": -1},
             {"input": "a", "task": "token_embed", "truncation_side": "left", "priority": 1}]
    pairs = [{"text_1": "a", "text_2": ["b", "c"]}, {"queries": ["a"], "documents": "b"}]
    ranked = [{"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1,
               "max_tokens_per_doc": 2, "return_documents": True}]
    masks = [{"input": [1, 5, 2], "top_k": 2, "targets": [3], "logprobs": True},
             {"input": [1, 2], "logprobs": True, "targets_of": [2, 1]}]
    tei = [{"inputs": "a", "truncate": True, "truncation_direction": "Left"},
           {"inputs": ["a", "b"], "normalize": False, "prompt_name": "query"},
           {"inputs": [["a"], ["b", "c"]], "raw_scores": True}]
    tensors = [{"text_input": ["a", "b"], "dimensions": 4, "timeout": 1000},
               {"text_input": "a", "parameters": {"normalize": True}}]
    bodies = [texts, texts, [*texts, {"input": "a", "aggregation": "viterbi"}], pairs, ranked, masks,
              tei, tei, tei, [{"query": "a", "texts": ["b"], "return_text": True}],
              [{"inputs": {"source_sentence": "a", "sentences": ["b"]},
                "parameters": {"truncate": True}}], tensors, tensors]
    for kind, of_route in enumerate(bodies):
        for body in of_route:
            for head in range(5):
                yield bytes([kind, head << 4]) + json.dumps(body).encode()
                yield bytes([kind, head << 4 | 1]) + json.dumps({**body, "model": "mh-moe"}).encode()
    random_bytes = random.Random(5)
    for kind, of_route in enumerate(bodies):
        text = bytearray(json.dumps(of_route[-1]).encode())
        for _ in range(20):
            changed = bytearray(text)
            changed[random_bytes.randrange(len(text))] = random_bytes.randrange(32, 127)
            yield bytes([kind, random_bytes.randrange(128)]) + bytes(changed)


def gzip_bodies():
    packed = [gzip.compress(text, mtime=0) for text in (b"", b"abc", b'{"prompt": "a"}' * 40)]
    for text in packed + [packed[1] + packed[2], b"gzip;q=0.5, *;q=0, identity"]:
        yield bytes([5]) + text


def write(out):
    for make in (answer_splitter, http, request_json, grpc_messages, frame_guard, chat_template,
                 gzip_bodies, json_schema, key_file, packed_cache, profile, text_requests,
                 tokenizer_text):
        folder = out / make.__name__.removesuffix("_bodies")
        folder.mkdir(parents=True, exist_ok=True)
        for seed in make():
            (folder / hashlib.sha1(seed).hexdigest()[:16]).write_bytes(seed)
