// What a model of Hugging Face's `transformers` computes, which its class says: a language model, a
// masked one, a classifier, or vectors.
#pragma once

#include <cstdint>
#include <string_view>

#include "model_loaders/architectures/huggingface/parts/decoder_config.h"

namespace moeserve::huggingface {

enum class ModelClass : uint8_t {
  kBase,  // without a head: "...Model"
  kCausalLm,
  kMaskedLm,
  kSequenceClassification,
  kTokenClassification,
  kSpans  // question answering
};

// Returns the class that "architectures" names; `fallback` if there is none or another.
ModelClass ClassOf(DecoderConfig& config, ModelClass fallback);

// Reads labels and how their scores are computed into the head of spec(), of the kind of the class.
// The head is then not yet complete: a family adds its layer. Vectors of texts are pooled by
// `pooling` unless other files say otherwise (sentence_transformers.h).
void ReadHead(DecoderConfig& config, ModelClass model_class, PoolingKind pooling);

// Reads the head of a decoder's class, which is a matrix "score" on the last row, and adds the
// names of its tensors. Decoders without a head compute vectors.
void ReadDecoderHead(DecoderConfig& config);

}  // namespace moeserve::huggingface
