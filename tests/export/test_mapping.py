"""Tests how mappings from a module's tensors to those of the native format are found and applied.
Needs no PyTorch: NumPy's arrays have the same shapes, slices and transposes."""

import json
import pathlib
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "model_loaders"))

from pytorch_export import mapping, names  # noqa: E402

D, WIDTH, E, L = 16, 24, 4, 2


def wanted():
    """The tensors of a small mixture of experts with a gated expert."""
    out = {"embed.weight": (50, D), "norm.weight": (D,), "head.weight": (50, D)}
    for i in range(L):
        at = f"blocks.{i}."
        out[at + "attention.norm.weight"] = (D,)
        for name, shape in (("q", (D, D)), ("k", (8, D)), ("v", (8, D)), ("o", (D, D))):
            out[at + f"attention.{name}.weight"] = shape
        out[at + "feed_forward.norm.weight"] = (D,)
        out[at + "feed_forward.router.weight"] = (E, D)
        for j in range(E):
            for name, shape in (("gate", (WIDTH, D)), ("up", (WIDTH, D)), ("down", (D, WIDTH))):
                out[at + f"feed_forward.experts.{j}.{name}.weight"] = shape
    return out


def renamed(rename):
    """The same tensors under other names."""
    return {rename(name): shape for name, shape in wanted().items()}


def replaced(*pairs):
    def rename(name):
        for old, new in pairs:
            name = name.replace(old, new)
        return name
    return rename


HUGGING_FACE = replaced(
    ("attention.norm", "input_layernorm"), ("feed_forward.norm", "post_attention_layernorm"),
    ("head.", "lm_head."), ("router", "gate_"), ("blocks.", "model.layers."),
    ("attention.", "self_attn."), (".q.", ".q_proj."), (".k.", ".k_proj."), (".v.", ".v_proj."),
    (".o.", ".o_proj."), (".gate.", ".gate_proj."), (".up.", ".up_proj."),
    (".down.", ".down_proj."), ("gate_.", "gate."), ("feed_forward", "mlp"),
    ("embed.", "model.embed_tokens."))
LLAMA = replaced(
    ("attention.norm", "attention_norm"), ("feed_forward.norm", "ffn_norm"), ("head.", "output."),
    (".gate.", ".w1."), (".up.", ".w3."), (".down.", ".w2."), ("router", "gate"),
    ("blocks.", "layers."), (".q.", ".wq."), (".k.", ".wk."), (".v.", ".wv."), (".o.", ".wo."),
    ("embed.", "tok_embeddings."))


@pytest.mark.parametrize("rename", [HUGGING_FACE, LLAMA, str], ids=["hugging_face", "llama", "same"])
def test_every_tensor_of_a_usual_naming_is_found(rename):
    proposal = mapping.propose(wanted(), renamed(rename))
    assert proposal.complete and not proposal.unused, proposal.text()
    assert mapping.resolve(proposal.mapping(), wanted()) == {name: rename(name) for name in wanted()}


@pytest.mark.parametrize("wanted_name, name", [
    ("blocks.{i}.attention.norm.weight", "layers.{i}.attn.norm.scale"),
    ("blocks.{i}.attention.q.weight", "layers.{i}.attn.heads.q.weight"),
    ("blocks.{i}.feed_forward.latent_down.weight", "layers.{i}.mlp.latent.weight")])
def test_a_word_of_the_format_may_be_a_part_of_other_names(wanted_name, name):
    assert names.similarity(wanted_name, name) > 0.85


def test_stacked_fused_and_transposed_tensors_are_noticed():
    shapes = {"wte.weight": (50, D), "ln_f.weight": (D,), "lm_head.weight": (50, D),
              "mask": (9, 9)}
    for i in range(L):
        at = f"h.{i}."
        shapes.update({at + "ln_1.weight": (D,), at + "ln_2.weight": (D,),
                       at + "attn.qkv.weight": (D + 16, D), at + "attn.out_proj.weight": (D, D),
                       at + "moe.router.weight": (E, D), at + "moe.w2": (E, WIDTH, D),
                       at + "moe.gate_up": (E, D, 2 * WIDTH)})
    proposal = mapping.propose(wanted(), shapes)
    assert proposal.complete, proposal.text()
    found = proposal.mapping()
    assert found["blocks.{i}.attention.q.weight"] == "h.{i}.attn.qkv.weight[0:16]"
    assert found["blocks.{i}.attention.v.weight"] == "h.{i}.attn.qkv.weight[24:32]"
    experts = "blocks.{i}.feed_forward.experts.{j}."
    assert found[experts + "down.weight"] == "h.{i}.moe.w2[{j}].T"
    assert found[experts + "gate.weight"] == "h.{i}.moe.gate_up[{j}].T[0/2]"
    assert found[experts + "up.weight"] == "h.{i}.moe.gate_up[{j}].T[1/2]"
    assert found["ignore"] == ["mask"]
    text = proposal.text()
    assert "transposed, part of gate + up, in this order, stacked" in text
    assert "not used: mask" in text and "square" in text

    # The parts are those that the notation says.
    chance = np.random.default_rng(1)
    tensors = {name: chance.normal(size=shape) for name, shape in shapes.items()}
    out = mapping.apply(found, tensors, wanted())
    assert {name: value.shape for name, value in out.items()} == wanted()
    up = out["blocks.1.feed_forward.experts.2.up.weight"]
    assert (up == tensors["h.1.moe.gate_up"][2].T[WIDTH:]).all()
    assert (out["blocks.1.attention.k.weight"] == tensors["h.1.attn.qkv.weight"][16:24]).all()


