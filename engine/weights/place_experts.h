// Chooses the ranks that get the experts of a model.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "engine/spec/spec.h"
#include "engine/weights/expert_placement.h"
#include "kernels/base/dtype.h"
#include "kernels/base/quantization.h"

namespace moeserve {

// The sizes of the experts, by stack and index of the routed block: [num_places()], 0 for places
// without matrices.
using ExpertSizes = std::map<std::pair<Stack, int>, std::vector<int64_t>>;

// Returns the parameters of the experts of all stacks.
ExpertSizes ExpertParameters(const ModelSpec& model);

// Returns the bytes of the experts if matrices have this quantization and other weights this type.
// The rows and columns of matrices are rounded up to multiples of `block`.
ExpertSizes ExpertBytes(const ModelSpec& model, Quantization quantization, DType dtype,
                        int64_t block = 1);

// Returns a digest, in 64 hexadecimal digits, of the model's routed blocks, without those of
// prediction layers, and of the sizes of their experts: a placement for one model is one for every
// model with the same digest.
std::string PlacementDigest(const ModelSpec& model);

// How many rows chose each place, by stack and index of the routed block: [num_places()], or more
// (experts without matrices follow). All rows of a block may be multiplied by a common factor.
using ExpertLoads = std::map<std::pair<Stack, int>, std::vector<double>>;

inline constexpr int kMostCopiesPercent = 100 * (kMaxRanks - 1);

struct PlaceOptions {
  int ranks = 1;
  // How many copies a block gets, in percent of its experts, rounded down; 0 to kMostCopiesPercent.
  // No rank gets two copies of an expert.
  int copies_percent = 0;
  ExpertLoads loads = {};  // blocks that are missing, or without rows, have uniform loads
};

// Gives every expert with matrices to a rank. In each block, experts go in descending order of load
// x parameters (ties: lower id) to the rank with the least load that has room, which is a rank's
// share of the parameters of the block; if none has room, to the rank with the fewest parameters.
// Ties: the rank with the fewest parameters in the block, then the lower one. So experts of one
// size take equal memory on all ranks, up to one expert; which rank has more differs between
// blocks.
//
// Then the experts with the most load per copy (ties: lower id) are copied, each to the rank with
// the least load that has room. A step gives an expert to one of its holders, never to several; so
// every holder's load counts as if it had the expert alone while the others are placed.
ExpertPlacement PlaceExperts(const ModelSpec& model, const PlaceOptions& options);

// Returns the sizes of the experts that each rank has: [ranks].
std::vector<int64_t> SizeOfRanks(const ExpertPlacement& placement, const ExpertSizes& sizes);

}  // namespace moeserve
