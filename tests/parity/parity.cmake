# Agreement with PyTorch: by the Python of TESSERA_PEER_PYTHON, else python3; skipped (77) if that has no PyTorch.
add_executable(dump_tnp parity/dump_tnp.cpp)
target_link_libraries(dump_tnp PRIVATE tessera::models tessera::optim tessera::io tessera_warnings)
add_executable(dump_language parity/dump_language.cpp)
target_link_libraries(dump_language PRIVATE tessera::train tessera_warnings)

# tessera_parity(<name> <program>): tests/parity/<name>.py on a program of this build.
function(tessera_parity name program)
  add_test(NAME ${name} COMMAND sh -c "exec \"\${TESSERA_PEER_PYTHON:-python3}\" \"$0\" \"$1\""
    ${CMAKE_CURRENT_SOURCE_DIR}/parity/${name}.py $<TARGET_FILE:${program}>)
  # Many small problems: threads in each would only wait for one another.
  set_tests_properties(${name} PROPERTIES LABELS parity SKIP_RETURN_CODE 77 TIMEOUT 900 ENVIRONMENT OMP_NUM_THREADS=1)
endfunction()
tessera_parity(torch_parity tessera)
tessera_parity(tnp_parity dump_tnp)
tessera_parity(language_parity dump_language)
tessera_parity(train_parity tessera)
tessera_parity(bert_glue tessera)
tessera_parity(prune_parity tessera)
tessera_parity(sparse_formats tessera)
tessera_parity(low_rank_parity tessera)
tessera_parity(sparse_backward_parity tessera)
tessera_parity(gates_parity tessera)

# What the command measures, bench/peers can measure too.
add_test(NAME peers COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/peers/run $<TARGET_FILE:tessera>)
set_tests_properties(peers PROPERTIES LABELS parity SKIP_RETURN_CODE 77 TIMEOUT 900 ENVIRONMENT OMP_NUM_THREADS=1)

if(TARGET tessera::sparsity)
  add_executable(dump_clusters parity/dump_clusters.cpp)
  target_link_libraries(dump_clusters PRIVATE tessera::sparsity tessera_warnings)
  tessera_parity(clusters_parity dump_clusters)
endif()

add_executable(dump_tokens parity/dump_tokens.cpp)
target_link_libraries(dump_tokens PRIVATE tessera::io tessera_warnings)
tessera_parity(tokenizer_parity dump_tokens)
