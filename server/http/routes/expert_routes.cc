#include "server/http/routes/expert_routes.h"

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error_text.h"
#include "engine/statistics/measures/collapse.h"
#include "engine/statistics/measures/token_affinity.h"
#include "model_loaders/profiles/profile_file.h"
#include "server/base/api_error.h"
#include "server/http/error_response.h"
#include "server/http/routes/json_response.h"
#include "server/http/url.h"
#include "server/reports/live_profile.h"
#include "server/reports/statistics_report.h"

namespace moeserve::server::http {
namespace {

// How many responses are computed at the same time, and the limit on the work for one response, in
// steps of about a nanosecond each (about 4 seconds). Both are small because the threads of the
// work pool also prepare chats and structured output.
constexpr int kComputations = 1;
constexpr double kMaxWork = double{1ull << 32};
// Limit on the profiles in memory at the same time. A profile stays in memory until its client has
// read it.
constexpr int kDownloads = 2;

// Limits how many responses are computed or held in memory at the same time.
class Slots {
 public:
  explicit Slots(int free) : free_(std::make_shared<std::atomic<int>>(free)) {}

  // Takes a slot, which becomes free when the last copy of the result is destroyed. Returns null if
  // no slot is free.
  std::shared_ptr<void> Take() const {
    int free = free_->load();
    while (free > 0 && !free_->compare_exchange_weak(free, free - 1)) {
    }
    if (free <= 0) return nullptr;
    return std::shared_ptr<void>(free_.get(), [slots = free_](void*) { ++*slots; });
  }

 private:
  const std::shared_ptr<std::atomic<int>> free_;
};

absl::Status Busy() {
  return MakeError(absl::StatusCode::kResourceExhausted, "queue_full",
                   "other statistics are being computed; try again");
}

// A response that occupies its slot until it is sent.
class HeldResponse final : public PendingResponse {
 public:
  HeldResponse(Response response, std::shared_ptr<void> slot)
      : response_(std::move(response)), slot_(std::move(slot)) {}
  Progress Next() override { return std::move(response_); }

 private:
  Response response_;
  const std::shared_ptr<void> slot_;
};

absl::Status Missing(std::string_view code, std::string message) {
  return MakeError(absl::StatusCode::kNotFound, code, std::move(message));
}

// The routed block that a query selected. `first` is the block's first column in the table of token
// counts.
struct Chosen {
  Stack stack = Stack::kOnly;
  size_t index = 0;
  int layer = 0;
  BlockKind kind = BlockKind::kFeedForward;
  int experts = 0;
  int64_t first = 0;
};

// Returns the block that "layer" and "block" of a query select; nullopt without "layer". "block"
// may be absent if the layer has only one routed block.
Result<std::optional<Chosen>> ChosenBlock(std::string_view query, const ExpertStats& stats) {
  MOESERVE_ASSIGN_OR_RETURN(const auto layer, QueryInteger(query, "layer", 0, 1 << 30));
  const auto name = QueryText(query, "block");
  if (name && *name != Name(BlockKind::kAttention) && *name != Name(BlockKind::kFeedForward) &&
      *name != Name(BlockKind::kCrossAttention)) {
    return InvalidValue("block",
                        Concat("'block' must be attention, cross_attention or feed_forward, not ",
                               Printable(*name, 32)));
  }
  if (!layer) {
    if (name) return InvalidValue("block", "'block' needs 'layer'");
    return std::optional<Chosen>();
  }
  std::optional<Chosen> found;
  int64_t first = 0;
  for (size_t i = 0; i < stats.blocks.size(); ++i) {
    const BlockExpertStats& b = stats.blocks[i];
    if (b.layer == *layer && (!name || *name == Name(b.block))) {
      if (found) {
        return InvalidValue("block",
                            Concat("layer ", *layer, " has several routed blocks: give 'block'"));
      }
      found = Chosen{b.stack, i, b.layer, b.block, b.num_experts, first};
    }
    first += b.num_experts;
  }
  if (!found) {
    return InvalidValue("layer", Concat("layer ", *layer, " routes no such block"));
  }
  return found;
}

// Returns what "rank" of a query ranks tokens by.
Result<TokenRank> ChosenRank(std::string_view query) {
  const auto name = QueryText(query, "rank");
  if (!name || *name == "pmi") return TokenRank::kPmi;
  if (*name == "g2") return TokenRank::kG2;
  if (*name == "count") return TokenRank::kCount;
  return InvalidValue("rank",
                      Concat("'rank' must be pmi, g2 or count, not ", Printable(*name, 32)));
}

OrderedJson BlockJson(const Chosen& block) {
  OrderedJson out;
  if (block.stack != Stack::kOnly) out["stack"] = KindName(block.stack);
  out["layer"] = block.layer;
  out["block"] = Name(block.kind);
  return out;
}

class ExpertRoutes {
 public:
  explicit ExpertRoutes(ServerContext& context) : context_(context) {}

