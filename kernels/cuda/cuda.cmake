# Finds nvcc, and lists the sources of the CUDA kernels. The top-level CMakeLists.txt includes this
# file, because CMake must enable a language before all targets that use it.

set(MOESERVE_HAVE_CUDA OFF)
if(MOESERVE_CUDA)
  include(CheckLanguage)
  check_language(CUDA)
  find_package(CUDAToolkit QUIET)
  if(CMAKE_CUDA_COMPILER AND TARGET CUDA::cudart_static)
    set(MOESERVE_HAVE_CUDA ON)
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
      # 90a enables instructions that only GPUs of compute capability 9.0 have. The last entry adds
      # PTX for later GPUs.
      set(CMAKE_CUDA_ARCHITECTURES 80-real 90a-real 80-virtual)
    elseif(CMAKE_CUDA_ARCHITECTURES MATCHES "(^|;)((90|native|all|all-major)(-real|-virtual)?)(;|$)")
      message(FATAL_ERROR "CMAKE_CUDA_ARCHITECTURES is ${CMAKE_CUDA_ARCHITECTURES}, which builds for "
                          "9.0: name 90a, whose instructions the kernels for such devices need")
    endif()
    enable_language(CUDA)
    # CMake 3.25 does not set the C++20 flag for this CUDA compiler.
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
    endif()
    if(MOESERVE_CCACHE)
      set(CMAKE_CUDA_COMPILER_LAUNCHER ${MOESERVE_CCACHE})
    endif()
  else()
    message(STATUS "CUDA is off: no nvcc was found")
  endif()
else()
  message(STATUS "CUDA is off: MOESERVE_CUDA=OFF")
endif()

# nvcc compiles these files for GPUs. For the emulated device of the tests, the C++ compiler
# compiles them.
set(MOESERVE_CUDA_SOURCES
  attention/attention.cc
  attention/attention_cluster_mma.cu
  attention/attention_f32.cu
  attention/attention_latent_mma.cu
  attention/attention_latent_wgmma.cu
  attention/pingpong/attention_pingpong_int8.cu
  attention/pingpong/attention_pingpong_wgmma.cu
  attention/attention_split_mma.cu
  attention/attention_tiled_mma.cu
  attention/attention_tiled_wgmma.cu
  attention/attention_wide.cu
  attention/attention_work.cu
  attention/int8/attention_tiled_int8.cu
  device/bandwidth.cu
  cache/kv_cache.cc
  cuda_backend.cc
  device/device.cc
  statistics/expert_counters.cu
  dense/dense_layers.cc
  dense/dense_layers.cu
  fused/fused_expert.cu
  fused/fused_expert_wgmma.cu
  device/handles.cc
  joined/joined_linear.cu
  joined/joined_stream.cu
  device/launch.cc
  linear/linear.cc
  linear/linear_bank.cc
  linear/linear_bank_moves.cc
  linear/linear_bank.cu
  linear/linear_f32.cu
  quantized/linear_int8.cu
  quantized/linear_int8_stream.cu
  quantized/linear_int8_wgmma.cu
  linear/linear_mma.cu
  linear/linear_split_mma.cu
  linear/linear_stationary.cu
  linear/linear_stream.cu
  linear/linear_wgmma.cu
  linear/pack_fp8.cu
  linear/pack_mxfp4.cu
  positions/norm_rope_append.cu
  quantized/linear_fp8.cu
  quantized/linear_fp8_wgmma.cu
  quantized/linear_grouped.cu
  quantized/linear_int4.cu
  ranks/checksum.cu
  ranks/plan_division.cu
  ranks/rank_ops.cc
  routing/pack_plans.cu
  routing/plan.cu
  quantized/round_rows.cu
  positions/rope.cu
  positions/rope_tables.cc
  quantized/linear_mxfp4.cu
  quantized/linear_mxfp4_wgmma.cu
  routing/route.cu
  routing/route_any.cu
  routing/route_cluster.cu
  routing/route_top_cosines.cu
  routing/route_top_dots.cu
  routing/route_variant.cc
  statistics/route_counters.cc
  routing/router.cc
  routes.cc
  rows/norm.cu
  rows/recurrence.cu
  rows/rows.cu
  rows/sampler.cu
  rows/short_convolution.cu
  slots/expert_slots.cc
  slots/slot_memory.cc
  states.cc
  step_buffers.cc
  steps.cc
  transfers.cc
  tuning.cc
  tuning/choices.cc
  tuning/graph_device.cc
  tuning/attention_tuning.cc
  tuning/kernel_tuning.cc
  tuning/product_tuning.cc
  tuning/route_tuning.cc
  tuning/sampler_tuning.cc
  tuning/tuner.cc
  tuning/tuning_key.cc)
list(TRANSFORM MOESERVE_CUDA_SOURCES PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
