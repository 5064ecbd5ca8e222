# Writes OUTPUT with the git revision of SOURCE, and only if it changed: run at every build by cmake/build_info.cmake.
execute_process(COMMAND git describe --always --dirty --abbrev=12 --exclude=* WORKING_DIRECTORY ${SOURCE}
                OUTPUT_VARIABLE revision OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
if(failed AND DEFINED ENV{REVISION})  # a copy of the tree without git, whose maker knows
  set(revision $ENV{REVISION})
elseif(failed)
  set(revision unknown)
endif()
file(CONFIGURE OUTPUT ${OUTPUT} @ONLY CONTENT [[
#include "report/facts.h"

const char* const tessera::report::kRevision = "@revision@";
]])
