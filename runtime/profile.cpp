#include "runtime/profile.h"

#if defined(TESSERA_WITH_CUDA)
#include <nvtx3/nvToolsExt.h>
#endif

namespace tessera {

#if defined(TESSERA_WITH_CUDA)
ProfileRange::ProfileRange(const char* name) {
  nvtxRangePushA(name);
}
ProfileRange::~ProfileRange() {
  nvtxRangePop();
}
#else
ProfileRange::ProfileRange(const char*) {}
ProfileRange::~ProfileRange() = default;
#endif

}  // namespace tessera
