// Reads the configuration of a decoder in a GGUF file.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "engine/spec/spec.h"
#include "model_loaders/architectures/architecture.h"
#include "model_loaders/architectures/gguf/gguf_families.h"
#include "model_loaders/architectures/gguf/gguf_model_reader.h"
#include "model_loaders/architectures/gguf/gguf_tensors.h"
#include "model_loaders/files/gguf/gguf_file.h"
#include "model_loaders/files/weight_files.h"

namespace moeserve {

// Also of a decoder's blocks whose tokens see the whole text.
class GgufConfigReader final : private GgufModelReader {
 public:
  // All arguments must outlive the object.
  GgufConfigReader(const GgufFile& file, const WeightFiles& weights, const GgufFamily& family,
                   const std::vector<std::string>& ignored, bool predictions);

  // Call once. Errors are those of ReadGgufConfig().
  ConfigResult Read();

 private:
  // gguf_config.cc
  void ReadLayerCounts();
  void ReadFactors();
  AttentionSpec ReadAttention();
  AttentionSpec ReadLatentAttention();
  void ReadHead();
  void ReadDenseModules();
  void RefuseSettings();
  void ReadIndexer();
  std::unique_ptr<GgufConfig> Assemble(const AttentionSpec& attention) const;
  // Whether the file has a prediction layer that can be read.
  bool HasPrediction() const;

  // gguf_layers.cc
  void ReadLayerHeads();
  // `head_dim` is the width of the heads of layers without a window.
  void ReadWindows(int head_dim);
  void ReadWindowPositions(int head_dim);
  void ReadQueryScale();
  LayerSpec Layer(int layer, const AttentionSpec& attention) const;
  void SetAttention(int layer, AttentionSpec& attention) const;
  bool HasWindow(int layer) const;
  // Returns the number of the first layer; nullopt without one.
  static std::optional<int> First(const std::vector<int>& of_layers);

  // gguf_mixers.cc
  enum class LayerKind : uint8_t { kAttention, kRecurrent, kFeedForward };
  void ReadMixers();
  void ReadInterval();
  void ReadKvHeads();
  int ReadHeadWidth(int heads);
  DeltaSpec ReadDelta();
  DeltaSpec ReadChannelDelta();
  StateSpaceSpec ReadStateSpace();
  // Returns the first layer of a kind; nullopt if there is none.
  std::optional<int> FirstOf(LayerKind kind) const;
  // Returns whether a layer has a tensor, such as "attn_q.bias".
  bool HasIn(std::optional<int> layer, std::string_view tensor) const;

  // gguf_rope.cc. `width` is the number of dimensions of a head that can be rotated.
  void ReadPosition(int width);
  RopeScaling ReadScaling();
  RopeScaling ReadDivisors();
  void ReadYarn(RopeScaling& scaling);
  RopeScaling ReadLongRope();
  // Reads a tensor of `count` divisors of rotary frequencies.
  std::vector<double> ReadRopeFactors(std::string_view tensor, int count);

  // gguf_experts.cc
  void ReadFeedForward();
  FeedForwardSpec ReadDense();
  FeedForwardSpec ReadExperts(int count);
  void ReadValueExperts();
  void ReadRoutedLayers();
  void ReadGate(RoutedLayerSpec& routing);
  void ReadGroups(RoutedLayerSpec& routing);
  int ReadSharedWidth(int expert_width);
  // Returns whether a layer has experts, and the first one that has.
  bool IsRouted(int layer) const;
  int FirstRouted() const;

  const GgufFamily& family_;
  int next_token_layers_ = 0;  // after them
  int rotated_ = 0;            // dimensions of a head
  int rotated_key_ = 0;        // what the key for them says
  double score_factor_ = 1.0;  // of latent attention, from yarn
  std::string_view head_dim_key_ = ".attention.key_length";

  std::vector<LayerKind> kinds_;    // of the layers
  std::optional<Mixer> recurrent_;  // the mixer of the recurrent ones
  std::optional<int> kv_heads_;     // of those with attention, if layers differ
  std::vector<int> widths_;         // of feed-forwards, if layers have one block
  std::string context_reason_;      // CheckpointConfig::context_reason
  std::vector<int> heads_;          // GgufFamily::layer_heads
  std::vector<int> kv_lists_;       // the same of kv heads
  std::optional<QueryScaleSpec> query_scale_;
  std::optional<RoutedLayerSpec> value_routing_;  // of layers with experts

  std::optional<int> window_;                 // of the layers that have one
  int window_period_ = 0;                     // GgufFamily::window_period
  std::optional<std::vector<bool>> windows_;  // the layers that have one, if the file lists them
  std::optional<PositionSpec> window_position_;
  std::optional<int> window_head_dim_;  // of the layers that have one, if others have another
  std::optional<PositionSpec> full_position_;  // of the other layers, if there are windows

  FeedForwardSpec dense_;
  FeedForwardSpec experts_;
  int first_routed_ = 0;             // layers before it are dense
  std::vector<bool> routed_layers_;  // the layers with experts, if a key does not say so
  int routed_step_ = 0;  // layers i with (i + 1) % routed_step_ == 0 have experts; 0: none has
  std::vector<float> limits_, shared_limits_;  // GgufFamily::layer_limits; of all other networks
};

}  // namespace moeserve
