# Tests of the tree itself: layers, layout, headers, the README's program, the installed package, planted errors.
set(root ${PROJECT_SOURCE_DIR})
find_package(Python3 COMPONENTS Interpreter QUIET)

# tessera_check(<name> <command>...): a test of the label "tree"; exit status 77 means skipped, with the reason printed.
function(tessera_check name)
  add_test(NAME tree.${name} COMMAND ${ARGN} WORKING_DIRECTORY ${root})
  set_tests_properties(tree.${name} PROPERTIES LABELS tree SKIP_RETURN_CODE 77)
endfunction()

tessera_check(layers ${Python3_EXECUTABLE} tools/check_layers)
tessera_check(layers_self_test ${Python3_EXECUTABLE} tools/check_layers --self-test)
tessera_check(words ${Python3_EXECUTABLE} tools/check_words)
tessera_check(words_self_test ${Python3_EXECUTABLE} tools/check_words --self-test)
tessera_check(citations ${Python3_EXECUTABLE} tools/check_citations)
tessera_check(citations_self_test ${Python3_EXECUTABLE} tools/check_citations --self-test)
tessera_check(format tools/format --check)
tessera_check(format_self_test tools/format --self-test)
tessera_check(readme_program ${Python3_EXECUTABLE} tools/check_readme)
tessera_check(snippets_self_test ${Python3_EXECUTABLE} tools/check_snippets --self-test)
tessera_check(api_docs ${Python3_EXECUTABLE} tools/api_docs ${CMAKE_CURRENT_BINARY_DIR}/api)
tessera_check(api_docs_self_test ${Python3_EXECUTABLE} tools/api_docs --self-test)
tessera_check(measured ${Python3_EXECUTABLE} tests/measured/run)
tessera_check(campaign tests/measured/campaign)
tessera_check(scripts tests/tools/run)
tessera_check(measured_tables ${Python3_EXECUTABLE} tools/measured --check)
if(TARGET tessera)
  set(program $<TARGET_FILE:tessera>)
endif()
if(TARGET tessera)
  tessera_check(commands ${Python3_EXECUTABLE} tools/check_commands ${program})
endif()
tessera_check(corpus ${Python3_EXECUTABLE} tests/corpus/run ${program})
tessera_check(reproduce ${Python3_EXECUTABLE} tests/reproduce/run ${program})
tessera_check(sparsity_study ${Python3_EXECUTABLE} tests/sparsity_study/run ${program})
tessera_check(agreement_self_test ${Python3_EXECUTABLE} tools/agreement --program ${program} --jobs 2 --self-test)

# A program that links tessera::ops carries no declarations of operators.
add_test(NAME specs_apart COMMAND ${CMAKE_COMMAND} -D NM=${CMAKE_NM} -D OPS=$<TARGET_FILE:tessera_ops>
  -D SPECS=$<TARGET_FILE:tessera_op_specs> -P ${CMAKE_CURRENT_SOURCE_DIR}/specs_apart.cmake)
set_tests_properties(specs_apart PROPERTIES LABELS tree)

if(TESSERA_CUDA)
  tessera_check(strict_nvcc tests/strict_nvcc/run ${CMAKE_CUDA_COMPILER})
elseif(nvcc_version VERSION_GREATER_EQUAL 12.8)
  include(cuda_compiles.cmake)
endif()

