"""Says which tensor of a PyTorch module is which tensor of the native format.

A mapping is a dict from names of the format to tensors of the module:

    {"blocks.{i}.feed_forward.experts.{j}.up.weight": "layers.{i}.moe.w1[{j}].T",
     "ignore": ["layers.{i}.rope.inv_freq"]}

{i}, {j} and {k} stand for the numbers of the name, in their order. Behind the name of a tensor may
follow, each applied to what stands before it: `.T` (transposed), `[3]` (entry 3 of the first
dimension), `[0:64]` (rows 0 to 63) and `[1/3]` (the second of three equal parts of the rows). Names
of the format that the mapping leaves out are the same in the module. "ignore" lists tensors of the
module that the model does not need.

`propose()` looks for a mapping by shapes and names. It needs shapes only, and no PyTorch.
"""

import dataclasses
import functools
import itertools
import json
import pathlib
import re

from pytorch_export import names

LETTERS = "ijk"
MARGIN = 0.12  # candidates whose scores differ by less are both listed
_VIEW = re.compile(r"\.T|\[\d+\]|\[\d+:\d+\]|\[\d+/\d+\]")
_SOURCE = re.compile(r"(.*?)((?:\.T|\[\d+(?:[:/]\d+)?\])*)", re.DOTALL)
# Tensors that models keep in one, in the usual order of the parts.
_FUSED = (("q", "k", "v"), ("k", "v"), ("gate", "up"))


class ExportError(ValueError):
    """The state dict and the configuration disagree; the message names the tensor or key."""


def template(name):
    """Returns the name with letters for numbers, and the numbers."""
    parts, numbers = name.split("."), []
    for at, part in enumerate(parts):
        if part.isdigit() and len(numbers) < len(LETTERS):
            parts[at] = "{" + LETTERS[len(numbers)] + "}"
            numbers.append(int(part))
    return ".".join(parts), tuple(numbers)


def fill(text, numbers):
    """Puts numbers in the place of their letters."""
    for letter, number in zip(LETTERS, numbers):
        text = text.replace("{" + letter + "}", str(number))
    return text