def test_experts_that_are_stacked_by_rows():
    shapes = renamed(LLAMA)
    for i in range(L):
        at = f"layers.{i}.feed_forward."
        for j in range(E):
            del shapes[f"{at}experts.{j}.w3.weight"]
        shapes[at + "w3"] = (E * WIDTH, D)
    found = mapping.propose(wanted(), shapes).mapping()
    source = found["blocks.{i}.feed_forward.experts.{j}.up.weight"]
    assert source == "layers.{i}.feed_forward.w3[{j}/4]"


def test_ambiguous_tensors_have_candidates():
    shapes = renamed(LLAMA)
    for i in range(L):
        for j in range(E):
            at = f"layers.{i}.feed_forward.experts.{j}."
            shapes[at + "x"] = shapes.pop(at + "w1.weight")
            shapes[at + "y"] = shapes.pop(at + "w3.weight")
    proposal = mapping.propose(wanted(), shapes)
    assert not proposal.complete
    key = "blocks.{i}.feed_forward.experts.{j}.up.weight"
    candidates = {f"layers.{{i}}.feed_forward.experts.{{j}}.{name}" for name in "xy"}
    found = proposal.mapping()
    assert set(found[key]) == candidates
    assert f"{key} [24, 16]: ambiguous" in proposal.text()
    with pytest.raises(mapping.ExportError, match="keep one of them"):
        mapping.resolve(found, wanted())


def test_names_without_a_meaning_go_by_shape():
    proposal = mapping.propose({"embed.weight": (9, 4), "norm.weight": (4,),
                                "blocks.0.attention.norm.weight": (4,)},
                               {"p": (9, 4), "s": (4,), "t": (4,)})
    found = proposal.mapping()
    assert found["embed.weight"] == "p"
    assert set(found["norm.weight"]) == {"s", "t"} == set(found["blocks.{i}.attention.norm.weight"])


def test_what_is_missing_is_said():
    shapes = renamed(LLAMA)
    for i in range(L):
        del shapes[f"layers.{i}.feed_forward.gate.weight"]
    proposal = mapping.propose(wanted(), shapes)
    key = "blocks.{i}.feed_forward.router.weight"
    assert f"{key} [4, 16]: found no tensor of this shape" in proposal.text()
    assert proposal.mapping()[key] is None
    with pytest.raises(mapping.ExportError, match="expected a tensor of the module, found null"):
        mapping.resolve(proposal.mapping(), wanted())


def test_other_ways_of_numbering_and_unequal_experts():
    need = {f"blocks.{i}.feed_forward.experts.{j}.{name}.weight": shape
            for i in range(L) for j in range(E)
            for name, shape in (("up", (4 + j, D)), ("down", (D, 4 + j)))}
    have = {f"net.{i}.1.experts.{j}.{name}.weight": shape
            for i in range(L) for j in range(E)
            for name, shape in (("0", (4 + j, D)), ("2", (D, 4 + j)))}
    proposal = mapping.propose(need, have)
    assert proposal.mapping() == {
        "blocks.{i}.feed_forward.experts.{j}.up.weight": "net.{i}.1.experts.{j}.0.weight",
        "blocks.{i}.feed_forward.experts.{j}.down.weight": "net.{i}.1.experts.{j}.2.weight"}


@pytest.mark.parametrize("given, message", [
    ({"embed.weight": "x"}, "x: expected a tensor of the module, found none named x"),
    ({"embed.weight": "a[9]"}, r"a\[9\]: \[9\] does not fit the shape \[2, 3\]"),
    ({"embed.weight": "a[0/4]"}, r"\[0/4\] does not fit"),
    ({"embed.weight": "a[1:1]"}, r"\[1:1\] does not fit"),
    ({"embed.weight": "a[0].T"}, r"\.T does not fit the shape \[3\]"),
    ({"embed.weight": 3}, "expected a tensor of the module, found 3"),
    ({"embd.weight": "a"}, "embd.weight: the model has no such tensor"),
])
def test_mappings_that_do_not_fit(given, message):
    with pytest.raises(mapping.ExportError, match=message):
        mapping.apply(given, {"a": np.zeros((2, 3))}, {"embed.weight": (2, 3)})


def test_files_and_tensors_that_are_left_over(tmp_path):
    file = tmp_path / "mapping.json"
    file.write_text(json.dumps({"embed.weight": "a.T", "ignore": ["c.{i}"]}))
    tensors = {"a": np.zeros((3, 2)), "b": np.zeros(1), "c.0": np.zeros(1), "c.1": np.zeros(1)}
    assert set(mapping.apply(file, tensors, {"embed.weight": (2, 3)})) == {"embed.weight", "b"}
    # A tensor with a name of the format that is mapped elsewhere is left over, too.
    tensors["embed.weight"] = np.zeros((2, 3))
    assert "embed.weight (of the module)" in mapping.apply(file, tensors, {"embed.weight": (2, 3)})
    file.write_text("[")
    with pytest.raises(mapping.ExportError, match="expected JSON"):
        mapping.load(file)
