#include "engine/spec/spec.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/error_text.h"
#include "engine/spec/checker.h"
#include "engine/spec/spec_limits.h"
#include "engine/spec/weights.h"

namespace moeserve {
namespace {

// Explains a bound that is the number of experts which a row can select.
std::string ExpertsAre(const RoutedLayerSpec& routing) {
  if (routing.null_experts.total() == 0) return Is("num_experts", routing.num_experts);
  return " (num_experts and null_experts together are " + std::to_string(routing.num_experts) + ")";
}

void CheckSelect(Checker& check, const std::string& scope, const RoutedLayerSpec& routing) {
  const SelectSpec& select = routing.select;
  const bool mixer = routing.gate == GateKind::kSparseMixer;
  const char* most = select.kind == SelectKind::kTopP ? "select.max" : "select.k";
  check.Divides(scope, "select.groups", select.groups, "num_experts", routing.num_experts);
  check.Int(scope, "select.best_groups", select.best_groups, 1, select.groups,
            Is("select.groups", select.groups));
  if (!check.ok()) return;
  const int size = routing.num_experts / select.groups;
  check.Refuse(select.groups > 1 && select.group_score == GroupScoreKind::kSumOfTwo && size < 2,
               scope, "select.groups", "groups of at least 2 experts", select.groups,
               ExpertsAre(routing));
  if (select.best_groups < select.groups) {
    check.Int(scope, most, select.MaxSelected(), 1, int64_t{size} * select.best_groups,
              " (the best groups have fewer experts)");
  }
  check.Int(scope, most, select.MaxSelected(), 1, routing.num_experts, ExpertsAre(routing));
  check.Refuse(select.kind == SelectKind::kTable && mixer, scope, "gate",
               "another gate than \"sparse_mixer\"", "\"sparse_mixer\" (select.kind is \"table\")");
}

// Checks the ids of experts that are replaced by constants.
void CheckReplaced(Checker& check, const std::string& scope, const RoutedLayerSpec& routing) {
  int before = -1;
  for (size_t i = 0; check.ok() && i < routing.null_experts.replaced.size(); ++i) {
    const int id = routing.null_experts.replaced[i];
    const std::string key = Concat("null_experts.replaced[", i, ']');
    check.Refuse(id <= before, scope, key, Concat("an id above ", before), id);
    check.Int(scope, key.c_str(), id, 0, routing.num_places() - 1,
              Concat(" (of the experts with matrices and those replaced, ", routing.num_places(),
                     " together)"));
    before = id;
  }
}

void CheckRouting(Checker& check, const std::string& scope, const ModelSpec& spec,
                  const RoutedLayerSpec& routing, BlockKind block) {
  const NullExperts& null_experts = routing.null_experts;
  const int64_t heads = routing.split.heads;
  const int bodies = routing.num_bodies();
  const int most = routing.num_experts - 1;  // at least one expert has matrices
  check.Int(scope, "null_experts.zero", null_experts.zero, 0, most, ExpertsAre(routing));
  check.Int(scope, "null_experts.copy", null_experts.copy, 0, most, ExpertsAre(routing));
  check.Int(scope, "null_experts.constant", null_experts.constant, 0, most, ExpertsAre(routing));
  check.Int(scope, "num_experts", bodies, 1, kMaxExperts);
  CheckReplaced(check, scope, routing);
  if (block == BlockKind::kAttention) {
    check.Refuse(!routing.widths.empty(), scope, "widths", "none in attention",
                 routing.widths.size());
    check.Refuse(heads != 1, scope, "split", "none in attention", heads, " heads");
    check.Refuse(null_experts.total() != 0, scope, "null_experts", "none in attention",
                 null_experts.total(), " experts");
  } else {
    check.Refuse(routing.widths.size() != static_cast<size_t>(bodies), scope, "widths",
                 Concat("a list of ", bodies, " widths"), routing.widths.size(),
                 Is("num_experts", bodies));
    check.Refuse(routing.weight_input && (null_experts.total() != 0 || routing.split.residual),
                 scope, "weight_input", "false",
                 "true (there are null_experts, or split.residual is true)");
    check.Divides(scope, "split.heads", heads, "hidden_size", spec.hidden_size);
    check.Refuse(heads * routing.num_experts > kMaxRoutesOfToken, scope, "split.heads",
                 Concat("heads * num_experts <= ", kMaxRoutesOfToken), heads * routing.num_experts);
    check.Refuse(routing.latent_width > 0 && routing.split.residual, scope, "split.residual",
                 "false", "true", Is("latent_width", routing.latent_width));
  }
  CheckSelect(check, scope, routing);
}

// Checks FeedForwardSpec::late_experts: `next` is the feed-forward of the next layer, or null.
void CheckLateExperts(Checker& check, const ModelSpec& spec, const std::string& scope,
                      const BlockSpec& block) {
  const FeedForwardSpec* const feed_forward = block.feed_forward();
  if (feed_forward == nullptr || !feed_forward->late_experts) return;
  const NormPlacement placement = NormPlacementOf(spec, block);
  const BlockSpec* const next = spec.FindBlock(block.layer + 1, BlockKind::kFeedForward);
  std::string_view why;
  if (block.layer + 1 == spec.num_layers()) why = "it is the last layer";
  if (next != nullptr && next->feed_forward()->late_experts) why = "so it is in the next layer";
  if (NormsOutput(placement) || placement == NormPlacement::kPost) why = "norm.placement";
  if (feed_forward->shared_norms) why = "shared_norms is true";
  if (spec.layer_scale) why = "layer_scale is true";
  if (spec.layer_input.has_value()) why = "layer_input is set";
  if (!feed_forward->routed()) why = "kind is \"dense\"";
  check.Refuse(!why.empty(), scope, "late_experts", "false", "true (", why, ')');
}

// Checks how a block joins the residual stream. `before` is null for the first block.
void CheckResidual(Checker& check, const ModelSpec& spec, const std::string& scope,
                   const BlockSpec& block, const BlockSpec* before) {
  const NormPlacement placement = NormPlacementOf(spec, block);
  const bool out_bias =
      std::visit([](const auto& mixer) { return SettingsOf(mixer).out_bias; }, block.mixer);
  check.Refuse(out_bias && NormsOutput(placement), scope, "out_bias", "false",
               "true (norm.placement normalizes the output)");
  CheckLateExperts(check, spec, scope, block);
  const RoutedLayerSpec* const routing = block.routing();
  const bool reads_stream = routing != nullptr && routing->score.stream;
  check.Refuse(reads_stream && routing->split.heads > 1, scope, "routing.score.stream", "false",
               "true (split.heads is ", routing != nullptr ? routing->split.heads : 0, ')');
  if (!block.residual.parallel) return;
  const FeedForwardSpec* const feed_forward = block.feed_forward();
  const bool post = placement == NormPlacement::kPost ||
                    (before != nullptr && NormPlacementOf(spec, *before) == NormPlacement::kPost);
  std::string_view why;
  if (before == nullptr) why = "it is the first block";
  if (before != nullptr && before->residual.parallel) why = "the block before it is parallel, too";
  if (post) why = "norm.placement \"post\" normalizes the sum";
  if (reads_stream) why = "routing.score.stream is true";
  if (before != nullptr && before->layer != block.layer) {
    if (spec.layer_scale) why = "layer_scale is true, and it is the first block of its layer";
    if (spec.layer_input.has_value()) {
      why = "layer_input is set, and it is the first block of its layer";
    }
  }
  if (feed_forward != nullptr && feed_forward->shared_norms) why = "shared_norms is true";
  check.Refuse(!why.empty(), scope, "parallel", "false", "true (", why, ')');
}

void CheckExpert(Checker& check, const std::string& scope, const ExpertSpec& expert) {
  check.Refuse(
      expert.form != ExpertForm::kGated &&
          (expert.activation_limit != 0 || expert.activation_slope != 1 || expert.up_offset != 0),
      scope, "form", "\"gated\" beside activation_limit, activation_slope or up_offset",
      "\"plain\"");
  check.Refuse(expert.form != ExpertForm::kGated && expert.limit_after, scope, "limit_after",
               "false", "true (form is \"plain\")");
  check.Refuse(expert.activation != ActivationKind::kSilu && expert.activation_slope != 1, scope,
               "activation_slope", "1 (activation is not \"silu\")",
               Number(expert.activation_slope));
}

void CheckLatent(Checker& check, const std::string& scope, const AttentionSpec& attention) {
  const LatentSpec& latent = *attention.latent;
  const int heads = attention.num_heads;
  check.Int(scope, "num_kv_heads", attention.num_kv_heads, heads, heads, " (latent attention)");
  check.Int(scope, "latent.rope_dim", latent.rope_dim, 1, attention.head_dim - 1,
            Is("head_dim", attention.head_dim));
  check.Refuse(attention.qk_norm != QkNorm::kNone, scope, "qk_norm", "none in latent attention",
               "another kind");
  const int64_t widest =
      heads * std::max(int64_t{latent.rank} + latent.rope_dim, int64_t{latent.value_dim});
  check.Refuse(widest > kMaxWidth, scope, "latent",
               Concat("num_heads * (rank + rope_dim) and num_heads * value_dim <= ", kMaxWidth),
               widest);
}

// Checks how values are made, and which keys tokens see.
void CheckValues(Checker& check, const ModelSpec& spec, const std::string& scope,
                 const AttentionSpec& attention) {
  const bool other = attention.routed() || attention.latent.has_value();
  const bool routed = attention.value_routing.has_value();
  check.Refuse(attention.query_scale.has_value() && attention.routed(), scope, "query_scale",
               "none in routed attention", "an object");
  check.Refuse(routed && other, scope, "value_routing", "none in routed and latent attention",
               "an object");
  check.Refuse(attention.value_from_key && (routed || attention.value_dim.has_value()), scope,
               "value_from_key", "false", "true (value_routing or value_dim is set)");
  check.Refuse(attention.window_kind == WindowKind::kChunk && !IsCausal(spec, attention), scope,
               "window_kind", "\"sliding\"", "\"chunk\" (the layer is not causal)");
  const int64_t width = int64_t{std::max(attention.num_heads, attention.num_kv_heads)} *
                        attention.value_dim.value_or(1);
  check.Refuse(width > kMaxWidth, scope, "value_dim",
               Concat("num_heads * value_dim <= ", kMaxWidth), width);
  if (check.ok() && routed) {
    CheckRouting(check, scope + "value_routing.", spec, *attention.value_routing,
                 BlockKind::kAttention);
  }
}

// Checks that a layer can read the keys and values of another one. `layer` is its number.
void CheckKvLayer(Checker& check, const ModelSpec& spec, const std::string& scope,
                  const AttentionSpec& attention, int layer) {
  if (!attention.kv_layer.has_value()) return;
  const int from = *attention.kv_layer;
  check.Refuse(spec.kind == ModelKind::kEncoder, scope, "kv_layer", "none in an encoder", from);
  check.Refuse(attention.value_routing.has_value(), scope, "value_routing", "none",
               "an object (kv_layer is set)");
  check.Refuse(from >= layer, scope, "kv_layer", Concat("a layer before layer ", layer), from);
  if (!check.ok()) return;
  const BlockSpec* const block = spec.FindBlock(from, BlockKind::kAttention);
  const AttentionSpec* const other = block == nullptr ? nullptr : block->attention();
  const bool dense = other != nullptr && !other->routed() && !other->latent.has_value();
  check.Refuse(!dense || other->kv_layer.has_value(), scope, "kv_layer",
               "a layer of dense attention with keys of its own", from);
  if (!check.ok()) return;
  const auto same = [&](std::string_view key, auto own, auto found) {
    check.Refuse(own != found, scope, key,
                 Concat("the value of layer ", from, ", whose keys it reads"), "another one");
  };
  same("num_kv_heads", attention.num_kv_heads, other->num_kv_heads);
  same("head_dim", attention.head_dim, other->head_dim);
  same("value_dim", attention.output_dim(), other->output_dim());
  same("window", attention.window, other->window);
  same("window_kind", attention.window_kind, other->window_kind);
  same("causal", IsCausal(spec, attention), IsCausal(spec, *other));
  check.Refuse(PositionOf(spec, attention).xpos_base > 0, scope, "kv_layer", "none", from,
               " (position.xpos_base is not 0)");
}

void CheckAttention(Checker& check, const ModelSpec& spec, const std::string& scope,
                    const AttentionSpec& attention) {
  const int64_t kv_width = int64_t{attention.num_kv_heads} * attention.head_dim;
  const int64_t width = int64_t{attention.num_heads} * attention.head_dim;
  check.Refuse(kv_width > kMaxWidth, scope, "num_kv_heads",
               Concat("num_kv_heads * head_dim <= ", kMaxWidth), kv_width);
  CheckValues(check, spec, scope, attention);
  if (attention.routed()) {
    // Routed attention has no QK norm; a loader that sets one misread its file.
    check.Refuse(attention.qk_norm != QkNorm::kNone, scope, "qk_norm", "none in routed attention",
                 "another kind");
    check.Refuse(attention.latent.has_value(), scope, "latent", "none in routed attention",
                 "an object");
    CheckRouting(check, scope + "routing.", spec, *attention.routing, BlockKind::kAttention);
  } else {
    check.Divides(scope, "num_kv_heads", attention.num_kv_heads, "num_heads", attention.num_heads);
    if (attention.latent.has_value()) CheckLatent(check, scope, attention);
    check.Refuse(width > kMaxWidth, scope, "num_heads",
                 Concat("num_heads * head_dim <= ", kMaxWidth), width);
  }
  CheckRopeOfLayer(check, spec, scope, attention);
  check.Refuse(!IsCausal(spec, attention) && spec.kind == ModelKind::kDecoder, scope, "causal",
               "true", "false (model_type is \"routed_decoder\")");
  check.Refuse(!IsCausal(spec, attention) && PositionOf(spec, attention).xpos_base > 0, scope,
               "causal", "true", "false (position.xpos_base is not 0)");
}

void CheckCrossAttention(Checker& check, const ModelSpec& spec, const std::string& scope,
                         const AttentionSpec& attention) {
  CheckAttention(check, spec, scope, attention);
  const auto refuse = [&](bool set, const char* key) {
    check.Refuse(set, scope, key, "none in attention to a source", "another value");
  };
  refuse(attention.position.has_value(), "position");
  refuse(attention.window.has_value(), "window");
  refuse(attention.causal.has_value(), "causal");
  refuse(attention.sinks, "sinks");
  refuse(attention.latent.has_value(), "latent");
  refuse(attention.qkv_clip > 0, "qkv_clip");
  refuse(attention.qk_norm == QkNorm::kHeads || attention.qk_norm == QkNorm::kL2, "qk_norm");
  refuse(attention.query_scale.has_value(), "query_scale");
  refuse(attention.value_dim.has_value(), "value_dim");
  refuse(attention.value_scale != 1.0, "value_scale");
  refuse(attention.value_norm, "value_norm");
  refuse(attention.value_from_key, "value_from_key");
  refuse(attention.value_routing.has_value(), "value_routing");
  refuse(attention.kv_layer.has_value(), "kv_layer");
  check.Refuse(spec.encoder == nullptr, scope, "kind",
               "no attention to a source without an encoder", "one");
}

// Returns the number of sub-layers of all networks of a block beyond the first of each network;
// each sub-layer has tensors of its own.
int64_t MoreSublayers(const FeedForwardSpec& feed_forward) {
  int64_t networks = feed_forward.shared_width > 0 ? 1 : 0;
  networks += feed_forward.routed() ? feed_forward.routing->num_bodies() : 1;
  return networks * (feed_forward.expert.depth - 1);
}

// Checks what the model computes from its last rows.
void CheckHead(Checker& check, const ModelSpec& spec) {
  const HeadSpec& head = spec.head;
  const bool pools = spec.pooling.has_value();
  const auto labels = static_cast<int64_t>(head.labels.size());
  const std::string kind = Concat(" (head.kind is ", Quoted(KindName(head.kind)), ')');
  check.Refuse(spec.kind == ModelKind::kEncoder && head.kind == HeadKind::kLanguageModel, "",
               "head.kind", "another kind, because an encoder generates nothing",
               Quoted(KindName(head.kind)));
  check.Refuse(spec.tie_word_embeddings && !HasVocabulary(head.kind), "", "tie_word_embeddings",
               "false", "true", kind);
  check.Refuse(spec.head_bias && !HasVocabulary(head.kind), "", "head_bias", "false", "true", kind);
  check.Int("", "number of head.labels", labels, HasLabels(head.kind) ? 1 : 0,
            HasLabels(head.kind) ? kMaxLabels : 0, kind);
  check.Refuse(head.kind == HeadKind::kSpans && labels != 2, "", "head.labels", "2 labels", labels,
               kind);
  const bool layer = head.kind == HeadKind::kMaskedLm || HasLabels(head.kind);
  check.Refuse(head.layer.has_value() && !layer, "", "head.layer", "none", "an object", kind);
  const bool of_text = head.kind == HeadKind::kSequenceClassification;
  check.Refuse((of_text || head.kind == HeadKind::kNone) && !pools && spec.stack == Stack::kOnly,
               "", "pooling", "an object", "none", kind);
  check.Refuse(pools && spec.stack != Stack::kOnly, "", "pooling", "none", "an object (encoder)");
  check.Int("", "number of pooling.dense", pools ? std::ssize(spec.pooling->dense) : 0, 0,
            of_text ? 0 : kMaxDenseModules, kind);
  check.Refuse(of_text && pools && spec.pooling->normalize, "", "pooling.normalize", "false",
               "true", kind);
}

void CheckTokenIds(Checker& check, const ModelSpec& spec) {
  const std::string because = Is("vocab_size", spec.vocab_size);
  if (spec.encoder != nullptr) {
    const auto start = spec.decoder_start_token_id;
    check.Refuse(!start.has_value(), "", "decoder_start_token_id", "an integer", "none");
    check.Int("", "decoder_start_token_id", start.value_or(0), 0, spec.vocab_size - 1, because);
  }
  if (spec.pad_token_id.has_value()) {
    check.Int("", "pad_token_id", *spec.pad_token_id, 0, spec.vocab_size - 1, because);
  }
  check.Refuse(!spec.position.count_padding && !spec.pad_token_id.has_value(), "", "pad_token_id",
               "an integer", "none (position.count_padding is false)");
  if (spec.bos_token_id.has_value()) {
    check.Int("", "bos_token_id", *spec.bos_token_id, 0, spec.vocab_size - 1, because);
  }
  for (size_t i = 0; i < spec.eos_token_ids.size(); ++i) {
    const std::string key =
        spec.eos_token_ids.size() == 1 ? "eos_token_id" : "eos_token_id[" + std::to_string(i) + "]";
    check.Int("", key.c_str(), spec.eos_token_ids[i], 0, spec.vocab_size - 1, because);
  }
}

// Runs after all other checks have passed, because these checks bound the number of tensors.
void CheckTotals(Checker& check, const ModelSpec& spec) {
  if (!check.ok()) return;
  int64_t total = 0;
  for (const TensorRequirement& tensor : RequiredTensors(spec)) {
    int64_t elements = 1;  // tensors have at most two dimensions, so this is at most 2^44
    for (const int64_t dim : tensor.shape) elements *= dim;
    total += elements;
    if (total > kMaxParameters) {
      check.Fail("the configuration", "at most " + std::to_string(kMaxParameters) + " parameters",
                 "more, counted up to " + tensor.name);
      return;
    }
  }
}

// A loader that numbers blocks wrongly is a defect of the program.
void CheckOrder(const ModelSpec& spec) {
  for (size_t i = 0; i < spec.blocks.size(); ++i) {
    const int layer = spec.blocks[i].layer;
    const int before = i == 0 ? -1 : spec.blocks[i - 1].layer;
    MOESERVE_CHECK(layer == before || layer == before + 1, "blocks are in the order of layers");
    for (size_t j = i; j-- > 0 && spec.blocks[j].layer == layer;) {
      MOESERVE_CHECK(spec.blocks[j].name() != spec.blocks[i].name(),
                     "the blocks of a layer have different names");
    }
  }
}

}  // namespace

ModelSpec PredictionOf(const ModelSpec& spec) {
  ModelSpec prediction;
  prediction.vocab_size = spec.vocab_size;
  prediction.hidden_size = spec.hidden_size;
  prediction.max_position_embeddings = spec.max_position_embeddings;
  prediction.norm = spec.norm;
  prediction.position = spec.position;
  prediction.embedding_scale = spec.embedding_scale;
  prediction.residual_scale = spec.residual_scale;
  prediction.embedding_norm = true;
  prediction.head.kind = HeadKind::kNone;
  prediction.stack = Stack::kPrediction;
  return prediction;
}

int PromptVocabulary(const ModelSpec& spec) {
  return spec.encoder != nullptr ? spec.encoder->vocab_size : spec.vocab_size;
}

int LargestVocabulary(const ModelSpec& spec) {
  return std::max(PromptVocabulary(spec), spec.vocab_size);
}

const AttentionSpec* FirstAttention(const ModelSpec& spec) {
  for (const BlockSpec& block : spec.blocks) {
    if (block.attention() != nullptr) return block.attention();
  }
  return nullptr;
}

bool IsCausal(const ModelSpec& spec, const AttentionSpec& attention) {
  return attention.causal.value_or(spec.kind != ModelKind::kEncoder);
}

namespace {

KvLayerShape CacheShape(const AttentionSpec& attention) {
  if (!attention.latent.has_value()) {
    return {.num_kv_heads = attention.num_kv_heads,
            .head_dim = attention.head_dim,
            .own_value_dim = attention.value_dim.value_or(0)};
  }
  return {1, attention.latent->rank + attention.latent->rope_dim, attention.latent->rank};
}

// Returns the shapes for the first `blocks` blocks, and the index of the last attention block's.
// `sources`: of blocks that attend to a source, instead of those that attend to their own tokens.
std::pair<std::vector<KvLayerShape>, int> CacheShapesOf(const ModelSpec& spec, int blocks,
                                                        bool sources = false) {
  std::vector<KvLayerShape> shapes;
  std::vector<int> of_layers(static_cast<size_t>(spec.num_layers()), -1);  // index of each layer's
  int last = -1;
  for (int b = 0; b < blocks; ++b) {
    const BlockSpec& block = spec.blocks[static_cast<size_t>(b)];
    const AttentionSpec* const attention = sources ? block.cross_attention() : block.attention();
    if (attention == nullptr) continue;
    if (!sources && attention->kv_layer.has_value()) {
      MOESERVE_CHECK(*attention->kv_layer < block.layer, "keys of a layer before");
      last = of_layers[static_cast<size_t>(block.layer)] =
          of_layers[static_cast<size_t>(*attention->kv_layer)];
      continue;
    }
    const KvLayerShape shape = CacheShape(*attention);
    const auto same =
        spec.kind == ModelKind::kEncoder ? std::ranges::find(shapes, shape) : shapes.end();
    last = static_cast<int>(same - shapes.begin());
    if (same == shapes.end()) shapes.push_back(shape);
    of_layers[static_cast<size_t>(block.layer)] = last;
  }
  return {std::move(shapes), last};
}

}  // namespace

std::vector<KvLayerShape> CacheShapes(const ModelSpec& spec) {
  std::vector<KvLayerShape> shapes = CacheShapesOf(spec, spec.num_blocks()).first;
  if (spec.encoder == nullptr) return shapes;
  const auto append = [&](std::vector<KvLayerShape> more, int table) {
    for (KvLayerShape& shape : more) {
      shape.table = table;
      shapes.push_back(shape);
    }
  };
  append(CacheShapesOf(spec, spec.num_blocks(), true).first, kSourceTable);
  append(CacheShapesOf(*spec.encoder, spec.encoder->num_blocks()).first, kEncoderTable);
  return shapes;
}

int FirstEncoderLayer(const ModelSpec& spec) {
  const auto of_encoder = CacheShapesOf(*spec.encoder, spec.encoder->num_blocks()).first;
  return static_cast<int>(CacheShapes(spec).size() - of_encoder.size());
}

int CacheLayer(const ModelSpec& spec, int block) {
  const bool source = spec.blocks[static_cast<size_t>(block)].cross_attention() != nullptr;
  const auto before = source ? CacheShapesOf(spec, spec.num_blocks()).first.size() : 0;
  return static_cast<int>(before) + CacheShapesOf(spec, block + 1, source).second;
}

namespace {

// Appends the state of a block to `shapes` if it has one.
void AddState(const ModelSpec& spec, const BlockSpec& block, std::vector<StateShape>& shapes) {
  const auto add = [&](const auto& mixer) {
    if constexpr (requires { mixer.State(0); }) shapes.push_back(mixer.State(spec.hidden_size));
  };
  std::visit(add, block.mixer);
}

}  // namespace

std::vector<StateShape> StateShapes(const ModelSpec& spec) {
  std::vector<StateShape> shapes;
  for (const BlockSpec& block : spec.blocks) AddState(spec, block, shapes);
  return shapes;
}

int StateIndex(const ModelSpec& spec, int block) {
  std::vector<StateShape> before;
  for (int b = 0; b < block; ++b) AddState(spec, spec.blocks[static_cast<size_t>(b)], before);
  return static_cast<int>(before.size());
}

namespace {

absl::Status CheckEncoder(const ModelSpec& spec) {
  if ((spec.kind == ModelKind::kEncoderDecoder) != (spec.encoder != nullptr)) {
    return absl::InvalidArgumentError("encoder: expected an object with model_type " +
                                      std::string(KindName(ModelKind::kEncoderDecoder)) + " alone");
  }
  if (spec.encoder == nullptr) return absl::OkStatus();
  const ModelSpec& encoder = *spec.encoder;
  MOESERVE_CHECK(encoder.stack == Stack::kEncoder && spec.stack == Stack::kDecoder,
                 "two stacks of one model");
  MOESERVE_CHECK(encoder.hidden_size == spec.hidden_size, "stacks of one width");
  if (encoder.vocab_size != spec.vocab_size && spec.share_embeddings) {
    return absl::InvalidArgumentError(
        Concat("encoder.vocab_size: expected ", spec.vocab_size,
               " (vocab_size, because share_embeddings is true), found ", encoder.vocab_size));
  }
  const absl::Status status = Validate(encoder);
  if (status.ok()) return status;
  return absl::Status(status.code(), Concat("encoder.", std::string(status.message())));
}

absl::Status CheckPrediction(const ModelSpec& spec) {
  if (spec.prediction == nullptr) return absl::OkStatus();
  const ModelSpec& prediction = *spec.prediction;
  MOESERVE_CHECK(prediction.stack == Stack::kPrediction && prediction.prediction == nullptr &&
                     prediction.hidden_size == spec.hidden_size &&
                     prediction.vocab_size == spec.vocab_size && prediction.embedding_norm,
                 "prediction layers of the model's sizes");
  const auto refuse = [](std::string_view expected, std::string_view found) {
    return absl::InvalidArgumentError(Concat("prediction: expected ", expected, ", found ", found));
  };
  if (spec.kind != ModelKind::kDecoder || !HasVocabulary(spec.head.kind) ||
      spec.pooling.has_value()) {
    return refuse("none beside a model that does not generate", "an object");
  }
  // Drafts that are rejected leave no trace in a cache of keys and values, but in a state.
  if (!StateShapes(prediction).empty()) {
    return refuse("attention in every layer", "a mixer with a state");
  }
  if (prediction.position.kind == PositionKind::kLearned ||
      prediction.position.kind == PositionKind::kSinusoidal || prediction.token_types > 0) {
    return refuse("no embeddings of positions or types", "a model with some");
  }
  const absl::Status status = Validate(prediction);
  if (status.ok()) return status;
  return absl::Status(status.code(), Concat("prediction.", std::string(status.message())));
}

}  // namespace

absl::Status Validate(const ModelSpec& spec) {
  CheckOrder(spec);
  MOESERVE_RETURN_IF_ERROR(CheckEncoder(spec));
  Checker check;
  check.Int("", "vocab_size", spec.vocab_size, 1, kMaxVocabulary);
  check.Int("", "hidden_size", spec.hidden_size, 1, kMaxWidth);
  check.Int("", "num_hidden_layers", spec.num_layers(), 1, kMaxLayers);
  check.Int("", "max_position_embeddings", spec.max_position_embeddings, 1, kMaxPositions);
  CheckTokenIds(check, spec);
  CheckSettings(check, "", spec);
  if (spec.layer_input.has_value()) {
    const int64_t inputs = int64_t{spec.layer_input->width} * spec.num_layers();
    check.Refuse(inputs > kMaxWidth, "", "layer_input.width",
                 Concat("num_hidden_layers * width <= ", kMaxWidth), inputs);
  }
  check.Divides("", "norm.groups", spec.norm.groups, "hidden_size", spec.hidden_size);
  CheckHead(check, spec);
  CheckPosition(check, spec);
  CheckRelativeBias(check, spec);
  if (!check.ok()) return check.status();

  int64_t experts = 0;
  int64_t latent_heads = 0;  // each head has tensors of its own
  for (size_t i = 0; check.ok() && i < spec.blocks.size(); ++i) {
    const BlockSpec& block = spec.blocks[i];
    const std::string scope = Concat(Name(block.kind()), '[', block.layer, "].");
    std::visit([&](const auto& mixer) { CheckSettings(check, scope, SettingsOf(mixer)); },
               block.mixer);
    CheckSettings(check, scope, block.residual);
    if (!check.ok()) break;
    if (const AttentionSpec* attention = block.attention()) {
      CheckAttention(check, spec, scope, *attention);
      CheckKvLayer(check, spec, scope, *attention, block.layer);
      CheckBiasOfLayer(check, spec, scope, *attention);
      if (attention->latent.has_value()) latent_heads += attention->num_heads;
    }
    if (const AttentionSpec* cross = block.cross_attention()) {
      CheckCrossAttention(check, spec, scope, *cross);
    }
    if (const DeltaSpec* delta = block.delta()) CheckDelta(check, scope, *delta);
    if (const StateSpaceSpec* ssm = block.state_space()) CheckStateSpace(check, scope, *ssm);
    const bool other = block.kind() != BlockKind::kAttention &&
                       block.kind() != BlockKind::kFeedForward &&
                       block.kind() != BlockKind::kCrossAttention;
    check.Refuse(other && spec.relative_bias.has_value(), scope, "kind", "\"dense\"",
                 "another kind (relative_bias is set)");
    if (const FeedForwardSpec* feed_forward = block.feed_forward()) {
      CheckExpert(check, scope + "expert.", feed_forward->expert);
      check.Refuse(
          feed_forward->shared_limit.has_value() && feed_forward->expert.form != ExpertForm::kGated,
          scope, "shared_limit", "none", "a number (expert.form is \"plain\")");
      if (feed_forward->routed()) {
        CheckRouting(check, scope + "routing.", spec, *feed_forward->routing, block.kind());
      }
      experts += MoreSublayers(*feed_forward);
    }
    CheckResidual(check, spec, scope, block, i == 0 ? nullptr : &spec.blocks[i - 1]);
    if (const RoutedLayerSpec* routing = block.routing()) experts += routing->num_experts;
    check.Refuse(
        latent_heads > kMaxExpertsOfModel, "", "num_heads",
        Concat("at most ", kMaxExpertsOfModel, " heads of latent attention in all layers together"),
        latent_heads, " up to layer ", block.layer);
    check.Refuse(experts > kMaxExpertsOfModel, "", "num_experts",
                 Concat("at most ", kMaxExpertsOfModel,
                        " experts in all layers together, each sub-layer of an expert counted"),
                 experts, " up to layer ", block.layer);
  }
  // The model's own faults come first, because its prediction layers share settings. Totals include
  // theirs, which must be valid then.
  if (!check.ok()) return check.status();
  MOESERVE_RETURN_IF_ERROR(CheckPrediction(spec));
  CheckTotals(check, spec);
  return check.status();
}

}  // namespace moeserve
