"""The requests whose answers must be the same to the bit whatever else the server does.

Sampling has seeds, and the models have the names of MODELS.
"""

import json

from session import comparable, exact

MODELS = {"split": "mh-moe", "widths": "hmoe-topp", "heads": "moa"}

PSALM = ("The LORD is my shepherd; I shall not want. He maketh me to lie down in green pastures: "
         "he leadeth me beside the still waters. ")
GENESIS = "In the beginning God created the heaven and the earth. And the earth was without form, "
ECHOES = "And God said, Let there be light: and there was light. And God said, Let"
LONG = " ".join(f"Chapter {i}. {PSALM if i % 3 else GENESIS}" for i in range(24))
PLACE = {"type": "object", "required": ["city", "year"], "additionalProperties": False,
         "properties": {"city": {"type": "string", "maxLength": 12},
                        "year": {"type": "integer", "minimum": 1, "maximum": 2000}}}
GRAMMAR = 'root ::= verse (" and " verse){0,3} "."\nverse ::= ("the" | "a") " " [a-z]{2,7}'
TAG = {"type": "structural_tag", "format": {"type": "sequence", "elements": [
    {"type": "any_text", "excludes": ["<"]},
    {"type": "tag", "begin": "<place>", "end": "</place>",
     "content": {"type": "json_schema", "json_schema": PLACE}}]}}
THINKS = ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
          "{% if add_generation_prompt %}<think>\n{% endif %}")
ASK = [{"role": "user", "content": "In the beginning"}]
TALK = [{"role": "system", "content": "Tell stories."}, {"role": "user", "content": "Who was he?"},
        {"role": "assistant", "content": "He was a king."},
        {"role": "user", "content": "And his wife?"}]
WEATHER = {"type": "object", "required": ["place", "unit"], "additionalProperties": False,
           "properties": {"place": {"type": "string", "maxLength": 12},
                          "unit": {"type": "string", "enum": ["C", "F"]},
                          "days": {"type": "integer", "minimum": 0, "maximum": 9}}}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}
NOW = {"type": "function", "function": {"name": "now", "parameters": {
    "type": "object", "properties": {}, "additionalProperties": False}}}

COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"


def seeded(seed, temperature=1.0, **fields):
    return {"seed": seed, "temperature": temperature, **fields}


def completion(prompt, tokens, model="split", **fields):
    return {"model": model, "prompt": prompt, "max_tokens": tokens, "return_token_ids": True,
            **fields}


def completions():
    """Yields (name, body) of completions."""
    greedy = {"temperature": 0}
    yield "greedy, log-probabilities", completion(GENESIS, 24, **greedy, logprobs=5)
    yield "greedy, drafts", completion(ECHOES, 96, **greedy, ignore_eos=True)
    yield "drafts, log-probabilities", completion(ECHOES, 48, **seeded(3, 0.5), logprobs=2,
                                                  stream=True)
    yield "three samples", completion(PSALM, 16, **seeded(11), n=3, logprobs=2)
    yield "filters", completion(PSALM, 24, **seeded(-1, 1.4, top_p=0.9, top_k=40, min_p=0.01))
    yield "penalties", completion(GENESIS, 32, **greedy, presence_penalty=0.5,
                                  frequency_penalty=0.3, repetition_penalty=1.1, logprobs=1)
    yield "biases", completion(GENESIS, 16, **seeded(7), logprobs=3,
                               logit_bias={"300": 5, "301": -100, "500": 2.5})
    yield "bad words", completion(PSALM, 16, **greedy, bad_words=["the", "of", ","])
    yield "stop", completion(PSALM, 48, **seeded(5), stop=["e", " the", "."], min_tokens=6,
                             stream=True)
    yield "score", completion(PSALM, 0, echo=True, logprobs=2)
    yield "prompt's log-probabilities", completion(GENESIS, 8, **greedy, prompt_logprobs=2)
    yield "several prompts", completion([GENESIS, PSALM, ECHOES], 12, **seeded(9), n=2,
                                        stream=True, stream_options={"include_usage": True})
    yield "best of", completion(PSALM, 12, **seeded(2), best_of=4, n=2)
    yield "long prompt", completion(LONG, 12, **greedy, logprobs=1)
    yield "end of a long prompt", completion(LONG + " And", 12, **seeded(4), logprobs=1)
    yield "prediction", completion(ECHOES, 32, **greedy,
                                   prediction={"type": "content", "content": " there be light"})
    yield "schema", completion("A city: ", 48, **seeded(1), guided_json=PLACE, logprobs=1)
    yield "regular expression", completion("A number: ", 24, **seeded(6), n=2,
                                           guided_regex="[0-9]{3}-(ab|cd){1,4}x")
    yield "choice", completion("Who? ", 12, **greedy, guided_choice=["the king", "the queen", "a"])
    yield "grammar", completion("He saw ", 32, **seeded(8), guided_grammar=GRAMMAR, stream=True)
    yield "tag", completion("Here: ", 64, **seeded(12), response_format=TAG)
    yield "routes", completion(PSALM, 12, **greedy, return_routing=True)
    yield "other routes", completion(PSALM, 12, **seeded(13), return_routing=True, stream=True,
                                     routing_control={"top_k": 1, "biased_experts": [
                                         {"layer": 1, "expert": 3, "bias": 2.5}]})
    yield "top-p experts", completion(GENESIS, 24, "widths", **greedy, logprobs=4)
    yield "top-p experts, samples", completion(PSALM, 16, "widths", **seeded(21), n=2, logprobs=1,
                                               stream=True)
    yield "top-p experts, routes", completion(ECHOES, 24, "widths", **greedy, return_routing=True)
    yield "attention experts", completion(GENESIS, 24, "heads", **greedy, logprobs=4)
    yield "attention experts, routes", completion(LONG, 8, "heads", **seeded(22),
                                                  return_routing=True)


