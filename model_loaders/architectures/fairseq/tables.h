// Where files of fairseq store the tensors of a model, and how they name its settings.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "engine/spec/spec.h"
#include "model_loaders/architectures/architecture.h"
#include "model_loaders/architectures/name_table.h"

namespace moeserve::fairseq {

inline constexpr std::string_view kDecoderName = "decoder";
inline constexpr std::string_view kEncoderName = "encoder";

// What a family's tables say about its files, beside what those of all families have in common: the
// names of embeddings, norms, dense attention and sizes. The tables describe a decoder; encoders
// have the same names with "encoder" in place of "decoder", and attention to a source those of
// self-attention with "encoder_attn". The texts must outlive the call that gets them.
struct Tables {
  std::span<const TensorRule> tensors;
  std::span<const KeyRule> keys;
  std::span<const std::string_view> ignored;  // patterns of stored tensors that are not needed
};

// Which stacks a model has, and which tensors of them are the same.
struct StackSet {
  bool encoder = false;
  bool decoder = false;
  bool shared_embeddings = false;  // of both stacks
  // The files have the embedding matrix of the stack with the head as the head, too.
  bool ignores_head = false;
  // The head is the decoder's embedding matrix, which the encoder does not have.
  bool head_is_embedding = false;
  // Heads of classification: the name of the one that the model computes, and whether there are
  // others, or tensors of a head of tokens, that it does not.
  std::string classifier = {};
  bool ignores_classifiers = false;
  bool ignores_token_head = false;

  bool pair() const { return encoder && decoder; }
};

// Returns a configuration with the tables of all stacks and without a spec.
std::unique_ptr<NameTableConfig> MakeFairseqConfig(const Tables& tables, const StackSet& stacks,
                                                   const StoredNames& stored);

// Returns `text`, which speaks of options or tensors of a decoder, for the stack called `stack`.
std::string OfStack(std::string_view text, std::string_view stack);

}  // namespace moeserve::fairseq
