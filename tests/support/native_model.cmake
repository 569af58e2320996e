# Writes checkpoint folders for tests.
add_library(moeserve_test_model STATIC ${CMAKE_CURRENT_LIST_DIR}/native_model.cc)
target_link_libraries(moeserve_test_model PUBLIC moeserve_loaders moeserve_spec moeserve_flags)
