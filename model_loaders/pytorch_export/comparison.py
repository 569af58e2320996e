"""Compares what a PyTorch module and moeserve compute from the same weights and tokens."""

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import struct
import tempfile

import torch

from pytorch_export import mapping as mappings
from pytorch_export.mapping import ExportError
from pytorch_export.server import Server

TIE = 1e-5  # scores that differ by less may be ranked either way
TOP = 20  # alternatives per token whose log-probabilities are compared, too
SHOWN = 4


@dataclasses.dataclass
class BlockRoutes:
    """The routes of one routed block. A row is a token, or a sub-token if the block splits tokens."""

    block: str  # such as "0.feed_forward"
    rows: int = 0
    differing: int = 0  # rows with other experts, without ties
    from_scores: bool = False  # experts were selected from the module's scores, as config.json says
    ties: int = 0  # rows with other experts whose scores are equal within rounding
    first: str = ""  # the first differing row
    skipped: str = ""  # why the routes were not compared


@dataclasses.dataclass
class Report:
    tokens: int
    tolerance: float
    largest: float  # largest difference of a log-probability
    largest_at: str
    first_at: str  # first position where the tolerance is exceeded; empty if there is none
    blocks: list  # BlockRoutes in the order in which they are computed
    hint: str = ""

    @property
    def equal(self):
        """Whether log-probabilities are within the tolerance and compared routes are the same."""
        return not self.first_at and not any(block.differing for block in self.blocks)

    def __str__(self):
        lines = [f"log-probabilities of {self.tokens} tokens: largest difference {self.largest:.2e} "
                 f"({self.largest_at})"]
        if self.first_at:
            lines.append(f"  first difference above {self.tolerance:g}: {self.first_at}")
        compared = [block for block in self.blocks if not block.skipped]
        if compared:
            differing = [block for block in compared if block.differing]
            ties = sum(block.ties for block in compared)
            from_scores = any(block.from_scores for block in compared)
            lines.append(f"routes of {len(compared)} blocks, {sum(b.rows for b in compared)} rows"
                         + (" (selected from the module's scores)" if from_scores else "") + ": "
                         f"{sum(b.differing for b in compared)} rows differ"
                         + (f", and {ties} more whose scores are tied" if ties else ""))
            for at, block in enumerate(differing[:SHOWN]):
                lines.append(f"  {'first ' if at == 0 else ''}block {block.block}: {block.differing} "
                             f"of {block.rows} rows; {block.first}")
            if len(differing) > SHOWN:
                lines.append(f"  and {len(differing) - SHOWN} more blocks")
        skipped = [block for block in self.blocks if block.skipped]
        for block in skipped[:SHOWN]:
            lines.append(f"  routes of {block.block} not compared: {block.skipped}")
        if len(skipped) > SHOWN:
            lines.append(f"  and those of {len(skipped) - SHOWN} more blocks")
        if self.hint:
            lines.append(self.hint)
        lines.append("equal" if self.equal else "different")
        return "\n".join(lines)


