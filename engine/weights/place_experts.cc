#include "engine/weights/place_experts.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <numeric>
#include <string_view>
#include <tuple>

#include "base/check.h"
#include "base/error_text.h"
#include "base/sha256.h"
#include "engine/spec/weights.h"

namespace moeserve {
namespace {

// Calls `visit` with the stack and the index of every routed block.
template <typename Visit>
void ForRoutedBlocks(const ModelSpec& model, const Visit& visit) {
  for (const ModelSpec* stack : {&model, model.encoder.get(), model.prediction.get()}) {
    if (stack == nullptr) continue;
    for (int b = 0; b < stack->num_blocks(); ++b) {
      const BlockSpec& block = stack->blocks[static_cast<size_t>(b)];
      if (block.routing() != nullptr) visit(*stack, b, block);
    }
  }
}

// Returns the sums of size_of(tensor) over the tensors of each expert.
template <typename SizeOfTensor>
ExpertSizes SumsOfTensors(const ModelSpec& model, const SizeOfTensor& size_of) {
  ExpertSizes sizes;
  std::map<std::string, std::vector<int64_t>*, std::less<>> blocks;
  ForRoutedBlocks(model, [&](const ModelSpec& stack, int b, const BlockSpec& block) {
    std::vector<int64_t>& of_block = sizes[{stack.stack, b}];
    of_block.resize(static_cast<size_t>(block.routing()->num_places()));
    blocks[block.name()] = &of_block;
  });
  constexpr std::string_view kExperts = ".experts.";
  for (const TensorRequirement& tensor : RequiredTensors(model)) {
    const std::string_view name = tensor.name;
    const size_t at = name.find(kExperts);
    if (at == std::string_view::npos || name.ends_with(".constant")) continue;
    const auto block = blocks.find(name.substr(0, at));
    size_t expert = 0;
    const char* const number = name.data() + at + kExperts.size();
    const auto parsed = std::from_chars(number, name.data() + name.size(), expert);
    if (block == blocks.end() || parsed.ec != std::errc()) continue;
    if (expert < block->second->size()) (*block->second)[expert] += size_of(tensor);
  }
  return sizes;
}

// Where the experts of a block are, while they are placed.
class BlockPlaces {
 public:
  BlockPlaces(const std::vector<int64_t>& parameters, size_t ranks)
      : parameters_(parameters),
        holders_(parameters.size()),
        load_(ranks),
        held_(ranks),
        all_(std::accumulate(parameters.begin(), parameters.end(), int64_t{0})) {}

  // Gives an expert to one more rank, whose load grows by `load`.
  void Add(size_t expert, double load) {
    size_t best = 0;
    bool found = false;
    for (size_t r = 0; r < load_.size(); ++r) {
      if ((holders_[expert] >> r & 1) != 0) continue;
      if (!found || Order(r, expert) < Order(best, expert)) best = r;
      found = true;
    }
    MOESERVE_CHECK(found, "a rank without the expert");
    holders_[expert] |= HolderSet{1} << best;
    load_[best] += load;
    held_[best] += parameters_[expert];
  }
  // More parameters are going to be placed, as copies.
  void Expect(int64_t parameters) { all_ += parameters; }
  size_t copies(size_t expert) const {
    return static_cast<size_t>(std::popcount(holders_[expert]));
  }

  // Returns the holders. All ranks are alike within a block: the part with the most parameters goes
  // to the rank with the fewest in `totals`, and so on; `totals` grows by what the ranks get.
  std::vector<HolderSet> Take(std::vector<int64_t>& totals) const {
    std::vector<size_t> parts(held_.size()), ranks(held_.size());
    std::iota(parts.begin(), parts.end(), size_t{0});
    ranks = parts;
    std::ranges::stable_sort(parts, [&](size_t a, size_t b) { return held_[a] > held_[b]; });
    std::ranges::stable_sort(ranks, [&](size_t a, size_t b) { return totals[a] < totals[b]; });
    std::vector<HolderSet> holders(holders_.size());
    for (size_t i = 0; i < parts.size(); ++i) {
      for (size_t e = 0; e < holders.size(); ++e) {
        holders[e] |= (holders_[e] >> parts[i] & 1) << ranks[i];
      }
      totals[ranks[i]] += held_[parts[i]];
    }
    return holders;
  }

 private:
  // The rank with the least value gets the expert.
  std::tuple<bool, double, int64_t> Order(size_t rank, size_t expert) const {
    const int64_t held = held_[rank];
    const bool full = (held + parameters_[expert]) * std::ssize(load_) > all_;
    return {full, full ? static_cast<double>(held) : load_[rank], held};
  }

