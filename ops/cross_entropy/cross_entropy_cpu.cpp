#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "ops/activation/activation_math.h"
#include "ops/cross_entropy/cross_entropy_kernels.h"
#include "ops/indices.h"
#include "ops/lane_sum_internal.h"
#include "runtime/parallel.h"
#include "tensor/convert.h"

namespace tessera::ops {
namespace {

constexpr int64_t kPiece = 512;  // logits that are widened and exponentiated together

int64_t grain_of(int64_t classes) {
  constexpr int64_t kGrain = 4096;  // logits per block: some 10 us
  return std::max<int64_t>(1, kGrain / std::max<int64_t>(classes, 1));
}

}  // namespace

void cross_entropy_forward_cpu(const CrossEntropyForward& args) {
  dispatch_floating(args.logits.dtype(), "cross_entropy", [&]<class T>() {
    using C = Compute<T>;
    const int64_t rows = args.targets.count(), classes = args.logits.row_length(),
                  stride = args.logits.row_stride(), ignored = args.options.ignore_index;
    const Indices targets(args.targets);
    for (int64_t row = 0; row < rows; ++row)
      check(targets[row] == ignored || (0 <= targets[row] && targets[row] < classes),
            "cross_entropy: target ", targets[row], " at position ", row, " of targets ",
            describe(args.targets), " is outside [0, ", classes, ") and is not ignore_index ", ignored);
    const T* const logits = args.logits.data<T>();
    C *const top = args.top.data<C>(), *const log_sum = args.log_sum.data<C>();
    const C smoothing = C(args.options.label_smoothing);
    std::vector<C> losses(size_t(rows), C(0));
    parallel_for(rows, grain_of(classes), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        if (targets[row] == ignored) continue;
        const T* const x = logits + row * stride;
        C values[kPiece], largest = -std::numeric_limits<C>::infinity();
        double sum = 0, shifted_sum = 0;
        for (int64_t first = 0; first < classes; first += kPiece) {
          const int64_t some = std::min(kPiece, classes - first);
          widen(values, x + first, some);
          largest = std::max(largest, lane_max(values, some));
        }
        for (int64_t first = 0; first < classes; first += kPiece) {
          const int64_t some = std::min(kPiece, classes - first);
          widen(values, x + first, some);
          for (int64_t v = 0; v < some; ++v) values[v] -= largest;
          if (smoothing > 0)
            shifted_sum += lane_sum<double>(some, [&](int64_t v) { return double(values[v]); });
          for (int64_t v = 0; v < some; ++v) values[v] = exponential<false>(values[v]);
          sum += lane_sum<double>(some, [&](int64_t v) { return double(values[v]); });
        }
        top[row] = largest;
        log_sum[row] = C(std::log(sum));
        C loss = log_sum[row] - (C(x[targets[row]]) - largest);
        if (smoothing > 0)
          loss = (1 - smoothing) * loss + smoothing * (log_sum[row] - C(shifted_sum / double(classes)));
        losses[size_t(row)] = loss;
      }
    });
    int64_t count = 0;
    double total = 0;
    for (int64_t row = 0; row < rows; ++row) {
      count += targets[row] != ignored;
      total += double(losses[size_t(row)]);
    }
    *args.count.data<C>() = C(count);
    if (args.options.reduction == Reduction::none) {
      std::copy(losses.begin(), losses.end(), args.loss.data<C>());
    } else {
      *args.loss.data<C>() = C(args.options.reduction == Reduction::mean ? total / double(count) : total);
    }
  });
}

void cross_entropy_backward_cpu(const CrossEntropyBackward& args) {
  dispatch_floating(args.logits.dtype(), "cross_entropy", [&]<class T>() {
    using C = Compute<T>;
    const int64_t rows = args.targets.count(), classes = args.logits.row_length(),
                  stride = args.logits.row_stride(), to_stride = args.dlogits.row_stride();
    const Indices targets(args.targets);
    const T* const logits = args.logits.data<T>();
    const C *const top = args.top.data<C>(), *const log_sum = args.log_sum.data<C>();
    const C* const dloss = args.dloss.data<C>();
    T* const dlogits = args.dlogits.data<T>();
    const double smoothing = args.options.label_smoothing;
    const C off = C(smoothing / double(classes)), on = C(1 - smoothing + smoothing / double(classes));
    parallel_for(rows, grain_of(classes), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* const x = logits + row * stride;
        T* const dx = dlogits + row * to_stride;
        const int64_t target = targets[row];
        if (target == args.options.ignore_index) {
          std::fill(dx, dx + classes, T(0.0f));
          continue;
        }
        C g = args.options.reduction == Reduction::none ? dloss[row] : *dloss;
        if (args.options.reduction == Reduction::mean) g /= *args.count.data<C>();
        for (int64_t first = 0; first < classes; first += kPiece) {
          const int64_t some = std::min(kPiece, classes - first), own = target - first;
          C values[kPiece];
          widen(values, x + first, some);  // dx may be x
          for (int64_t v = 0; v < some; ++v)
            values[v] = exponential<false>(values[v] - top[row] - log_sum[row]);
          const bool has_target = 0 <= own && own < some;
          const C p = has_target ? values[own] : C(0);
          for (int64_t v = 0; v < some; ++v) values[v] = g * (values[v] - off);
          if (has_target) values[own] = g * (p - on);
          narrow(dx + first, values, some);
        }
      }
    });
  });
}

void cross_entropy_in_place_cpu(const CrossEntropyForward& args, const Tensor& dloss) {
  const Tensor top = Tensor::empty({args.targets.count()}, args.loss.dtype(), args.loss.device()),
               log_sum = Tensor::empty_like(top),
               g = dloss.defined() ? dloss : Tensor::full({}, 1.0, args.loss.dtype(), args.loss.device());
  cross_entropy_forward_cpu({args.loss, top, log_sum, args.count, args.logits, args.targets, args.options});
  cross_entropy_backward_cpu(
      {args.logits, g, top, log_sum, args.count, args.logits, args.targets, args.options});
}

void cross_entropy_scale_cpu(const Tensor& dlogits, const Tensor& dloss, const Tensor& made_for) {
  dispatch_floating(dlogits.dtype(), "cross_entropy", [&]<class T>() {
    using C = Compute<T>;
    const C g = made_for.defined() ? *dloss.data<C>() / *made_for.data<C>() : *dloss.data<C>();
    if (g == 1) return;
    T* const to = dlogits.data<T>();
    const int64_t classes = dlogits.row_length(), stride = dlogits.row_stride();
    parallel_for(dlogits.rows(), grain_of(classes), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        for (int64_t v = 0; v < classes; ++v) to[row * stride + v] = T(g * C(to[row * stride + v]));
    });
  });
}

}  // namespace tessera::ops
