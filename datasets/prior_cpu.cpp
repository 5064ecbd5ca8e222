#include <algorithm>
#include <numeric>
#include <vector>

#include "datasets/matern_math.h"
#include "datasets/prior_kernels.h"
#include "runtime/parallel.h"

namespace tessera::datasets {
namespace {

using namespace prior_math;

/// Calls body(task, first, last) for parts of tasks; each point is addressed, so the partition does not
/// matter.
template <class Body>
void for_parts(const BatchView& out, Body&& body) {
  const int64_t points = out.points();
  parallel_for(out.tasks * points, 1024, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t task = begin / points, last = std::min(end, (task + 1) * points);
      body(task, begin - task * points, last - task * points);
      begin = last;
    }
  });
}

void draw_linear(const PriorDraw& draw) {
  const BatchView& out = draw.out;
  const LinearTask model{draw.stream, out.features, kLogNoiseMean, kLogNoiseDeviation};
  for_parts(out, [&](int64_t task, int64_t first, int64_t last) {
    std::vector<Normals> weights;
    for (int64_t block = 0; block < model.blocks(); ++block) weights.push_back(model.weights(task, block));
    double intercept, sigma;
    model.rest(task, intercept, sigma);
    for (int64_t i = first; i < last; ++i) {
      const int64_t point = task * out.points() + i;
      double lane[kLanes] = {};
      for (int64_t block = 0; block < model.blocks(); ++block)
        lane[block % kLanes] += model.term(out.x(task, i), point, block, weights[size_t(block)]);
      lane[kLanes - 1] += intercept + sigma * observation_noise(draw.stream.words(Purpose::point, point));
      *out.y(task, i) = float((lane[0] + lane[1]) + (lane[2] + lane[3]));
    }
  });
}

void draw_fourier(const PriorDraw& draw) {
  const BatchView& out = draw.out;
  for_parts(out, [&](int64_t task, int64_t first, int64_t last) {
    const int64_t functions = 2 * draw.harmonics + 1;
    std::vector<double> w(static_cast<size_t>(functions));
    for (int64_t block = 0; block * 4 < functions; ++block)
      fourier_weights(draw.stream, task, draw.amplitude, draw.harmonics, block, w.data());
    for (int64_t i = first; i < last; ++i) {
      const Uint4 random = draw.stream.words(Purpose::point, task * out.points() + i);
      const double x = position_of(random.word[0] >> 8);
      *out.x(task, i) = float(x);
      *out.y(task, i) = float(fourier_sum(w.data(), draw.harmonics, draw.frequency * x) +
                              draw.noise * observation_noise(random));
    }
  });
}

void draw_matern(const PriorDraw& draw) {
  const BatchView& out = draw.out;
  const int64_t points = out.points();
  parallel_for(out.tasks, 1, [&](int64_t begin, int64_t end) {
    std::vector<uint32_t> key(static_cast<size_t>(points));
    std::vector<int64_t> order(static_cast<size_t>(points));
    for (int64_t task = begin; task < end; ++task) {
      for (int64_t i = 0; i < points; ++i) {
        key[size_t(i)] = position_key(draw.stream, task * points + i);
        *out.x(task, i) = float(position_of(key[size_t(i)]));
      }
      std::iota(order.begin(), order.end(), int64_t{0});
      std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
        return key[size_t(a)] != key[size_t(b)] ? key[size_t(a)] < key[size_t(b)] : a < b;
      });
      double state[3] = {}, earlier = 0;
      for (int64_t rank = 0; rank < points; ++rank) {
        const int64_t i = order[size_t(rank)], point = task * points + i;
        const double x = position_of(key[size_t(i)]);
        const double tau = rank == 0 ? kMaternForever : draw.rate * (x - earlier);
        earlier = x;
        const Normals drive = normals(draw.stream, Purpose::process, point);
        double increment[3];
        matern_increment(tau, drive.value, increment);
        MaternDecay(tau).apply(state);
        for (int c = 0; c < 3; ++c) state[c] += increment[c];
        *out.y(task, i) = float(draw.scale * state[0] + draw.noise * drive.value[3]);
      }
    }
  });
}

}  // namespace

void draw_cpu(PriorKind kind, const PriorDraw& draw) {
  switch (kind) {
    case PriorKind::linear:
      return draw_linear(draw);
    case PriorKind::rbf:
    case PriorKind::periodic:
      return draw_fourier(draw);
    case PriorKind::matern52:
      return draw_matern(draw);
  }
}

}  // namespace tessera::datasets
