"""The limit of tokens, and what belongs to which part of an answer, with models that say a script.

An answer that fits `max_tokens` is the same for every larger value: with tools, schemas and free
text, reasoning of three kinds of templates, in all APIs, with and without drafts."""

import itertools
import json
import random
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from conftest import post, start_server, stop_server
from scripted_model import ScriptedModel

TOOL_TAGS = "{% if tools and false %}<tool_call></tool_call>{% endif %}<s>{{ messages[-1].content }}"
THINK_TAGS = (("<think>", False), ("</think>", False))
CHANNEL_TAGS = tuple((f"<|{name}|>", True) for name in (
    "channel", "message", "end", "start", "return", "call", "constrain"))
# The template, its added tokens, and the tokens that end an answer.
FAMILIES = {
    "opened": (TOOL_TAGS + "{# </think> #}<think>", THINK_TAGS, ("</s>",)),
    "opens": (TOOL_TAGS + "{# <think> </think> #}", THINK_TAGS, ("</s>",)),
    "channels": ("{# <|channel|>analysis<|message|> tools #}<s>{{ messages[-1].content }}"
                 "<|start|>assistant", CHANNEL_TAGS, ("</s>", "<|return|>")),
}
ANSWERS = 168  # per family
LARGE = 300    # tokens; more than any answer has

SCHEMA = {"type": "object", "additionalProperties": False, "required": ["s", "n"], "properties": {
    "ok": {"type": "boolean"}, "s": {"type": "string"}, "n": {"type": "integer"},
    "list": {"type": "array", "items": {"type": "string"}},
    "o": {"type": "object", "required": ["k"], "additionalProperties": False,
          "properties": {"k": {"enum": ["one", "two and a half", "drei"]}, "b": {"type": "null"}}}}}
WORDS = ["Zürich", "rain", "the sun", "🙂", "a \"quote\"", "42", "so", "well then", "é", "{", "line\n"]


def words(rng, most):
    return " ".join(rng.choice(WORDS[:4] + WORDS[5:9]) for _ in range(rng.randint(1, most)))


def instance(rng):
    value = {}
    if rng.random() < 0.5:
        value["ok"] = rng.random() < 0.5
    value["s"] = " ".join(rng.sample(WORDS, rng.randint(0, 3)))
    value["n"] = rng.randint(-99, 9999)
    if rng.random() < 0.4:
        value["list"] = rng.sample(WORDS, rng.randint(0, 3))
    if rng.random() < 0.4:
        value["o"] = {"k": rng.choice(["one", "two and a half", "drei"])}
        if rng.random() < 0.5:
            value["o"]["b"] = None
    separators = (",", ":") if rng.random() < 0.2 else (", ", ": ")
    return json.dumps(value, ensure_ascii=False, separators=separators)


def pieces(rng, text, tags):
    """Cuts a text into tokens; tags are tokens by themselves."""
    for tag in tags:
        before, found, after = text.partition(tag)
        if found:
            return pieces(rng, before, tags) + [tag] + pieces(rng, after, tags)
    out = []
    while text:
        size = rng.choice([1, 2, 4, 7, 12])
        out.append(text[:size])
        text = text[size:]
    return out


