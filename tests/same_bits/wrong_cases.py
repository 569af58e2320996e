"""Requests that the server rejects, and requests that do not generate text."""

COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"


def wrong_fields(shape):
    """Returns fields that make a completion request invalid: they are out of range, have the wrong
    type, or are not supported."""
    blocks = shape["blocks"] or [{"layer": 0, "block": "feed_forward", "experts": 4}]
    first = {"layer": blocks[0]["layer"], "block": blocks[0]["block"]}
    other = {"layer": 0, "block": "attention" if first["block"] == "feed_forward" else
             "feed_forward"}
    everyone = list(range(blocks[0]["experts"]))
    controls = [
        3, {"top_k": 0}, {"top_k": 1000}, {"top_k": "1"}, {"top_p": 0}, {"top_p": 1.5},
        {"top_k": 1, "top_p": 0.5}, {"topk": 1}, {"masked_experts": {}},
        {"masked_experts": [first]},
        {"masked_experts": [{**first, "experts": [-1]}]},
        {"masked_experts": [{**first, "experts": [1, 1]}]},
        {"masked_experts": [{**first, "experts": everyone}]},
        {"masked_experts": [{**first, "experts": [100000]}]},
        {"masked_experts": [{**other, "experts": [0]}]},
        {"masked_experts": [{"layer": 999, "experts": [0]}]},
        {"masked_experts": [{"layer": 0, "block": "x", "experts": [0]}]},
        {"biased_experts": [{**first, "expert": 0}]},
        {"biased_experts": [{**first, "expert": 0, "bias": 1e9}]},
    ]
    return [
        {"temperature": -0.1}, {"temperature": 2.5}, {"temperature": "hot"}, {"top_p": -1},
        {"top_p": 1.01}, {"top_k": -2}, {"top_k": 1.5}, {"min_p": -1}, {"min_p": 1.5},
        {"seed": 1.5}, {"seed": 2**63}, {"max_tokens": -1}, {"max_tokens": 0},
        {"max_tokens": 100000}, {"max_tokens": "8"}, {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1}, {"repetition_penalty": 0}, {"repetition_penalty": 101},
        {"logit_bias": {"4096": 1}}, {"logit_bias": {"01": 1}}, {"logit_bias": {"1": 101}},
        {"logit_bias": [1]}, {"allowed_token_ids": []}, {"allowed_token_ids": [-1]},
        {"bad_words": [""]}, {"bad_words": "the"}, {"bad_words": ["a"] * 129}, {"min_tokens": -1},
        {"min_tokens": 100}, {"stop": [""]}, {"stop": ["a"] * 17}, {"stop": ["a" * 257]},
        {"stop": 5}, {"stop_token_ids": [5000]}, {"stop_token_ids": [0] * 65}, {"n": 0},
        {"n": 129}, {"best_of": 2}, {"logprobs": 21}, {"logprobs": True},
        {"prompt_logprobs": -1}, {"prompt_logprobs": 1, "stream": True},
        {"stream": "yes"}, {"stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": 1}, {"echo": 1}, {"ignore_eos": 1},
        {"skip_special_tokens": "no"}, {"truncate_prompt_tokens": 0}, {"request_id": "a b"},
        {"cache_salt": ""}, {"cache_salt": "a" * 129}, {"priority": 1001}, {"model": "other"},
        {"model": 3}, {"suffix": "x"}, {"tools": [{}]}, {"num_beams": 2},
        {"guided_grammar": "x"}, {"guided_json": 3}, {"guided_json": {"type": "no type"}},
        {"guided_json": {"type": "string", "pattern": "("}}, {"guided_regex": ""},
        {"guided_regex": "(a"}, {"guided_choice": []}, {"guided_choice": [1]},
        {"guided_regex": "a", "guided_choice": ["a"]}, {"guided_regex": "a", "ignore_eos": True},
        {"response_format": {"type": "xml"}}, {"response_format": "json_object"},
        {"response_format": {"type": "json_schema"}}, {"structured_outputs": {"grammar": "x"}},
        {"return_routing": "yes"}, {"return_routed_experts": True, "stream": True},
        {"return_routed_experts": True, "routing_control": {"top_k": 1}},
        {"routing_control": {}, "prompt": 5}, {"prompt": None}, {"prompt": ""}, {"prompt": []},
        {"prompt": [4096]}, {"prompt": ["a", 1]}, {"prompt": [[]]}, {"prompt": [1] * 9000},
    ] + [{"routing_control": control} for control in controls]


