# In a build without CUDA, where a toolkit is: every file for a GPU compiles, kernels to PTX without optimisation. That takes seconds
# each, a build of the kernels as long as all else. Neither ptxas nor the linker is asked: a build with CUDA does that.
string(REGEX REPLACE "[;-].*" "" architecture "${TESSERA_CUDA_ARCHITECTURES}")
get_filename_component(toolkit "${nvcc}" REALPATH)
get_filename_component(toolkit "${toolkit}/../.." ABSOLUTE)
set(language -std=c++20 -DTESSERA_WITH_CUDA -I${root})

function(tessera_compiles file)
  add_test(NAME CudaCompiles.${file} COMMAND ${ARGN} ${language} ${root}/${file} WORKING_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR})
  set_tests_properties(CudaCompiles.${file} PROPERTIES LABELS cuda_slow TIMEOUT 600)
endfunction()

file(GLOB_RECURSE files CONFIGURE_DEPENDS RELATIVE ${root} ${root}/*.cu ${root}/*.cpp)
list(FILTER files EXCLUDE REGEX "^build|^tests/strict_nvcc/")
foreach(file ${files})
  if(file MATCHES "\\.cu$")
    tessera_compiles(${file} ${nvcc} -arch=sm_${architecture} --expt-relaxed-constexpr --extended-lambda -Xcicc -O0 -ptx -o /dev/null)
  else()
    file(STRINGS ${root}/${file} for_gpu REGEX "TESSERA_WITH_CUDA" LIMIT_COUNT 1)
    if(for_gpu)
      tessera_compiles(${file} ${CMAKE_CXX_COMPILER} -fsyntax-only -isystem ${toolkit}/include)
    endif()
  endif()
endforeach()