class Answer:
    """What the model says to one prompt, and how the server should read it."""

    def __init__(self, rng, family, number):
        self.kind = ("tools", "schema", "free")[number % 3]
        self.api = (("chat", "stream", "responses", "messages") if self.kind != "schema" else
                    ("chat", "stream", "responses", "completions"))[number // 3 % 4]
        self.required = self.kind == "tools" and rng.random() < 0.5
        self.offers_tools = self.kind == "tools" or (self.kind == "free" and rng.random() < 0.8)
        self.reasoning = "" if self.api == "completions" else rng.choice(
            [words(rng, 4), words(rng, 2), ""])
        self.content, self.calls = "", []
        if self.kind == "tools":
            several = family != "channels" and rng.random() < 0.3
            self.calls = [(rng.choice("fg"), instance(rng)) for _ in range(2 if several else 1)]
        else:
            self.content = instance(rng) if self.kind == "schema" else words(rng, 6)
        text = self.channels(rng) if family == "channels" else self.tags(family)
        if self.api == "completions":
            text = self.content
        self.pieces = pieces(rng, text, [tag for tag, _ in FAMILIES[family][1]])
        # What constrains the answer need not be followed by a token for the end.
        if self.kind == "free" or (self.calls and family != "channels" and not self.required):
            self.pieces.append(FAMILIES[family][2][-1])

    def tags(self, family):
        text = "\n".join('<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>' % call
                         for call in self.calls) or self.content
        if family == "opens":
            return f"<think>{self.reasoning}</think>\n{text}" if self.reasoning else text
        return f"{self.reasoning}</think>\n\n{text}"

    def channels(self, rng):
        text = ""
        if self.reasoning:
            text = f"<|channel|>analysis<|message|>{self.reasoning}<|end|><|start|>assistant"
        for name, arguments in self.calls:
            text += (f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
                     f"{arguments}")
        if not self.calls:
            head = " <|constrain|>json" if self.kind == "schema" and rng.random() < 0.5 else ""
            text += f"<|channel|>final{head}<|message|>{self.content}"
        return text

    def expected(self):
        return self.reasoning, self.content, self.calls, "stop"


class Server:
    def __init__(self, folder, family, draft_tokens):
        self.process = start_server("--draft-tokens", str(draft_tokens), folder=folder)
        probe = post(self.process, "/v1/chat/completions", {
            "messages": [{"role": "user", "content": "x" * 9}], "max_tokens": 1})
        self.around = probe["usage"]["prompt_tokens"] - 9  # tokens of the template

    def stop(self):
        return stop_server(self.process)

    def ask(self, answer, limit):
        """Returns (reasoning, content, calls, how it ended) and the number of tokens."""
        content = "x" * (answer.prompt_tokens - self.around)
        functions = [{"name": name, "parameters": SCHEMA} for name in "fg"]
        tools = [{"type": "function", "function": function} for function in functions]
        body = {"temperature": 0, "messages": [{"role": "user", "content": content}],
                "max_tokens": limit}
        if answer.api in ("chat", "stream"):
            if answer.offers_tools:
                body["tools"] = tools
                body["tool_choice"] = "required" if answer.required else "auto"
            if answer.kind == "schema":
                body["response_format"] = {"type": "json_schema",
                                           "json_schema": {"name": "answer", "schema": SCHEMA}}
            return (self.stream if answer.api == "stream" else self.chat)(body)
        if answer.api == "responses":
            body = {"temperature": 0, "input": content, "max_output_tokens": limit}
            if answer.offers_tools:
                body["tools"] = [{"type": "function", **function} for function in functions]
                body["tool_choice"] = "required" if answer.required else "auto"
            if answer.kind == "schema":
                body["text"] = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
            return self.responses(body)
        if answer.api == "messages":
            if answer.offers_tools:
                body["tools"] = [{"name": name, "input_schema": SCHEMA} for name in "fg"]
                body["tool_choice"] = {"type": "any" if answer.required else "auto"}
            return self.messages(body)
        return self.completions({"temperature": 0, "prompt": [5] * answer.prompt_tokens,
                                 "max_tokens": limit, "guided_json": SCHEMA})

    def chat(self, body):
        out = post(self.process, "/v1/chat/completions", body)
        choice = out["choices"][0]
        message = choice["message"]
        calls = [(call["function"]["name"], call["function"]["arguments"])
                 for call in message.get("tool_calls", [])]
        return self.result(message.get("reasoning_content"), message["content"], calls,
                           choice["finish_reason"], out["usage"]["completion_tokens"])

    def stream(self, body):
        request = urllib.request.Request(
            self.process.url + "/v1/chat/completions",
            json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode(),
            {"Content-Type": "application/json"})
        reasoning = content = ""
        calls, finish, tokens = [], None, 0
        for line in urllib.request.urlopen(request):
            data = line.decode().strip().removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            for choice in event["choices"]:
                finish = choice["finish_reason"] or finish
                delta = choice["delta"]
                reasoning += delta.get("reasoning_content") or ""
                content += delta.get("content") or ""
                for call in delta.get("tool_calls", []):
                    if call["index"] == len(calls):
                        calls.append([call["function"]["name"], ""])
                    calls[call["index"]][1] += call["function"]["arguments"]
        return self.result(reasoning, content, [tuple(call) for call in calls], finish, tokens)

    def responses(self, body):
        out = post(self.process, "/v1/responses", body)
        parts = {"reasoning": "", "message": ""}
        calls = []
        for item in out["output"]:
            if item["type"] == "function_call":
                calls.append((item["name"], item["arguments"]))
            else:
                parts[item["type"]] += "".join(part["text"] for part in item["content"])
        finish = {"completed": "stop", "incomplete": "length"}[out["status"]]
        return self.result(parts["reasoning"], parts["message"], calls, finish,
                           out["usage"]["output_tokens"])

    def messages(self, body):
        out = post(self.process, "/v1/messages", body)
        text = {"thinking": "", "text": ""}
        calls = []
        for block in out["content"]:
            if block["type"] == "tool_use":
                calls.append((block["name"], block["input"]))
            else:
                text[block["type"]] += block[block["type"]]
        return self.result(text["thinking"], text["text"], calls, out["stop_reason"],
                           out["usage"]["output_tokens"])

    def completions(self, body):
        out = post(self.process, "/v1/completions", body)
        return self.result("", out["choices"][0]["text"], [], out["choices"][0]["finish_reason"],
                           out["usage"]["completion_tokens"])

    @staticmethod
    def result(reasoning, content, calls, finish, tokens):
        calls = [(name, json.loads(arguments) if isinstance(arguments, str) and finish != "length"
                  else arguments) for name, arguments in calls]
        ends = {"tool_calls": "stop", "tool_use": "stop", "end_turn": "stop", "max_tokens": "length"}
        return (reasoning or "", content or "", calls, ends.get(finish, finish)), tokens


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request, tmp_path_factory):
    """Returns the answers of a family, and servers without and with drafts."""
    folder = tmp_path_factory.mktemp(request.param)
    template, added, ends = FAMILIES[request.param]
    rng = random.Random(request.param)
    answers = [Answer(rng, request.param, number) for number in range(ANSWERS)]
    script, position = {}, 12
    for answer in answers:
        answer.prompt_tokens = position + 1
        script.update(zip(itertools.count(position), answer.pieces))
        position += len(answer.pieces) + 1
    ScriptedModel(folder, script, position + LARGE + 20, template, added, ends)
    servers = [Server(folder, request.param, tokens) for tokens in (0, 8)]
    yield answers, servers
    for server in servers:
        assert server.stop() == 0


