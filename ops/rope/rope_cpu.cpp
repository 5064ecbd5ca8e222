#include <algorithm>

#include "ops/indices.h"
#include "ops/rope/rope_kernels.h"
#include "ops/wide_row.h"
#include "runtime/parallel.h"

namespace tessera::ops {
namespace {

constexpr int64_t kGrain = 16384;  // elements below which a thread is not worth waking

void check_positions(const RopeProblem& rope) {
  const Indices position(rope.positions);
  for (int64_t i = 0; i < rope.positions.count(); ++i)
    check(0 <= position[i] && position[i] < rope.table.size(0), "rope: position ", position[i],
          " at element ", i, " of positions ", describe(rope.positions), " is outside [0, ",
          rope.table.size(0), "), the rows of table ", describe(rope.table));
}

}  // namespace

void rope_cpu(const RopeProblem& rope) {
  if (rope.positions.defined()) check_positions(rope);
  dispatch_floating(rope.x.dtype(), "rope", [&]<class T>() {
    using C = Compute<T>;
    const Layout &from = rope.x.layout(), &to = rope.y.layout();
    const int64_t tokens = rope.x.size(1), heads = rope.x.size(2), width = rope.x.size(3);
    const int64_t rotary = rope.table.size(1), half = rotary / 2, pitch = rope.table.row_stride();
    const T* const x = rope.x.data<T>();
    const C* const table = rope.table.data<C>();
    T* const y = rope.y.data<T>();
    const C sign = rope.inverse ? C(-1) : C(1);
    const bool each = rope.positions.defined() && rope.positions.rank() == 2;
    const auto position_of = [&](int64_t b, int64_t t) {
      if (!rope.positions.defined()) return rope.offset + t;
      return Indices(rope.positions)[each ? b * tokens + t : t];
    };
    const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(heads * width, 1));
    parallel_for(rope.x.size(0) * tokens, grain, [&](int64_t begin, int64_t end) {
      WideRow<T> before(rotary), after(rotary);
      for (int64_t token = begin; token < end; ++token) {
        const int64_t b = token / tokens, t = token % tokens;
        const C* const cosines = table + position_of(b, t) * pitch;
        const C* const sines = cosines + half;
        for (int64_t h = 0; h < heads; ++h) {
          const T* const in = x + b * from.stride(0) + t * from.stride(1) + h * from.stride(2);
          T* const out = y + b * to.stride(0) + t * to.stride(1) + h * to.stride(2);
          const C* const from_row = before.read(in);
          C* const to_row = after.write(out);
          for (int64_t i = 0; i < half; ++i) {
            const C first = from_row[i], second = from_row[i + half], sine = sign * sines[i];
            to_row[i] = first * cosines[i] - second * sine;
            to_row[i + half] = second * cosines[i] + first * sine;
          }
          after.written(out);
          std::copy(in + rotary, in + width, out + rotary);
        }
      }
    });
  });
}

}  // namespace tessera::ops
