// Turns the numbers that a model computes of texts into what clients receive: vectors of length 1,
// similarities, and scores of labels.
#pragma once

#include <span>
#include <vector>

#include "absl/status/status.h"
#include "engine/spec/head.h"

namespace moeserve::server {

// Divides the vector by its length, or by 1e-12 if it is shorter.
void NormalizeVector(std::span<float> vector);

// Returns the cosine of the angle between two vectors of equal size; 0 if one of them is 0.
float CosineOf(std::span<const float> a, std::span<const float> b);

// Replaces the logits of labels by their scores. `logits` must not be empty.
void ScoreLabels(LabelScores kind, std::span<float> logits);

// Returns the logarithms of the softmax. `logits` must not be empty.
std::vector<double> LogSoftmax(std::span<const float> logits);

// Returns Internal if a value is not finite, so that no client takes such values for a result.
absl::Status CheckFinite(std::span<const float> values);

}  // namespace moeserve::server
