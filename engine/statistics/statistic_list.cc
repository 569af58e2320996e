#include "engine/statistics/statistic_list.h"

#include "base/kinds.h"
#include "engine/statistics/measures/activated.h"
#include "engine/statistics/measures/load_balance.h"
#include "engine/statistics/measures/router_losses.h"

namespace moeserve {
namespace {

using Options = StatisticOptions;
using Value = StatisticValue;

constexpr int kPrefill = static_cast<int>(Phase::kPrefill);
constexpr int kDecode = static_cast<int>(Phase::kDecode);

Value Integer(int value) { return int64_t{value}; }

template <typename T>
Value Integers(const std::vector<T>& values) {
  return std::vector<int64_t>(values.begin(), values.end());
}

// clang-format off
constexpr BlockStatistic kBlockStatistics[] = {
    // Properties of the block.
    {"layer", "layer", "", "decoder layer, from 0", "",
     [](const BlockExpertStats& b, const Options&) { return Integer(b.layer); }},
    {"block", "block", "", "\"attention\" or \"feed_forward\"", "",
     [](const BlockExpertStats& b, const Options&) { return Value(std::string(Name(b.block))); }},
    {"experts", "num_experts", "experts", "E", "",
     [](const BlockExpertStats& b, const Options&) { return Integer(b.num_experts); }},
    {"select", "select", "", "\"top_k\", \"top_p\" or \"table\"", "",
     [](const BlockExpertStats& b, const Options&) { return Value(std::string(KindName(b.select))); }},
    {"max_selected", "max_selected", "experts",
     "k, the maximum number of experts selected for one row", "",
     [](const BlockExpertStats& b, const Options&) { return Integer(b.max_selected); }},
    {"split_heads", "split_heads", "rows", "h, rows into which a token is split", "MH-MoE, eq. 3",
     [](const BlockExpertStats& b, const Options&) { return Integer(b.split_heads); }},
    // Counts.
    {"", "prefill_tokens", "tokens", "prompt tokens", "",
     [](const BlockExpertStats& b, const Options&) { return Value(b.tokens[kPrefill]); },
     {"moe_layer_tokens_total", "Tokens run through a routed block.", "prefill"}},
    {"", "decode_tokens", "tokens", "generated tokens", "",
     [](const BlockExpertStats& b, const Options&) { return Value(b.tokens[kDecode]); },
     {"moe_layer_tokens_total", "Tokens run through a routed block.", "decode"}},
    {"", "prefill_rows", "rows", "rows of prompt tokens", "",
     [](const BlockExpertStats& b, const Options&) { return Value(b.rows[kPrefill]); },
     {"moe_layer_rows_total", "Routed rows: tokens, or sub-tokens in blocks that split tokens.",
      "prefill"}},
    {"", "decode_rows", "rows", "rows of generated tokens", "",
     [](const BlockExpertStats& b, const Options&) { return Value(b.rows[kDecode]); },
     {"moe_layer_rows_total", "Routed rows: tokens, or sub-tokens in blocks that split tokens.",
      "decode"}},
    {"rows", "", "rows", "rows routed", "",
     [](const BlockExpertStats& b, const Options&) { return Value(b.total_rows()); }},
    {"tokens", "", "tokens", "T, tokens run through the block", "",
     [](const BlockExpertStats& b, const Options&) { return Value(b.total_tokens()); }},
    {"counts", "counts", "rows [E]", "n_e, rows routed to the expert", "",
     [](const BlockExpertStats& b, const Options&) { return Value(b.selections); },
     {"moe_expert_tokens_total", "Rows routed to the expert.", nullptr, MetricDetail::kExperts}},
    {"weight_sums", "weight_sums", "[E]", "sum of the final gate weights", "",
     [](const BlockExpertStats& b, const Options&) { return Value(b.weight_sums); },
     {"moe_expert_weight_total",
      "Sum of the gate weights of the rows routed to the expert.", nullptr,
      MetricDetail::kWeights}},
    {"distinct_experts_histogram", "distinct_histogram", "tokens [n]",
     "tokens that touched n distinct experts, n from 0", "",
     [](const BlockExpertStats& b, const Options&) { return Value(b.distinct_histogram); }},
    {"distinct_experts_mean", "", "experts", "mean of `distinct_experts_histogram`",
     "MH-MoE, fig. 7",
     [](const BlockExpertStats& b, const Options&) { return Value(MeanDistinctExperts(b)); }},
    {"", "recomputed_tokens", "tokens", "as `recomputed.tokens`", "",
     [](const BlockExpertStats& b, const Options&) { return Value(b.recomputed_tokens); },
     {"moe_recomputed_tokens_total",
      "Tokens run again after a preemption. Only the per-step metrics include them, too."}},
    {"", "rejected_tokens", "tokens", "as `rejected.tokens`", "",
     [](const BlockExpertStats& b, const Options&) { return Value(b.rejected_tokens); },
     {"moe_rejected_tokens_total",
      "Drafted tokens that the model did not draw. Only the per-step metrics include them, too."}},
    {"nonfinite_rows", "nonfinite_rows", "rows", "rows with NaN or Inf in router scores", "",
     [](const BlockExpertStats& b, const Options&) { return Value(b.nonfinite_rows); },
     {"moe_router_nonfinite_total", "Rows with NaN or Inf in router scores."}},
    {"expert_parameters", "expert_parameters", "parameters [E]", "parameters of each expert", "",
     [](const BlockExpertStats& b, const Options&) { return Value(b.expert_parameters); }},
    {"decode_counts", "decode_counts", "rows [E]", "`counts`, generated tokens only", "",
     [](const BlockExpertStats& b, const Options&) { return Value(b.decode_selections); }},
    {"touching_tokens", "touching_tokens", "tokens [E]",
     "tokens with at least one row routed to the expert",
     "", [](const BlockExpertStats& b, const Options&) { return Value(b.touching_tokens); }},
    {"visits", "", "steps [E]", "steps in which at least one row was routed to the expert", "",
     [](const BlockExpertStats& b, const Options&) { return Value(b.visits); }},
    {"recomputed.tokens", "", "tokens",
     "tokens run again after a preemption; no other count includes them", "",
     [](const BlockExpertStats& b, const Options&) { return Value(b.recomputed_tokens); }},
    {"recomputed.rows", "", "rows", "rows of the recomputed tokens", "",
     [](const BlockExpertStats& b, const Options&) { return Value(b.recomputed_rows); }},
    {"recomputed.counts", "recomputed_counts", "rows [E]", "`counts` of the recomputed tokens", "",
     [](const BlockExpertStats& b, const Options&) { return Value(b.recomputed_selections); }},
    {"rejected.tokens", "", "tokens",
     "drafted tokens that the model did not draw; no other count includes them", "",
     [](const BlockExpertStats& b, const Options&) { return Value(b.rejected_tokens); }},
    {"rejected.rows", "", "rows", "rows of the rejected tokens", "",
     [](const BlockExpertStats& b, const Options&) { return Value(b.rejected_rows); }},
    {"rejected.counts", "rejected_counts", "rows [E]", "`counts` of the rejected tokens", "",
     [](const BlockExpertStats& b, const Options&) { return Value(b.rejected_selections); }},
    {"expert_widths", "", "units [E]",
     "hidden width, 0 without matrices; attention: width of all heads", "HMoE",
     [](const BlockExpertStats& b, const Options&) { return Integers(b.expert_widths); }},
    // How the experts share the work. n_e: selections of expert e; T: tokens; h: rows per token; k:
    // largest number of experts per row.
    {"selection_ratio", "", "rows per token [E]", "n_e / T", "MH-MoE, fig. 1 and 5",
     [](const BlockExpertStats& b, const Options&) { return Value(SelectionRatios(b)); }},
    {"selection_ratio_of_choices", "", "share [E]", "n_e / (T h k)", "",
     [](const BlockExpertStats& b, const Options&) { return Value(SelectionRatiosOfChoices(b)); }},
    {"activated_experts", "", "experts", "experts with n_e / T above `activation_threshold`",
     "MH-MoE, fig. 1",
     [](const BlockExpertStats& b, const Options& o) { return Integer(ActivatedExperts(b, o.threshold)); }},
    {"load_share", "", "share [E]", "n_e / sum n", "MoA, fig. 3 and 4",
     [](const BlockExpertStats& b, const Options&) { return Value(LoadShares(b)); }},
    {"experts_by_load", "", "[E]", "ids of the experts, in descending order of load", "MoA, fig. 3",
     [](const BlockExpertStats& b, const Options&) { return Integers(ExpertsByLoad(b)); }},
    {"activated_parameters.compute", "", "parameters per token",
     "parameters of routed experts; an expert counts once for each row that it processes",
      "HMoE, table 2",
     [](const BlockExpertStats& b, const Options&) { return Value(ActivatedOf(b).compute); }},
    {"activated_parameters.unique", "", "parameters per token", "an expert counts once per token",
     "", [](const BlockExpertStats& b, const Options&) { return Value(ActivatedOf(b).unique); }},
    {"activated_parameters.total", "", "parameters", "parameters of all experts of the block", "",
     [](const BlockExpertStats& b, const Options&) { return Value(ActivatedOf(b).total); }},
    {"activated_parameters.compute_ratio", "", "share", "compute / total", "HMoE, table 2",
     [](const BlockExpertStats& b, const Options&) { return Value(ActivatedOf(b).compute_ratio()); }},
    {"activated_parameters.unique_ratio", "", "share", "unique / total", "",
     [](const BlockExpertStats& b, const Options&) { return Value(ActivatedOf(b).unique_ratio()); }},
    // Computed from sampled router scores. p_e: probability of expert e; T_e: share of rows that
    // chose e; P_e: mean of p_e.
    {"router.rows", "", "rows", "rows whose scores were sampled", "",
     [](const BlockExpertStats& b, const Options&) { return Value(SummarizeRouter(b).rows); }},
    {"router.entropy_mean", "", "nats", "mean of -sum p_e ln p_e", "HMoE, eq. 5",
     [](const BlockExpertStats& b, const Options&) { return Value(SummarizeRouter(b).entropy_mean); }},
    {"router.entropy_loss", "", "", "E sum p_e ln p_e, mean over rows", "HMoE, eq. 5",
     [](const BlockExpertStats& b, const Options&) { return Value(SummarizeRouter(b).entropy_loss); }},
    {"router.z_loss", "", "", "mean of (ln sum exp s_e)^2", "MoA, eq. 16",
     [](const BlockExpertStats& b, const Options&) { return Value(SummarizeRouter(b).z_loss); }},
    {"router.balance_loss", "", "", "E sum T_e P_e",
     "X-MoE, eq. 9; MH-MoE, eq. 10; HMoE, eq. 3",
     [](const BlockExpertStats& b, const Options&) { return Value(SummarizeRouter(b).balance_loss); }},
    {"router.normalized_balance_loss", "", "", "L_a; 1 if the load is uniform", "MoA, eq. 13",
     [](const BlockExpertStats& b, const Options&) {
       return Value(SummarizeRouter(b).normalized_balance_loss);
     }},
    {"router.parameter_penalty", "", "units", "E sum (T_e w_e) P_e, w_e the width", "HMoE, eq. 4",
     [](const BlockExpertStats& b, const Options&) { return Value(SummarizeRouter(b).parameter_penalty); }},
    {"router.probability_mean", "", "[E]", "P_e", "",
     [](const BlockExpertStats& b, const Options&) { return Value(SummarizeRouter(b).probability_mean); }},
    {"router.counts", "", "rows [E]", "`counts`, sampled rows only", "",
     [](const BlockExpertStats& b, const Options&) { return Value(b.router.selections); }},
};

constexpr ModelStatistic kModelStatistics[] = {
    {"tokens", "tokens", "tokens", "tokens run through the model", "",
     [](const ExpertStats& s, const Options&) { return Value(s.tokens); }},
    {"activation_ratio", "activation_ratio", "share",
     "share of the experts of all blocks with n_e / T above `activation_threshold`",
      "MH-MoE, fig. 1",
     [](const ExpertStats& s, const Options& o) { return Value(ActivationRatio(s, o.threshold)); }},
    {"activation_threshold", "", "rows per token", "threshold of n_e / T for an activated expert",
     "",
     [](const ExpertStats&, const Options& o) { return Value(o.threshold); }},
    {"activated_parameters_per_token", "activated_parameters_per_token", "parameters per token",
     "mean without embeddings and LM head; an expert counts once for each row", "HMoE, table 2",
     [](const ExpertStats& s, const Options&) { return Value(MeanActivatedParameters(s)); }},
    {"always_active_parameters", "always_active_parameters", "parameters",
     "parameters that every token uses", "",
     [](const ExpertStats& s, const Options&) { return Value(s.always_active_parameters); }},
    {"recomputed_tokens", "", "tokens", "tokens run again after a preemption, not in `tokens`", "",
     [](const ExpertStats& s, const Options&) { return Value(s.recomputed_tokens); }},
    {"rejected_tokens", "", "tokens", "drafted tokens that the model did not draw, not in `tokens`",
     "", [](const ExpertStats& s, const Options&) { return Value(s.rejected_tokens); }},
    {"diversity.mean", "", "experts", "mean number of distinct experts per token and block",
     "MH-MoE, fig. 7",
     [](const ExpertStats& s, const Options&) { return Value(MeanDiversity(s)); }},
    {"diversity.blocks", "", "blocks",
     "blocks that diversity covers: the blocks that split tokens if there are any, else all", "",
     [](const ExpertStats& s, const Options&) { return Integer(s.diversity_blocks); }},
    {"diversity.histogram", "", "tokens [n]",
     "tokens that touched n distinct experts in these blocks together", "",
     [](const ExpertStats& s, const Options&) { return Value(s.diversity_histogram); }},
    {"activated_parameters.compute", "", "parameters per token",
     "routed experts, once for each row, plus the parameters that every token uses",
      "HMoE, table 2",
     [](const ExpertStats& s, const Options&) { return Value(ActivatedOf(s).compute); }},
    {"activated_parameters.unique", "", "parameters per token", "an expert counts once per token",
     "", [](const ExpertStats& s, const Options&) { return Value(ActivatedOf(s).unique); }},
    {"activated_parameters.total", "", "parameters",
     "parameters of the model without embeddings and LM head", "",
     [](const ExpertStats& s, const Options&) { return Value(ActivatedOf(s).total); }},
    {"activated_parameters.compute_ratio", "", "share", "compute / total", "HMoE, table 2",
     [](const ExpertStats& s, const Options&) { return Value(ActivatedOf(s).compute_ratio()); }},
    {"activated_parameters.unique_ratio", "", "share", "unique / total", "",
     [](const ExpertStats& s, const Options&) { return Value(ActivatedOf(s).unique_ratio()); }},
    {"activated_parameters.always", "", "parameters", "parameters that every token uses", "",
     [](const ExpertStats& s, const Options&) { return Value(s.always_active_parameters); }},
    {"activated_parameters.mean_block_ratio", "", "share",
     "mean of `compute_ratio` over the blocks",
     "HMoE, table 2",
     [](const ExpertStats& s, const Options&) { return Value(MeanActivatedRatio(s)); }},
};
// clang-format on

}  // namespace

std::span<const BlockStatistic> BlockStatistics() { return kBlockStatistics; }
std::span<const ModelStatistic> ModelStatistics() { return kModelStatistics; }

}  // namespace moeserve
