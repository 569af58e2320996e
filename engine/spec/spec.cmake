# The model specification, with Validate() and RequiredTensors(), and the MACs that
# follow from it. The loaders and the engine use it.
add_library(moeserve_spec STATIC
  ${CMAKE_CURRENT_LIST_DIR}/block.cc
  ${CMAKE_CURRENT_LIST_DIR}/check_position.cc
  ${CMAKE_CURRENT_LIST_DIR}/check_recurrent.cc
  ${CMAKE_CURRENT_LIST_DIR}/expert_ids.cc
  ${CMAKE_CURRENT_LIST_DIR}/spec.cc
  ${CMAKE_CURRENT_LIST_DIR}/tensor_list.cc
  # The loaders describe a model without the engine.
  ${CMAKE_CURRENT_LIST_DIR}/../statistics/measures/macs.cc)
target_link_libraries(moeserve_spec PUBLIC moeserve_base)
