// The bodies of requests about texts over HTTP, in this server's forms, TEI's and the Open
// Inference Protocol's. The first byte chooses the route, the second one the model and the server's
// options.

#include <array>
#include <memory>
#include <string>
#include <utility>

#include "base/strict_json.h"
#include "server/base/memory_budget.h"
#include "server/encode/encode_fields.h"
#include "server/encode/tei.h"
#include "server/open_inference/infer_json.h"
#include "server/open_inference/infer_request.h"
#include "tests/fuzz/bundled_model.h"
#include "tests/fuzz/fuzz.h"

namespace moeserve::server {
namespace {

using testing::BundledModel;

constexpr FieldRoute kTextRoutes[] = {FieldRoute::kEmbeddings, FieldRoute::kPooling,
                                      FieldRoute::kClassify,   FieldRoute::kScore,
                                      FieldRoute::kRerank,     FieldRoute::kFillMask};
constexpr TeiRoute kTeiRoutes[] = {TeiRoute::kEmbed, TeiRoute::kEmbedAll, TeiRoute::kPredict,
                                   TeiRoute::kRerank, TeiRoute::kSimilarity};
constexpr size_t kTextKinds = std::size(kTextRoutes) + std::size(kTeiRoutes) + 2;

// The bundled model with the heads that make vectors and labels of texts.
const std::array<ModelSpec, 5>& TextSpecs() {
  static const auto* const specs = [] {
    auto* out = new std::array<ModelSpec, 5>;
    out->fill(BundledModel::Get().spec());
    const auto set = [&](size_t i, HeadKind kind, std::vector<std::string> labels, bool pools) {
      ModelSpec& spec = (*out)[i];
      spec.head.kind = kind;
      spec.head.labels = std::move(labels);
      if (pools) spec.pooling.emplace();
    };
    set(0, HeadKind::kNone, {}, true);
    set(1, HeadKind::kSequenceClassification, {"no", "yes"}, true);
    set(2, HeadKind::kSequenceClassification, {"one"}, true);
    set(3, HeadKind::kTokenClassification, {"O", "B-X", "I-X", "E-X", "S-X"}, false);
    set(4, HeadKind::kMaskedLm, {}, false);
    (*out)[0].token_types = 2;
    return out;
  }();
  return *specs;
}

Result<EncodeJob> ParseTexts(const Json& body, size_t kind, const RequestRules& rules,
                             const EncodeModel& model) {
  if (kind < std::size(kTextRoutes)) {
    return ParseEncode(body, kTextRoutes[kind], rules, model, kind % 2 == 0);
  }
  kind -= std::size(kTextRoutes);
  if (kind < std::size(kTeiRoutes)) {
    const TeiRoute route = kTeiRoutes[kind];
    MOESERVE_ASSIGN_OR_RETURN(const TeiRequest request, FromTei(route, body));
    Result<EncodeJob> job = ParseEncode(request.body, request.fields, rules, model, true);
    if (!job.ok()) return TeiError(route, job.status());
    return job;
  }
  MOESERVE_ASSIGN_OR_RETURN(const InferRequest request, ParseGenerate(body));
  InferSettings settings;
  MOESERVE_ASSIGN_OR_RETURN(Json texts, TextsBody(request, Pieces::kNever, settings));
  const bool labels = kind > std::size(kTeiRoutes);
  Result<EncodeJob> job = ParseEncode(
      texts, labels ? FieldRoute::kClassify : FieldRoute::kEmbeddings, rules, model, true);
  ClearJson(texts);
  return job;
}

absl::Status RunTexts(const Json& body, size_t kind, uint8_t options) {
  const BundledModel& bundled = BundledModel::Get();
  static const TextSettings settings;
  const ModelSpec& spec = TextSpecs()[(options >> 4) % TextSpecs().size()];
  const EncodeModel model{.spec = &spec,
                          .tokenizer = &bundled.tokenizer(),
                          .settings = &settings,
                          .mask = 5,
                          .max_tokens = bundled.max_model_len()};
  MOESERVE_ASSIGN_OR_RETURN(const EncodeJob job,
                            ParseTexts(body, kind, bundled.Rules(options & 15), model));
  MOESERVE_ASSIGN_OR_RETURN(const auto texts, PrepareTexts(job, model, 64 << 10));
  MOESERVE_CHECK(!texts.empty() && texts.size() <= 2 * kMaxEncodeInputs, "the limit on texts");
  for (const PreparedText& text : texts) {
    MOESERVE_CHECK(std::ssize(text.ids) <= model.max_tokens, "the limit on tokens");
    MOESERVE_CHECK(text.types.empty() || text.types.size() == text.ids.size(), "a type each");
    EncodeParamsOf(job, spec, text);
  }
  MOESERVE_CHECK(CountAnswerValues(job, spec, texts) >= 0, "a number of values");
  return absl::OkStatus();
}

}  // namespace
}  // namespace moeserve::server

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace moeserve;  // NOLINT(google-build-using-namespace)
  testing::Input input(data, size);
  const size_t kind = input.Byte() % server::kTextKinds;
  const uint8_t options = input.Byte();
  Result<server::Json> body = ParseStrictJson(input.rest());
  if (!body.ok()) return 0;
  if (body->is_object()) {
    const absl::Status status = server::RunTexts(*body, kind, options);
    if (status.ok()) {
      testing::CountAccepted();
    } else {
      MOESERVE_CHECK(status.code() != absl::StatusCode::kInternal, "requests cause no such errors");
    }
  }
  ClearJson(*body);
  return 0;
}
