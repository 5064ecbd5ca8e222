#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <list>
#include <span>

#include "ops/attention/attention_variants.h"
#include "ops/decode_attention/decode_attention_kernels.h"
#include "ops/embedding/embedding_kernels.h"
#include "ops/gemm/gemm_models_internal.h"
#include "ops/gemm/gemm_padding.h"
#include "ops/grouped_mlp/grouped_mlp_kernels.h"
#include "ops/linear/linear_kernels.h"
#include "ops/linear/linear_swiglu_kernels.h"
#include "ops/linear/sliced_rows_internal.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_kernels.h"
#include "ops/mlp/mlp_kernels.h"
#include "ops/select/select_kernels.h"
#include "tests/ops/choice_grid.h"
#include "tests/place.h"

/// Which kernel each operator chooses for a wide grid of problems, on GPUs that need not be there, next to
/// the choices of the revision before the choosers became one (tests/ops/choices.tsv). A change of a cost
/// model changes lines: look at what they say, and if that is what was meant, write the table with
/// TESSERA_WRITE_CHOICES=FILE.

namespace tessera::ops {
namespace {

using namespace choice_grid;

Table all_choices(std::span<const GpuCase> gpus) {
  const Device cpu = Device::cpu();
  Table table;
  for (const GpuCase& c : gpus) {
    static std::list<DeviceInfo> cards;  // a Gpu refers to its name
    cards.push_back(
        {.name = c.name, .major = c.major, .minor = c.minor, .multiprocessors = c.multiprocessors});
    const Gpu gpu(cards.back(), c.multiprocessors);
    const auto line = [&](const char* op, const std::string& kind) -> Tally& {
      return table[std::string(op) + "/" + c.name + "/" + kind];
    };
    for_each_gemm([&](const std::string& kind, const Gemm& g) {
      const GemmOnGpu& on = gemm_on_gpu(g, gpu);
      const std::string name(gemm_variant(on));
      Tally& tally = line("gemm", kind);
      if (name == "wgmma") {
        const GemmChoice& p = on.wgmma();
        tally.add(name, {p.tile, p.splits, p.whole, p.by_threads, p.rows, p.columns, p.cluster, p.along_n});
      } else if (name == "narrow") {
        const NarrowChoice& p = on.narrow();
        tally.add(name, {p.tile, p.swapped, p.splits, p.group, p.rows, p.columns, p.staged});
      } else {
        tally.add(name);
      }
      if (!g.transpose_a || g.transpose_b || g.out != DType::f32 || g.in == DType::f32 || g.batch != 1 ||
          g.bias)
        return;
      Gemm first = g, second = g;
      second.b = reinterpret_cast<char*>(0x900000000);
      float sums = 0;
      if (g.m % 3 == 0) first.sums = &sums;
      if (gemm_pair_pays(first, second, gpu)) {
        const GemmChoice p = choose_pair(first, gpu);
        line("gemm pair", kind).add("pair", {p.tile, p.splits, p.whole, p.by_threads, p.rows});
      } else {
        line("gemm pair", kind).add("separate");
      }
    });
    for_each_linear(cpu, [&](const std::string& kind, const Tensor& x, const Tensor& weight) {
      line("linear", kind).add(std::string(linear_variant(x, weight, gpu)));
      const Tensor y = matrix(cpu, x.size(0), weight.size(0) / 2, x.dtype(), 0);
      line("linear_swiglu", kind).add(std::string(linear_swiglu_variant(y, x, weight, false, gpu)));
      line("linear_swiglu kept", kind).add(std::string(linear_swiglu_variant(y, x, weight, true, gpu)));
    });
    for_each_sum(cpu, [&](const std::string& kind, const Tensor& x) {
      const bool narrow = x.count() > 0 && column_sums_variant(x, gpu) == "narrow";
      line("column sums", kind).add(narrow ? "narrow" : "column sums");
    });
    for_each_attention(cpu, [&](const std::string& kind, const AttentionCase& a) {
      AttentionProblem problem;
      problem.causal = a.causal;
      if (a.dropout) problem.drop = {0.1, {}};
      if (a.sequences)
        problem.cu_seqlens_q = problem.cu_seqlens_k = untouched(cpu, {a.sequences + 1}, {}, DType::i32);
      for (const bool forward : {true, false})
        line(forward ? "attention forward" : "attention backward", kind)
            .add(std::string(attention_variant(forward, {&a.q, &a.k, &a.k, &a.q}, problem, gpu)));
    });
    for_each_decode(cpu, [&](const std::string& kind, const Tensor& q, int64_t dim) {
      line("decode_attention", kind).add(std::string(decode_attention_variant(q, dim, gpu)));
    });
    for_each_grouped(cpu,
                     [&](const std::string& kind, const Tensor& x, const Tensor& up, const Tensor& down) {
                       line("grouped_mlp", kind).add(std::string(grouped_mlp_variant(x, up, down, gpu)));
                     });
    for_each_head(cpu, [&](const std::string& kind, const Tensor& x, const Tensor& weight, bool bias,
                           double smoothing) {
      const Head head(x, weight, bias ? untouched(cpu, {weight.size(0)}, {}, x.dtype()) : Tensor(),
                      untouched(cpu, {x.size(0)}, {}, DType::i64), {.label_smoothing = smoothing});
      line("linear_cross_entropy", kind).add(std::string(linear_cross_entropy_variant(head, gpu)));
    });
    for_each_mlp(cpu, [&](const std::string& kind, const Tensor& a, const Tensor& h, const Tensor& x,
                          const Tensor& up, bool none) {
      const bool fuses = fuses_up(a, h, x, up, none ? Activation::none : Activation::silu, gpu);
      line("mlp", kind).add(fuses ? "epilogue" : "separate");
    });
    for_each_embedding([&](const std::string& kind, int64_t count, int64_t rows) {
      constexpr const char* kNames[] = {"one launch", "count", "sort"};
      line("embedding", kind).add(kNames[size_t(embedding_way(count, rows, gpu))]);
    });
    for_each_selection(
        [&](int64_t rows) { line("select", "all").add(select_variants()[size_t(select_way(rows, gpu))]); });
    for_each_norms(cpu, [&](const std::string& kind, const Tensor& x) {
      line("row_norms", kind).add(std::string(row_norms_variant(x, gpu)));
    });
    for_each_sliced_dx(
        cpu, [&](const std::string& kind, const Tensor& dx, const Tensor& dy_rows, const Tensor& weight) {
          line("sliced dx", kind).add(std::string(sliced_dx_variant(dx, dy_rows, weight, {}, gpu)));
        });
    const auto transposed = [](const Tensor& x) { return x.layout().stride(1) != 1; };
    for_each_padded(cpu, [&](const std::string& kind, const Tensor& d, const Tensor& a, const Tensor& b,
                             bool accumulate, const Tensor& bias) {
      const MultiplyOptions options{.accumulate = accumulate && !bias.defined(), .bias = bias};
      const CublasGemm gemm{d, a, b, options, transposed(a), transposed(b), a.dtype() == DType::f32};
      line("cublas", kind).add(std::string(cublas_variant(gemm, gpu)));
    });
    for_each_tf32(cpu, [&](const std::string& kind, const Tensor& d, const Tensor& a, const Tensor& b,
                           bool accumulate) {
      const MultiplyOptions options{.accumulate = accumulate};
      const CublasGemm gemm{d, a, b, options, transposed(a), transposed(b), true};
      const bool tf32 = cublas_variant(gemm, gpu).starts_with("cublas tf32");
      line("cublas tf32", kind).add(tf32 ? "tf32" : "no");
    });
  }
  return table;
}

TEST(Choices, AProblemWithoutAnActivationIsDescribedWhole) {
  const DeviceInfo card{.name = "NVIDIA H200", .major = 9, .minor = 0, .multiprocessors = 132};
  const Tensor a = matrix(Device::cpu(), 64, 128, DType::bf16, 0),
               x = matrix(Device::cpu(), 64, 72, DType::bf16, 0),
               up = matrix(Device::cpu(), 128, 72, DType::bf16, 0);
  const ChoiceLog log;
  EXPECT_FALSE(fuses_up(a, {}, x, up, Activation::none, Gpu(card, 132)));
  ASSERT_FALSE(log.lines().empty());
  EXPECT_NE(log.lines()[0].find(text_of(describe(up))), std::string::npos) << log.lines()[0];
}

TEST(Choices, AreMadeForStreamsOfAFewMultiprocessors) {
  for (const int multiprocessors : {1, 2, 3}) {
    const GpuCase few[] = {{"NVIDIA H200", 9, 0, multiprocessors}};
    EXPECT_EQ(all_choices(few).count("gemm/NVIDIA H200/bf16 tn lines"), 1);
  }
}

TEST(Choices, AreThoseOfTheTableForEveryProblemOfTheGrid) {
  const Table table = all_choices(kGpus);
  if (const char* const path = std::getenv("TESSERA_WRITE_CHOICES")) {
    std::ofstream out(path);
    for (const auto& [name, tally] : table) out << name << "\t" << tally.text() << "\n";
  }
  std::ifstream in(test::place("TESSERA_TEST_DATA", TESSERA_TEST_DATA) + "/ops/choices.tsv");
  ASSERT_TRUE(in) << "tests/ops/choices.tsv is missing";
  size_t lines = 0;
  for (std::string text; std::getline(in, text); ++lines) {
    const size_t tab = text.find('\t');
    ASSERT_NE(tab, std::string::npos) << text;
    const auto found = table.find(text.substr(0, tab));
    ASSERT_NE(found, table.end()) << text;
    EXPECT_EQ(found->second.text(), text.substr(tab + 1)) << text.substr(0, tab);
  }
  EXPECT_EQ(lines, table.size());
}

}  // namespace
}  // namespace tessera::ops
