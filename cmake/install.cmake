# The installed tree: lib/, include/tessera/ (the tree's own folders), lib/cmake/tessera/, bin/tessera.
include(CMakePackageConfigHelpers)

# tessera::core is what a training loop of one's own needs; tessera::tessera is everything.
set(core tessera_runtime tessera_tensor tessera_autograd tessera_comm tessera_ops tessera_nn tessera_models tessera_plan tessera_optim tessera_dist)
get_property(all GLOBAL PROPERTY TESSERA_TARGETS)
add_library(tessera_core INTERFACE)
target_link_libraries(tessera_core INTERFACE ${core})
add_library(tessera_all INTERFACE)
target_link_libraries(tessera_all INTERFACE ${all})
set_target_properties(tessera_core PROPERTIES EXPORT_NAME core)
set_target_properties(tessera_all PROPERTIES EXPORT_NAME tessera)
add_library(tessera::core ALIAS tessera_core)
add_library(tessera::tessera ALIAS tessera_all)

install(TARGETS tessera_flags tessera_core tessera_all ${all} EXPORT tesseraTargets)
if(TARGET tessera)
  install(TARGETS tessera)
endif()
install(EXPORT tesseraTargets NAMESPACE tessera:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/tessera)

set(destination ${CMAKE_INSTALL_INCLUDEDIR}/tessera)
install(FILES tessera.h DESTINATION ${destination})
foreach(target gpu ${all})
  string(REPLACE tessera_ "" folder ${target})
  if(IS_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR}/${folder})
    install(DIRECTORY ${folder} DESTINATION ${destination} FILES_MATCHING PATTERN *.h PATTERN *.cuh)
  endif()
endforeach()

if(TESSERA_CUDA)
  string(APPEND TESSERA_DEPENDENCIES "find_dependency(CUDAToolkit ${CUDAToolkit_VERSION_MAJOR})\n")
endif()
configure_package_config_file(cmake/tesseraConfig.cmake.in tesseraConfig.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/tessera)
write_basic_package_version_file(tesseraConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/tesseraConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/tesseraConfigVersion.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/tessera)
