"""Converts responses to JSON without losing a bit, and removes values that differ between runs.

A number that is not a plain integer becomes a string: "#" followed by its digits. In JSON responses
these are the digits that the server sent; for gRPC, the shortest digits that yield the same float
or double. A value that is random or depends on time becomes "*".
"""

import json
import re

import numpy as np

ANY = "*"
# gRPC messages omit fields with default values, but join() needs them.
EMPTY_ROUTING = {"first_position": 0, "tokens": 0, "reused": [], "offsets": [0], "experts": [],
                 "weights": []}
RANDOM_ID = re.compile(r"^(cmpl|chatcmpl|gen|score)-[0-9a-f]{24}$")
FINGERPRINT = re.compile(r"^moeserve-.+$")


def _integer(text):
    return int(text) if str(int(text)) == text else f"#{text}"


def parse(text):
    """Parses JSON and keeps the digits of its numbers."""
    return json.loads(text, parse_int=_integer, parse_float=lambda digits: f"#{digits}",
                      parse_constant=lambda word: f"#{word}")


def _hide(answer, key, pattern=None):
    value = answer.get(key)
    if value is not None and (pattern is None or pattern.match(value)):
        answer[key] = value.split("-")[0] + "-" + ANY if pattern is RANDOM_ID else ANY


def hide_identity(answer):
    """Replaces ids, times and versions of a response and of the models in "data" by "*"."""
    _hide(answer, "id", RANDOM_ID)
    _hide(answer, "created")
    _hide(answer, "created_at")
    _hide(answer, "system_fingerprint", FINGERPRINT)
    for key in ("version", "commit", "server_version", "window_seconds"):
        if key in answer and not isinstance(answer[key], dict):
            answer[key] = ANY if answer[key] is not None else None
    data = answer.get("data")
    for card in data if isinstance(data, list) else []:
        _hide(card, "created")
        _hide(card, "created_at")
    return answer


def _join_routing(a, b):
    """Concatenates the routing records `a` and `b` of consecutive ranges of tokens."""
    if b["first_position"] != a["first_position"] + a["tokens"]:
        return {"not adjacent": [a, b]}
    end = a["offsets"][-1]
    out = dict(a)
    out["tokens"] += b["tokens"]
    out["reused"] = a.get("reused", []) + b.get("reused", [])
    out["offsets"] = a["offsets"] + [end + offset for offset in b["offsets"][1:]]
    for key in ("experts", "weights"):
        out[key] = a.get(key, []) + b.get(key, [])
    return out


def join(a, b, key=""):
    """Joins two pieces of a response: concatenates texts and lists, else keeps the last value."""
    if a is None or b is None:
        return a if b is None else b
    if key == "routing":
        return _join_routing(a, b)
    if isinstance(a, dict):
        out = dict(a)
        for name, value in b.items():
            out[name] = join(out.get(name), value, name)
        return out
    if isinstance(a, list):
        return a + b
    return a + b if key in ("text", "content") else b


def join_stream(body):
    """Joins a stream of events to one response, because the cuts between events depend on time."""
    heads, choices, usages, once, end = [], {}, set(), {}, None
    usage = "absent"
    for event in body.split("\n\n"):
        if not event or event.startswith(":"):
            continue
        if event == "data: [DONE]":
            end = "[DONE]"
            continue
        chunk = hide_identity(parse(event.removeprefix("data: ")))
        usage = chunk.pop("usage", "absent")
        parts = chunk.pop("choices", None)
        if parts:
            usages.add(usage if usage in (None, "absent") else "given")
        for choice in parts or []:
            choices[choice["index"]] = join(choices.get(choice["index"]), choice)
        # These fields are in the first chunk only.
        for key in ("routing_control", "prompt_token_ids"):
            if key in chunk:
                once.setdefault(key, []).append(chunk.pop(key))
        if chunk not in heads:
            heads.append(chunk)
    return {"heads": heads, **once, "choices": [_sorted(choices[i]) for i in sorted(choices)],
            "usage": usage, "usage_of_chunks": sorted(map(str, usages)), "end": end}


def _sorted(choice):
    """Sorts the keys, because their order depends on how a stream is divided into events."""
    return dict(sorted(choice.items()))


def _number(value, single):
    return f"#{np.float32(value)!s}" if single else f"#{value!r}"


def _field_value(field, value):
    if field.type == field.TYPE_MESSAGE:
        return message(value)
    if field.type == field.TYPE_ENUM:
        return field.enum_type.values_by_number[value].name
    if field.type in (field.TYPE_FLOAT, field.TYPE_DOUBLE):
        return _number(value, field.type == field.TYPE_FLOAT)
    return value.hex() if isinstance(value, bytes) else value


def message(proto):
    """Converts a gRPC message to a dict. Leaves out fields with default values."""
    out = {}
    for field, value in proto.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            values = field.message_type.fields_by_name["value"]
            out[field.name] = {str(key): _field_value(values, value[key]) for key in sorted(value)}
        elif field.is_repeated:
            out[field.name] = [_field_value(field, item) for item in value]
        else:
            out[field.name] = _field_value(field, value)
    return dict(sorted(out.items()))


def join_messages(messages):
    """Joins a stream of GenerateResponse to one response per choice."""
    choices = {}
    for piece in messages:
        one = {"index": 0, **hide_identity(message(piece))}
        if "routing" in one:
            one["routing"] = {**EMPTY_ROUTING, **one["routing"]}
        choices[one["index"]] = join(choices.get(one["index"]), one)
    return [_sorted(choices[i]) for i in sorted(choices)]


# Metrics that depend on time: gauges over a decaying window, metrics of the process, and metrics
# that other connections and earlier scrapes change.
TIMED = re.compile(
    r"^process_|_load_(balance|entropy)_ratio|moe_window_tokens|moe_hot_expert|layer_unused_experts|"
    r"connections_open|key_requests_total|"
    r"^moeserve_(ranks|rank_up|rank_wait_seconds_total|exchange_|expert_imbalance|placement_|tier_)|"
    r"^moeserve_(http|grpc)_request_duration|"
    r"http_requests_total\{.*\"/(metrics|v1/experts/stats)\"")
SECONDS = re.compile(r"_(seconds|time|latency)")
HISTOGRAM_COUNT = re.compile(r"_count[{ ]")
# Series that exist for each rank.
RANK_LABEL = re.compile(r"^moeserve_rank_(up|wait_seconds_total)\{")
VERSION_LABEL = re.compile(r'version="[^"]*"')


def metrics(text, with_memory=True):
    """Returns the comment lines (name, type and help) of all families, and {series: value}. A value
    that depends on time is "*", and so is the memory of models unless it is asked for."""
    heads, series = [], {}
    for line in text.splitlines():
        if line.startswith("#"):
            heads.append(line)
            continue
        name, value = line.rsplit(" ", 1)
        timed = TIMED.search(name) or (SECONDS.search(name.split("{")[0]) and
                                       not HISTOGRAM_COUNT.search(line))
        if RANK_LABEL.search(name):
            continue
        timed = timed or (not with_memory and name.startswith("moeserve_model_memory_bytes"))
        name = VERSION_LABEL.sub(f'version="{ANY}"', name)
        assert name not in series, name
        series[name] = ANY if timed else value
    return {"families": heads, "series": series}


def metric(text, name, **labels):
    """Returns the sum of the samples of the metric `name` that have these labels."""
    total = 0.0
    for line in text.splitlines():
        if re.match(rf"{name}[{{ ]", line) and all(f'{k}="{v}"' in line for k, v in labels.items()):
            total += float(line.rsplit(" ", 1)[1])
    return total