def shape_of_view(shape, view):
    """Returns the shape of a tensor after one step such as ".T" or "[0:64]"; None if it has none."""
    if view == ".T":
        return shape[::-1] if len(shape) == 2 else None
    if not shape:
        return None
    first, *second = (int(number) for number in re.findall(r"\d+", view))
    if ":" in view:
        return (second[0] - first, *shape[1:]) if first < second[0] <= shape[0] else None
    if "/" in view:
        parts = second[0]
        return (shape[0] // parts, *shape[1:]) if first < parts and shape[0] % parts == 0 else None
    return shape[1:] if first < shape[0] else None


def split_source(source, present):
    """Splits "name[3].T" into the name of a tensor and its views; ExportError if it is unknown."""
    if source in present:
        return source, []
    name, views = _SOURCE.fullmatch(source).groups()
    if name not in present:
        raise ExportError(f"mapping: {source}: expected a tensor of the module, found none named "
                          f"{name}")
    return name, _VIEW.findall(views)


def take(tensors, source):
    """Returns the tensor for which `source` stands; it shares the data of the module's."""
    name, views = split_source(source, tensors)
    tensor = tensors[name]
    for view in views:
        shape = shape_of_view(tuple(tensor.shape), view)
        if shape is None:
            raise ExportError(f"mapping: {source}: {view} does not fit the shape "
                              f"{list(tensor.shape)}")
        numbers = [int(number) for number in re.findall(r"\d+", view)]
        if view == ".T":
            tensor = tensor.T
        elif ":" in view:
            tensor = tensor[numbers[0]:numbers[1]]
        elif "/" in view:
            tensor = tensor[numbers[0] * shape[0]:(numbers[0] + 1) * shape[0]]
        else:
            tensor = tensor[numbers[0]]
    return tensor.reshape(1) if tensor.ndim == 0 else tensor


def load(mapping):
    """Returns a mapping that is given as a dict or as the path of a JSON file."""
    if isinstance(mapping, dict):
        return mapping
    try:
        document = json.loads(pathlib.Path(mapping).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ExportError(f"{mapping}: expected JSON: {error}") from None
    if not isinstance(document, dict):
        raise ExportError(f"{mapping}: expected an object, found {type(document).__name__}")
    return document


def resolve(mapping, wanted):
    """Returns {name of the format: source} for every name in `wanted`."""
    mapping = {name: source for name, source in load(mapping).items() if name != "ignore"}
    out, used = {}, set()
    for name in wanted:
        pattern, numbers = template(name)
        key = name if name in mapping else pattern
        used.add(key)
        source = mapping.get(key, name)
        if isinstance(source, list):
            raise ExportError(f"mapping: {key}: expected one tensor, found the candidates "
                              f"{', '.join(map(str, source))}: keep one of them")
        if not isinstance(source, str):
            raise ExportError(f"mapping: {key}: expected a tensor of the module, found "
                              f"{json.dumps(source, default=str)}")
        out[name] = fill(source, numbers)
    unknown = [name for name in mapping if name not in used]
    if unknown:
        raise ExportError(f"mapping: {unknown[0]}: the model has no such tensor")
    return out


def apply(mapping, tensors, wanted):
    """Returns the tensors under the names of the format.

    Tensors of the module that are neither used nor ignored keep their names, so that they are
    reported.
    """
    mapping = load(mapping)
    sources = resolve(mapping, wanted)
    ignored = set(mapping.get("ignore", []))
    out, used = {}, set()
    for name, source in sources.items():
        if source == name and name not in tensors:
            continue  # reported as missing
        used.add(split_source(source, tensors)[0])
        out[name] = take(tensors, source)
    for name, tensor in tensors.items():
        if name not in used and name not in ignored and template(name)[0] not in ignored:
            out.setdefault(name if name not in wanted else f"{name} (of the module)", tensor)
    return out


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    source: str  # with the letters of the format's name
    used: frozenset  # (tensor of the module, views) that it stands for
    score: float
    notes: tuple

    @functools.cached_property
    def tensors(self):
        return frozenset(name for name, _ in self.used)

    @functools.cached_property
    def whole_tensors(self):
        return frozenset(name for name, views in self.used if views in ("", ".T", "[0]"))


@dataclasses.dataclass
class Proposal:
    """`candidates` has a list for every name pattern of the format, the best one first: one entry if
    it is clear, more if it is ambiguous, none if no tensor fits. `unused` lists the other tensors."""

    shapes: dict  # pattern -> shapes of its tensors, for printing
    candidates: dict
    unused: list

    @property
    def complete(self):
        return all(len(found) == 1 for found in self.candidates.values())

    def mapping(self):
        """Returns the mapping to pass back. An ambiguous entry is a list of candidates of which one
        must be kept; an entry without candidates is null."""
        out = {}
        for pattern, found in self.candidates.items():
            sources = [candidate.source for candidate in found]
            if sources != [pattern]:
                out[pattern] = sources[0] if len(sources) == 1 else sources or None
        if self.unused:
            out["ignore"] = self.unused
        return out

    def text(self):
        """Returns a description for people, a line for each name pattern and candidate."""
        lines = []
        for pattern, found in self.candidates.items():
            what = f"{pattern} {self.shapes[pattern]}"
            if not found:
                lines.append(f"{what}: found no tensor of this shape")
            elif len(found) == 1:
                lines.append(f"{what} <- {_described(found[0])}")
            else:
                lines.append(f"{what}: ambiguous")
                lines += [f"    candidate {_described(candidate)}" for candidate in found]
        lines += [f"not used: {name}" for name in self.unused]
        chosen = [candidate for found in self.candidates.values() for candidate in found]
        if any("transposed" in candidate.notes for candidate in chosen):
            lines.append("Some tensors are transposed. The shapes of square ones do not show whether "
                         "they are, too; verify shows it.")
        return "\n".join(lines)


def _described(candidate):
    notes = f" ({', '.join(candidate.notes)})" if candidate.notes else ""
    return candidate.source + notes


def _groups(shapes):
    """Returns {count of letters: {pattern: {numbers: name}}} for the module's names.

    Of a name with more numbers than letters, every choice of the numbers is a pattern, because some
    are the position in a container: layers.{i}.mlp.2.weight.
    """
    out = {count: {} for count in range(len(LETTERS) + 1)}
    for name in shapes:
        parts = name.split(".")
        places = [at for at, part in enumerate(parts) if part.isdigit()]
        for count in range(min(len(places), len(LETTERS)) + 1):
            for chosen in itertools.combinations(places, count):
                pattern = list(parts)
                for letter, at in zip(LETTERS, chosen):
                    pattern[at] = "{" + letter + "}"
                numbers = tuple(int(parts[at]) for at in chosen)
                out[count].setdefault(".".join(pattern), {})[numbers] = name
    return out


def _part_views(pattern, numbers, wanted):
    """Returns (view, note) for each fused tensor of which this one may be a part."""
    parts = pattern.split(".")
    for group in _FUSED:
        if len(parts) < 2 or parts[-2] not in group:
            continue
        rows = []
        for member in group:
            sibling = fill(".".join([*parts[:-2], member, parts[-1]]), numbers)
            if sibling not in wanted:
                break
            rows.append(wanted[sibling][0])
        if len(rows) < len(group):
            continue
        at = group.index(parts[-2])
        view = (f"[{at}/{len(rows)}]" if len(set(rows)) == 1
                else f"[{sum(rows[:at])}:{sum(rows[:at + 1])}]")
        yield view, sum(rows), f"part of {' + '.join(group)}, in this order"


def _views(pattern, members, wanted):
    """Yields (count of letters in the name, views, notes): what may stand behind a tensor's name."""
    count = len(next(iter(members)))
    simple = [("", ()), (".T", ("transposed",)), ("[0]", ())]
    for view, _, note in _part_views(pattern, next(iter(members)), wanted):
        simple += [(view, (note,)), (".T" + view, ("transposed", note))]
    for views, notes in simple:
        yield count, views, notes
        if count and len(members) == 1:  # a model of one layer may name it without a number
            yield 0, views, notes
    if re.search(r"\.(experts|heads)\.\{.\}\.", pattern) is None or count == 0:
        return
    last = re.search(r"\.(?:experts|heads)\.\{(.)\}\.", pattern).group(1)
    if LETTERS.index(last) != count - 1:
        return
    experts = 1 + max(numbers[-1] for numbers in members)
    entry, part = "[{" + last + "}]", "[{" + last + "}" + f"/{experts}]"
    for views, notes in simple:
        yield count - 1, entry + views, (*notes, "stacked")
    for views, notes in ((part, ()), (part + ".T", ("transposed",)), (".T" + part, ("transposed",))):
        yield count - 1, views, (*notes, "stacked by rows")


def _fits(members, group, shapes, count, views):
    """Returns the parts of the module's tensors that a pattern uses; None if one does not fit."""
    used, steps = set(), _split_views(views)
    # A view [0] removes a dimension of size 1, and parts share a tensor whole.
    whole = "[0]" in steps
    sums = {}
    for numbers, shape in members.items():
        name = group.get(numbers[:count])
        if name is None:
            return None
        found = shapes[name]
        if whole and (not found or found[0] != 1):
            return None
        filled = [fill(step, numbers) for step in steps]
        for step in filled:
            # A square tensor is taken as it is: its shape does not show whether it is transposed.
            if step == ".T" and len(set(found)) == 1:
                return None
            found = shape_of_view(found, step)
            if found is None:
                return None
        if (found or not views and (1,)) != shape:  # a module may store one number without dimension
            return None
        used.add((name, "".join(filled)))
        sums.setdefault(name, []).append(numbers)
    # A stack must not have further entries.
    if views.startswith("[{") and "/" not in views.split("]")[0]:
        if any(shapes[name][0] != len(entries) for name, entries in sums.items()):
            return None
    return frozenset(used)


def _split_views(views):
    return re.findall(r"\.T|\[[^\]]*\]", views)


def _whole(pattern, members, wanted, group, shapes, count, views):
    """Whether parts such as [0:64] cover the module's tensor completely."""
    slices = [(view, rows) for view, rows, _ in _part_views(pattern, next(iter(members)), wanted)
              if views.endswith(view)]
    if not slices or not _split_views(views)[-1].strip("[]")[0].isdigit() or views.endswith("[0]"):
        return True
    numbers = next(iter(members))
    shape = shapes[group[numbers[:count]]]
    for step in _split_views(views)[:-1]:
        shape = shape_of_view(shape, fill(step, numbers))
    return any(shape[0] == rows for _, rows in slices)


def propose(wanted, shapes):
    """Looks for the tensors of a module.

    wanted, shapes: {name: shape} of the format's and of the module's tensors.
    """
    wanted = {name: tuple(shape) for name, shape in wanted.items()}
    shapes = {name: tuple(shape) for name, shape in shapes.items()}
    patterns = {}
    for name, shape in wanted.items():
        pattern, numbers = template(name)
        patterns.setdefault(pattern, {})[numbers] = shape
    groups = _groups(shapes)
    found = {pattern: _candidates(pattern, members, wanted, groups, shapes)
             for pattern, members in patterns.items()}
    chosen = _assign(found)
    taken = {name for candidates in chosen.values() for candidate in candidates
             for name, _ in candidate.used}
    unused = sorted({template(name)[0] for name in shapes if name not in taken})
    return Proposal({pattern: _shape_text(members) for pattern, members in patterns.items()},
                    chosen, unused)


def _shape_text(members):
    different = sorted(set(members.values()))
    text = " or ".join(str(list(shape)) for shape in different[:3])
    return text + (" or ..." if len(different) > 3 else "")


def _candidates(pattern, members, wanted, groups, shapes):
    out = {}
    for count, views, notes in _views(pattern, members, wanted):
        for source, group in groups[count].items():
            used = _fits(members, group, shapes, count, views)
            if used is None or not _whole(pattern, members, wanted, group, shapes, count, views):
                continue
            # The name of a stack need not say that these are experts.
            stacked = any(note.startswith("stacked") for note in notes)
            score = names.similarity(pattern, source + ".experts" * stacked) - 0.02 * len(notes)
            if used not in out or out[used].score < score:
                out[used] = Candidate(source + views, used, score, notes)
    return sorted(out.values(), key=lambda candidate: (-candidate.score, candidate.source))


def _assign(found):
    """Gives each pattern its best candidate, the clearest first, each tensor once; and keeps further
    candidates that are about as good."""
    pairs = sorted(((candidate.score, pattern, candidate) for pattern, candidates in found.items()
                    for candidate in candidates),
                   key=lambda pair: (-pair[0], pair[1], pair[2].source))
    best, owner = {}, {}
    for _, pattern, candidate in pairs:
        if pattern not in best and not any(_overlap(candidate, other) for other in owner):
            best[pattern] = candidate
            owner[candidate] = pattern
    score_of = {(pattern, candidate.used): candidate.score for pattern, candidates in found.items()
                for candidate in candidates}
    out = {}
    for pattern, candidates in found.items():
        if pattern not in best:
            # All that fit are taken. They are listed, because one of them may be taken wrongly.
            out[pattern] = candidates[:4] if len(candidates) > 1 else []
            continue
        mine, rivals = best[pattern], []
        for candidate in candidates:
            if candidate is mine or candidate.score < mine.score - MARGIN:
                continue
            other = next((owner[taken] for taken in owner if _overlap(candidate, taken)), None)
            if other is not None and other != pattern:
                # Taken by another pattern, which would have to take mine without loss.
                swapped = score_of.get((other, mine.used))
                if swapped is None or swapped < best[other].score - MARGIN:
                    continue
            rivals.append(candidate)
        out[pattern] = [mine, *rivals[:4]]
    return out


def _overlap(a, b):
    """Whether two candidates use the same entries of a tensor, or one uses a tensor of which the
    other uses a part."""
    if a.used & b.used:
        return True
    return bool(a.whole_tensors & b.tensors) or bool(b.whole_tensors & a.tensors)
