#include "tests/fuzz/bundled_model.h"

#include <filesystem>
#include <fstream>
#include <iterator>
#include <utility>

#include "base/check.h"
#include "engine/validate_request.h"

namespace moeserve::testing {
namespace {

std::string ReadText(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace

const BundledModel& BundledModel::Get() {
  static const BundledModel* const model = new BundledModel;
  return *model;
}

BundledModel::BundledModel() {
  const std::filesystem::path root = MOESERVE_SOURCE_DIR;
  Result<Checkpoint> checkpoint = LoadCheckpoint(root / "deploy/models/mh-moe");
  MOESERVE_CHECK(checkpoint.ok(), "the bundled model is valid");
  checkpoint_ = *std::move(checkpoint);
  layout_ = std::make_unique<RouteLayout>(checkpoint_.spec);
  TokenizerConfig config = checkpoint_.tokenizer_config;
  config.chat_template = ReadText(root / "tests/chat/templates/chatml.jinja");
  chat_format_ = std::make_unique<server::ChatFormat>(config);
  MOESERVE_CHECK(chat_format_->status().ok(), "the template is valid");
}

server::RequestRules BundledModel::Rules(uint8_t options) const {
  server::RequestRules rules;
  rules.served_names = {"mh-moe", "alias"};
  rules.defaults = checkpoint_.generation;
  rules.tokenizer = checkpoint_.tokenizer.get();
  rules.vocab_size = checkpoint_.spec.vocab_size;
  rules.strict_fields = (options & 1) != 0;
  rules.routing.permitted = (options & 2) == 0;
  rules.routing.records = (options & 4) == 0;
  rules.routing.control.enabled = (options & 8) == 0;
  rules.routing.spec = &checkpoint_.spec;
  rules.routing.layout = layout_.get();
  return rules;
}

absl::Status BundledModel::Admit(const server::GenerationParams& params,
                                 const std::vector<server::PreparedPrompt>& prompts,
                                 const std::shared_ptr<server::MemoryBudget>& memory) const {
  const server::RequestRules rules = Rules(0);
  MOESERVE_RETURN_IF_ERROR(
      server::CheckRecordSize(params, prompts, checkpoint_.spec, rules.limits.max_routes));
  server::MemoryCharge charge(memory);
  MOESERVE_RETURN_IF_ERROR(charge.Add(server::AdmissionBytes(params, prompts, checkpoint_.spec)));
  const RequestLimits limits{.max_model_len = max_model_len(),
                             .has_tokenizer = true,
                             .routing_records = true,
                             .routing_control = true};
  const std::vector<Request> requests =
      server::MakeEngineRequests(params, prompts, "id", absl::InfiniteFuture());
  MOESERVE_CHECK(requests.size() == prompts.size() * static_cast<size_t>(params.n), "all choices");
  for (const Request& request : requests) {
    MOESERVE_RETURN_IF_ERROR(ValidateRequest(request, limits, checkpoint_.spec));
  }
  return absl::OkStatus();
}

absl::Status BundledModel::Admit(const server::CompletionParams& params,
                                 const std::shared_ptr<server::MemoryBudget>& memory) const {
  MOESERVE_ASSIGN_OR_RETURN(const auto prompts,
                            server::PreparePrompts(params, {&tokenizer(), max_model_len()}));
  return Admit(params, prompts, memory);
}

}  // namespace moeserve::testing