def wrong_chats():
    """Returns bodies of chat requests that the server rejects."""
    user = {"role": "user", "content": "Tell me."}
    fields = [
        {"messages": None}, {"messages": []}, {"messages": [1]}, {"messages": [{"content": "a"}]},
        {"messages": [{"role": "tool", "content": "a"}]}, {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{**user, "tool_calls": [1]}]}, {"max_tokens": 0}, {"top_logprobs": 2},
        {"logprobs": 3}, {"logprobs": True, "top_logprobs": 21}, {"echo": True},
        {"documents": ["x"]}, {"modalities": ["audio"]}, {"chat_template": "x"},
        {"chat_template_kwargs": {"a": 1}}, {"continue_final_message": True},
    ]
    return [{"messages": [user], **more} for more in fields]


def raw_posts():
    """Returns malformed requests: (path, headers, bytes of the body)."""
    json_type = {"Content-Type": "application/json"}
    return [
        (COMPLETIONS, json_type, b""), (COMPLETIONS, json_type, b"{"),
        (COMPLETIONS, json_type, b"[1]"), (COMPLETIONS, json_type, b'{"prompt": "\xff"}'),
        (COMPLETIONS, json_type, b'{"prompt": "a", "prompt": "b"}'),
        (COMPLETIONS, json_type, b'{"prompt": "a", "temperature": NaN}'),
        (COMPLETIONS, json_type, b"[" * 100 + b"]" * 100),
        (COMPLETIONS, {"Content-Type": "text/plain"}, b'{"prompt": "a"}'),
        (COMPLETIONS, {**json_type, "Content-Encoding": "gzip"}, b'{"prompt": "a"}'),
        (CHATS, json_type, b'"text"'), ("/nowhere", json_type, b"{}"), ("/metrics", json_type, b""),
    ]


def tokenizer_posts():
    """Returns requests to /tokenize and /detokenize: (path, body)."""
    user = {"role": "user", "content": "Where is <|endoftext|>?"}
    texts = ["In the beginning", "naïve 東京 🙂", "a<|endoftext|>b", " \n\n  x\t", ""]
    return [("/tokenize", {"prompt": text, "return_token_strs": True}) for text in texts] + [
        ("/tokenize", {"prompt": "a b", "add_special_tokens": False}),
        ("/tokenize", {"messages": [user], "return_token_strs": True}),
        ("/tokenize", {"messages": [user], "add_generation_prompt": False}),
        ("/tokenize", {"messages": [user], "prompt": "a"}),
        ("/tokenize", {}), ("/tokenize", {"prompt": 3}),
        ("/tokenize", {"prompt": "a", "model": "x"}),
        ("/detokenize", {"tokens": [0, 300, 17, 4095, 261, 262]}), ("/detokenize", {"tokens": []}),
        ("/detokenize", {"tokens": list(range(100, 200))}), ("/detokenize", {"tokens": [4096]}),
        ("/detokenize", {}), ("/detokenize", {"tokens": "a"}),
    ]


def plain_gets(name):
    """Returns (method, path) of requests without a body; `name` is the model's name."""
    return [("GET", path) for path in (
        "/v1/models", f"/v1/models/{name}", "/v1/models/other", "/v1/models/%", "/health",
        "/health/ready", "/health/live", "/v2/health/ready", "/v2/health/live", "/version", "/",
        "/dashboard/nothing", "/nowhere", COMPLETIONS)] + [
            ("HEAD", "/health"), ("OPTIONS", COMPLETIONS), ("DELETE", "/v1/models")]


def statistics_gets(shape):
    """Returns paths of the expert statistics, with valid and invalid parameters."""
    paths = ["stats", "stats?threshold=0.01", "stats?window=600", "stats?window=0",
             "stats?threshold=-1", "layout", "collapse", "tokens", "tokens?layer=99",
             "tokens?layer=0&block=x", "similarity?block=attention", "similarity?layer=0&eps=0",
             "collapse?layer=1"]
    for block in shape["blocks"]:
        where = f"layer={block['layer']}&block={block['block']}"
        paths += [f"tokens?{where}&top=6&min_count=2", f"tokens?{where}", f"similarity?{where}"]
    return [f"/v1/experts/{path}" for path in paths]


