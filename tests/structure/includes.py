"""Checks the #include lines of the product: no arrow upward, no circle of folders.

Run as a script, it prints what it finds and exits with status 1 if that is anything.
"""

import collections
import pathlib
import re
import sys

# The floors of each folder, from the bottom to the top. A folder may include those before it in
# its list and nothing else of the same list. Files that lie directly in a folder are on no floor.
FLOORS = {
    "": ["base", "kernels", "engine", "model_loaders", "server"],
    "kernels": ["base", "cpu", "cuda"],
    "engine": [
        "text",
        "beam",
        "spec",
        "routes",
        "tiers",
        "weights",
        "balance",
        "step",
        "layers",
        "model",
        "ranks",
        "statistics",
        "sample",
        "draft",
        "memory",
        "sequence",
        "schedule",
        "run",
    ],
    "engine/text": ["tokenizer", "chat", "structured"],
    "model_loaders": ["files", "tokenizer", "architectures", "checkpoint", "profiles", "write"],
    "server": [
        "base",
        "config",
        "process",
        "connections",
        "logging",
        "metrics",
        "tracing",
        "tls",
        "tools",
        "keys",
        "generation",
        "fields",
        "answers",
        "encode",
        "reports",
        "completions",
        "chat",
        "anthropic",
        "responses",
        "models",
        "ollama",
        "open_inference",
        "bench",
        "http",
        "rpc",
        "commands",
    ],
}
# Folders that include nothing of the product but these folders and themselves.
ALONE = {
    "base": [],
    "engine/text": ["base"],
    "kernels/cpu": ["base", "kernels"],
    "kernels/cuda": ["base", "kernels"],
}
# Pairs of folders that never include one another.
APART = [("kernels/cpu", "kernels/cuda"), ("server/http", "server/rpc")]

SUFFIXES = {".h", ".cc", ".cu", ".cuh", ".inl"}
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def read_includes(root):
    """Returns the pairs (file, included file), as paths relative to `root`, of all source files."""
    files = []
    for top in FLOORS[""]:
        files += [p for p in sorted((root / top).rglob("*")) if p.suffix in SUFFIXES]
    names = {p.relative_to(root).as_posix() for p in files}
    pairs = []
    for path in files:
        name = path.relative_to(root).as_posix()
        for included in INCLUDE.findall(path.read_text(encoding="utf-8")):
            if included in names:
                pairs.append((name, included))
    return pairs


def inside(name, folder):
    return folder == "" or name.startswith(folder + "/")


def node_of(name, folder):
    """Returns the child of `folder` that contains `name`: a folder with "/", or a file's stem."""
    rest = name[len(folder) + 1 :] if folder else name
    head, slash, _ = rest.partition("/")
    return head + "/" if slash else pathlib.PurePosixPath(head).stem


def arrows_upward(pairs):
    faults = []
    for folder, floors in FLOORS.items():
        place = {name: i for i, name in enumerate(floors)}
        for name, included in pairs:
            if not (inside(name, folder) and inside(included, folder)):
                continue
            a, b = node_of(name, folder), node_of(included, folder)
            if a == b or not (a.endswith("/") and b.endswith("/")):
                continue
            for child in (a, b):
                if child[:-1] not in place:
                    faults.append(f"{folder}/{child} has no floor; add it to {__file__}")
            if place.get(a[:-1], 0) < place.get(b[:-1], 0):
                faults.append(f"upward: {name} includes {included}: {a} is below {b}")
    return faults


def forbidden(pairs):
    faults = []
    for name, included in pairs:
        for folder, allowed in ALONE.items():
            if inside(name, folder) and not any(inside(included, a) for a in [folder, *allowed]):
                faults.append(f"forbidden: {name} includes {included}")
        for pair in APART:
            for a, b in (pair, pair[::-1]):
                if inside(name, a) and inside(included, b):
                    faults.append(f"forbidden: {name} includes {included}")
    return faults


def components(graph):
    """Returns the strongly connected components of more than one node (Tarjan's algorithm)."""
    index, low, stack, found = {}, {}, [], []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph[node]):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            component = []
            while True:
                component.append(stack.pop())
                if component[-1] == node:
                    break
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def circles(pairs):
    """Finds circles between the children of each folder that contain at least one folder.

    A header, its implementation and its helpers in the same folder may form a circle.
    """
    folders = {""}
    for name, _ in pairs:
        folders.update(str(p) for p in pathlib.PurePosixPath(name).parents if str(p) != ".")
    faults = []
    for folder in sorted(folders):
        graph = collections.defaultdict(set)
        cause = {}
        for name, included in pairs:
            if inside(name, folder) and inside(included, folder):
                a, b = node_of(name, folder), node_of(included, folder)
                if a != b:
                    graph[a].add(b)
                    graph[b]  # every node is a key
                    cause.setdefault((a, b), f"{name} includes {included}")
        for component in components(graph):
            if not any(node.endswith("/") for node in component):
                continue
            lines = [
                f"  {text}"
                for (a, b), text in sorted(cause.items())
                if a in component and b in component
            ]
            faults.append("\n".join([f"circle in {folder or '.'}: {', '.join(component)}", *lines]))
    return faults


def check(root):
    pairs = read_includes(root)
    return arrows_upward(pairs) + forbidden(pairs) + circles(pairs)


def main():
    root = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).parents[2]
    faults = check(root)
    print("\n".join(faults) or "no arrow upward, no circle of folders")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
