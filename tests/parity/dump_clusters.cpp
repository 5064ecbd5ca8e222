#include <chrono>
#include <cstdio>
#include <exception>
#include <string>

#include "io/npy.h"
#include "ops/bits/bits.h"
#include "sparsity/clusters.h"
#include "sparsity/features.h"

// dump_clusters FEATURES.npy masks|values K STARTS: clusters of the rows of a matrix, for clusters_parity.py.
// Prints the seconds that inner products and k-means took, the inertia, and a label per row.

using namespace tessera;

namespace {

sparsity::Clusters clusters_of(const Tensor& features, bool masks, const sparsity::KMeansOptions& options) {
  const int64_t n = features.size(0);
  if (!masks) return sparsity::k_means<double>({sparsity::inner_products(features), n}, options);
  const Tensor overlaps =
      sparsity::overlaps_of({.bits = ops::pack_bits(features), .length = features.size(1)});
  return sparsity::k_means<int32_t>({{overlaps.data<int32_t>(), size_t(n * n)}, n}, options);
}

int run(char** words) {
  const Tensor features = io::load_npy(words[1]);
  const auto begin = std::chrono::steady_clock::now();
  const sparsity::Clusters found = clusters_of(features, words[2] == std::string("masks"),
                                               {.k = std::stoll(words[3]), .starts = std::stoll(words[4])});
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
  std::printf("%.17g %.17g", taken.count(), found.inertia);
  for (const int32_t label : found.labels) std::printf(" %d", label);
  std::printf("\n");
  return 0;
}

}  // namespace

int main(int count, char** words) {
  try {
    if (count == 5) return run(words);
    std::fprintf(stderr, "usage: dump_clusters FEATURES.npy masks|values K STARTS\n");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "dump_clusters: %s\n", error.what());
  }
  return 1;
}
