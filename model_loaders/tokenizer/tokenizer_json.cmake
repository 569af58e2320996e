find_package(absl REQUIRED)
find_package(nlohmann_json 3.11 REQUIRED)

add_library(moeserve_tokenizer_json STATIC
  ${CMAKE_CURRENT_LIST_DIR}/json_reader.cc
  ${CMAKE_CURRENT_LIST_DIR}/protobuf_reader.cc
  ${CMAKE_CURRENT_LIST_DIR}/sentence_piece_file.cc
  ${CMAKE_CURRENT_LIST_DIR}/tokenizer_config.cc
  ${CMAKE_CURRENT_LIST_DIR}/fairseq_dictionary.cc
  ${CMAKE_CURRENT_LIST_DIR}/tokenizer_folder.cc
  ${CMAKE_CURRENT_LIST_DIR}/tokenizer_json.cc
  ${CMAKE_CURRENT_LIST_DIR}/tokenizer_stages.cc
  ${CMAKE_CURRENT_LIST_DIR}/vocab_files.cc)
target_link_libraries(moeserve_tokenizer_json
  PUBLIC moeserve_file_kind moeserve_tokenizer absl::status absl::statusor
  PRIVATE moeserve_flags nlohmann_json::nlohmann_json)
moeserve_precompile(moeserve_tokenizer_json)
