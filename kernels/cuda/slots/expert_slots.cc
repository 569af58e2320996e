#include "kernels/cuda/slots/expert_slots.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/error_text.h"

namespace moeserve::cuda {
namespace {

// Stops the process: after an error in a step the device is unusable.
void SlotsMustSucceed(const absl::Status& status, const char* what) {
  if (status.ok()) return;
  moeserve::internal::CheckFailed(__FILE__, __LINE__, what, std::string(status.message()).c_str());
}

}  // namespace

Result<std::unique_ptr<LinearBank>> CudaExpertSlots::NewBank(LinearBankShape shape) {
  MOESERVE_ASSIGN_OR_RETURN(std::unique_ptr<CudaLinearBank> bank, make_bank_(std::move(shape)));
  return std::unique_ptr<LinearBank>(std::move(bank));
}

int CudaExpertSlots::AddBlock(std::span<LinearBank* const> banks) {
  Block block;
  for (LinearBank* const bank : banks) {
    block.banks.push_back(static_cast<CudaLinearBank*>(bank));
    block.banks.back()->FinishLoading();
  }
  block.copied.resize(block.banks.size());
  block.experts.resize(static_cast<size_t>(block.banks.front()->num_experts()));
  for (size_t e = 0; e < block.experts.size(); ++e) {
    for (const CudaLinearBank* const bank : block.banks) {
      block.experts[e].bytes += ImagePlace(std::ssize(bank->host_image(static_cast<int>(e))));
    }
    block.experts[e].bytes = SlotMemory::RoundUp(block.experts[e].bytes);
    bytes_ += block.experts[e].bytes;
  }
  blocks_.push_back(std::move(block));
  return static_cast<int>(blocks_.size()) - 1;
}

absl::Status CudaExpertSlots::Start(int64_t bytes) {
  int64_t largest = 0;
  for (const Block& block : blocks_) {
    for (const Expert& expert : block.experts) largest = std::max(largest, expert.bytes);
  }
  if (bytes < largest) {
    return absl::InvalidArgumentError(Concat("device memory for experts: expected at least ",
                                             largest, " bytes, those of the largest expert, found ",
                                             bytes));
  }
  const int64_t taken = std::min(bytes, bytes_);
  MOESERVE_ASSIGN_OR_RETURN(pool_, DeviceMemory::Allocate(static_cast<size_t>(taken)));
  add_bytes_(taken);
  places_ = SlotMemory(taken);
  all_stay_ = bytes >= bytes_;
  if (!all_stay_) return absl::OkStatus();
  for (size_t b = 0; b < blocks_.size(); ++b) {
    ++wave_;
    Block& block = blocks_[b];
    for (size_t e = 0; e < block.experts.size(); ++e) {
      MOESERVE_CHECK(Bring(static_cast<int>(b), static_cast<int>(e)), "room for all experts");
    }
    MOESERVE_RETURN_IF_ERROR(Place(block));
  }
  counts_ = {};
  MOESERVE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream_));
  return absl::OkStatus();
}

bool CudaExpertSlots::DropOldest() {
  for (auto at = recent_.begin(); at != recent_.end(); ++at) {
    Expert& expert =
        blocks_[static_cast<size_t>(at->block)].experts[static_cast<size_t>(at->expert)];
    if (expert.wave == wave_) continue;
    // The table of its bank still names the place: nothing gives rows to the expert until it is
    // back.
    places_.Give(std::exchange(expert.offset, -1), expert.bytes);
    recent_.erase(at);
    return true;
  }
  return false;
}

