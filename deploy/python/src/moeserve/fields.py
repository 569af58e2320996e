"""What a request may have beside its prompt, and how it is sent over gRPC and HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeserve.v1 import moeserve_pb2 as pb

Prompt = str | Sequence[int] | NDArray[np.int32]
# A JSON schema as text or as a dict, or a class with model_json_schema(), as Pydantic's models have.
Schema = str | Mapping[str, Any] | type


@dataclass(frozen=True)
class StructuredOutput:
    """A form that the answer must have. Exactly one field, beside `strict`, is set."""

    json_schema: Schema | None = None
    regex: str | None = None  # must match the whole text
    choice: Sequence[str] | None = None  # one of these texts
    json_object: bool = False  # any JSON object
    grammar: str | None = None  # in the notation of GBNF or Lark
    structural_tag: str | Mapping[str, Any] | None = None
    strict: bool = False  # for json_schema: unknown keywords are errors

    def message(self) -> pb.StructuredOutput:
        """Returns the form for gRPC. ValueError if not exactly one field is set."""
        name, value = self._only()
        out = pb.StructuredOutput(strict=self.strict)
        if name == "choice":
            out.choice.texts.extend(value)
        else:
            setattr(out, name, value)
        return out

    def fields(self) -> dict[str, Any]:
        """Returns the fields of a chat over HTTP. ValueError as for message()."""
        name, value = self._only()
        if name == "json_schema":
            schema = {"name": "answer", "schema": json.loads(value), "strict": self.strict}
            return {"response_format": {"type": "json_schema", "json_schema": schema}}
        return {"structured_outputs": {name: value}}

    def _only(self) -> tuple[str, Any]:
        given: dict[str, Any] = {}
        if self.json_schema is not None:
            given["json_schema"] = _schema_text(self.json_schema)
        if self.choice is not None:
            given["choice"] = _texts(self.choice)
        if self.structural_tag is not None:
            given["structural_tag"] = (self.structural_tag if isinstance(self.structural_tag, str)
                                       else json.dumps(self.structural_tag))
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None:
                given[name] = getattr(self, name)
        if self.json_object:
            given["json_object"] = True
        if len(given) != 1:
            raise ValueError("StructuredOutput: expected exactly one of json_schema, regex, choice, "
                             f"json_object, grammar and structural_tag, found {len(given)}")
        return next(iter(given.items()))


@dataclass(frozen=True)
class ExpertOverride:
    """Masks an expert, or adds `bias` (-1000 to 1000) to its router score. Of an encoder-decoder, the
    decoder's experts are meant."""

    layer: int
    expert: int
    bias: float | None = None  # None masks the expert
    block: str = "feed_forward"  # or "attention", "cross_attention"


@dataclass(frozen=True)
class RoutingControl:
    """Changes the routing of one request, on a server with --routing-control.

    In every routed block, `top_k` experts per row are selected, or the most probable ones whose
    probabilities together reach `top_p`; at most one of the two is set.
    """

    top_k: int | None = None
    top_p: float | None = None
    experts: Sequence[ExpertOverride] = ()

    def message(self) -> pb.RoutingControl:
        """Returns the override for gRPC. ValueError if both top_k and top_p are set."""
        if self.top_k is not None and self.top_p is not None:
            raise ValueError("RoutingControl: expected top_k or top_p, found both")
        out = pb.RoutingControl()
        if self.top_k is not None:
            out.top_k = self.top_k
        if self.top_p is not None:
            out.top_p = self.top_p
        for item in self.experts:
            out.experts.add(layer=item.layer, block=item.block, expert=item.expert, bias=item.bias)
        return out

    def fields(self) -> dict[str, Any]:
        """Returns the value of "routing_control" over HTTP. ValueError as for message()."""
        message = self.message()
        out: dict[str, Any] = {}
        if message.WhichOneof("selection") == "top_k":
            out["top_k"] = self.top_k
        elif message.WhichOneof("selection") == "top_p":
            out["top_p"] = self.top_p
        masked = [{"layer": item.layer, "block": item.block, "experts": [item.expert]}
                  for item in self.experts if item.bias is None]
        biased = [{"layer": item.layer, "block": item.block, "expert": item.expert,
                   "bias": item.bias} for item in self.experts if item.bias is not None]
        if masked:
            out["masked_experts"] = masked
        if biased:
            out["biased_experts"] = biased
        return out


@dataclass(frozen=True)
class BeamSearch:
    """Searches for the most probable answers instead of drawing tokens."""

    num_beams: int  # 1 to 64, at least n
    length_penalty: float | None = None  # above 0 favours long answers; None: 1
    # Whether the search ends once num_beams answers are finished; "never" goes on as long as a better
    # one is possible.
    early_stopping: bool | str = False

    def message(self) -> pb.BeamSearch:
        """Returns the search for gRPC. ValueError for another value of early_stopping."""
        kinds = {False: pb.EARLY_STOPPING_FALSE, True: pb.EARLY_STOPPING_TRUE,
                 "never": pb.EARLY_STOPPING_NEVER}
        if self.early_stopping not in kinds:
            raise ValueError("BeamSearch: early_stopping: expected True, False or 'never', found "
                             f"{self.early_stopping!r}")
        out = pb.BeamSearch(num_beams=self.num_beams, early_stopping=kinds[self.early_stopping])
        if self.length_penalty is not None:
            out.length_penalty = self.length_penalty
        return out


