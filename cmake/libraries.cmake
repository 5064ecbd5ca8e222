# The outside libraries, each linked to the one target that uses it.
find_package(BLAS)
find_library(LAPACKE_LIBRARY lapacke)
find_path(CBLAS_INCLUDE cblas.h PATH_SUFFIXES openblas x86_64-linux-gnu x86_64-linux-gnu/openblas-openmp)
if(NOT BLAS_FOUND OR NOT LAPACKE_LIBRARY OR NOT CBLAS_INCLUDE)
  message(FATAL_ERROR "OpenBLAS with LAPACKE is needed: apt-get install libopenblas-openmp-dev liblapacke-dev")
endif()
target_link_libraries(tessera_ops PUBLIC ${BLAS_LIBRARIES})
target_include_directories(tessera_ops SYSTEM PRIVATE ${CBLAS_INCLUDE})

# The tuning table is compiled in.
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS docs/results/tuning.tsv)
file(READ docs/results/tuning.tsv table)
file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/tuning_table.cpp @ONLY CONTENT
"namespace tessera::tuning {
extern const char* const kTable;
const char* const kTable = R\"table(@table@)table\";
}  // namespace tessera::tuning
")
target_sources(tessera_runtime PRIVATE ${CMAKE_BINARY_DIR}/tuning_table.cpp)

if(TESSERA_CUDA)
  target_link_libraries(tessera_runtime PUBLIC CUDA::cudart_static CUDA::nvtx3)
  target_link_libraries(tessera_ops PUBLIC CUDA::cublasLt CUDA::cublas)
endif()
