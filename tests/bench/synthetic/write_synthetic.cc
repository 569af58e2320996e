// Writes the weights of a synthetic model as a native folder, a GGUF file or a folder in Hugging
// Face's format, so that other engines can run the same model as `moeserve bench --synthetic`,
// which generates it in memory.
//
//   write_synthetic --synthetic small --native DIR --gguf FILE --hugging-face DIR
#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <string>

#include "base/status.h"
#include "server/bench/synthetic_model.h"
#include "server/bench/synthetic_options.h"
#include "tests/bench/synthetic/synthetic_files.h"

namespace moeserve {
namespace {

struct Outputs {
  std::string native, gguf, hugging_face;  // empty: not written
};

absl::Status Run(const server::SyntheticOptions& options, const Outputs& to) {
  MOESERVE_ASSIGN_OR_RETURN(const ModelSpec spec, server::BuildSyntheticSpec(options));
  const std::unique_ptr<WeightSource> weights = MakeSyntheticWeights(DType::kBF16);
  if (!to.native.empty()) MOESERVE_RETURN_IF_ERROR(testing::WriteNative(spec, *weights, to.native));
  if (!to.gguf.empty()) {
    MOESERVE_RETURN_IF_ERROR(
        testing::WriteGguf(spec, *weights, server::Describe(options), to.gguf));
  }
  if (to.hugging_face.empty()) return absl::OkStatus();
  return testing::WriteHuggingFace(spec, *weights, to.hugging_face);
}

}  // namespace
}  // namespace moeserve

int main(int argc, char** argv) {
  CLI::App app("Writes the weights of a synthetic model");
  moeserve::server::SyntheticOptions options;
  moeserve::Outputs to;
  moeserve::server::AddSyntheticOptions(app, options)->required();
  app.add_option("--native", to.native,
                 "Folder for config.json, model.safetensors, tokenizer.json");
  app.add_option("--gguf", to.gguf, "File; shapes that qwen3moe, qwen3 and qwen35moe can express");
  app.add_option(
      "--hugging-face", to.hugging_face,
      "Folder in Hugging Face's format; shapes that qwen3_moe and qwen3_5_moe can express");
  CLI11_PARSE(app, argc, argv);
  const absl::Status status = moeserve::Run(options, to);
  if (status.ok()) return 0;
  std::fprintf(stderr, "error: %s\n", std::string(status.message()).c_str());
  return 1;
}
