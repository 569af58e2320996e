// A model whose tokens have other ids: those of a dictionary that was made after the model.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/text/tokenizer/models/model.h"

namespace moeserve {

class RenumberedModel : public TokenModel {
 public:
  // The id of a token is its index in `symbols`; a token of `model` that is not there becomes
  // `unk_id`. InvalidArgument if a symbol is listed twice or not UTF-8.
  static absl::StatusOr<std::unique_ptr<TokenModel>> Create(std::unique_ptr<TokenModel> model,
                                                            std::vector<std::string> symbols,
                                                            TokenId unk_id);

  absl::Status Tokenize(std::string_view piece, std::vector<TokenId>* ids,
                        std::vector<TextSpan>* spans = nullptr) const override;

 private:
  RenumberedModel() = default;

  // Constant after Create().
  std::unique_ptr<TokenModel> model_;
  std::vector<TokenId> new_ids_;  // by the model's id
};

}  // namespace moeserve
