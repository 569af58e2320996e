// Experts of a bank that come and go between steps.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "kernels/cuda/linear/linear_bank.h"

namespace moeserve::cuda {
namespace {

// Stops the process: an error of the device between two steps is as fatal as one within a step.
void RequireMove(const Status& status) {
  if (status.ok()) return;
  moeserve::internal::CheckFailed(__FILE__, __LINE__, "experts of a bank move",
                                  std::string(status.message()).c_str());
}

}  // namespace

bool CudaLinearBank::TakesFrom(const LinearBank& other) const {
  const auto* const bank = dynamic_cast<const CudaLinearBank*>(&other);
  return CanTake() && bank != nullptr && bank->memory_ == BankMemory::kSeparate &&
         bank->signature_ == signature_;
}

void CudaLinearBank::TakeExperts(const LinearBank& other) {
  MOESERVE_CHECK(TakesFrom(other), "a bank of the same layer");
  const auto& from = static_cast<const CudaLinearBank&>(other);
  std::vector<PlacedImage> taken;
  for (int e = 0; e < num_experts(); ++e) {
    const auto i = static_cast<size_t>(e);
    if (images_[i] != nullptr || from.images_[i] == nullptr) continue;
    images_[i] = from.images_[i];
    bytes_ += ImageBytes(e);
    taken.push_back({e, images_[i]->as<char>()});
    RequireMove(CopyVectors(from, e, move_stream_));
    shape_.out_features[i] = from.shape_.out_features[i];
    if (shape_.in_features.size() > 1) shape_.in_features[i] = from.shape_.in_features[i];
  }
  if (!taken.empty()) RequireMove(Place(taken, move_stream_));
}

std::shared_ptr<const void> CudaLinearBank::DropExpert(int expert) {
  const auto e = static_cast<size_t>(expert);
  if (!CanTake() || images_[e] == nullptr) return nullptr;
  const PlacedImage none{.expert = expert};
  RequireMove(Place({&none, 1}, move_stream_));
  shape_.out_features[e] = 0;
  bytes_ -= ImageBytes(expert);
  return std::exchange(images_[e], nullptr);
}

}  // namespace moeserve::cuda