def chats():
    """Yields (name, path, body) of chats in their three forms."""
    def chat(messages, tokens, **fields):
        return {"model": "split", "messages": messages, "max_completion_tokens": tokens, **fields}

    yield "chat", CHATS, chat(ASK, 16, temperature=0, logprobs=True, top_logprobs=3)
    yield "chat, stream", CHATS, chat(TALK, 24, **seeded(1), stream=True, logprobs=True,
                                      stream_options={"include_usage": True})
    yield "chat, samples", CHATS, chat(TALK, 16, **seeded(2, 0.8), n=3)
    yield "chat, other model", CHATS, {**chat(ASK, 16, temperature=0), "model": "widths"}
    yield "tools, required", CHATS, chat(ASK, 100, **seeded(3), tools=[TOOL, NOW],
                                         tool_choice="required")
    yield "tools, stream", CHATS, chat(ASK, 100, **seeded(4), tools=[TOOL, NOW], stream=True,
                                       tool_choice={"type": "function",
                                                    "function": {"name": "get_weather"}})
    yield "tools, auto", CHATS, chat(TALK, 32, **seeded(5), tools=[TOOL])
    yield "chat, schema", CHATS, chat(ASK, 64, **seeded(6), response_format={
        "type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}, stream=True)
    yield "chat, reasoning", CHATS, chat(ASK, 48, **seeded(7), chat_template=THINKS)
    response = {"model": "split", "input": "In the beginning", "max_output_tokens": 24}
    tool = {"type": "function", "name": "get_weather", "strict": True, "parameters": WEATHER}
    yield "response", "/v1/responses", {
        **response, "temperature": 0, "include": ["message.output_text.logprobs"],
        "top_logprobs": 2}
    yield "response, stream", "/v1/responses", {**response, **seeded(8), "stream": True}
    yield "response, tools", "/v1/responses", {
        **response, "max_output_tokens": 100, **seeded(9), "stream": True, "tools": [tool],
        "tool_choice": "required"}
    message = {"model": "split", "max_tokens": 24, "messages": ASK, "system": "Tell stories."}
    tool = {"name": "get_weather", "input_schema": WEATHER}
    yield "message", "/v1/messages", {**message, "temperature": 0}
    yield "message, stream", "/v1/messages", {**message, **seeded(10), "stream": True}
    yield "message, tools", "/v1/messages", {
        **message, "max_tokens": 100, **seeded(11), "stream": True, "tools": [tool],
        "tool_choice": {"type": "any"}}
    yield "message, count", "/v1/messages/count_tokens", {
        "model": "split", "messages": ASK, "system": "Tell stories."}


def others():
    """Yields (name, path, body) of other routes."""
    yield "tokenize", "/tokenize", {"model": "split", "prompt": LONG, "return_token_strs": True}
    yield "detokenize", "/detokenize", {"model": "split", "tokens": list(range(300, 340))}
    body = {"text_input": PSALM, "parameters": {"max_tokens": 16, "temperature": 0}}
    yield "generate", "/v2/models/split/generate", body
    yield "generate, stream", "/v2/models/widths/generate_stream", {
        "text_input": PSALM, "parameters": {"max_tokens": 16, **seeded(1)}}
    yield "infer", "/v2/models/split/infer", {
        "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [2],
                    "data": [GENESIS, PSALM]}],
        "parameters": {"max_tokens": 12, "temperature": 0}}


