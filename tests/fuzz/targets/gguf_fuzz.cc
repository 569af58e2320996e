// GGUF files: the tables, the tensors, the tokenizer and the model.

#include "model_loaders/checkpoint/loader.h"
#include "model_loaders/files/gguf/gguf_file.h"
#include "model_loaders/tokenizer/gguf_tokenizer.h"
#include "tests/fuzz/fuzz.h"

namespace moeserve::testing {
namespace {

void ReadGguf(std::string_view bytes) {
  if (!ParseGguf(bytes).ok()) return;
  const InputFile input(bytes, ".gguf");
  const auto file = GgufFile::Open(input.path());
  MOESERVE_CHECK(file.ok(), "the file was accepted before");
  ReadAllTensors(**file);
  const auto tokenizer = ReadGgufTokenizer(**file);
  if (tokenizer.ok() && *tokenizer != nullptr) UseTokenizer(**tokenizer);
  const auto checkpoint = LoadCheckpoint(input.path(), {.require_tokenizer = false});
  if (!checkpoint.ok()) return;
  CountAccepted();
  MOESERVE_CHECK(Validate(checkpoint->spec).ok(), "a valid model");
}

}  // namespace
}  // namespace moeserve::testing

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  moeserve::testing::ReadGguf(moeserve::testing::Text(data, size));
  return 0;
}
