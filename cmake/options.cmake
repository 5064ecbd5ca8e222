# What a builder may choose. Everything has a default that works.
option(TESSERA_BUILD_TESTS "Build tests and examples" ${PROJECT_IS_TOP_LEVEL})
set(TESSERA_CUDA "AUTO" CACHE STRING "CUDA kernels: AUTO (if a toolkit of 12.8 or newer is found), ON, OFF")
# -real: without PTX, which for 90a runs on no other GPU
set(TESSERA_CUDA_ARCHITECTURES "90a-real" CACHE STRING "GPU architectures, as in CMAKE_CUDA_ARCHITECTURES")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(cpu x86-64-v3)  # AVX2 and FMA: any server or desktop since about 2013
else()
  set(cpu native)
endif()
set(TESSERA_CPU ${cpu} CACHE STRING "-march of the CPU code; \"native\" for this machine only")
set(TESSERA_SANITIZE "" CACHE STRING "Host sanitizers, for example address,undefined")
option(TESSERA_STRICT_PTXAS "Fail if ptxas serialises wgmma or spills registers (cmake/strict_nvcc)" ON)
set(TESSERA_MUTANTS_ONE_IN 8 CACHE STRING "ctest plants one mutant in that many, drawn by the revision; 1: all of them")
option(TESSERA_FUZZ "Build the libFuzzer targets of tests/fuzz (clang)" OFF)

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(BUILD_SHARED_LIBS)
  set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)
endif()
include(GNUInstallDirs)
set(CMAKE_INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR}")

find_program(TESSERA_CCACHE ccache)
if(TESSERA_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${TESSERA_CCACHE})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${TESSERA_CCACHE})
endif()
if(TESSERA_STRICT_PTXAS)  # before ccache, which replays what ptxas said
  list(PREPEND CMAKE_CUDA_COMPILER_LAUNCHER ${CMAKE_CURRENT_SOURCE_DIR}/cmake/strict_nvcc)
endif()

include(cuda)
include(outside)

# Flags of every target.
add_library(tessera_flags INTERFACE)
target_compile_features(tessera_flags INTERFACE $<INSTALL_INTERFACE:cxx_std_20>)
target_compile_options(tessera_flags INTERFACE
  $<BUILD_INTERFACE:$<$<COMPILE_LANGUAGE:CXX>:-march=${TESSERA_CPU};-fno-math-errno>>)
if(TESSERA_CUDA)
  target_compile_definitions(tessera_flags INTERFACE TESSERA_WITH_CUDA)
  target_compile_options(tessera_flags INTERFACE
    $<BUILD_INTERFACE:$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr;--extended-lambda;-lineinfo>>)
  if(TESSERA_STRICT_PTXAS)
    target_compile_options(tessera_flags INTERFACE
      $<BUILD_INTERFACE:$<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=--warn-on-spills>>)
  endif()
endif()
target_link_libraries(tessera_flags INTERFACE Threads::Threads)
if(TESSERA_SANITIZE)
  target_compile_options(tessera_flags INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${TESSERA_SANITIZE};-fno-omit-frame-pointer>)
  target_link_options(tessera_flags INTERFACE -fsanitize=${TESSERA_SANITIZE})
endif()

# How our own code is compiled, not its users'.
add_library(tessera_warnings INTERFACE)
# Designated initializers leave out what has a default; GCC 12 warns of overlaps in std::string that do not exist (its bug 105651).
target_compile_options(tessera_warnings INTERFACE $<$<COMPILE_LANGUAGE:CXX>:
  -Wall;-Wextra;-Wno-unknown-pragmas;-Wno-missing-field-initializers;$<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>>)
# GCC collects its garbage whenever its memory has doubled, which takes a tenth of its time. Not below 1 GB, then.
target_compile_options(tessera_warnings INTERFACE
  $<$<COMPILE_LANG_AND_ID:CXX,GNU>:--param=ggc-min-heapsize=1000000>)

# tessera_optimize(<target> <-O1|-O2>): for code that computes little, in place of a release's -O3; -O1 compiles a third faster, -O2 a
# sixth.
function(tessera_optimize target level)
  target_compile_options(${target} PRIVATE $<$<AND:$<CONFIG:Release>,$<COMPILE_LANGUAGE:CXX>>:${level}>)
endfunction()