def wrong_grpc(shape, pb):
    """Returns Generate requests that the server rejects."""
    sampling = [
        {"temperature": -0.1}, {"temperature": 2.5}, {"temperature": float("nan")}, {"top_p": -1},
        {"top_p": 1.01}, {"top_k": -2}, {"min_p": -1}, {"min_p": 1.5}, {"max_tokens": -1},
        {"max_tokens": 100000}, {"stop": [""]}, {"stop": ["a"] * 17}, {"stop": ["a" * 257]},
        {"stop_token_ids": [5000]}, {"stop_token_ids": [0] * 65}, {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1}, {"repetition_penalty": 0}, {"repetition_penalty": 101},
        {"logit_bias": {4096: 1}}, {"logit_bias": {1: 101}}, {"allowed_token_ids": [-1]},
        {"bad_words": [""]}, {"bad_words": ["a"] * 129}, {"min_tokens": 2**32 - 1},
        {"min_tokens": 100},
    ]
    block = (shape["blocks"] or [{"layer": 0, "block": "feed_forward", "experts": 4}])[0]
    expert = {"layer": block["layer"], "block": block["block"], "expert": 0}
    control, entry, output = pb.RoutingControl, pb.RoutingControl.Expert, pb.StructuredOutput
    fields = [{"sampling": pb.SamplingParams(**params)} for params in sampling] + [
        # No error if texts begin with a token.
        {"text": "", "sampling": pb.SamplingParams(seed=1)},
        {"text": "a", "model": "other"}, {"n": 129}, {"logprobs": 21},
        {"prompt_logprobs": 21}, {"priority": 1001}, {"cache_salt": "a" * 129},
        {"request_id": "a b"}, {"token_ids": pb.TokenIds()}, {"token_ids": pb.TokenIds(ids=[4096])},
        {"token_ids": pb.TokenIds(ids=[1] * 9000)},
        {"structured_output": output(regex="(")}, {"structured_output": output(json_schema="{")},
        {"structured_output": output(json_schema='{"kind": 1}', strict=True)},
        {"structured_output": output(choice=pb.Choices())},
        {"structured_output": output(regex="a"), "sampling": pb.SamplingParams(ignore_eos=True)},
        {"routing_control": control(top_k=0)}, {"routing_control": control(top_k=1000)},
        {"routing_control": control(top_p=0)}, {"routing_control": control(top_p=1.5)},
        {"routing_control": control(experts=[entry(layer=999)])},
        {"routing_control": control(experts=[entry(block="x")])},
        {"routing_control": control(experts=[entry(**{**expert, "expert": 100000})])},
        {"routing_control": control(experts=[entry(**expert, bias=1e9)])},
        {"routing_control": control(experts=[entry(**expert), entry(**expert)])},
    ]
    requests = [pb.GenerateRequest()]
    for more in fields:
        text = {} if "token_ids" in more else {"text": "a"}
        requests.append(pb.GenerateRequest(**{**text, **more}))
    return requests


def other_grpc(pb):
    """Returns (method, request) of calls other than Generate. The server rejects some of them."""
    ids = pb.TokenIds(ids=[17, 300, 2000, 0, 5, 261])
    return [
        ("Score", pb.ScoreRequest(text="In the beginning God created the heaven", top_logprobs=3)),
        ("Score", pb.ScoreRequest(token_ids=ids, top_logprobs=20)),
        ("Score", pb.ScoreRequest(text="a<|endoftext|>b", add_special_tokens=False)),
        ("Score", pb.ScoreRequest()), ("Score", pb.ScoreRequest(text="a", top_logprobs=21)),
        ("Score", pb.ScoreRequest(text="a", model="other")),
        ("Tokenize", pb.TokenizeRequest(text="naïve 東京 🙂", return_token_strs=True)),
        ("Tokenize", pb.TokenizeRequest(text="a<|endoftext|>b", add_special_tokens=False)),
        ("Tokenize", pb.TokenizeRequest(model="other")),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[0, 300, 17, 4095])),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[4096])),
        ("GetModelInfo", pb.GetModelInfoRequest()),
        ("GetModelInfo", pb.GetModelInfoRequest(model="other")),
        ("GetExpertStats", pb.GetExpertStatsRequest()),
        ("GetExpertStats", pb.GetExpertStatsRequest(activation_threshold=0.01)),
        ("GetExpertStats", pb.GetExpertStatsRequest(activation_threshold=-1)),
    ]
