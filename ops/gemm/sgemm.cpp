#include <cblas.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <cstdlib>
#include <mutex>
#include <string_view>
#include <vector>

#include "ops/gemm/sgemm_internal.h"
#include "runtime/error.h"
#include "runtime/parallel.h"

namespace tessera::ops {
namespace {

/// The OpenMP runtime that OpenBLAS's OpenMP build brings with it. Its number of threads belongs to the
/// calling thread, so setting it affects no other thread.
struct OpenMp {
  int (*get)();
  void (*set)(int);

  OpenMp()
      : get(reinterpret_cast<int (*)()>(::dlsym(RTLD_DEFAULT, "omp_get_max_threads"))),
        set(reinterpret_cast<void (*)(int)>(::dlsym(RTLD_DEFAULT, "omp_set_num_threads"))) {
    check(get && set,
          "matmul: OpenBLAS was built with OpenMP, but no OpenMP runtime is loaded; install "
          "libopenblas0-pthread or libopenblas0-openmp");
  }
};

/// The build with POSIX threads has one number of threads for the process: 1 while any thread is in sgemm.
struct Shared {
  std::mutex mutex;
  int users = 0, before = 1;
};

const OpenMp& openmp() {
  static const OpenMp found;
  return found;
}

Shared& shared() {
  static Shared one;
  return one;
}

/// OpenBLAS maps a buffer for each call that runs at the same time, keeps it, and tries again for ever if the
/// system refuses (blas_memory_alloc in driver/others/memory.c). So the first call of a process maps as many
/// buffers as its loops have threads, in the same way, and unmaps them. Throws OutOfMemory if one is refused.
void check_buffers() {
  constexpr size_t kBuffer = size_t{128} << 20;  // BUFFER_SIZE of DYNAMIC_ARCH builds; others have less
  const int threads = cpu_threads();
  std::vector<void*> buffers;
  for (void* buffer = nullptr; int(buffers.size()) < threads; buffers.push_back(buffer)) {
    buffer = ::mmap(nullptr, kBuffer, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (buffer == MAP_FAILED) break;
  }
  for (void* const buffer : buffers) ::munmap(buffer, kBuffer);
  if (int(buffers.size()) == threads) return;
  MessageStream text;
  text << "out of memory on cpu: OpenBLAS needs a buffer of " << (kBuffer >> 20) << " MiB for each of "
       << threads << (threads == 1 ? " thread" : " threads") << ", and the system gives " << buffers.size()
       << " of them; raise the limit of the process (ulimit -v), or set TESSERA_THREADS to fewer threads";
  throw OutOfMemory(text.str(), __FILE__, __LINE__);
}

#if defined(__x86_64__)
/// A build of OpenBLAS for many CPUs (DYNAMIC_ARCH) chooses its kernels by the model number when it is
/// loaded, and falls back to those of Prescott, which use SSE alone, where its version does not know the
/// model: 17 instead of 100 GFLOP/s of sgemm on a Xeon that is newer than OpenBLAS 0.3.21. This lets it
/// choose again, by the instructions that the CPU has, unless OPENBLAS_CORETYPE says what the user wants. It
/// runs before main(), since no other thread may be in OpenBLAS or read the environment meanwhile.
bool choose_kernels() {
  if (std::string_view(openblas_get_corename()) != "Prescott" || std::getenv("OPENBLAS_CORETYPE"))
    return false;
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512cd") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  const auto quit = reinterpret_cast<void (*)()>(::dlsym(RTLD_DEFAULT, "gotoblas_dynamic_quit"));
  const auto init = reinterpret_cast<void (*)()>(::dlsym(RTLD_DEFAULT, "gotoblas_dynamic_init"));
  if (!avx2 || !quit || !init) return false;
  ::setenv("OPENBLAS_CORETYPE", avx512 ? "SkylakeX" : "Haswell", 1);
  quit(), init();
  ::unsetenv("OPENBLAS_CORETYPE");
  return true;
}
[[maybe_unused]] const bool kChosen = choose_kernels();
#endif

}  // namespace

const char* blas_kernels() {
  return openblas_get_corename();
}

OneBlasThread::OneBlasThread() : build_(openblas_get_parallel()) {
  static const bool fits = (check_buffers(), true);  // tried again at the next call if it throws
  (void)fits;
  if (build_ == OPENBLAS_OPENMP) {
    before_ = openmp().get();
    if (before_ != 1) openmp().set(1);
  } else if (build_ == OPENBLAS_THREAD) {
    const std::lock_guard lock(shared().mutex);
    if (shared().users++ > 0) return;
    shared().before = openblas_get_num_threads();
    if (shared().before != 1) openblas_set_num_threads(1);
  }
}

OneBlasThread::~OneBlasThread() {
  if (build_ == OPENBLAS_OPENMP) {
    if (before_ != 1) openmp().set(before_);
  } else if (build_ == OPENBLAS_THREAD) {
    const std::lock_guard lock(shared().mutex);
    if (--shared().users == 0 && shared().before != 1) openblas_set_num_threads(shared().before);
  }
}

void sgemm(int64_t m, int64_t n, int64_t k, float alpha, const SgemmOperand& a, const SgemmOperand& b,
           float beta, float* c, int64_t ldc) {
  const OneBlasThread one;
  cblas_sgemm(CblasRowMajor, a.transposed ? CblasTrans : CblasNoTrans,
              b.transposed ? CblasTrans : CblasNoTrans, int(m), int(n), int(k), alpha, a.data, int(a.ld),
              b.data, int(b.ld), beta, c, int(ldc));
}

void dgemm_at_b(int64_t m, int64_t n, int64_t k, const DgemmOperand& a, const DgemmOperand& b, double* c,
                int64_t ldc) {
  const OneBlasThread one;
  cblas_dgemm(CblasRowMajor, CblasTrans, CblasNoTrans, int(m), int(n), int(k), 1, a.data, int(a.ld), b.data,
              int(b.ld), 1, c, int(ldc));
}

void dsyrk(int64_t n, int64_t k, const double* a, int64_t lda, double* c, int64_t ldc) {
  const OneBlasThread one;
  cblas_dsyrk(CblasRowMajor, CblasUpper, CblasTrans, int(n), int(k), 1, a, int(lda), 1, c, int(ldc));
}

}  // namespace tessera::ops
