"""Generates the requests of a recording. The same model, number and SEED yield the same requests.

Each valid request is generated as the body of an HTTP request. `grpc_request` converts it to a gRPC
request, if gRPC can express it.
"""

import json
import pathlib
import random

ROOT = pathlib.Path(__file__).resolve().parents[2]
SEED = 20240611
SCHEMAS = [
    {"type": "object", "additionalProperties": False, "required": ["city", "year"],
     "properties": {"city": {"type": "string", "maxLength": 6},
                    "year": {"type": "integer", "minimum": 1, "maximum": 2000}}},
    {"type": "array", "items": {"enum": ["red", "green", 3, None]}, "minItems": 1, "maxItems": 3},
    {"anyOf": [{"type": "boolean"}, {"type": "number", "minimum": 0, "maximum": 10}]},
    {"type": "object", "required": ["a"], "additionalProperties": False,
     "properties": {"a": {"$ref": "#/$defs/word"}, "b": {"type": "integer"}},
     "$defs": {"word": {"type": "string", "pattern": "^[a-c]{1,4}$"}}},
]
REGEXES = ["[0-9]{3}-(ab|cd)", "(yes|no), (he|she) (is|was) [a-z]{2,5}\\.", "[A-Z][a-z]{1,6}"]
CHOICES = [["red", "green", "blue"], ["the king", "the queen", "a"], ["1", "12", "123"]]
ODD_TEXTS = ["naïve café, 東京 🙂 and é", "a<|endoftext|>b", " \n\t  two  blanks ", "x"]
HTTP_ONLY = {"messages", "echo", "return_routed_experts", "truncate_prompt_tokens"}
SEEDS = [0, 1, 7, -1, 2**63 - 1, -2**63, 123456789]


def shape_of(model):
    """Returns the properties of a model that requests need: routed blocks and number of tokens;
    and the size of a small cache."""
    config = json.loads((model / "config.json").read_text())
    blocks = []
    stack = config.get("decoder", config)
    for layer in range(stack["num_hidden_layers"]):
        for block in ("attention", "feed_forward"):
            routing = stack.get(block, {}).get("routing")  # other families have other keys
            if routing:
                blocks.append({"layer": layer, "block": block, "experts": routing["num_experts"]})
    # Samples are preempted, but one fits. Two stacks have two caches.
    small_cache = "420KiB" if "decoder" in config else "200KiB"
    return {"vocabulary": config["vocab_size"], "blocks": blocks, "small_cache": small_cache}


