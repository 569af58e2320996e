"""Checks with clang that members guarded by a mutex are used only while it is locked."""

import re
import shutil
import subprocess
import tempfile

import includes

CLANG = "clang++"
FLAGS = ["-std=c++20", "-fsyntax-only", "-pthread"]
FLAGS += ["-Wno-everything", "-Wthread-safety", "-Werror=thread-safety"]
ANNOTATION = re.compile(r"\bABSL_(?:PT_)?GUARDED_BY\b|\bABSL_EXCLUSIVE_LOCKS_REQUIRED\b")
MUTEX = re.compile(r"^\s*(?:static |mutable )*Mutex (\w+);", re.MULTILINE)
UNCHECKED = re.compile(r"\bstd::(?:\w*mutex|lock_guard|unique_lock|scoped_lock)\b")
# The mutex that others wrap, and one that is a parameter of a library's template.
MAY_BE_UNCHECKED = {"base/mutex.h", "server/logging/logging.cc"}
# Mutexes that guard no member: held while a model is loaded, and needed to wait.
GUARD_NOTHING = {
    ("server/models/model_manager.h", "load_mutex_"),
    ("server/base/stop_wait.h", "mutex"),
}


def read_sources(root):
    """Returns the text of each source file of the product, by its path relative to `root`."""
    texts = {}
    for top in includes.FLOORS[""]:
        for path in sorted((root / top).rglob("*")):
            if path.suffix in includes.SUFFIXES:
                texts[path.relative_to(root).as_posix()] = path.read_text(encoding="utf-8")
    return texts


def faults_of_declarations(texts):
    faults = []
    for name, text in texts.items():
        if name not in MAY_BE_UNCHECKED:
            faults += [f"{name}: {found} is not checked; use base/mutex.h"
                       for found in sorted(set(UNCHECKED.findall(text)))]
        for mutex in MUTEX.findall(text):
            guards = re.search(rf"\bABSL_(?:PT_)?GUARDED_BY\({mutex}\)", text)
            if not guards and (name, mutex) not in GUARD_NOTHING:
                faults.append(f"{name}: no member is declared as guarded by {mutex}")
    return faults


def sources_to_compile(texts):
    """Returns the .cc files that may use a guarded member: those with annotations, or that include
    a header with some."""
    annotated = {name for name, text in texts.items() if ANNOTATION.search(text)}
    annotated.discard("base/mutex.h")
    return [
        name
        for name, text in texts.items()
        if name.endswith(".cc")
        and (name in annotated or annotated.intersection(includes.INCLUDE.findall(text)))
    ]


def compile_unit(root, names, build):
    """Returns what clang says about the files `names`, compiled as one. `build` is a build folder
    with the generated protobuf headers."""
    command = [CLANG, *FLAGS, f"-I{root}", f"-isystem{build}/proto", '-DMOESERVE_VERSION=""']
    if not shutil.which("nvcc"):
        command += ["-isystem", f"{root}/tests/cuda_emulator/include"]
    with tempfile.NamedTemporaryFile("w", suffix=".cc", encoding="utf-8") as unit:
        unit.write("".join(f'#include "{name}"\n' for name in names))
        unit.flush()
        run = subprocess.run([*command, unit.name], capture_output=True, text=True, check=False)
        return run.stderr if run.returncode != 0 else ""


def compile_all(root, sources, build):
    """Returns what clang says about the sources. Those of a top folder are compiled as one, so that
    their headers are parsed once. If that fails, perhaps because of equal names, each is compiled
    by itself."""
    folders = {}
    for name in sources:
        folders.setdefault(name.split("/")[0], []).append(name)
    faults = []
    for names in folders.values():
        if compile_unit(root, names, build):
            faults += [compile_unit(root, [name], build) for name in names]
    return [fault for fault in faults if fault]


def check(root, build):
    texts = read_sources(root)
    return faults_of_declarations(texts) + compile_all(root, sources_to_compile(texts), build)
