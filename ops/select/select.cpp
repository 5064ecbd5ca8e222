#include "ops/select/select.h"
#include "runtime/has_cuda.h"

#include <cmath>
#include <limits>

#include "ops/select/select_cluster_math.h"
#include "ops/select/select_kernels.h"
#include "runtime/call_site.h"
#include "runtime/text.h"

namespace tessera::ops {
namespace {

constexpr int64_t kMostOfBlock = 8192;  // rows; more are shared by several SMs (docs/ops/select.md)

struct Ranked {
  int64_t rows;
};
std::string describe_problem(const Ranked& problem) {
  return text_of(problem.rows, " rows");
}

constexpr Variant<Ranked, void()> kVariants[] = {
    {"block", lacks_nothing<Ranked>,
     [](const Ranked& problem, const Gpu&) {
       return problem.rows <= kMostOfBlock ? Estimate::preferred() : Estimate::slower();
     },
     nullptr},
    {"grid", lacks_nothing<Ranked>, is_otherwise<Ranked>, nullptr},
    {"cluster",
     [](const Ranked& problem, const Gpu& gpu) -> Reason {
       if (gpu.major != 9) return "a GPU of compute capability 9.0";
       if (problem.rows > ClusterChunks::kMostRows) return "at most 131,072 rows";
       return {};
     },
     // H200: 1.0 to 1.26 times the time of the others, but for importance of 8,192 rows (0.75).
     [](const Ranked&, const Gpu&) { return Estimate::slower(); }, nullptr}};

constexpr int64_t kMostRows = std::numeric_limits<int32_t>::max() - 1;  // M itself is an entry of `indices`

void check_count(const char* name, const char* what, const Tensor& count, Device device) {
  if (!count.defined()) return;
  check(count.dtype() == DType::i32 && count.count() == 1 && count.rank() == 1, "select ", name, ": ", what,
        " is ", describe(count), "; expected i32 [1]");
  check(count.device() == device, "select ", name, ": ", what, " is ", describe(count), "; expected it on ",
        device.name());
}

/// Before a stream is reserved: what throws draws nothing.
void check_numbers(const char* name, int64_t rows, int64_t n, const SelectionCounts& counts, Device device) {
  check(rows >= 0 && rows <= kMostRows, "select ", name, ": ", rows, " rows; expected 0 to ", kMostRows);
  check(n >= 0, "select ", name, ": n = ", n, " rows; expected 0 or more");
  check(n <= rows, "select ", name, ": n = ", n, " of ", rows, " rows; expected at most ", rows,
        " (take the smaller of the two)");
  check_count(name, "counts.n", counts.n, device);
  check_count(name, "counts.rows", counts.rows, device);
  check(counts.share > 0 && counts.share <= 1, "select ", name, ": counts.share is ", counts.share,
        "; expected a number above 0, at most 1");
}

void check_norms(const char* name, const Tensor& norms) {
  check(norms.defined(), "select ", name, ": norms is undefined");
  check(norms.rank() == 1 && is_floating(norms.dtype()) && norms.dtype() != DType::f8e4m3, "select ", name,
        ": norms is ", describe(norms), "; expected f64, f32, bf16 or f16 of rank 1");
}

}  // namespace

Selection run_selection(SelectMode mode, const Tensor& norms, int64_t rows, int64_t n, Device device,
                        const SelectionCounts& counts, float threshold, const RandomStream& stream) {
  Selection result;
  result.rows = rows;
  result.indices = Tensor::empty_packed({n}, DType::i32, device);
  result.scales = Tensor::empty_packed({n}, DType::f32, device);
  result.count = Tensor::empty_packed({1}, DType::i32, device);
  const SelectCall call{.mode = mode,
                        .result = result,
                        .norms = norms.defined() ? norms.detach().to(DType::f32).packed() : norms,
                        .counts = counts,
                        .n = n,
                        .threshold = threshold,
                        .stream = stream};
  if (device.is_cpu()) {
    select_cpu(call);
  } else if constexpr (kCuda) {
    select_cuda(call);
  }
  return result;
}

SelectWay select_way(int64_t rows, const Gpu& gpu) {
  return SelectWay(choose_index("select", kVariants, Ranked{rows}, gpu));
}

std::vector<std::string> select_variants() {
  return names_of(kVariants);
}

namespace {
constexpr const char* kModeNames[] = {"first", "top_norm", "threshold", "random", "importance"};
}

const char* name_of(SelectMode mode) {
  return kModeNames[size_t(mode)];
}

SelectMode parse_select_mode(const std::string& name) {
  return parse_name<SelectMode>("select: there is no way to choose rows", kModeNames, name);
}

int64_t share_of_rows(int64_t rows, double share) {
  check(share > 0 && share <= 1, "select: a share of ", share, "; expected a number above 0, at most 1");
  check(rows >= 0 && rows <= kMostRows, "select: ", rows, " rows; expected 0 to ", kMostRows);
  return rows_of_units(uint32_t(rows), units_of_share(share));
}

Selection Selection::first(int64_t rows, int64_t n, Device device, const SelectionCounts& counts, Site site) {
  const CallScope call(site);
  check_numbers("first", rows, n, counts, device);
  return run_selection(SelectMode::first, Tensor(), rows, n, device, counts, 0, {});
}

Selection Selection::top_norm(const Tensor& norms, int64_t n, const SelectionCounts& counts, Site site) {
  const CallScope call(site);
  check_norms("top_norm", norms);
  check_numbers("top_norm", norms.count(), n, counts, norms.device());
  return run_selection(SelectMode::top_norm, norms, norms.count(), n, norms.device(), counts, 0, {});
}

Selection Selection::threshold(const Tensor& norms, double threshold, const SelectionCounts& counts,
                               Site site) {
  const CallScope call(site);
  check_norms("threshold", norms);
  check_numbers("threshold", norms.count(), 0, counts, norms.device());
  check(!std::isnan(threshold), "select threshold: the threshold is NaN; expected a number");
  check(!counts.n.defined(),
        "select threshold: counts.n is given; expected none (the threshold decides how many)");
  check(counts.share == 1, "select threshold: counts.share is ", counts.share,
        "; expected 1 (the threshold decides how many)");
  return run_selection(SelectMode::threshold, norms, norms.count(), norms.count(), norms.device(), counts,
                       float(threshold), {});
}

Selection Selection::random(int64_t rows, int64_t n, const Rng& rng, Device device,
                            const SelectionCounts& counts, Site site) {
  const CallScope call(site);
  check_numbers("random", rows, n, counts, device);
  return run_selection(SelectMode::random, Tensor(), rows, n, device, counts, 0, rng.reserve(device));
}

Selection Selection::importance(const Tensor& norms, int64_t n, const Rng& rng, const SelectionCounts& counts,
                                Site site) {
  const CallScope call(site);
  check_norms("importance", norms);
  check_numbers("importance", norms.count(), n, counts, norms.device());
  return run_selection(SelectMode::importance, norms, norms.count(), n, norms.device(), counts, 0,
                       rng.reserve(norms.device()));
}

}  // namespace tessera::ops
