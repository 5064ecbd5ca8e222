#include <algorithm>
#include <bit>

#include "ops/sparse24/weight24_kernels.h"
#include "ops/sparse24/weight24_math.h"
#include "runtime/integers.h"
#include "runtime/parallel.h"

namespace tessera::ops {

void transposable24_cpu(const Tensor& mask, const Tensor& weight) {
  const int64_t rows = weight.size(0), columns = weight.size(1), words = mask.size(1);
  const int64_t down = weight.layout().stride(0), along = weight.layout().stride(1);
  auto* const out = mask.data<int32_t>();
  dispatch_floating(weight.dtype(), "transposable24", [&]<class T>() {
    const T* const from = weight.data<T>();
    const auto block_bits = [&](int64_t first_row, int64_t first_column) {
      double magnitude[4][4] = {};
      for (int64_t r = 0; r < std::min<int64_t>(4, rows - first_row); ++r)
        for (int64_t c = 0; c < std::min<int64_t>(4, columns - first_column); ++c)
          magnitude[r][c] = weight24::magnitude_of(
              double(Compute<T>(from[(first_row + r) * down + (first_column + c) * along])));
      return weight24::best_pattern(magnitude);
    };
    parallel_for(ceil_div(rows, 4), 1, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block)
        for (int64_t w = 0; w < words; ++w) {
          uint32_t word[4] = {};
          const int64_t blocks = std::min<int64_t>(8, ceil_div(columns - 32 * w, 4));
          for (int64_t i = 0; i < blocks; ++i) {
            const uint32_t bits = block_bits(4 * block, 32 * w + 4 * i);
            for (int r = 0; r < 4; ++r) word[r] |= (bits >> 4 * r & 0xF) << 4 * i;
          }
          const int64_t inside = std::min<int64_t>(32, columns - 32 * w);
          const uint32_t tail = inside == 32 ? ~0u : (1u << inside) - 1;
          for (int64_t r = 0; r < std::min<int64_t>(4, rows - 4 * block); ++r)
            out[(4 * block + r) * mask.row_stride() + w] = std::bit_cast<int32_t>(word[r] & tail);
        }
    });
  });
}

}  // namespace tessera::ops
