# The last words of a configuration: what this build has, and for each "no" the package that brings it and what is lost.
if(TESSERA_CUDA)
  string(REPLACE "-real" "" architectures "${TESSERA_CUDA_ARCHITECTURES}")
  list(JOIN architectures ", sm_" architectures)
  set(cuda "CUDA ${CUDAToolkit_VERSION_MAJOR}.${CUDAToolkit_VERSION_MINOR} (sm_${architectures}): yes")
else()
  set(cuda "CUDA: no (${TESSERA_CUDA_REASON}); lost: GPUs, this build is CPU-only")
endif()
string(STRIP "${tessera_checklist}" checklist)
message(STATUS "tessera ${PROJECT_VERSION}, ${CMAKE_BUILD_TYPE}, ${CMAKE_CXX_COMPILER_ID} "
               "${CMAKE_CXX_COMPILER_VERSION}, ${TESSERA_CPU}:\n  ${cuda}\n  ${checklist}")