bool CudaExpertSlots::Bring(int block, int expert) {
  Block& of = blocks_[static_cast<size_t>(block)];
  Expert& wanted = of.experts[static_cast<size_t>(expert)];
  if (wanted.bytes == 0) return true;
  if (wanted.offset >= 0) {
    counts_.hit_bytes += static_cast<uint64_t>(wanted.bytes);
    wanted.wave = wave_;
    return true;
  }
  std::optional<int64_t> place = places_.Take(wanted.bytes);
  while (!place.has_value() && DropOldest()) place = places_.Take(wanted.bytes);
  if (!place.has_value()) return false;
  wanted.offset = *place;
  wanted.wave = wave_;
  wanted.recent = recent_.insert(recent_.end(), {block, expert});
  counts_.copied_bytes += static_cast<uint64_t>(wanted.bytes);
  SlotsMustSucceed(Copy(of, expert), "copy an expert to the device");
  return true;
}

absl::Status CudaExpertSlots::Copy(Block& block, int expert) {
  char* to = pool_.as<char>() + block.experts[static_cast<size_t>(expert)].offset;
  for (size_t i = 0; i < block.banks.size(); ++i) {
    const std::span<const char> image = block.banks[i]->host_image(expert);
    if (image.empty()) continue;
    MOESERVE_CUDA_RETURN_IF_ERROR(
        cudaMemcpyAsync(to, image.data(), image.size(), cudaMemcpyHostToDevice, stream_));
    block.copied[i].push_back({expert, to});
    to += ImagePlace(std::ssize(image));
  }
  return absl::OkStatus();
}

absl::Status CudaExpertSlots::Place(Block& block) {
  for (size_t i = 0; i < block.banks.size(); ++i) {
    if (block.copied[i].empty()) continue;
    MOESERVE_RETURN_IF_ERROR(block.banks[i]->Place(block.copied[i], stream_));
    block.copied[i].clear();
  }
  return absl::OkStatus();
}

PlanParts CudaExpertSlots::PartOf(const RoutingPlan& plan, int places, int begin, int end,
                                  std::span<const int32_t> offsets) {
  // The experts before, those of the wave and those behind are three owners, so that the
  // assignments keep their order.
  std::vector<int> owners;
  for (int e = 0; e < plan.num_experts; ++e) {
    owners.push_back(e >= places ? kNoOwner : e < begin ? 0 : e < end ? 1 : 2);
  }
  constexpr int kOnlySlot = 0;
  return division_.Divide(
      plan,
      {.of_expert = owners, .ranks = 3, .rank = 1, .places = places, .expert_offsets = offsets},
      kOnlySlot);
}

void CudaExpertSlots::Run(int block, const RoutingPlan& plan, const RoutingPlan& part,
                          const Products& products) {
  if (all_stay_) return products(part, 0);
  Block& of = blocks_[static_cast<size_t>(block)];
  const std::span<const int32_t> offsets = division_.ExpertOffsets(plan);
  std::vector<int> chosen;
  for (int e = 0; e < part.num_experts; ++e) {
    if (offsets[e + 1] > offsets[e]) chosen.push_back(e);
  }
  // The largest step, which reserves memory, may not need waves.
  const int64_t elements = int64_t{plan.capacity} + plan.rows + plan.num_experts;
  if (elements > divided_) {
    PartOf(plan, part.num_experts, 0, part.num_experts, offsets);
    divided_ = elements;
  }
  // What is needed last is given up first.
  for (size_t i = chosen.size(); i-- > 0;) {
    Expert& expert = of.experts[static_cast<size_t>(chosen[i])];
    if (expert.offset >= 0) recent_.splice(recent_.end(), recent_, expert.recent);
  }
  size_t next = 0;
  do {
    const size_t begin = next;
    ++wave_;
    while (next < chosen.size() && Bring(block, chosen[next])) ++next;
    MOESERVE_CHECK(next > begin || chosen.empty(), "room for the largest expert");
    SlotsMustSucceed(Place(of), "the table of a bank");
    if (begin == 0 && next == chosen.size()) return products(part, 0);
    ++counts_.waves;
    const PlanParts wave =
        PartOf(plan, part.num_experts, chosen[begin], chosen[next - 1] + 1, offsets);
    products(wave.local, wave.first);
  } while (next < chosen.size());
}

}  // namespace moeserve::cuda