  // Takes no slot, because one pass over the table is short.
  Handled Tokens(const Request& request) const {
    return WithModel(request, [&](const ServedModel& model) -> Result<OrderedJson> {
      const Engine& engine = model.engine();
      MOESERVE_ASSIGN_OR_RETURN(const StackExperts experts, QueriedStack(request, engine));
      MOESERVE_ASSIGN_OR_RETURN(const auto top, QueryInteger(request.query, "top", 1, 1000));
      MOESERVE_ASSIGN_OR_RETURN(const auto min_count,
                                QueryInteger(request.query, "min_count", 1, UINT32_MAX));
      MOESERVE_ASSIGN_OR_RETURN(const TokenRank rank, ChosenRank(request.query));
      MOESERVE_ASSIGN_OR_RETURN(const Table table, TableOf(request, experts));
      OrderedJson out = BlockJson(table.block);
      const auto least = static_cast<uint32_t>(min_count.value_or(5));
      out["min_count"] = least;
      const int vocabulary = LargestVocabulary(experts.spec());
      const auto counted = static_cast<int64_t>(table.values.tokens.size());
      out["vocabulary"] = vocabulary;
      out["counted_tokens"] = counted == 0 ? int64_t{vocabulary} : counted - 1;
      if (counted > 0) out["token_stats_mib_of_all"] = MibOfAllTokens(experts);
      out["experts"] = TopTokensJson(table.counts(), engine.tokenizer(), least,
                                     static_cast<int>(top.value_or(10)), rank);
      return out;
    });
  }

  Handled Similarity(const Request& request) const {
    return Computed(request, [&](const ServedModel& model) -> Result<OrderedJson> {
      MOESERVE_ASSIGN_OR_RETURN(const StackExperts experts, QueriedStack(request, model.engine()));
      MOESERVE_ASSIGN_OR_RETURN(const auto eps, QueryNumber(request.query, "eps", 1e-12, 1e6));
      MOESERVE_ASSIGN_OR_RETURN(const Table table, TableOf(request, experts));
      if (!table.values.tokens.empty()) return NotCounted(experts);
      if (SimilarityWork(table.rows(), table.block.experts) > kMaxWork) {
        return MakeError(absl::StatusCode::kInvalidArgument, "too_large",
                         "vocabulary and experts of this model are too many to compare here: "
                         "download the profile and use 'moeserve experts show'");
      }
      OrderedJson out = BlockJson(table.block);
      out.update(SimilarityJson(table.counts(), eps.value_or(1.0)));
      return out;
    });
  }

  Handled Collapse(const Request& request) const {
    return Computed(request, [&](const ServedModel& model) -> Result<OrderedJson> {
      MOESERVE_ASSIGN_OR_RETURN(const StackExperts experts, QueriedStack(request, model.engine()));
      const ExpertStats stats = experts.Snapshot();
      MOESERVE_ASSIGN_OR_RETURN(const auto chosen, ChosenBlock(request.query, stats));
      const std::vector<HiddenSample> samples = experts.HiddenSamples();
      if (samples.size() != stats.blocks.size() || samples.empty()) {
        return Missing("not_sampled", stats.blocks.empty()
                                          ? "this model routes nothing"
                                          : "router inputs are not sampled: start the server with "
                                            "--hidden-samples N to keep N of each block");
      }
      OrderedJson out;
      out["model"] = model.name();
      out["layers"] = OrderedJson::array();
      double work = 0.0;
      for (size_t i = 0; i < samples.size(); ++i) {
        if (chosen && chosen->index != i) continue;
        work += CollapseWork(samples[i]);
        if (work > kMaxWork) {
          return MakeError(absl::StatusCode::kInvalidArgument, "too_large",
                           chosen ? "the sample is too large to be evaluated here"
                                  : "the samples are too large to be evaluated at once: give "
                                    "'layer'",
                           "layer");
        }
        OrderedJson layer;
        if (stats.stack != Stack::kOnly) layer["stack"] = KindName(stats.stack);
        layer["layer"] = stats.blocks[i].layer;
        layer["block"] = Name(stats.blocks[i].block);
        layer.update(CollapseJson(samples[i]));
        out["layers"].push_back(std::move(layer));
      }
      return out;
    });
  }

