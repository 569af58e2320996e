// Which ranks have the matrices of which experts.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "engine/spec/spec.h"
#include "kernels/exchange/exchange.h"

namespace moeserve {

// Whether ranks divide what could also be computed by each of them.
enum class SplitChoice : uint8_t { kAuto, kOn, kOff };

// The ranks that hold an expert: bit r is set if rank r does. 0: the expert has no matrices.
using HolderSet = uint64_t;
inline constexpr int kMaxRanks = 64;

// The holders of the experts of all routed blocks of a model. Equal on all ranks. Immutable.
class ExpertPlacement {
 public:
  // The holders of the places of each routed block, by stack and index in ModelSpec::blocks.
  using Blocks = std::map<std::pair<Stack, int>, std::vector<HolderSet>>;

  ExpertPlacement() = default;
  ExpertPlacement(int ranks, Blocks blocks, uint32_t version = 1)
      : ranks_(ranks), version_(version), blocks_(std::move(blocks)) {}
  // Gives every expert to one rank, as PlaceExperts() (place_experts.h) does for uniform loads.
  static ExpertPlacement Balanced(const ModelSpec& model, int ranks);

  int ranks() const { return ranks_; }
  // Placements that follow one another while a model runs have ascending versions; from 1.
  uint32_t version() const { return version_; }
  // [RoutedLayerSpec::num_places()]; `block` is an index in ModelSpec::blocks of the stack.
  const std::vector<HolderSet>& holders(Stack stack, int block) const;
  const Blocks& blocks() const { return blocks_; }

 private:
  int ranks_ = 1;
  uint32_t version_ = 1;
  Blocks blocks_;
};

// Returns numbers that are proportional to the parameters of the places of a routed block; 0 for
// places without matrices.
std::vector<int64_t> PlaceParameters(const BlockSpec& block);

// Returns the rank that computes each expert in a step: in descending order of max(rows, 8) x
// parameters (ties: lower id), the holder with the least cost so far (ties: lower rank); -1 for
// experts without holders. rows[e] is the number of rows of expert e. The spans have equal sizes.
std::vector<int> OwnersOf(std::span<const int32_t> rows, std::span<const int64_t> parameters,
                          std::span<const HolderSet> holders, int ranks);

// Returns the imbalance of a step in a block: the largest cost of a rank, max(rows, 8) x parameters
// of the experts with rows that it owns, divided by the mean cost of the ranks. 0 if no expert that
// is owned has rows.
double Imbalance(std::span<const int32_t> rows, std::span<const int64_t> parameters,
                 std::span<const int> owners, int ranks);

class LoadWatch;

// What a rank computes of a model.
struct RankShare {
  Exchange* exchange = nullptr;
  const ExpertPlacement* placement = nullptr;  // may change between steps
  LoadWatch* watch = nullptr;                  // counts the steps; null: nobody does
  bool divide_head = false;                    // every rank has a range of the vocabulary's matrix
  SplitChoice owner_sums = SplitChoice::kOff;  // OwnersAdd()

  bool Holds(Stack stack, int block, int expert) const {
    const HolderSet holders = placement->holders(stack, block)[static_cast<size_t>(expert)];
    return (holders >> exchange->rank() & 1) != 0;
  }
};

}  // namespace moeserve
