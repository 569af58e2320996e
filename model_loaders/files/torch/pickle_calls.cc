#include "model_loaders/files/torch/pickle_calls.h"

#include <algorithm>

#include "base/error_text.h"

namespace moeserve {
namespace {

// Packages of the values in checkpoints of PyTorch and fairseq, and Python's modules that define
// only data types.
constexpr std::string_view kPackages[] = {
    "argparse", "collections", "datetime", "decimal", "enum",       "fairseq", "fractions",
    "numpy",    "omegaconf",   "pathlib",  "torch",   "torchscale", "typing",  "uuid",
};

struct Function {
  std::string_view module;
  std::string_view name;
};

constexpr std::string_view kBuiltins[] = {
    "bool", "bytearray", "bytes", "complex", "dict",  "float", "frozenset", "int",
    "list", "object",    "range", "set",     "slice", "str",   "tuple",     "type",
};

constexpr Function kFunctions[] = {
    {"_codecs", "encode"},        {"copyreg", "_reconstructor"},  {"copyreg", "__newobj__"},
    {"copyreg", "__newobj_ex__"}, {"copy_reg", "_reconstructor"}, {"copy_reg", "__newobj__"},
    {"operator", "getitem"},      {"_operator", "getitem"},
};

}  // namespace

bool MayCall(std::string_view module, std::string_view name) {
  if (name.find('.') != std::string_view::npos) return false;
  if (module == "builtins" || module == "__builtin__") {
    return std::find(std::begin(kBuiltins), std::end(kBuiltins), name) != std::end(kBuiltins);
  }
  for (const Function& function : kFunctions) {
    if (function.module == module && function.name == name) return true;
  }
  const std::string_view package = module.substr(0, module.find('.'));
  return std::find(std::begin(kPackages), std::end(kPackages), package) != std::end(kPackages);
}

std::string AllowedPackages() {
  std::string text;
  for (const std::string_view package : kPackages) {
    if (!text.empty()) text.append(", ");
    text.append(package);
  }
  return text;
}

}  // namespace moeserve
