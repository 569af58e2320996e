#include "engine/statistics/statistic_list.h"

#include "base/kinds.h"
#include "engine/statistics/measures/activated.h"
#include "engine/statistics/measures/load_balance.h"
#include "engine/statistics/measures/router_losses.h"

namespace moeserve {
namespace {

using Block = BlockExpertStats;
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
     [](const Block& b, const Options&) { return Integer(b.layer); }},
    {"block", "block", "", "\"attention\" or \"feed_forward\"", "",
     [](const Block& b, const Options&) { return Value(std::string(Name(b.block))); }},
    {"experts", "num_experts", "experts", "E", "",
     [](const Block& b, const Options&) { return Integer(b.num_experts); }},
    {"select", "select", "", "\"top_k\" or \"top_p\"", "",
     [](const Block& b, const Options&) { return Value(std::string(KindName(b.select))); }},
    {"max_selected", "max_selected", "experts", "k, the most experts of a row", "",
     [](const Block& b, const Options&) { return Integer(b.max_selected); }},
    {"split_heads", "split_heads", "rows", "h, rows of a token", "MH-MoE, eq. 3",
     [](const Block& b, const Options&) { return Integer(b.split_heads); }},
    // Counts.
    {"", "prefill_tokens", "tokens", "tokens of prompts", "",
     [](const Block& b, const Options&) { return Value(b.tokens[kPrefill]); },
     {"moe_layer_tokens_total", "Tokens run through a routed block.", "prefill"}},
    {"", "decode_tokens", "tokens", "tokens of answers", "",
     [](const Block& b, const Options&) { return Value(b.tokens[kDecode]); },
     {"moe_layer_tokens_total", "Tokens run through a routed block.", "decode"}},
    {"", "prefill_rows", "rows", "rows of prompts", "",
     [](const Block& b, const Options&) { return Value(b.rows[kPrefill]); },
     {"moe_layer_rows_total", "Rows routed: tokens, or sub-tokens where split.",
      "prefill"}},
    {"", "decode_rows", "rows", "rows of answers", "",
     [](const Block& b, const Options&) { return Value(b.rows[kDecode]); },
     {"moe_layer_rows_total", "Rows routed: tokens, or sub-tokens where split.",
      "decode"}},
    {"rows", "", "rows", "rows routed", "",
     [](const Block& b, const Options&) { return Value(b.total_rows()); }},
    {"tokens", "", "tokens", "T, tokens run through the block", "",
     [](const Block& b, const Options&) { return Value(b.total_tokens()); }},
    {"counts", "counts", "rows [E]", "n_e, rows that chose the expert", "",
     [](const Block& b, const Options&) { return Value(b.selections); },
     {"moe_expert_tokens_total", "Rows that chose the expert.", nullptr, MetricDetail::kExperts}},
    {"weight_sums", "weight_sums", "[E]", "sum of the final gate weights", "",
     [](const Block& b, const Options&) { return Value(b.weight_sums); },
     {"moe_expert_weight_total", "Sum of the gate weights that rows gave the expert.", nullptr,
      MetricDetail::kWeights}},
    {"distinct_experts_histogram", "distinct_histogram", "tokens [n]",
     "tokens that touched n distinct experts, n from 0", "",
     [](const Block& b, const Options&) { return Value(b.distinct_histogram); }},
    {"distinct_experts_mean", "", "experts", "mean of that histogram", "MH-MoE, fig. 7",
     [](const Block& b, const Options&) { return Value(MeanDistinctExperts(b)); }},
    {"", "recomputed_tokens", "tokens", "as `recomputed.tokens`", "",
     [](const Block& b, const Options&) { return Value(b.recomputed_tokens); },
     {"moe_recomputed_tokens_total",
      "Tokens run again after a preemption; only the families of steps count them as well."}},
    {"nonfinite_rows", "nonfinite_rows", "rows", "rows with NaN or Inf in router scores", "",
     [](const Block& b, const Options&) { return Value(b.nonfinite_rows); },
     {"moe_router_nonfinite_total", "Rows with NaN or Inf in router scores."}},
    {"expert_parameters", "expert_parameters", "parameters [E]", "size of each expert", "",
     [](const Block& b, const Options&) { return Value(b.expert_parameters); }},
    {"decode_counts", "decode_counts", "rows [E]", "`counts` of answers alone", "",
     [](const Block& b, const Options&) { return Value(b.decode_selections); }},
    {"touching_tokens", "touching_tokens", "tokens [E]", "tokens with a row that chose the expert",
     "", [](const Block& b, const Options&) { return Value(b.touching_tokens); }},
    {"visits", "", "steps [E]", "steps in which a row chose the expert", "",
     [](const Block& b, const Options&) { return Value(b.visits); }},
    {"recomputed.tokens", "", "tokens",
     "tokens run again after a preemption; in none of the other counts", "",
     [](const Block& b, const Options&) { return Value(b.recomputed_tokens); }},
    {"recomputed.rows", "", "rows", "their rows", "",
     [](const Block& b, const Options&) { return Value(b.recomputed_rows); }},
    {"recomputed.counts", "recomputed_counts", "rows [E]", "their `counts`", "",
     [](const Block& b, const Options&) { return Value(b.recomputed_selections); }},
    {"expert_widths", "", "units [E]", "hidden width; attention: width of all heads", "HMoE",
     [](const Block& b, const Options&) { return Integers(b.expert_widths); }},
    // How the experts share the work. n_e: selections of expert e; T: tokens; h: rows per token; k:
    // largest number of experts per row.
    {"selection_ratio", "", "rows per token [E]", "n_e / T", "MH-MoE, fig. 1 and 5",
     [](const Block& b, const Options&) { return Value(SelectionRatios(b)); }},
    {"selection_ratio_of_choices", "", "share [E]", "n_e / (T h k)", "",
     [](const Block& b, const Options&) { return Value(SelectionRatiosOfChoices(b)); }},
    {"activated_experts", "", "experts", "experts with n_e / T above the threshold",
     "MH-MoE, fig. 1",
     [](const Block& b, const Options& o) { return Integer(ActivatedExperts(b, o.threshold)); }},
    {"load_share", "", "share [E]", "n_e / sum n", "MoA, fig. 3 and 4",
     [](const Block& b, const Options&) { return Value(LoadShares(b)); }},
    {"experts_by_load", "", "[E]", "numbers of the experts, the most loaded first", "MoA, fig. 3",
     [](const Block& b, const Options&) { return Integers(ExpertsByLoad(b)); }},
    {"activated_parameters.compute", "", "parameters per token",
     "of routed experts; an expert counts for each row that ran it", "HMoE, table 2",
     [](const Block& b, const Options&) { return Value(ActivatedOf(b).compute); }},
    {"activated_parameters.unique", "", "parameters per token", "an expert counts once per token",
     "", [](const Block& b, const Options&) { return Value(ActivatedOf(b).unique); }},
    {"activated_parameters.total", "", "parameters", "of all experts of the block", "",
     [](const Block& b, const Options&) { return Value(ActivatedOf(b).total); }},
    {"activated_parameters.compute_ratio", "", "share", "compute / total", "HMoE, table 2",
     [](const Block& b, const Options&) { return Value(ActivatedOf(b).compute_ratio()); }},
    {"activated_parameters.unique_ratio", "", "share", "unique / total", "",
     [](const Block& b, const Options&) { return Value(ActivatedOf(b).unique_ratio()); }},
    // Computed from sampled router scores. p_e: probability of expert e; T_e: share of rows that
    // chose e; P_e: mean of p_e.
    {"router.rows", "", "rows", "rows whose scores were sampled", "",
     [](const Block& b, const Options&) { return Value(SummarizeRouter(b).rows); }},
    {"router.entropy_mean", "", "nats", "mean of -sum p_e ln p_e", "HMoE, eq. 5",
     [](const Block& b, const Options&) { return Value(SummarizeRouter(b).entropy_mean); }},
    {"router.entropy_loss", "", "", "E sum p_e ln p_e, mean over rows", "HMoE, eq. 5",
     [](const Block& b, const Options&) { return Value(SummarizeRouter(b).entropy_loss); }},
    {"router.z_loss", "", "", "mean of (ln sum exp s_e)^2", "MoA, eq. 16",
     [](const Block& b, const Options&) { return Value(SummarizeRouter(b).z_loss); }},
    {"router.balance_loss", "", "", "E sum T_e P_e",
     "X-MoE, eq. 9; MH-MoE, eq. 10; HMoE, eq. 3",
     [](const Block& b, const Options&) { return Value(SummarizeRouter(b).balance_loss); }},
    {"router.normalized_balance_loss", "", "", "L_a: 1 is even", "MoA, eq. 13",
     [](const Block& b, const Options&) {
       return Value(SummarizeRouter(b).normalized_balance_loss);
     }},
    {"router.parameter_penalty", "", "units", "E sum (T_e w_e) P_e, w_e the width", "HMoE, eq. 4",
     [](const Block& b, const Options&) { return Value(SummarizeRouter(b).parameter_penalty); }},
    {"router.probability_mean", "", "[E]", "P_e", "",
     [](const Block& b, const Options&) { return Value(SummarizeRouter(b).probability_mean); }},
    {"router.counts", "", "rows [E]", "`counts` of the sampled rows", "",
     [](const Block& b, const Options&) { return Value(b.router.selections); }},
};

