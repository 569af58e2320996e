// Writing a specification as config.json. What the reader of the native format reads back must be
// the same specification.
#include "model_loaders/architectures/native/write_config.h"

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <optional>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "base/kinds.h"
#include "gtest/gtest.h"
#include "model_loaders/architectures/native/config_json.h"
#include "model_loaders/checkpoint/loader.h"
#include "tests/model_loaders/spec_members.h"
#include "tests/support/family_cases.h"
#include "tests/support/golden.h"
#include "tests/support/native_model.h"

namespace moeserve::testing {
namespace {

namespace fs = std::filesystem;

// Returns the names of all members of all structures that ForMembers() can visit.
std::set<std::string> AllMembers() {
  AttentionSpec routed, latent;
  routed.routing.emplace();
  routed.position.emplace();
  latent.latent.emplace();
  latent.query_scale.emplace();
  ModelSpec spec;
  spec.AddLayers(1);
  spec.relative_bias.emplace();
  spec.head.layer.emplace();
  spec.pooling.emplace();
  std::set<std::string> names;
  const auto add = [&](const std::string& name, auto&) { names.insert(name); };
  for (const AttentionSpec& attention : {routed, latent}) {
    spec.attention(0) = attention;
    ForMembers(spec, add);
  }
  [&]<size_t... i>(std::index_sequence<i...>) {
    const auto one = [&](const Mixer& mixer) {
      spec.blocks.front().mixer = mixer;
      ForMembers(spec, add);
    };
    (one(std::variant_alternative_t<i, Mixer>()), ...);
  }
  (std::make_index_sequence<std::variant_size_v<Mixer>>());
  return names;
}

template <typename Kind>
std::vector<Kind> AllValues() {
  if constexpr (std::is_same_v<Kind, ActivationKind>) {
    return AllKinds(ActivationKind::kSilu);  // experts never have kNone
  } else if constexpr (std::is_same_v<Kind, GateActivation>) {
    return AllKinds(GateActivation::kSigmoid);  // nor have gates of mixers
  } else {
    return AllKinds<Kind>();
  }
}

// Gives a member its `choice`-th other value. Returns false if it has no more.
template <typename T>
bool Change(T& member, int choice) {
  const auto pick = [&]<typename U>(std::vector<U> values) {
    std::erase(values, member);
    if (choice >= static_cast<int>(values.size())) return false;
    member = values[static_cast<size_t>(choice)];
    return true;
  };
  if constexpr (std::is_same_v<T, bool>) {
    member = !member;
    return choice == 0;
  } else if constexpr (std::is_enum_v<T>) {
    return pick(AllValues<T>());
  } else if constexpr (std::is_integral_v<T>) {
    return pick(std::vector<T>{member + 1, member - 1, 2 * member, member / 2});
  } else if constexpr (std::is_floating_point_v<T>) {
    return pick(std::vector<T>{member / 3, member / 2, member + 1, member * 2, member + T{0.1}});
  } else if constexpr (std::is_same_v<T, std::vector<BlockSpec>>) {
    const int layer = member.back().layer + 1;
    for (size_t b = 0; b < 2; ++b) {
      member.push_back(member[b]);
      member.back().layer = layer;
    }
    return choice == 0;
  } else if constexpr (std::is_same_v<T, std::string>) {
    member += '"';
    return choice == 0;
  } else if constexpr (IsVector<T>::value) {
    if (choice == 0) {
      member.push_back(member.empty() ? typename T::value_type{} : member.front());
      return true;
    }
    if (choice > 4 || member.empty()) return false;
    if constexpr (Structure<typename T::value_type>)
      return false;
    else
      return Change(member.back(), choice - 1);
  } else {
    static_assert(IsOptional<T>::value);
    if (choice > 0) {
      if constexpr (Structure<typename T::value_type>)
        return false;
      else
        return member.has_value() && Change(*member, choice - 1);
    }
    if (member.has_value()) {
      member.reset();
    } else {
      member.emplace();
      if constexpr (std::is_same_v<T, std::optional<RoutedLayerSpec>>) member->widths = {3};
      if constexpr (std::is_same_v<T, std::optional<int>>) *member = 5;
    }
    return true;
  }
}

// Whether other members can lose their meaning when this one changes.
template <typename T>
constexpr bool IsKind() {
  if constexpr (IsOptional<T>::value) {
    return Structure<typename T::value_type>;
  } else {
    return std::is_enum_v<T>;
  }
}

// The following specifications together use every setting, with values that are no defaults.

ModelSpec Base() {
  ModelSpec spec;
  spec.vocab_size = 40;
  spec.hidden_size = 24;
  spec.max_position_embeddings = 512;
  spec.bos_token_id = 3;
  spec.eos_token_ids = {5, 4};
  LayerSpec layer;
  layer.attention.num_heads = 4;
  layer.attention.num_kv_heads = 4;
  layer.attention.head_dim = 16;
  layer.attention.scale = 0.25;
  layer.feed_forward.width = 7;
  spec.AddLayers(2, layer);
  return spec;
}

ModelSpec DenseEverything() {
  ModelSpec spec = Base();
  spec.norm = {.kind = NormKind::kLayer,
               .eps = 1e-6f,
               .final_eps = 3e-7f,
               .placement = NormPlacement::kPost};
  spec.position.theta = 500000.0;
  spec.position.pairing = RopePairing::kInterleaved;
  spec.position.fraction = 0.25;
  spec.position.xpos_base = 320.0;
  spec.position.scaling = {.kind = RopeScalingKind::kLlama3,
                           .factor = 8.0,
                           .original_positions = 64.0,
                           .low_freq_factor = 1.5,
                           .high_freq_factor = 3.7,
                           .magnitude = 1.1};
  spec.embedding_scale = 4.898979485566356;
  spec.embedding_norm = true;
  spec.residual_scale = 0.22;
  spec.logit_scale = 1.0 / 3.0;
  spec.logit_soft_cap = 30.0;
  spec.head_bias = true;
  AttentionSpec& a = spec.attention(0);
  a.num_kv_heads = 2;
  a.bias = true;
  a.out_bias = true;
  a.scale = 0.0625;
  a.soft_cap = 50.0;
  a.sinks = true;
  a.window = 9;
  a.qk_norm = QkNorm::kFull;
  a.qk_norm_after_rope = true;
  a.qkv_clip = 6.5;
  a.gate = true;
  a.inner_norm = true;
  a.group_order = GroupOrder::kTile;
  a.position = PositionSpec();
  a.position->scaling = {.kind = RopeScalingKind::kLinear, .factor = 4.0};
  FeedForwardSpec& f = spec.feed_forward(0);
  f.out_bias = true;
  f.expert = {.form = ExpertForm::kGated,
              .activation = ActivationKind::kSilu,
              .activation_limit = 7.1f,
              .activation_slope = 1.702f,
              .up_offset = 0.3f,
              .bias = true,
              .inner_norm = true};
  return spec;
}

ModelSpec Routed() {
  ModelSpec spec = Base();
  spec.position.kind = PositionKind::kSinusoidal;
  spec.position.first = 2;
  spec.tie_word_embeddings = true;
  spec.norm.placement = NormPlacement::kBoth;
  RoutedLayerSpec routing;
  routing.num_experts = 8;
  routing.score = {.kind = ScoreKind::kCosine,
                   .bias = true,
                   .dim = 6,
                   .normalize_row = false,
                   .normalize_expert = false,
                   .eps = 1e-7,
                   .temperature = TemperatureKind::kLogScale};
  routing.gate = GateKind::kSigmoid;
  routing.select.kind = SelectKind::kTopP;
  routing.select.p = 0.7;
  routing.select.compare = TopPCompare::kGt;
  routing.select.max_experts = 3;
  routing.renormalize = true;
  routing.scale = 2.5;
  AttentionSpec& a = spec.attention(0);
  a.num_heads = 1;  // unused
  a.num_kv_heads = 1;
  a.routing = routing;
  FeedForwardSpec& f = spec.feed_forward(0);
  f.width = 0;  // unused
  f.shared_width = 11;
  f.shared_gate = true;
  f.expert.form = ExpertForm::kPlain;
  f.expert.activation = ActivationKind::kGelu;
  f.routing = routing;
  f.routing->widths = {9, 11, 13, 15, 17, 19, 21, 23};
  f.routing->split = {.heads = 4, .projection = false, .bias = false, .residual = true};
  f.routing->select = {};
  f.routing->select.k = 3;
  f.routing->select.bias = true;
  f.routing->select.groups = 4;
  f.routing->select.best_groups = 2;
  f.routing->select.group_score = GroupScoreKind::kSumOfTwo;
  f.routing->select.group_mask = GroupMaskKind::kZero;
  return spec;
}

ModelSpec Latent() {
  ModelSpec spec = Base();
  spec.position.scaling = {.kind = RopeScalingKind::kYarn,
                           .factor = 40.0,
                           .original_positions = 4096.0,
                           .beta_fast = 24.0,
                           .beta_slow = 2.0,
                           .truncate = false,
                           .magnitude = 0.9};
  AttentionSpec& a = spec.attention(0);
  a.latent = {
      .query_rank = 5, .rank = 6, .rope_dim = 4, .value_dim = 3, .norm_eps = 1e-5f, .scale = 1.5};
  FeedForwardSpec& f = spec.feed_forward(0);
  f.width = 0;  // unused
  f.routing.emplace();
  f.expert.residual = true;
  f.expert.depth = 3;
  f.routing->null_experts = {.zero = 1, .copy = 2, .constant = 3, .replaced = {0}};
  f.routing->num_experts = 11;
  f.routing->widths = {5, 5, 5, 5};
  f.routing->split = {.heads = 2, .projection = true, .depth = 3};
  f.routing->latent_width = 6;
  f.routing->gate = GateKind::kSparseMixer;
  f.routing->mixer_limit = 0.02;
  f.routing->select.k = 2;
  return spec;
}

ModelSpec Factors(RopeScalingKind kind) {
  ModelSpec spec = Base();
  spec.position.fraction = 0.5;
  spec.position.scaling = {.kind = kind, .factors = {1.0, 1.1, 1.3, 1.7}, .magnitude = 1.19};
  if (kind == RopeScalingKind::kLong) {
    spec.position.scaling.original_positions = 128.0;
    spec.position.scaling.long_factors = {1.0, 2.1, 4.3, 8.7};
    spec.position.scaling.long_magnitude = 1.23;
  }
  return spec;
}

ModelSpec Listed() {
  ModelSpec spec = Base();
  FeedForwardSpec& f = spec.feed_forward(0);
  f.width = 0;  // unused
  f.routing.emplace();
  f.routing->num_experts = 4;
  f.routing->widths = {5, 5, 5, 5};
  f.routing->score.norm = RowNorm::kRmsWeight;
  f.routing->score.row_scale = 0.25;
  f.routing->gate = GateKind::kSqrtSoftplus;
  f.routing->select.kind = SelectKind::kTable;
  f.routing->select.k = 2;
  f.routing->expert_scale = true;
  return spec;
}

ModelSpec Learned() {
  ModelSpec spec = Base();
  spec.position.kind = PositionKind::kLearned;
  spec.bos_token_id = std::nullopt;
  spec.eos_token_ids = {};
  return spec;
}

ModelSpec Biased() {
  ModelSpec spec = Base();
  spec.relative_bias = RelativeBias{.buckets = 40, .max_distance = 90, .bidirectional = true};
  return spec;
}

ModelSpec Convolved() {
  ModelSpec spec = Base();
  spec.blocks.front().mixer = ShortConvolutionSpec{.taps = 4, .bias = false};
  return spec;
}

ModelSpec ValueForms() {
  ModelSpec spec = Base();
  spec.norm.groups = 3;
  spec.layer_scale = true;
  spec.position.span = spec.position.frequencies = RopeSpan::kHead;
  spec.position.fraction = 0.5;
  AttentionSpec& a = spec.attention(0);
  a.qk_norm = QkNorm::kHeads;
  a.window = 8;
  a.window_kind = WindowKind::kChunk;
  a.value_dim = 20;
  a.value_scale = 0.7;
  a.value_norm = true;
  a.query_scale = QueryScaleSpec{.step = 8.0, .factor = 0.2, .first = 1};
  spec.attention(1).value_from_key = true;
  return spec;
}

ModelSpec LayerInputs() {
  ModelSpec spec = Base();
  spec.layer_input = LayerInputSpec{.width = 5,
                                    .activation = ActivationKind::kRelu,
                                    .token_scale = 2.5,
                                    .projection_scale = 0.3,
                                    .scale = 0.6};
  return spec;
}

ModelSpec RoutedValues() {
  ModelSpec spec = Base();
  RoutedLayerSpec routing;
  routing.num_experts = 6;
  routing.select.k = 2;
  spec.attention(0).value_routing = routing;
  FeedForwardSpec& f = spec.feed_forward(0);
  f.width = 0;  // unused
  f.routing = routing;
  f.routing->widths.assign(6, 5);
  f.routing->weight_input = true;
  f.expert.activation_limit = 3.0f;
  f.expert.limit_after = true;
  f.shared_width = 7;
  f.shared_limit = 2.0f;
  f.late_experts = true;
  return spec;
}

ModelSpec WithDelta() {
  ModelSpec spec = Base();
  spec.blocks.front().mixer = DeltaSpec{.num_heads = 6,
                                        .num_key_heads = 3,
                                        .key_dim = 4,
                                        .value_dim = 6,
                                        .taps = 3,
                                        .decay = DecayOf::kChannel,
                                        .decay_form = DecayForm::kBounded,
                                        .decay_bound = -4.0,
                                        .decay_rank = 5,
                                        .gate_activation = GateActivation::kSigmoid,
                                        .gate_rank = 7};
  return spec;
}

ModelSpec WithPlainDelta() {
  ModelSpec spec = Base();
  spec.blocks.front().mixer = DeltaSpec{.num_heads = 2, .num_key_heads = 2, .value_dim = 4};
  return spec;
}

ModelSpec WithStateSpace() {
  ModelSpec spec = Base();
  spec.blocks.front().mixer = StateSpaceSpec{.num_heads = 6,
                                             .head_dim = 4,
                                             .state_dim = 5,
                                             .groups = 3,
                                             .taps = 3,
                                             .conv_bias = false,
                                             .bias = true,
                                             .step_low = 0.25,
                                             .step_high = 1.5};
  return spec;
}

ModelSpec Encoder() {
  ModelSpec spec = Base();
  spec.kind = ModelKind::kEncoder;
  spec.norm.kind = NormKind::kLayer;
  spec.norm.bias = false;
  spec.position.kind = PositionKind::kSinusoidal;
  spec.position.spacing = SinusoidSpacing::kHalf;
  spec.position.count_padding = false;
  spec.pad_token_id = 7;
  spec.token_types = 2;
  spec.attention(0).causal = true;
  spec.head.kind = HeadKind::kMaskedLm;
  spec.head.layer = HeadLayerSpec{.activation = ActivationKind::kTanh, .bias = false, .norm = true};
  spec.pooling = PoolingSpec{.kind = PoolingKind::kMax,
                             .dense = {{.width = 5, .activation = ActivationKind::kTanh}},
                             .normalize = true};
  return spec;
}

ModelSpec Classifier() {
  ModelSpec spec = Base();
  spec.head = {.kind = HeadKind::kTokenClassification,
               .labels = {"O", "B-\xc3\xa9"},
               .scores = LabelScores::kSigmoid,
               .layer = std::nullopt,
               .bias = false};
  return spec;
}

ModelSpec Pair() {
  ModelSpec encoder = Encoder();
  encoder.position.count_padding = true;
  encoder.pad_token_id.reset();
  encoder.head = {.kind = HeadKind::kNone, .labels = {}, .layer = std::nullopt};
  encoder.pooling.reset();
  encoder.stack = Stack::kEncoder;
  encoder.bos_token_id.reset();
  encoder.eos_token_ids.clear();
  for (BlockSpec& block : encoder.blocks) block.stack = Stack::kEncoder;
  ModelSpec spec = Base();
  const std::vector<BlockSpec> blocks = std::exchange(spec.blocks, {});
  for (const BlockSpec& block : blocks) {
    spec.blocks.push_back(block);
    if (block.attention() == nullptr) continue;
    AttentionSpec source = *block.attention();
    source.group_order = GroupOrder::kTile;
    spec.blocks.push_back({.mixer = CrossAttentionSpec{source}, .layer = block.layer});
  }
  for (BlockSpec& block : spec.blocks) block.stack = Stack::kDecoder;
  spec.kind = ModelKind::kEncoderDecoder;
  spec.stack = Stack::kDecoder;
  spec.decoder_start_token_id = 1;
  spec.pad_token_id = 7;
  spec.output_scale = 0.25;
  spec.encoder = std::make_shared<const ModelSpec>(std::move(encoder));
  return spec;
}

std::vector<ModelSpec> MadeUpSpecs() {
  return {Base(),
          DenseEverything(),
          Routed(),
          Latent(),
          Factors(RopeScalingKind::kFactors),
          Factors(RopeScalingKind::kLong),
          Listed(),
          Learned(),
          Biased(),
          ValueForms(),
          LayerInputs(),
          RoutedValues(),
          Convolved(),
          WithDelta(),
          WithPlainDelta(),
          WithStateSpace(),
          Encoder(),
          Classifier(),
          Pair()};
}

Result<ModelSpec> ReadBack(const nlohmann::ordered_json& json) {
  MOESERVE_ASSIGN_OR_RETURN(const NativeConfig config, ParseNativeConfig(json.dump(2)));
  return config.spec;
}

// The following functions give the members that the kinds do not use their defaults.

void ForgetUnused(RopeScaling& scaling) {
  RopeScaling used;
  used.kind = scaling.kind;
  used.magnitude = scaling.magnitude;
  switch (scaling.kind) {
    case RopeScalingKind::kNone:
      break;
    case RopeScalingKind::kLinear:
      used.factor = scaling.factor;
      break;
    case RopeScalingKind::kLlama3:
      used.factor = scaling.factor;
      used.original_positions = scaling.original_positions;
      used.low_freq_factor = scaling.low_freq_factor;
      used.high_freq_factor = scaling.high_freq_factor;
      break;
    case RopeScalingKind::kYarn:
      used.factor = scaling.factor;
      used.original_positions = scaling.original_positions;
      used.beta_fast = scaling.beta_fast;
      used.beta_slow = scaling.beta_slow;
      used.truncate = scaling.truncate;
      break;
    case RopeScalingKind::kFactors:
      used.factors = scaling.factors;
      break;
    case RopeScalingKind::kLong:
      used.original_positions = scaling.original_positions;
      used.factors = scaling.factors;
      used.long_factors = scaling.long_factors;
      used.long_magnitude = scaling.long_magnitude;
      break;
  }
  scaling = used;
}

void ForgetUnused(PositionSpec& position) {
  PositionSpec used;
  used.kind = position.kind;
  used.first = position.first;
  used.spacing = position.spacing;
  used.count_padding = position.count_padding;
  if (position.kind == PositionKind::kRope) used = position;
  ForgetUnused(used.scaling);
  position = used;
}

void ForgetUnused(RoutedLayerSpec& routing) {
  const SelectSpec assumed;
  if (routing.select.kind != SelectKind::kTopP) {
    routing.select.p = assumed.p;
    routing.select.compare = assumed.compare;
    routing.select.max_experts = assumed.max_experts;
  } else {
    routing.select.k = assumed.k;
  }
  if (routing.score.kind == ScoreKind::kDot) {
    const ScoreSpec score = routing.score;
    routing.score = {.stream = score.stream,
                     .norm = score.norm,
                     .row_scale = score.row_scale,
                     .bias = score.bias};
  }
}

void ForgetUnused(AttentionSpec& attention) {
  if (attention.value_routing.has_value()) ForgetUnused(*attention.value_routing);
  if (attention.position.has_value()) ForgetUnused(*attention.position);
  if (attention.routed()) {
    const AttentionSpec assumed;
    attention.num_heads = assumed.num_heads;
    attention.qk_norm_after_rope = assumed.qk_norm_after_rope;
    attention.group_order = assumed.group_order;
    ForgetUnused(*attention.routing);
  }
}

void ForgetUnused(ShortConvolutionSpec& /*convolution*/) {}
void ForgetUnused(DeltaSpec& /*delta*/) {}
void ForgetUnused(StateSpaceSpec& /*ssm*/) {}

void ForgetUnused(CrossAttentionSpec& source) { ForgetUnused(source.attention); }

void ForgetUnused(FeedForwardSpec& feed_forward) {
  if (feed_forward.routed()) {
    feed_forward.width = FeedForwardSpec().width;
    ForgetUnused(*feed_forward.routing);
  } else {
    feed_forward.shared_gate = false;
  }
}

void ExpectRoundTrip(const ModelSpec& spec) {
  ASSERT_TRUE(Validate(spec).ok()) << Validate(spec);
  ModelSpec used = spec;
  ForgetUnused(used.position);
  for (BlockSpec& block : used.blocks) {
    std::visit([](auto& mixer) { ForgetUnused(mixer); }, block.mixer);
  }
  const auto json = NativeConfigJson(spec);
  const auto read = ReadBack(json);
  ASSERT_TRUE(read.ok()) << read.status() << "\n" << json.dump(2);
  EXPECT_EQ(NativeConfigJson(*read), json);
  EXPECT_TRUE(Same(*read, used)) << json.dump(2);
}

TEST(WriteConfig, MadeUpSpecsAreReadBack) {
  for (const ModelSpec& spec : MadeUpSpecs()) ExpectRoundTrip(spec);
}

// Changes one member at a time. Either nothing that the model uses changed, or the reader returns
// the changed specification. Every member must have changed the file in one of the specifications,
// so none of them can be missing in the writer and in the reader.
TEST(WriteConfig, EveryMemberIsReadBack) {
  std::set<std::string> written;
  for (const ModelSpec& base : MadeUpSpecs()) {
    const auto base_json = NativeConfigJson(base);
    int members = 0;
    ModelSpec counted = base;
    ForMembers(counted, [&](const std::string&, auto&) { ++members; });
    for (int number = 0; number < members; ++number) {
      bool more = true;
      for (int choice = 0; more; ++choice) {
        ModelSpec changed = base;
        std::string name;
        bool kind = false;
        int at = 0;
        ForMembers(changed, [&](const std::string& member_name, auto& member) {
          if (at++ != number) return;
          name = member_name;
          kind = IsKind<std::remove_reference_t<decltype(member)>>();
          more = Change(member, choice);
        });
        // A layer cannot read its own keys and values.
        if (const AttentionSpec* const first = changed.blocks.front().attention();
            first != nullptr && first->kv_layer.has_value()) {
          if (changed.FindBlock(1, BlockKind::kAttention) == nullptr) continue;
          changed.attention(0).kv_layer.reset();
          changed.attention(1) = changed.attention(0);
          changed.attention(1).kv_layer = 0;
        }
        // All experts are those with widths and those without.
        if (name.starts_with("NullExperts.") && changed.feed_forward(0).routed()) {
          RoutedLayerSpec& routing = *changed.feed_forward(0).routing;
          routing.num_experts =
              static_cast<int>(routing.widths.size()) + routing.null_experts.total();
        }
        if (changed.encoder != nullptr) {
          auto encoder = std::make_shared<ModelSpec>(*changed.encoder);
          encoder->vocab_size = changed.vocab_size;
          encoder->hidden_size = changed.hidden_size;
          encoder->share_embeddings = changed.share_embeddings;
          changed.encoder = encoder;
        }
        if (!more || !Validate(changed).ok()) continue;
        const auto json = NativeConfigJson(changed);
        if (json == base_json) continue;
        const auto read = ReadBack(json);
        ASSERT_TRUE(read.ok()) << name << ": " << read.status() << "\n" << json.dump(2);
        EXPECT_EQ(NativeConfigJson(*read), json) << name;
        EXPECT_TRUE(kind || Same(*read, changed)) << name << "\n" << json.dump(2);
        written.insert(name);
      }
    }
  }
  std::vector<std::string> missing;
  std::ranges::set_difference(AllMembers(), written, std::back_inserter(missing));
  EXPECT_TRUE(missing.empty()) << "MadeUpSpecs() allow no other value of the members "
                               << ::testing::PrintToString(missing) << ", which count from 0";
}

TEST(WriteConfig, SpecsOfFamiliesAreReadBack) {
  const LoadOptions options{.require_tokenizer = false};
  for (const FamilyCase& c : FamilyCases()) {
    SCOPED_TRACE(c.name);
    const auto checkpoint = LoadCheckpoint(c.folder, options);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    ExpectRoundTrip(checkpoint->spec);
  }
}

TEST(WriteConfig, SpecsOfNativeFoldersAreReadBack) {
  int folders = 0;
  std::vector<GoldenModel> models = GoldenModels();
  for (const char* folder : {"tests/golden/encoders", "tests/golden/pairs"}) {
    for (const auto& entry : fs::directory_iterator(SourcePath(folder))) {
      const std::string name = entry.path().filename().string();
      if (name.starts_with("tiny-")) models.push_back({name, entry.path(), {}});
    }
  }
  for (const GoldenModel& model : models) {
    SCOPED_TRACE(model.name);
    const auto config = ParseNativeConfig(ReadFile(model.model / "config.json"));
    ASSERT_TRUE(config.ok()) << config.status();
    ExpectRoundTrip(config->spec);
    ++folders;
  }
  EXPECT_GT(folders, 20);
}

TEST(WriteConfig, SpecsOfGgufFilesAreReadBack) {
  int files = 0;
  for (const auto& entry : fs::directory_iterator(SourcePath("tests/golden/gguf/models"))) {
    SCOPED_TRACE(entry.path());
    const auto checkpoint = LoadCheckpoint(entry.path(), {.require_tokenizer = false});
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    ExpectRoundTrip(checkpoint->spec);
    ++files;
  }
  EXPECT_GT(files, 10);
}

TEST(WriteConfig, IsShort) {
  ModelSpec spec = Base();
  spec.norm.eps = 1e-6f;
  spec.eos_token_ids = {4};
  const auto json = NativeConfigJson(spec);
  EXPECT_EQ(json.dump(),
            "{\"model_type\":\"routed_decoder\",\"vocab_size\":40,\"hidden_size\":24,"
            "\"num_hidden_layers\":2,\"max_position_embeddings\":512,"
            "\"bos_token_id\":3,\"eos_token_id\":4,"
            "\"norm\":{\"kind\":\"rms\",\"eps\":1e-06},\"position\":{\"kind\":\"rope\"},"
            "\"attention\":{\"kind\":\"dense\",\"num_heads\":4,\"head_dim\":16},"
            "\"feed_forward\":{\"kind\":\"dense\",\"expert\":{\"form\":\"gated\","
            "\"activation\":\"silu\"},\"width\":7}}");
}

TEST(WriteConfig, WritesUnequalLayersAsLists) {
  ModelSpec spec = Base();
  EXPECT_TRUE(NativeConfigJson(spec)["attention"].is_object());
  spec.attention(1).window = 5;
  const auto json = NativeConfigJson(spec);
  ASSERT_TRUE(json["attention"].is_array());
  ASSERT_EQ(json["attention"].size(), 2u);
  EXPECT_FALSE(json["attention"][0].contains("window"));
  EXPECT_EQ(json["attention"][1]["window"], 5);
  EXPECT_TRUE(json["feed_forward"].is_object());
}

TEST(WriteConfig, WritesTheTypeOfIntegers) {
  for (const Quantization type : {Quantization::kInt8, Quantization::kInt8Channel,
                                  Quantization::kInt4, Quantization::kInt4K}) {
    const auto json = NativeConfigJson(Base(), type);
    const auto config = ParseNativeConfig(json.dump());
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_EQ(config->quantization, type);
    EXPECT_TRUE(Same(config->spec, Base()));
  }
}

}  // namespace
}  // namespace moeserve::testing