def http_probes():
    """Returns (name, path, body) of all probes over HTTP."""
    return [*((name, COMPLETIONS, body) for name, body in completions()), *chats(), *others()]


def calls(pb):
    """Yields (name, method, request) of calls over gRPC; the method is None for Generate."""
    def request(text, tokens, model="split", sampling=(), **fields):
        return pb.GenerateRequest(model=model, text=text, sampling=pb.SamplingParams(
            max_tokens=tokens, **dict(sampling)), **fields)

    greedy = {"temperature": 0}
    yield "call", None, request(GENESIS, 24, sampling=greedy, logprobs=3)
    yield "call, samples", None, request(PSALM, 16, sampling=seeded(1), n=3, logprobs=1)
    yield "call, drafts", None, request(ECHOES, 96, sampling={**greedy, "ignore_eos": True})
    yield "call, routes", None, request(PSALM, 12, "widths", greedy, return_routing=True)
    yield "call, schema", None, request("A city: ", 48, sampling=seeded(2), structured_output=(
        pb.StructuredOutput(json_schema=json.dumps(PLACE))))
    yield "call, other model", None, request(LONG, 12, "heads", seeded(3), prompt_logprobs=1)
    yield "call, score", "Score", pb.ScoreRequest(model="split", text=PSALM, top_logprobs=2)
    yield "call, tokens", "Tokenize", pb.TokenizeRequest(model="split", text=LONG)
    yield "call, text", "Detokenize", pb.DetokenizeRequest(model="widths",
                                                          token_ids=range(300, 340))


def infer_request(pb, model, text, stream=False, **parameters):
    """Returns a ModelInferRequest."""
    request = pb.ModelInferRequest(model_name=model)
    for name, value in parameters.items():
        kind = "double_param" if isinstance(value, float) else "int64_param"
        setattr(request.parameters[name], kind, value)
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(text.encode())
    if stream:
        flag = request.inputs.add(name="stream", datatype="BOOL", shape=[1])
        flag.contents.bool_contents.append(True)
    return request


def infer(session, model, text, **parameters):
    """Returns the comparable answer to ModelInfer."""
    request = infer_request(session.v2[0], model, text, **parameters)
    answer = session.open_inference().ModelInfer(request, timeout=120, metadata=session.metadata)
    return comparable(exact.message(answer))


def infer_stream(session, model, text, **parameters):
    """Returns the joined texts of ModelStreamInfer, and the outputs of its last answer."""
    request = infer_request(session.v2[0], model, text, stream=True, **parameters)
    pieces, last = b"", None
    for answer in session.open_inference().ModelStreamInfer(iter([request]), timeout=120,
                                                            metadata=session.metadata):
        if answer.error_message:
            raise ValueError(answer.error_message)
        last = {tensor.name: tensor for tensor in answer.infer_response.outputs}
        pieces += b"".join(last["text_output"].contents.bytes_contents)
    return {"text": pieces.decode(), "last": {
        name: exact.message(tensor) for name, tensor in last.items() if name != "text_output"}}


def probes(pb):
    """Returns the list of (name, function of a session that returns the comparable answer)."""
    out = [(name, lambda s, path=path, body=body: s.answer(path, body))
           for name, path, body in http_probes()]
    for name, method, request in calls(pb):
        out.append((name, lambda s, method=method, request=request:
                    s.call(method, request) if method else s.generate(request)))
    out.append(("infer over gRPC", lambda s: infer(s, "split", GENESIS, max_tokens=16,
                                                   temperature=1.0, seed=4)))
    out.append(("infer, stream over gRPC", lambda s: infer_stream(
        s, "widths", PSALM, max_tokens=16, temperature=0.0)))
    return out


def differences(expected, found, place=""):
    """Returns the first differences of two answers, as texts."""
    if type(expected) is not type(found):
        return [f"{place}: {str(expected)[:120]} became {str(found)[:120]}"]
    if isinstance(expected, dict):
        out = [f"{place}: fields {sorted(expected)} became {sorted(found)}"
               ] if expected.keys() != found.keys() else []
        for key in expected.keys() & found.keys():
            out += differences(expected[key], found[key], f"{place}.{key}")
        return out[:5]
    if isinstance(expected, list):
        out = [f"{place}: {len(expected)} elements became {len(found)}"
               ] if len(expected) != len(found) else []
        for index, (a, b) in enumerate(zip(expected, found)):
            out += differences(a, b, f"{place}[{index}]")
        return out[:5]
    if expected == found:
        return []
    return [f"{place}: {str(expected)[:120]} became {str(found)[:120]}"]
