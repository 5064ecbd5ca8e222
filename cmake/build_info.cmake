# Facts of the build for report/facts.h. The git revision is asked for at every build, the rest at configuration.
if(TESSERA_CUDA)
  string(REPLACE "-real" "" architectures "${TESSERA_CUDA_ARCHITECTURES}")
  list(JOIN architectures " sm_" architectures)
  set(cuda_version "${CUDAToolkit_VERSION} sm_${architectures}")
else()
  set(cuda_version none)
endif()
list(GET BLAS_LIBRARIES 0 blas)
set(chart_js "")
if(CHART_JS)
  file(READ ${CHART_JS} chart_js)
endif()
file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/build_info.cpp @ONLY CONTENT [==[
#include "report/facts.h"

namespace tessera::report {

const char* const kVersion = "@PROJECT_VERSION@";
const char* const kCompiler = "@CMAKE_CXX_COMPILER_ID@ @CMAKE_CXX_COMPILER_VERSION@, @CMAKE_BUILD_TYPE@";
const char* const kCpuFlags = "-march=@TESSERA_CPU@";
const char* const kCudaVersion = "@cuda_version@";
const char* const kBlas = "@blas@";
const char* const kChartJs = R"chart(@chart_js@)chart";

}  // namespace tessera::report
]==])

set(revision_file ${CMAKE_BINARY_DIR}/build_revision.cpp)
add_custom_target(tessera_revision
  COMMAND ${CMAKE_COMMAND} -D OUTPUT=${revision_file} -D SOURCE=${CMAKE_CURRENT_SOURCE_DIR}
          -P ${CMAKE_CURRENT_SOURCE_DIR}/cmake/write_revision.cmake
  BYPRODUCTS ${revision_file} COMMENT "" VERBATIM)
add_dependencies(tessera_report tessera_revision)
target_sources(tessera_report PRIVATE ${CMAKE_BINARY_DIR}/build_info.cpp ${revision_file})