  Handled Profile(const Request& request) const {
    const auto model = Model(request);
    if (!model.ok()) return ErrorResponse(model.status());
    const auto experts = QueriedStack(request, (*model)->engine());
    if (!experts.ok()) return ErrorResponse(experts.status());
    std::shared_ptr<void> slot = downloads_.Take();
    if (slot == nullptr) return ErrorResponse(Busy());
    Response response;
    response.content_type = "application/octet-stream";
    response.headers.emplace_back("Content-Disposition",
                                  "attachment; filename=\"experts.profile\"");
    response.body = EncodeProfile(LiveProfile(*experts, (*model)->name()));
    return std::make_unique<HeldResponse>(std::move(response), std::move(slot));
  }

 private:
  // The counts of selections by token and expert, for one block.
  struct Table {
    Chosen block;
    TokenColumns values;

    int64_t rows() const { return static_cast<int64_t>(values.counts.size()) / block.experts; }
    TokenCounts counts() const {
      return {.rows = rows(),
              .experts = block.experts,
              .counts = values.counts,
              .tokens = values.tokens};
    }
  };

  Result<std::shared_ptr<ServedModel>> Model(const Request& request) const {
    if (context_.settings().moe_metrics.mode == MoeMetricsMode::kOff) {
      return Missing("not_counted", "expert statistics are switched off (--moe-metrics=off)");
    }
    return QueriedModel(request, context_);
  }

  template <typename F>
  Handled WithModel(const Request& request, const F& compute) const {
    const auto model = Model(request);
    return JsonOrError(model.ok() ? compute(**model) : Result<OrderedJson>(model.status()));
  }

  template <typename F>
  Handled Computed(const Request& request, const F& compute) const {
    const std::shared_ptr<void> slot = computations_.Take();
    if (slot == nullptr) return ErrorResponse(Busy());
    return WithModel(request, compute);
  }

  // Returns the value of --token-stats-mib for a table of all tokens.
  static int64_t MibOfAllTokens(const StackExperts& of) {
    int64_t experts = 0;
    for (const BlockExpertStats& block : of.Snapshot().blocks) {
      experts += block.num_experts;
    }
    const int64_t bytes = TokenExpertCounts::BytesFor(LargestVocabulary(of.spec()), experts);
    return (bytes + (1 << 20) - 1) >> 20;
  }

  static absl::Status NotCounted(const StackExperts& of) {
    return Missing("not_counted",
                   Concat("not all tokens are counted by expert: start the server with "
                          "--token-stats-mib ",
                          MibOfAllTokens(of), " for a table of all tokens"));
  }

  static Result<Table> TableOf(const Request& request, const StackExperts& of) {
    const ExpertStats stats = of.Snapshot();
    MOESERVE_ASSIGN_OR_RETURN(const auto chosen, ChosenBlock(request.query, stats));
    if (!chosen) return MissingField("layer");
    const std::optional<TokenExpertCounts> counts = of.token_counts();
    if (!counts) return NotCounted(of);
    return Table{*chosen, counts->ReadColumns(chosen->first, chosen->experts)};
  }

  ServerContext& context_;
  const Slots computations_{kComputations};
  const Slots downloads_{kDownloads};
};

}  // namespace

Result<StackExperts> QueriedStack(const Request& request, const Engine& engine) {
  const auto name = QueryText(request.query, "stack");
  if (!name) return StackExperts(engine);
  return StackExperts::Named(engine, *name);
}

Result<std::shared_ptr<ServedModel>> QueriedModel(const Request& request,
                                                  const ServerContext& context) {
  const std::optional<std::string> name =
      FormDecode(QueryText(request.query, "model").value_or(""));
  if (!name) return InvalidValue("model", "'model' is not well-formed");
  return context.LoadedModelFor(*name, request.key.get());
}

void AddExpertRoutes(Router& router, ServerContext& context) {
  const auto routes = std::make_shared<const ExpertRoutes>(context);
  const auto add = [&](std::string_view path, Scope scope,
                       Handled (ExpertRoutes::*handler)(const Request&) const) {
    router.Add("GET", path, Access::Key(scope), Work::kSlow, HandlerOf(routes, handler));
  };
  // The tokens and the profile show what other users have sent.
  add("/v1/experts/tokens", Scope::kAdmin, &ExpertRoutes::Tokens);
  add("/v1/experts/similarity", Scope::kStatistics, &ExpertRoutes::Similarity);
  add("/v1/experts/collapse", Scope::kStatistics, &ExpertRoutes::Collapse);
  add("/v1/experts/profile", Scope::kAdmin, &ExpertRoutes::Profile);
}

}  // namespace moeserve::server::http