def test_a_limit_that_an_answer_fits_in_does_not_change_it(family):
    answers, (plain, drafting) = family

    def check(answer):
        reasoning, content, calls, _ = answer.expected()
        expected = reasoning, content, [(n, json.loads(a)) for n, a in calls], "stop"
        found, tokens = plain.ask(answer, LARGE)
        wrong = [] if found == expected else [(LARGE, answer.api, answer.pieces, found, expected)]
        limits = {tokens, tokens + 1, tokens + 4, 2 * tokens + 3}
        for server, limit in [*((plain, m) for m in limits), (drafting, tokens), (drafting, LARGE)]:
            again, count = server.ask(answer, limit)
            if again != found or count != tokens:
                wrong.append((limit, tokens, answer.api, answer.pieces, again, found))
        return wrong

    with ThreadPoolExecutor(8) as pool:
        wrong = list(itertools.chain.from_iterable(pool.map(check, answers)))
    assert not wrong, f"{len(wrong)} wrong, such as {wrong[0]}"


def test_free_text_is_cut_off(family):
    """With tools as without, a limit cuts free text and reasoning off, and nothing else happens."""
    answers, (plain, drafting) = family
    free = [answer for answer in answers if answer.kind == "free"][:24]
    for answer in free:
        whole, tokens = plain.ask(answer, LARGE)
        begins_with_head = answer.pieces[0] == "<|channel|>"
        for limit in {tokens - 1, tokens // 2, 1}:
            # The head of a first message that does not fit may become that of another.
            if begins_with_head and limit < tokens - 1:
                continue
            cut, count = (plain if limit % 2 else drafting).ask(answer, limit)
            assert count == limit and cut[3] == "length" and not cut[2], (answer.pieces, limit, cut)
            assert whole[0].startswith(cut[0]) and whole[1].startswith(cut[1]), (limit, cut, whole)