  const std::vector<int64_t>& parameters_;
  std::vector<HolderSet> holders_;
  std::vector<double> load_;   // [ranks]
  std::vector<int64_t> held_;  // [ranks] parameters
  int64_t all_;                // parameters on all ranks together, when all are placed
};

// Returns load x parameters of the places of a block.
std::vector<double> CostsOf(const ExpertLoads& loads, std::pair<Stack, int> block,
                            const std::vector<int64_t>& parameters) {
  const auto found = loads.find(block);
  const size_t places = parameters.size();
  const bool known = found != loads.end() && found->second.size() >= places &&
                     std::accumulate(found->second.begin(),
                                     found->second.begin() + std::ssize(parameters), 0.0) > 0.0;
  std::vector<double> costs;
  for (size_t e = 0; e < places; ++e) {
    costs.push_back((known ? found->second[e] : 1.0) * static_cast<double>(parameters[e]));
  }
  return costs;
}

std::vector<HolderSet> PlaceBlock(const std::vector<int64_t>& parameters,
                                  const std::vector<double>& costs, int copies_percent,
                                  std::vector<int64_t>& totals) {
  BlockPlaces places(parameters, totals.size());
  std::vector<size_t> order;
  for (size_t e = 0; e < parameters.size(); ++e) {
    if (parameters[e] > 0) order.push_back(e);
  }
  std::ranges::stable_sort(order, [&](size_t a, size_t b) { return costs[a] > costs[b]; });
  for (const size_t e : order) places.Add(e, costs[e]);
  // What is copied does not depend on where, but the room for it does on what is copied.
  std::vector<size_t> count(parameters.size(), 1), copied;
  const auto per_copy = [&](size_t e) { return costs[e] / static_cast<double>(count[e]); };
  for (auto left = std::ssize(order) * copies_percent / 100; left > 0; --left) {
    size_t most = parameters.size();
    for (const size_t e : order) {
      if (count[e] == totals.size()) continue;
      if (most == parameters.size() ||
          std::tuple(-per_copy(e), e) < std::tuple(-per_copy(most), most)) {
        most = e;
      }
    }
    if (most == parameters.size()) break;  // all ranks have all experts
    ++count[most];
    copied.push_back(most);
    places.Expect(parameters[most]);
  }
  for (const size_t e : copied) {
    places.Add(e, costs[e] / static_cast<double>(places.copies(e) + 1));
  }
  return places.Take(totals);
}

}  // namespace

ExpertSizes ExpertParameters(const ModelSpec& model) {
  return SumsOfTensors(model, [](const TensorRequirement& tensor) {
    int64_t size = 1;
    for (const int64_t dim : tensor.shape) size *= dim;
    return size;
  });
}

ExpertSizes ExpertBytes(const ModelSpec& model, Quantization quantization, DType dtype,
                        int64_t block) {
  const auto in_blocks = [block](int64_t n) { return (n + block - 1) / block * block; };
  return SumsOfTensors(model, [&](const TensorRequirement& tensor) {
    const Quantization type = QuantizationOf(tensor.name, tensor.shape, quantization);
    if (type != Quantization::kNone && tensor.shape.size() == 2) {
      constexpr int64_t kBytesOfScale = 2;
      const int64_t columns = in_blocks(tensor.shape[1]);
      return in_blocks(tensor.shape[0]) *
             (QuantRowBytes(type, columns) + QuantScales(type, columns) * kBytesOfScale);
    }
    int64_t bytes = static_cast<int64_t>(SizeOf(dtype));
    for (const int64_t dim : tensor.shape) bytes *= tensor.shape.size() == 2 ? in_blocks(dim) : dim;
    return bytes;
  });
}

std::string PlacementDigest(const ModelSpec& model) {
  const ExpertSizes sizes = ExpertParameters(model);
  std::string text;
  ForRoutedBlocks(model, [&](const ModelSpec& stack, int b, const BlockSpec& block) {
    if (stack.stack == Stack::kPrediction) return;
    text += Concat(KindName(stack.stack), ' ', block.name());
    for (const int64_t size : sizes.at({stack.stack, b})) text += Concat(' ', size);
    text += '\n';
  });
  std::string hex;
  for (const char c : Sha256(text)) {
    constexpr std::string_view kDigits = "0123456789abcdef";
    hex += kDigits[static_cast<uint8_t>(c) >> 4];
    hex += kDigits[static_cast<uint8_t>(c) & 15];
  }
  return hex;
}

ExpertPlacement PlaceExperts(const ModelSpec& model, const PlaceOptions& options) {
  MOESERVE_CHECK(options.ranks >= 1 && options.ranks <= kMaxRanks, "number of ranks");
  MOESERVE_CHECK(options.copies_percent >= 0 && options.copies_percent <= kMostCopiesPercent,
                 "number of copies");
  ExpertPlacement::Blocks blocks;
  std::vector<int64_t> totals(static_cast<size_t>(options.ranks));
  const ExpertSizes sizes = ExpertParameters(model);
  ForRoutedBlocks(model, [&](const ModelSpec& stack, int b, const BlockSpec&) {
    const std::pair key(stack.stack, b);
    const std::vector<int64_t>& parameters = sizes.at(key);
    blocks[key] = PlaceBlock(parameters, CostsOf(options.loads, key, parameters),
                             options.copies_percent, totals);
  });
  return {options.ranks, std::move(blocks)};
}

std::vector<int64_t> SizeOfRanks(const ExpertPlacement& placement, const ExpertSizes& sizes) {
  std::vector<int64_t> of_rank(static_cast<size_t>(placement.ranks()));
  for (const auto& [block, holders] : placement.blocks()) {
    const std::vector<int64_t>& of_block = sizes.at(block);
    for (size_t e = 0; e < holders.size(); ++e) {
      for (size_t r = 0; r < of_rank.size(); ++r) {
        if ((holders[e] >> r & 1) != 0) of_rank[r] += of_block[e];
      }
    }
  }
  return of_rank;
}

}  // namespace moeserve
