# Unpacks the models and results of tests/golden when the tests are configured, and again when an
# archive changes.
set(golden_files ${CMAKE_CURRENT_LIST_DIR}/golden_files.py)
execute_process(COMMAND python3 ${golden_files} unpack COMMAND_ERROR_IS_FATAL ANY)
file(GLOB_RECURSE golden_archives CONFIGURE_DEPENDS
  ${PROJECT_SOURCE_DIR}/tests/golden/packed/*.tar.xz)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${golden_archives} ${golden_files})
add_test(NAME golden_files_are_packed COMMAND python3 ${golden_files} check)
add_test(NAME golden_files_test COMMAND python3 -B ${CMAKE_CURRENT_LIST_DIR}/golden_files_test.py)
