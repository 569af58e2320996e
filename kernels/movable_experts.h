// Banks of weights whose experts come and go between steps.
#pragma once

#include <memory>

#include "kernels/backend.h"

namespace moeserve {

// Implemented by the LinearBanks of devices that can do this. An expert without a matrix has 0
// outputs in LinearBank::shape(). Called by the thread that runs the model, between steps.
class MovableExperts {
 public:
  virtual ~MovableExperts() = default;
  // Returns whether the bank can take any matrix: not if it reads a mapped file.
  virtual bool CanTake() const = 0;
  // Returns whether TakeExperts() can take the matrices of `other`: CanTake(), and it has the same
  // experts and settings. It may be of another backend of the same kind.
  virtual bool TakesFrom(const LinearBank& other) const = 0;
  // Takes the matrices of `other` for the experts that have none here, and what keeps them alive.
  // `other` stays until the next step has ended: a device may still copy from it.
  virtual void TakeExperts(const LinearBank& other) = 0;
  // Takes the matrix of an expert away. Its memory is freed with the result, on any thread. Returns
  // null if there is no matrix, or if its memory is a mapped file's; then it may stay.
  virtual std::shared_ptr<const void> DropExpert(int expert) = 0;
};

}  // namespace moeserve
