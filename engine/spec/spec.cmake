# The model specification, with Validate() and RequiredTensors(). The loaders and the engine use it.
add_library(moeserve_spec STATIC
  ${CMAKE_CURRENT_LIST_DIR}/block.cc
  ${CMAKE_CURRENT_LIST_DIR}/check_position.cc
  ${CMAKE_CURRENT_LIST_DIR}/check_recurrent.cc
  ${CMAKE_CURRENT_LIST_DIR}/expert_ids.cc
  ${CMAKE_CURRENT_LIST_DIR}/spec.cc
  ${CMAKE_CURRENT_LIST_DIR}/tensor_list.cc)
target_link_libraries(moeserve_spec PUBLIC moeserve_base)