class Generator:
    """Draws requests. Requests with sampling have a seed, so that their responses repeat."""

    def __init__(self, shape):
        self._rng = random.Random(SEED)
        self._shape = shape
        self._text = (ROOT / "tests/data/heldout.txt").read_text()
        self._prefix = self._cut(900)

    def requests(self, count):
        """Returns `count` triples of name, path and body."""
        out = []
        for number in range(count):
            kind = KINDS[number % len(KINDS)]
            path, body = getattr(self, f"kind_{kind}")()
            self._finish(body)
            out.append((f"{number:03} {kind}", path, body))
        return out

    def lists_of_prompts(self):
        """Returns requests with several prompts. Which prompts share a step of the engine depends
        on time, but the responses do not."""
        prompts = [self._cut(60), self._cut(90)]
        ids = [self._ids(9), self._ids(14), self._ids(5)]
        base = {"max_tokens": 8, "return_token_ids": True, "logprobs": 2}
        return [
            ("prompts texts", "/v1/completions",
             {**base, "prompt": prompts, "temperature": 0, "cache_salt": "p1"}),
            ("prompts ids", "/v1/completions",
             {**base, "prompt": ids, "seed": 5, "n": 2, "cache_salt": "p2"}),
            ("prompts stream", "/v1/completions",
             {**base, "prompt": ids, "seed": 6, "stream": True, "cache_salt": "p3"}),
        ]

    # The parts that requests consist of.

    def _cut(self, most):
        length = self._rng.randint(max(8, most // 4), most)
        begin = self._rng.randrange(len(self._text) - length)
        return self._text[begin:begin + length]

    def _ids(self, count):
        return [self._rng.randrange(self._shape["vocabulary"]) for _ in range(count)]

    def _seeded(self):
        return {"seed": self._rng.choice(SEEDS), "temperature": self._rng.choice([0.6, 1.0, 1.4])}

    def _completion(self, **fields):
        draw = self._rng.random()
        if draw < 0.7:
            prompt = self._cut(200)
        elif draw < 0.75:
            prompt = self._rng.choice(ODD_TEXTS)
        else:
            prompt = self._ids(self._rng.randint(3, 50))
        most = self._rng.choice([8, 12, 16, 24, 32])
        return "/v1/completions", {"prompt": prompt, "max_tokens": most, **fields}

    def _chat(self, **fields):
        messages = [{"role": "user", "content": self._cut(120)}]
        most = self._rng.choice([8, 12, 16])
        return "/v1/chat/completions", {"messages": messages, "max_completion_tokens": most,
                                        **fields}

    def _finish(self, body):
        """Adds random fields that any request may have."""
        if self._rng.random() < 0.6:
            body["return_token_ids"] = True
        unary = {"prompt_logprobs", "return_routed_experts"} & set(body)
        if not unary and self._rng.random() < 0.4:
            body["stream"] = True
            options = self._rng.choice([None, {"include_usage": True},
                                        {"include_usage": True, "continuous_usage_stats": True}])
            if options:
                body["stream_options"] = options

    # One function for each kind of request.

    def kind_greedy(self):
        return self._completion(temperature=0)

    def kind_greedy_logprobs(self):
        return self._completion(temperature=0, logprobs=self._rng.choice([0, 1, 5, 20]))

    def kind_seeded_draw(self):
        return self._completion(**self._seeded(), logprobs=2)

    def kind_top_p(self):
        return self._completion(**self._seeded(), top_p=self._rng.choice([0.1, 0.7, 0.95, 1]))

    def kind_top_k(self):
        return self._completion(**self._seeded(), top_k=self._rng.choice([-1, 0, 1, 5, 50, 4096]))

    def kind_min_p(self):
        return self._completion(**self._seeded(), min_p=self._rng.choice([0, 0.02, 0.3, 1]))

    def kind_all_filters(self):
        return self._completion(**self._seeded(), top_p=0.9, top_k=40, min_p=0.01, logprobs=1)

    def kind_penalties(self):
        return self._completion(temperature=0, presence_penalty=self._rng.choice([-2, -0.5, 1.5]),
                                frequency_penalty=self._rng.choice([-1, 0.3, 2]), logprobs=1)

    def kind_repetition(self):
        return self._completion(**self._seeded(),
                                repetition_penalty=self._rng.choice([0.5, 1.3, 100]))

    def kind_logit_bias(self):
        bias = {str(i): self._rng.choice([-100, -2.5, 3.25, 100]) for i in sorted(self._ids(5))}
        return self._completion(**self._seeded(), logit_bias=bias, logprobs=3)

    def kind_allowed(self):
        return self._completion(**self._seeded(), allowed_token_ids=sorted(self._ids(12)))

    def kind_bad_words(self):
        return self._completion(temperature=0, bad_words=["the", "of", ",", "and the"])

    def kind_min_tokens(self):
        return self._completion(**self._seeded(), min_tokens=6, logit_bias={"0": 30},
                                stop_token_ids=[0, 261, 263, 264], logprobs=1)

    def kind_ignore_eos(self):
        return self._completion(temperature=0, ignore_eos=True, logit_bias={"0": 100},
                                skip_special_tokens=self._rng.random() < 0.5)

    def kind_stop(self):
        return self._completion(**self._seeded(), stop=["e", " the", ".", "ing "],
                                include_stop_str_in_output=self._rng.random() < 0.5)

    def kind_stop_text(self):
        return self._completion(temperature=0, stop=" of", min_tokens=self._rng.choice([0, 4]))

    def kind_samples(self):
        return self._completion(**self._seeded(), n=self._rng.choice([2, 3, 5]))

    def kind_samples_logprobs(self):
        return self._completion(**self._seeded(), n=2, best_of=2, logprobs=2, top_k=30,
                                frequency_penalty=0.7)

    def kind_echo(self):
        return self._completion(temperature=0, echo=True)

    def kind_echo_logprobs(self):
        return self._completion(**self._seeded(), echo=True, logprobs=3)

    def kind_echo_only(self):
        path, body = self._completion(echo=True, logprobs=1)
        body["max_tokens"] = 0
        return path, body

    def kind_names_of_ids(self):
        return self._completion(temperature=0, logprobs=4, return_tokens_as_token_ids=True)

    def kind_prompt_logprobs(self):
        return self._completion(temperature=0, prompt_logprobs=self._rng.choice([0, 2, 20]),
                                logprobs=self._rng.choice([None, 1]))

    def kind_guided_json(self):
        path, body = self._completion(**self._seeded(), guided_json=self._rng.choice(SCHEMAS))
        body["max_tokens"] = 40
        return path, body

    def kind_guided_regex(self):
        return self._completion(**self._seeded(), guided_regex=self._rng.choice(REGEXES), n=2)

    def kind_guided_choice(self):
        return self._completion(temperature=0, guided_choice=self._rng.choice(CHOICES), logprobs=2)

    def kind_structured(self):
        schema = {"name": "answer", "strict": True, "schema": SCHEMAS[0]}
        fields = self._rng.choice([
            {"response_format": {"type": "json_object"}},
            {"response_format": {"type": "json_schema", "json_schema": schema}},
            {"structured_outputs": {"regex": REGEXES[0]}},
            {"structured_outputs": {"choice": CHOICES[0]}},
            {"structured_outputs": {"json": SCHEMAS[2]}},
        ])
        path, body = self._completion(**self._seeded(), **fields)
        body["max_tokens"] = 32
        return path, body

    def kind_routing(self):
        return self._completion(temperature=0, return_routing=True, ignore_eos=True)

    def kind_routing_samples(self):
        return self._completion(**self._seeded(), return_routing=True, n=2)

    def kind_routed_experts(self):
        return self._completion(temperature=0, return_routed_experts=True, return_routing=True)

    def _changed(self, control, **fields):
        if not self._shape["blocks"]:
            control = {}
        return self._completion(**self._seeded(), return_routing=True, routing_control=control,
                                **fields)

    def kind_control_top_k(self):
        return self._changed({"top_k": self._rng.choice([1, 2, 3, 5])})

    def kind_control_top_p(self):
        return self._changed({"top_p": self._rng.choice([0.2, 0.5, 0.9, 1])})

    def _some_experts(self):
        blocks = self._shape["blocks"]
        for block in self._rng.sample(blocks, min(2, len(blocks))):
            most = block["experts"] // 3
            experts = self._rng.sample(range(block["experts"]), self._rng.randint(1, most))
            yield {"layer": block["layer"], "block": block["block"]}, experts

    def kind_control_masked(self):
        return self._changed({"masked_experts": [{**where, "experts": experts}
                                                 for where, experts in self._some_experts()]})

    def kind_control_biased(self):
        return self._changed({"biased_experts": [
            {**where, "expert": expert, "bias": self._rng.choice([-5, 0.5, 2.25, 50])}
            for where, experts in self._some_experts() for expert in experts[:2]]}, logprobs=1)

    def kind_cached_prefix(self):
        path, body = self._completion(temperature=0, return_routing=True, logprobs=1)
        body["prompt"] = self._prefix[:self._rng.randint(500, 900)] + self._cut(40)
        body["cache_salt"] = self._rng.choice(["a", "b"])
        return path, body

    def kind_long_prompt(self):
        path, body = self._completion(temperature=0, logprobs=1)
        begin = self._rng.randrange(len(self._text) // 2)
        return path, {**body, "prompt": self._text[begin:begin + 4000], "max_tokens": 8}

    def kind_odd_fields(self):
        path, body = self._completion(
            **self._seeded(), truncate_prompt_tokens=self._rng.choice([-1, 4, 20]), priority=3,
            user="somebody", request_id=f"r{self._rng.randrange(1 << 30)}", no_such_field=1)
        if self._rng.random() < 0.5:
            body["add_special_tokens"] = False
        return path, body

    def kind_default_length(self):
        path, body = self._completion(temperature=0, priority=1000)
        del body["max_tokens"]
        return path, body

    def kind_chat_greedy(self):
        return self._chat(temperature=0)

    def kind_chat_turns(self):
        path, body = self._chat(**self._seeded(), logprobs=True, top_logprobs=3)
        body["messages"] = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": self._cut(60)}], "name": "Ann"},
            {"role": "assistant", "content": self._cut(40)}, *body["messages"]]
        return path, body

    def kind_chat_guided(self):
        format_ = {"type": "json_schema",
                   "json_schema": {"name": "answer", "schema": self._rng.choice(SCHEMAS)}}
        path, body = self._chat(**self._seeded(), response_format=format_)
        body["max_completion_tokens"] = 40
        return path, body

    def kind_chat_samples(self):
        return self._chat(**self._seeded(), n=2, stop=[" the", "<|im_end|>"], return_routing=True,
                          logprobs=True)

    def kind_chat_prompt_logprobs(self):
        return self._chat(temperature=0, prompt_logprobs=1, logprobs=True)

    def kind_chat_continued(self):
        path, body = self._chat(temperature=0, add_generation_prompt=False,
                                continue_final_message=True)
        body["messages"].append({"role": "assistant", "content": "In the beginning"})
        return path, body


KINDS = [name.removeprefix("kind_") for name in vars(Generator) if name.startswith("kind_")]


def structured_output(body, pb):
    """Returns the gRPC form of the structured output fields; None if there are none."""
    outputs = body.get("structured_outputs", {})
    format_ = body.get("response_format", {})
    named = format_.get("json_schema", {})
    schema = body.get("guided_json", outputs.get("json", named.get("schema")))
    regex = body.get("guided_regex", outputs.get("regex"))
    choice = body.get("guided_choice", outputs.get("choice"))
    if schema is not None:
        strict = named.get("strict", False)
        return pb.StructuredOutput(json_schema=json.dumps(schema), strict=strict)
    if regex is not None:
        return pb.StructuredOutput(regex=regex)
    if choice is not None:
        return pb.StructuredOutput(choice=pb.Choices(texts=choice))
    if format_.get("type") == "json_object":
        return pb.StructuredOutput(json_object=True)
    return None


def routing_control(control, pb):
    """Returns the gRPC form of "routing_control"."""
    out = pb.RoutingControl(**{key: control[key] for key in ("top_k", "top_p") if key in control})
    for entry in control.get("masked_experts", []):
        for expert in entry["experts"]:
            out.experts.add(layer=entry["layer"], block=entry["block"], expert=expert)
    for entry in control.get("biased_experts", []):
        out.experts.add(**entry)
    return out


def grpc_request(number, body, pb):
    """Returns the gRPC request for a completion's body; None if gRPC cannot express it."""
    if HTTP_ONLY & set(body):
        return None
    out = pb.GenerateRequest(return_routing=body.get("return_routing", False))
    if isinstance(body["prompt"], str):
        out.text = body["prompt"]
    else:
        out.token_ids.ids.extend(body["prompt"])
    sampling = out.sampling
    for name, field in sampling.DESCRIPTOR.fields_by_name.items():
        value = body.get(name)
        if value is None:
            continue
        if name == "logit_bias":
            sampling.logit_bias.update({int(key): bias for key, bias in value.items()})
        elif field.is_repeated:
            getattr(sampling, name).extend([value] if isinstance(value, str) else value)
        else:
            setattr(sampling, name, value)
    for name in ("n", "logprobs", "prompt_logprobs", "priority", "cache_salt"):
        if body.get(name) is not None:
            setattr(out, name, body[name])
    # The server has processed every prompt over HTTP before, so the prefix cache has it. A new salt
    # makes the server process half of the prompts again.
    if number % 2 and not out.cache_salt:
        out.cache_salt = "grpc"
    structured = structured_output(body, pb)
    if structured is not None:
        out.structured_output.CopyFrom(structured)
    if body.get("routing_control"):
        out.routing_control.CopyFrom(routing_control(body["routing_control"], pb))
    return out