@dataclass(frozen=True)
class Decoder:
    """How the answers of an encoder-decoder begin, whose prompt is the source."""

    prompt: Prompt | None = None  # a text without special tokens, or token ids
    # The first token that is generated: an id, or a language ("fra_Latn", "fr").
    forced_bos_token_id: int | None = None
    target_language: str = ""

    def put(self, request: Any) -> None:
        if isinstance(self.prompt, str):
            request.decoder_prompt = self.prompt
        elif self.prompt is not None:
            request.decoder_prompt_token_ids.ids.extend(int(token) for token in self.prompt)
        if self.forced_bos_token_id is not None:
            request.forced_bos_token_id = self.forced_bos_token_id
        request.target_language = self.target_language


Structured = StructuredOutput | Schema


def generate_request(prompt: Prompt, sampling: Mapping[str, Any], *, model: str = "",
                     logprobs: bool = False, prompt_logprobs: bool = False, routes: bool = False,
                     n: int = 1, structured_output: Structured | None = None,
                     routing_control: RoutingControl | None = None,
                     beam: BeamSearch | None = None,
                     decoder: Decoder | None = None) -> pb.GenerateRequest:
    """ValueError if a field of `sampling` is unknown or has a wrong value."""
    if n < 1:
        raise ValueError(f"n: expected at least 1, found {n}")
    request = pb.GenerateRequest(model=model, return_routing=routes, n=n,
                                 sampling=_sampling(sampling))
    if logprobs:
        request.logprobs = 0
    if prompt_logprobs:
        request.prompt_logprobs = 0
    if structured_output is not None:
        request.structured_output.CopyFrom(_structured(structured_output).message())
    if routing_control is not None:
        request.routing_control.CopyFrom(routing_control.message())
    if beam is not None:
        request.beam.CopyFrom(beam.message())
    if decoder is not None:
        decoder.put(request)
    set_prompt(request, prompt)
    return request


def encode_request(texts: str | Sequence[Prompt], task: int, *, model: str,
                   pairs: Sequence[str] | None = None, **options: Any) -> pb.EncodeRequest:
    """The request for something of texts. Options that are None are left out."""
    found = [texts] if isinstance(texts, str) else list(texts)
    if pairs is not None and len(pairs) != len(found):
        raise ValueError(f"expected a second text for each of {len(found)}, found {len(pairs)}")
    request = pb.EncodeRequest(model=model, task=task,
                               **{name: value for name, value in options.items()
                                  if value is not None})
    for index, text in enumerate(found):
        item = request.inputs.add()
        if isinstance(text, str):
            item.text = text
        else:
            item.token_ids.ids.extend(int(i) for i in text)
        if pairs is not None:
            item.text_pair = pairs[index]
    return request


def score_request(text: Prompt, model: str) -> pb.GenerateRequest:
    """Computes a text and generates nothing. Unlike Score, Generate can return routes."""
    return generate_request(text, {"max_tokens": 0}, model=model, prompt_logprobs=True, routes=True)


def chat_body(messages: str | Sequence[Mapping[str, Any]], fields: Mapping[str, Any], *,
              model: str = "", routes: bool = False, n: int | None = None, stream: bool = False,
              tools: Sequence[Mapping[str, Any]] | None = None,
              structured_output: Structured | None = None,
              routing_control: RoutingControl | None = None) -> dict[str, Any]:
    """Returns the body of /v1/chat/completions."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    body: dict[str, Any] = {"messages": list(messages),
                            **{name: value for name, value in fields.items() if value is not None}}
    if model:
        body["model"] = model
    if n is not None:
        body["n"] = n
    if routes:
        body["return_routing"] = True
    if stream:
        body["stream"] = True
    if tools is not None:
        body["tools"] = list(tools)
    if structured_output is not None:
        body.update(_structured(structured_output).fields())
    if routing_control is not None:
        body["routing_control"] = routing_control.fields()
    return body


def set_prompt(request: Any, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(int(token) for token in prompt)


def _sampling(fields: Mapping[str, Any]) -> pb.SamplingParams:
    known = pb.SamplingParams.DESCRIPTOR.fields_by_name
    values = {}
    for name, value in fields.items():
        if name not in known:
            raise ValueError(f"{name}: expected a field of SamplingParams: {', '.join(known)}")
        if value is None:
            continue
        # A text is a sequence of characters, too, but here it is one element.
        if name in ("stop", "bad_words"):
            value = _texts(value)
        elif name in ("stop_token_ids", "allowed_token_ids"):
            value = [int(i) for i in ([value] if isinstance(value, (int, np.integer)) else value)]
        values[name] = value
    return pb.SamplingParams(**values)


def _texts(value: str | Iterable[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _structured(value: Structured) -> StructuredOutput:
    return value if isinstance(value, StructuredOutput) else StructuredOutput(json_schema=value)


def _schema_text(schema: Schema) -> str:
    if isinstance(schema, str):
        return schema
    if isinstance(schema, Mapping):
        return json.dumps(schema)
    describe = getattr(schema, "model_json_schema", None)
    if describe is None:
        raise ValueError("json_schema: expected a dict, a text or a class with model_json_schema(), "
                         f"found {schema!r}")
    return json.dumps(describe())
