# The fuzz targets in one program of the ordinary build, which runs the kept inputs and the seeds
# of each target as the test fuzz.TARGET. libFuzzer, which makes new inputs, needs clang
# (CMakeLists.txt).
file(GLOB fuzz_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/targets/*_fuzz.cc)
set(replay_sources)
set(replay_targets "")
foreach(source IN LISTS fuzz_sources)
  cmake_path(GET source STEM name)
  string(REGEX REPLACE "_fuzz$" "" name ${name})
  set(file ${CMAKE_CURRENT_BINARY_DIR}/fuzz/replay_${name}.cc)
  set(text "#define LLVMFuzzerTestOneInput Fuzz_${name}\n")
  string(APPEND text "#include \"${source}\"\n#undef LLVMFuzzerTestOneInput\n")
  file(CONFIGURE OUTPUT ${file} CONTENT "${text}")
  list(APPEND replay_sources ${file})
  string(APPEND replay_targets "FUZZ_TARGET(${name})\n")
  add_test(NAME fuzz.${name}
    COMMAND python3 -B ${CMAKE_CURRENT_LIST_DIR}/replay.py $<TARGET_FILE:fuzz_replay> ${name})
  set_tests_properties(fuzz.${name} PROPERTIES TIMEOUT ${test_timeout})
endforeach()
file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/fuzz/replay_targets.inc
  CONTENT "${replay_targets}")

add_executable(fuzz_replay ${CMAKE_CURRENT_LIST_DIR}/replay.cc ${replay_sources}
  ${CMAKE_CURRENT_LIST_DIR}/bundled_model.cc model_loaders/torch_bytes.cc
  ${PROJECT_SOURCE_DIR}/server/commands/ranks/start_facts.cc)
target_include_directories(fuzz_replay PRIVATE ${CMAKE_CURRENT_BINARY_DIR}/fuzz)
target_include_directories(fuzz_replay SYSTEM PRIVATE ${Boost_INCLUDE_DIRS})
target_compile_definitions(fuzz_replay PRIVATE MOESERVE_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
target_link_libraries(fuzz_replay PRIVATE
  moeserve_server moeserve_config moeserve_test_model)
set_target_properties(fuzz_replay PROPERTIES UNITY_BUILD "${test_unity}")
moeserve_precompile(fuzz_replay)