constexpr ModelStatistic kModelStatistics[] = {
    {"tokens", "tokens", "tokens", "tokens run through the model", "",
     [](const ExpertStats& s, const Options&) { return Value(s.tokens); }},
    {"activation_ratio", "activation_ratio", "share",
     "experts of all blocks with n_e / T above the threshold", "MH-MoE, fig. 1",
     [](const ExpertStats& s, const Options& o) { return Value(ActivationRatio(s, o.threshold)); }},
    {"activation_threshold", "", "rows per token", "that threshold", "",
     [](const ExpertStats&, const Options& o) { return Value(o.threshold); }},
    {"activated_parameters_per_token", "activated_parameters_per_token", "parameters per token",
     "mean, embeddings and head excluded; an expert counts for each row", "HMoE, table 2",
     [](const ExpertStats& s, const Options&) { return Value(MeanActivatedParameters(s)); }},
    {"always_active_parameters", "always_active_parameters", "parameters",
     "parameters that every token uses", "",
     [](const ExpertStats& s, const Options&) { return Value(s.always_active_parameters); }},
    {"recomputed_tokens", "", "tokens", "tokens run again after a preemption, not in `tokens`", "",
     [](const ExpertStats& s, const Options&) { return Value(s.recomputed_tokens); }},
    {"diversity.mean", "", "experts", "distinct experts of a token in a block", "MH-MoE, fig. 7",
     [](const ExpertStats& s, const Options&) { return Value(MeanDiversity(s)); }},
    {"diversity.blocks", "", "blocks", "blocks it counts: those that split, or all", "",
     [](const ExpertStats& s, const Options&) { return Integer(s.diversity_blocks); }},
    {"diversity.histogram", "", "tokens [n]",
     "tokens that touched n distinct experts in these blocks together", "",
     [](const ExpertStats& s, const Options&) { return Value(s.diversity_histogram); }},
    {"activated_parameters.compute", "", "parameters per token",
     "routed experts (for each row) and all that every token uses", "HMoE, table 2",
     [](const ExpertStats& s, const Options&) { return Value(ActivatedOf(s).compute); }},
    {"activated_parameters.unique", "", "parameters per token", "an expert counts once per token",
     "", [](const ExpertStats& s, const Options&) { return Value(ActivatedOf(s).unique); }},
    {"activated_parameters.total", "", "parameters", "of the model", "",
     [](const ExpertStats& s, const Options&) { return Value(ActivatedOf(s).total); }},
    {"activated_parameters.compute_ratio", "", "share", "compute / total", "HMoE, table 2",
     [](const ExpertStats& s, const Options&) { return Value(ActivatedOf(s).compute_ratio()); }},
    {"activated_parameters.unique_ratio", "", "share", "unique / total", "",
     [](const ExpertStats& s, const Options&) { return Value(ActivatedOf(s).unique_ratio()); }},
    {"activated_parameters.always", "", "parameters", "parameters that every token uses", "",
     [](const ExpertStats& s, const Options&) { return Value(s.always_active_parameters); }},
    {"activated_parameters.mean_block_ratio", "", "share", "mean of the blocks' compute_ratio",
     "HMoE, table 2",
     [](const ExpertStats& s, const Options&) { return Value(MeanActivatedRatio(s)); }},
};
// clang-format on

}  // namespace

std::span<const BlockStatistic> BlockStatistics() { return kBlockStatistics; }
std::span<const ModelStatistic> ModelStatistics() { return kModelStatistics; }

}  // namespace moeserve