def compare(module, folder, token_ids=None, mapping=None, routers=None, moeserve=None,
            tolerance=1e-3):
    """Runs the tokens through the module and through moeserve in f32. Returns a Report.

    module: called with token ids [1, T]; returns logits [1, T, V] or [T, V], an object with
    `logits`, or a tuple or dict with them.
    token_ids: a list of at least two ids; default: 64 random ones.
    mapping: that of the export, which leads to the routers.
    routers: {"0.feed_forward": name of a submodule, ...} for blocks whose router is not found. The
    submodule returns scores [rows, experts], or expert ids [rows, selected] (integers; negative ones
    are ignored), alone or in a tuple. {i} in both stands for the layer.
    moeserve: the program; default: $MOESERVE_BIN, or moeserve on the search path.
    Raises ExportError if the module or the server cannot be run as described.
    """
    folder = pathlib.Path(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = config.get("model_type")
    if kind in ("routed_encoder", "routed_encoder_decoder"):
        raise ExportError(f"{folder}: expected a decoder, found {kind}; moeserve check loads the "
                          "folder, but only decoders can be compared")
    ids = _ids(token_ids, config)
    with _with_tokenizer(folder) as served, Server(served, moeserve) as server:
        answer = server.prompt(ids, TOP)
    record = answer.get("routing") or {"layout": {"blocks": []}}
    blocks = record["layout"]["blocks"]
    names = [f"{block['layer']}.{block['block']}" for block in blocks]
    found, skipped = _find_routers(module, names, mapping, routers or {})
    logits, outputs = _run(module, ids, found)
    if logits.shape != (len(ids), config["vocab_size"]):
        raise ExportError(f"module: expected logits of shape [1, {len(ids)}, "
                          f"{config['vocab_size']}], found {list(logits.shape)}")
    report = _compare_logprobs(logits, ids, answer["prompt_logprobs"], tolerance)
    for name, block in zip(names, blocks):
        result = BlockRoutes(name, skipped=skipped.get(name, ""))
        if not result.skipped:
            _compare_routes(result, block, record, _routing(config, block), outputs.get(name),
                            found[name])
        report.blocks.append(result)
    if not report.equal:
        report.hint = _hint(module, folder)
    return report


def _ids(given, config):
    if given is None:
        count = max(2, min(64, config["max_position_embeddings"] - 1))
        chance = torch.Generator().manual_seed(0)
        given = torch.randint(config["vocab_size"], (count,), generator=chance)
    ids = [int(i) for i in given]
    if len(ids) < 2:
        raise ExportError(f"token_ids: expected at least 2, found {len(ids)}")
    for i in ids:
        if not 0 <= i < config["vocab_size"]:
            raise ExportError(f"token_ids: expected ids in [0, {config['vocab_size']}), found {i}")
    return ids


@contextlib.contextmanager
def _with_tokenizer(folder):
    """Gives a folder that can be served: for one without a tokenizer, a copy with a made-up one."""
    names = ("tokenizer.json", "*tokenizer*.model", "spiece.model", "sentencepiece.bpe.model",
             "*tiktoken*", "vocab.json")
    if any(next(folder.glob(name), None) for name in names):
        yield folder
        return
    folder = folder.resolve()
    beside = folder.parent if os.access(folder.parent, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=beside) as scratch:
        for path in folder.iterdir():
            _link(path, os.path.join(scratch, path.name))
        with open(os.path.join(scratch, "tokenizer.json"), "w", encoding="utf-8") as file:
            json.dump({"version": "1.0", "added_tokens": [],
                       "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}, file)
        yield pathlib.Path(scratch)


def _link(path, to):
    """Links a file, because weights are large; copies it where files cannot be linked."""
    if not path.is_file():
        return
    try:
        os.link(path, to)
    except OSError:
        shutil.copyfile(path, to)


def _run(module, ids, routers):
    """Returns the logits [T, V] in f64, and what the routers returned: {block: output}."""
    outputs, hooks = {}, []
    modules = dict(module.named_modules())
    for block, name in routers.items():
        def keep(_, __, output, block=block):
            outputs.setdefault(block, output)
        hooks.append(modules[name].register_forward_hook(keep))
    place = next(iter(module.parameters()), torch.zeros(0)).device
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            output = module(torch.tensor([ids], device=place))
    finally:
        module.train(training)
        for hook in hooks:
            hook.remove()
    if isinstance(output, dict):
        output = output.get("logits")
    elif not isinstance(output, torch.Tensor):
        output = getattr(output, "logits", output)
    if isinstance(output, (tuple, list)) and output:
        output = output[0]
    if not isinstance(output, torch.Tensor):
        raise ExportError(f"module: expected logits, found {type(output).__name__}")
    logits = output.detach().to("cpu", torch.float64)
    return logits[0] if logits.ndim == 3 and logits.shape[0] == 1 else logits, outputs


def _compare_logprobs(logits, ids, served, tolerance):
    own = logits.log_softmax(-1)
    largest, largest_at, first_at = -1.0, "", ""
    for position in range(1, len(ids)):
        for key, entry in served[position].items():
            token, value = int(key), float(entry["logprob"])
            mine = own[position - 1, token].item()
            difference = abs(value - mine)
            if not difference <= tolerance and not first_at:  # also NaN
                first_at = _place(position, token, value, mine)
            if not difference <= largest:
                largest, largest_at = difference, _place(position, token, value, mine)
    return Report(len(ids), tolerance, largest, largest_at, first_at, [])


def _place(position, token, served, own):
    return f"position {position}, token {token}: moeserve {served:.6f}, module {own:.6f}"


def _find_routers(module, blocks, mapping, given):
    """Returns {block: submodule that has the block's router} and {block: why there is none}."""
    modules, sources = dict(module.named_modules()), dict(module.named_parameters())
    mapped = mappings.load(mapping) if mapping is not None else {}
    given = {key: value for key, value in given.items() if value}
    known = set(blocks) | {mappings.template(block)[0] for block in blocks}
    unknown = [key for key in given if key not in known]
    if unknown:
        example = blocks[0] if blocks else "none"
        raise ExportError(f"routers: expected a routed block such as {example}, found {unknown[0]}")
    found, skipped = {}, {}
    for block in blocks:
        pattern, numbers = mappings.template(block)
        name = given.get(block, given.get(pattern))
        if name is not None:
            name = mappings.fill(name, numbers)
            if name not in modules:
                raise ExportError(f"routers: {block}: expected a submodule, found none named {name}")
            found[block] = name
            continue
        name = _owner(block, sources, mapped, modules)
        if name:
            found[block] = name
        else:
            skipped[block] = ("no submodule has the router's tensors and no others; name the one "
                              "that returns scores or expert ids in routers")
    return found, skipped


def _owner(block, parameters, mapped, modules):
    """Returns the smallest submodule that has all parameters of a block's router and no others."""
    prefix = f"blocks.{block}.router."
    leaves = ("weight", "bias", "projection.weight", "projection.bias", "experts.weight",
              "temperature", "norm.weight")
    names = []
    for leaf in leaves:
        pattern, numbers = mappings.template(prefix + leaf)
        source = mapped.get(prefix + leaf, mapped.get(pattern, prefix + leaf))
        if not isinstance(source, str):
            continue
        source = mappings.fill(source, numbers)
        if source in parameters:
            names.append(source)
    if not names:
        return None
    parts = [name.split(".")[:-1] for name in names]
    common = os.path.commonprefix(parts)
    owner = ".".join(common)
    inside = [name for name in parameters if name.startswith(owner + ".")]
    return owner if owner in modules and common and set(inside) <= set(names) else None


def _routing(config, block):
    value = config[block["block"]]
    value = value[block["layer"]] if isinstance(value, list) else value
    return value["routing"]


def _tensors(output):
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for item in output.values():
            yield from _tensors(item)
    elif isinstance(output, (tuple, list)):
        for item in output:
            yield from _tensors(item)


def _selections(output, rows, experts, routing):
    """Returns (expert ids per row, scores [rows, experts] or None) from a router's output.

    ExportError, with the reason, if they cannot be told from it.
    """
    tensors = [tensor.detach().cpu() for tensor in _tensors(output)]
    for tensor in tensors:
        if tensor.dtype in (torch.int32, torch.int64) and tensor.numel() and tensor.ndim > 1:
            ids = tensor.reshape(-1, tensor.shape[-1])
            if len(ids) == rows and int(ids.max()) < experts:
                return [sorted({int(e) for e in row if e >= 0}) for row in ids], None
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.ndim > 1 and tensor.shape[-1] == experts:
            scores = tensor.reshape(-1, experts).double()
            if len(scores) == rows:
                return _select(scores, routing), scores
    shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors) or "no tensor"
    raise ExportError(f"expected scores [{rows}, {experts}] or expert ids [{rows}, selected], found "
                      f"{shapes}")


def _select(scores, routing):
    chooser = routing["select"]
    plain = not chooser.get("bias") and chooser.get("best_groups", chooser.get("groups", 1)) == \
        chooser.get("groups", 1)
    order = scores.sort(descending=True, stable=True).indices
    if chooser["kind"] == "top_k" and plain:
        return [sorted(row[:chooser["k"]].tolist()) for row in order]
    if chooser["kind"] == "top_p" and plain and routing.get("gate", "softmax") == "softmax":
        sums = scores.softmax(-1).gather(1, order).cumsum(-1)
        reached = sums > chooser["p"] if chooser.get("compare") == "gt" else sums >= chooser["p"]
        most = min(chooser.get("max", scores.shape[1]), scores.shape[1])
        counts = [min(int((~row).sum()) + 1, most) for row in reached]
        return [sorted(row[:count].tolist()) for row, count in zip(order, counts)]
    raise ExportError("scores do not determine these selections; name a submodule in routers that "
                      "returns the expert ids")


def _compare_routes(result, block, record, routing, output, name):
    sub, per_token = block["sub_tokens"], record["layout"]["rows_per_token"]
    result.rows = record["tokens"] * sub
    if output is None:
        result.skipped = f"the module did not call {name}"
        return
    try:
        own, scores = _selections(output, result.rows, block["experts"], routing)
    except ExportError as error:
        result.skipped = f"output of {name}: {error}"
        return
    result.from_scores = scores is not None
    offsets, experts = record["offsets"], record["experts"]
    for row in range(result.rows):
        token, at = divmod(row, sub)
        r = token * per_token + block["first_row"] + at
        served = experts[offsets[r]:offsets[r + 1]]
        if served == own[row]:
            continue
        margin = _margin(scores[row], served, own[row], routing) if scores is not None else None
        if margin is not None and margin < TIE:
            result.ties += 1
            continue
        result.differing += 1
        if not result.first:
            place = f"token {token}" + (f", sub-token {at}" if sub > 1 else "")
            result.first = f"first {place}: moeserve {served}, module {own[row]}" + (
                f", the module's scores differ by {margin:.1e}" if margin is not None else "")


def _margin(scores, served, own, routing):
    """Returns by how much the module's scores prefer its own selection."""
    extra, lost = set(served) - set(own), set(own) - set(served)
    if extra and lost:
        return (min(scores[list(lost)]) - max(scores[list(extra)])).item()
    shares = scores.softmax(-1)  # top_p: one selection is part of the other
    return min(abs(shares[list(chosen)].sum().item() - routing["select"].get("p", 0.0))
               for chosen in (served, own) if chosen)


def _hint(module, folder):
    """Says so if the folder has rounded weights and the module does not."""
    file = next(iter(sorted(folder.glob("*.safetensors"))), None)
    if file is None:
        return ""
    with open(file, "rb") as opened:
        header = json.loads(opened.read(struct.unpack("<Q", opened.read(8))[0]))
    stored = {entry["dtype"] for name, entry in header.items() if name != "__metadata__"}
    own = {parameter.dtype for parameter in module.parameters()}
    if torch.float32 not in own or not stored & {"BF16", "F16"}:
        return ""
    name = "bfloat16" if "BF16" in stored else "float16"
    return (f"The folder has {name} weights and the module f32: compare module.to(torch.{name})"
            ".float(), or export with dtype=torch.float32.")
