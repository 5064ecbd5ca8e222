# The outside libraries of cmake/outside.cmake, each linked to the targets that use it.
target_link_libraries(tessera_ops PUBLIC ${BLAS_LIBRARIES} ${LAPACKE_LIBRARY} ${CMAKE_DL_LIBS})
target_include_directories(tessera_ops SYSTEM PRIVATE ${CBLAS_INCLUDE})

# CPU kernels: nothing reads the flags of floating-point exceptions; without them loops with comparisons vectorise.
file(GLOB_RECURSE kernels CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/ops/*_cpu.cpp ${CMAKE_CURRENT_SOURCE_DIR}/ops/*_blas.cpp
     ${CMAKE_CURRENT_SOURCE_DIR}/optim/*_cpu.cpp ${CMAKE_CURRENT_SOURCE_DIR}/tensor/*_cpu.cpp)
set_source_files_properties(${kernels} PROPERTIES COMPILE_OPTIONS -fno-trapping-math)

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

# Around the core. The sources ask for TESSERA_WITH_<NAME> where a library is optional.
function(tessera_use folder)  # tessera_use(<folder> PRIVATE|PUBLIC <libraries>...), once the folder has sources
  get_target_property(type tessera_${folder} TYPE)
  if(type STREQUAL "STATIC_LIBRARY")
    target_link_libraries(tessera_${folder} ${ARGN})
  endif()
endfunction()
if(TESSERA_OUTER_RING)
  tessera_use(io PRIVATE fmt::fmt nlohmann_json::nlohmann_json ${XXHASH_LIBRARY})
  tessera_use(pretrained PRIVATE nlohmann_json::nlohmann_json)
  tessera_use(datasets PRIVATE fmt::fmt nlohmann_json::nlohmann_json)
  tessera_use(report PRIVATE fmt::fmt PUBLIC nlohmann_json::nlohmann_json)
  tessera_use(train PRIVATE fmt::fmt PUBLIC nlohmann_json::nlohmann_json)
  tessera_use(bench PRIVATE fmt::fmt PUBLIC nlohmann_json::nlohmann_json)
  target_compile_definitions(tessera_io PRIVATE XXH_INLINE_ALL)  # built for TESSERA_CPU: with AVX2 twice as fast
  # TensorBoard events: the messages by libprotobuf, or by the file that says it is absent.
  if(TESSERA_HAS_Protobuf AND TARGET protobuf::protoc)
    protobuf_generate_cpp(events_sources events_headers io/events.proto)
    set_source_files_properties(${events_sources} PROPERTIES COMPILE_OPTIONS -w)
    target_sources(tessera_io PRIVATE ${events_sources} ${events_headers})
    target_include_directories(tessera_io PRIVATE ${CMAKE_CURRENT_BINARY_DIR})
    if(SENTENCEPIECE_FOUND)  # see cmake/outside.cmake
      target_include_directories(tessera_io SYSTEM PRIVATE ${Protobuf_INCLUDE_DIRS})
      target_link_libraries(tessera_io PRIVATE ${PROTOBUF_LITE_STATIC})
      target_link_options(tessera_io INTERFACE LINKER:--exclude-libs,libprotobuf-lite.a:libtessera_io.a)
    else()
      target_link_libraries(tessera_io PRIVATE protobuf::libprotobuf-lite)
    endif()
    set_source_files_properties(io/events_absent.cpp PROPERTIES HEADER_FILE_ONLY ON)
  else()
    set_source_files_properties(io/events_protobuf.cpp PROPERTIES HEADER_FILE_ONLY ON)
  endif()
  # Tokenizers: each library by the file that uses it, or by the one that says it is absent.
  foreach(part "PCRE2 regex_pcre2 regex_absent" "UTF8PROC unicode_utf8proc unicode_absent"
               "SENTENCEPIECE sentencepiece_library sentencepiece_absent")
    separate_arguments(part)
    list(GET part 0 name)
    list(GET part 1 with)
    list(GET part 2 without)
    if(${name}_FOUND)
      tessera_use(io PRIVATE ${${name}_LIBRARY})
      target_include_directories(tessera_io SYSTEM PRIVATE ${${name}_INCLUDE})
      set_source_files_properties(io/tokenizer/${without}.cpp PROPERTIES HEADER_FILE_ONLY ON)
    else()
      set_source_files_properties(io/tokenizer/${with}.cpp PROPERTIES HEADER_FILE_ONLY ON)
    endif()
  endforeach()
  # Archives of torch.save: by libzip, or by the file that says it is absent.
  if(TESSERA_HAS_libzip)
    tessera_use(io PRIVATE ${LIBZIP_LIBRARY})
    target_include_directories(tessera_io SYSTEM PRIVATE ${LIBZIP_INCLUDE})
    set_source_files_properties(io/zip_absent.cpp PROPERTIES HEADER_FILE_ONLY ON)
  else()
    set_source_files_properties(io/zip_libzip.cpp PROPERTIES HEADER_FILE_ONLY ON)
  endif()
  if(TESSERA_HAS_SQLite)
    tessera_use(report PRIVATE SQLite::SQLite3)
    target_compile_definitions(tessera_report PRIVATE TESSERA_WITH_SQLITE)
  endif()
  if(TESSERA_HAS_PNG)
    tessera_use(report PRIVATE PNG::PNG)
    target_compile_definitions(tessera_report PRIVATE TESSERA_WITH_PNG)
  endif()
  include(build_info)
endif()
