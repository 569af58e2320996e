#include "engine/text/tokenizer/models/renumbered_model.h"

#include "base/status.h"

namespace moeserve {

absl::StatusOr<std::unique_ptr<TokenModel>> RenumberedModel::Create(
    std::unique_ptr<TokenModel> model, std::vector<std::string> symbols, TokenId unk_id) {
  std::unique_ptr<RenumberedModel> made(new RenumberedModel);
  std::vector<std::pair<std::string, TokenId>> tokens;
  for (std::string& symbol : symbols) {
    tokens.emplace_back(std::move(symbol), static_cast<TokenId>(tokens.size()));
  }
  MOESERVE_ASSIGN_OR_RETURN(made->vocab_, Vocabulary::Create(std::move(tokens)));
  for (TokenId id = 0; id < model->id_bound(); ++id) {
    const std::optional<std::string_view> token = model->TokenString(id);
    made->new_ids_.push_back(token.has_value() ? made->vocab_.Find(*token).value_or(unk_id)
                                               : unk_id);
  }
  made->model_ = std::move(model);
  return made;
}

absl::Status RenumberedModel::Tokenize(std::string_view piece, std::vector<TokenId>* ids,
                                       std::vector<TextSpan>* spans) const {
  const size_t begin = ids->size();
  MOESERVE_RETURN_IF_ERROR(model_->Tokenize(piece, ids, spans));
  for (size_t i = begin; i < ids->size(); ++i) (*ids)[i] = new_ids_[(*ids)[i]];
  return absl::OkStatus();
}

}  // namespace moeserve