# Every header of the umbrella, and of the folders whose headers programs include one by one, compiles by itself: one with a
# source file of its name by being that file's first include (checked by tools/check_layers), any other in a unit of its own, twice.
file(STRINGS ${root}/tessera.h lines REGEX "^#include \"")
set_property(DIRECTORY ${root} APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${root}/tessera.h)
file(GLOB apart RELATIVE ${root} CONFIGURE_DEPENDS ${root}/report/*.h ${root}/eval/*.h ${root}/train/*.h ${root}/sparsity/*.h ${root}/bench/*.h)
list(FILTER apart EXCLUDE REGEX "_internal\\.h$")
set(units "")
foreach(line tessera.h ${lines} ${apart})
  string(REGEX REPLACE "^#include \"(.*)\".*$" "\\1" header "${line}")
  string(REGEX REPLACE "\\.h$" ".cpp" source "${header}")
  file(GLOB source CONFIGURE_DEPENDS ${root}/${source})
  if(NOT source)
    string(MAKE_C_IDENTIFIER "${header}" unit)
    file(CONFIGURE OUTPUT headers/${unit}.cpp CONTENT "#include \"@header@\"\n#include \"@header@\"\n" @ONLY)
    list(APPEND units ${CMAKE_CURRENT_BINARY_DIR}/headers/${unit}.cpp)
  endif()
endforeach()
add_library(test_headers OBJECT ${units})
target_link_libraries(test_headers PRIVATE tessera::tessera tessera_warnings)
target_compile_options(test_headers PRIVATE -O0)

# A program may name some members of an options struct, without a warning of -Wextra.
add_library(test_designated OBJECT ${CMAKE_CURRENT_SOURCE_DIR}/designated.cpp)
target_link_libraries(test_designated PRIVATE tessera::tessera)
target_compile_options(test_designated PRIVATE -O0 -Wall -Wextra -Werror=missing-field-initializers)

# The C++ code that documents and header comments show compiles.
add_custom_target(snippets ALL COMMAND ${Python3_EXECUTABLE} tools/check_snippets ${CMAKE_CURRENT_BINARY_DIR}/snippets.cpp
  BYPRODUCTS ${CMAKE_CURRENT_BINARY_DIR}/snippets.cpp WORKING_DIRECTORY ${root} VERBATIM)
add_library(test_snippets OBJECT ${CMAKE_CURRENT_BINARY_DIR}/snippets.cpp)
add_dependencies(test_snippets snippets)
target_include_directories(test_snippets PRIVATE ${root})
target_link_libraries(test_snippets PRIVATE tessera::tessera tessera_warnings)
target_compile_options(test_snippets PRIVATE -O0)

# A program outside the tree, built against an installed one.
add_test(NAME package COMMAND ${CMAKE_COMMAND}
  -D BUILD=${CMAKE_BINARY_DIR} -D WORK=${CMAKE_CURRENT_BINARY_DIR}/package -D SOURCE=${CMAKE_CURRENT_SOURCE_DIR}/package
  -D GENERATOR=${CMAKE_GENERATOR} -D CXX=${CMAKE_CXX_COMPILER} -D SANITIZE=${TESSERA_SANITIZE}
  -P ${CMAKE_CURRENT_SOURCE_DIR}/package/run.cmake)
set_tests_properties(package PROPERTIES LABELS package TIMEOUT 300)

# Errors planted into formulas must be caught by the checks of their operator: each revision plants an eighth of them (tools/mutants: all).
set(mutants ${Python3_EXECUTABLE} ${root}/tools/mutants ${CMAKE_BINARY_DIR} --passed --one-in ${TESSERA_MUTANTS_ONE_IN})
add_test(NAME mutants COMMAND ${mutants})
cmake_host_system_information(RESULT cores QUERY NUMBER_OF_LOGICAL_CORES)  # it uses them all
set_tests_properties(mutants PROPERTIES LABELS slow TIMEOUT 3600 PROCESSORS ${cores})
foreach(folder comm nn optim models dist pretrained sparsity)
  if(TARGET test_${folder})
    add_test(NAME ${folder}_mutants COMMAND ${mutants} --mutants ${CMAKE_CURRENT_SOURCE_DIR}/${folder}/mutants)
    set_tests_properties(${folder}_mutants PROPERTIES LABELS slow TIMEOUT 1200 PROCESSORS ${cores})
  endif()
endforeach()
# f16 with its loss scale learns like bf16 and f32: a TNP, a GPT and a BERT, small enough for a CPU, three seeds each.
if(TARGET tessera)
  add_test(NAME precision COMMAND ${root}/tools/precision ${CMAKE_CURRENT_BINARY_DIR}/precision)
  set_tests_properties(precision PROPERTIES LABELS slow TIMEOUT 600 ENVIRONMENT
    "TESSERA=$<TARGET_FILE:tessera>;JOBS=2;OMP_NUM_THREADS=1;TEXT=${root}/docs/tokens.md;TNP_FLAGS=--device cpu --d-model 16 --d-ff 32 --n-head 2 --layers 2 --emb-hidden 16 --components 3 --m 16 --n 16 --batch-size 8 --steps 300 --warmup 30 --lr 3e-3 --eval-tasks 32;GPT_FLAGS=--device cpu --tokenizer-kind byte --layers 2 --d-model 32 --heads 2 --d-ff 64 --length 32 --batch 8 --steps 200 --warmup 20 --lr 3e-3 --dropout 0 --eval-tokens 2000;BERT_FLAGS=--device cpu --layers 2 --d-model 32 --n-head 2 --d-ff 64 --vocab-size 400 --batch 16 --max-length 24 --steps 600 --eval-every 600 --lr 3e-3 --dropout 0")
endif()
# Texts of mutants are found where they have moved to.
tessera_check(mutants_are_found ${Python3_EXECUTABLE} tools/mutants --self-test)
# The tool itself can fail: a change that changes nothing must be reported as a survivor.
add_test(NAME cuda_mutants_apply COMMAND ${Python3_EXECUTABLE} ${root}/tools/cuda_mutants check)
set_tests_properties(cuda_mutants_apply PROPERTIES LABELS tree)
add_test(NAME mutants_self_test COMMAND ${Python3_EXECUTABLE} ${root}/tools/mutants ${CMAKE_BINARY_DIR}
  --mutants ${CMAKE_CURRENT_SOURCE_DIR}/surviving_mutants)
set_tests_properties(mutants_self_test PROPERTIES LABELS tree PASS_REGULAR_EXPRESSION "1 caught, 1 survived, 1 broken")
