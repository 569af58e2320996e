#include "server/commands/score/score_dump.h"

#include <system_error>
#include <utility>

#include "base/error_text.h"
#include "base/kinds.h"
#include "model_loaders/profiles/profile_file.h"
#include "server/base/json.h"

namespace moeserve::server {
namespace {

std::string FileName(size_t block, const char* what) { return Concat(block, ".", what, ".npy"); }

template <typename T>
absl::Status WriteArray(const std::filesystem::path& path, const std::vector<T>& values) {
  MOESERVE_ASSIGN_OR_RETURN(const auto writer, NpyWriter::Create(path, NpyType<T>(), 0));
  writer->Append(std::span<const T>(values));
  return writer->Finish();
}

OrderedJson SelectJson(const SelectSpec& select) {
  OrderedJson out;
  out["kind"] = KindName(select.kind);
  switch (select.kind) {
    case SelectKind::kTopK:
    case SelectKind::kTable:
      out["k"] = select.k;
      break;
    case SelectKind::kTopP:
      out["p"] = select.p;
      out["compare"] = KindName(select.compare);
      out["max"] = select.max_experts;
      break;
  }
  return out;
}

}  // namespace

Result<std::unique_ptr<ScoreDump>> ScoreDump::Create(const std::filesystem::path& folder,
                                                     const ModelSpec& spec, bool hidden) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) {
    return absl::UnavailableError(
        Concat("cannot create ", Quoted(folder.string()), ": ", error.message()));
  }
  std::unique_ptr<ScoreDump> dump(new ScoreDump(folder, spec));
  const std::vector<RoutedBlock>& blocks = dump->layout().blocks;
  for (size_t i = 0; i < blocks.size(); ++i) {
    MOESERVE_ASSIGN_OR_RETURN(
        auto scores,
        NpyWriter::Create(folder / FileName(i, "scores"), NpyType<float>(), blocks[i].num_experts));
    dump->scores_.push_back(std::move(scores));
    if (!hidden) continue;
    MOESERVE_ASSIGN_OR_RETURN(auto inputs,
                              NpyWriter::Create(folder / FileName(i, "inputs"), NpyType<float>(),
                                                spec.hidden_size / blocks[i].sub_tokens));
    dump->inputs_.push_back(std::move(inputs));
  }
  return dump;
}

void ScoreDump::OnStep(const Batch& batch, const StepReport& report) {
  RouteTrace::OnStep(batch, report);
  for (size_t i = 0; i < report.blocks.size(); ++i) {
    scores_[i]->Append(report.blocks[i].scores);
    if (!inputs_.empty()) inputs_[i]->Append(report.blocks[i].inputs);
  }
}

absl::Status ScoreDump::Finish(const std::string& model, const std::vector<int32_t>& run) {
  OrderedJson index;
  index["format"] = "moeserve-score-dump";
  index["version"] = 1;
  index["model"] = model;
  index["vocabulary"] = spec_.vocab_size;
  index["tokens"] = "tokens.npy";
  MOESERVE_RETURN_IF_ERROR(WriteArray(folder_ / "tokens.npy", run));
  index["blocks"] = OrderedJson::array();
  for (size_t i = 0; i < layout().blocks.size(); ++i) {
    const RoutedBlock& block = layout().blocks[i];
    const RoutedLayerSpec& routing = RoutingOf(spec_, block);
    OrderedJson entry;
    entry["layer"] = block.layer;
    entry["block"] = Name(block.block);
    entry["experts"] = block.num_experts;
    entry["split_heads"] = block.sub_tokens;
    entry["gate"] = KindName(routing.gate);
    entry["select"] = SelectJson(routing.select);
    entry["renormalize"] = routing.renormalize;
    entry["scale"] = routing.scale;
    MOESERVE_RETURN_IF_ERROR(scores_[i]->Finish());
    entry["scores"] = FileName(i, "scores");
    MOESERVE_RETURN_IF_ERROR(WriteArray(folder_ / FileName(i, "offsets"), routes()[i].offsets));
    entry["offsets"] = FileName(i, "offsets");
    MOESERVE_RETURN_IF_ERROR(WriteArray(folder_ / FileName(i, "experts"), routes()[i].experts));
    entry["chosen"] = FileName(i, "experts");
    MOESERVE_RETURN_IF_ERROR(WriteArray(folder_ / FileName(i, "weights"), weights()[i]));
    entry["weights"] = FileName(i, "weights");
    if (!inputs_.empty()) {
      MOESERVE_RETURN_IF_ERROR(inputs_[i]->Finish());
      entry["inputs"] = FileName(i, "inputs");
    }
    index["blocks"].push_back(std::move(entry));
  }
  return WriteWholeFile(folder_ / "index.json",
                        index.dump(2, ' ', false, OrderedJson::error_handler_t::replace) + "\n");
}

}  // namespace moeserve::server
