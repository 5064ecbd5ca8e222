#include <algorithm>

#include "ops/attention/attention.h"
#include "ops/attention/attention_variants.h"
#include "ops/op.h"
#include "ops/pointwise/pointwise.h"

/// The declaration of attention: its problem, cases and benchmarks.

namespace tessera::ops {
namespace {

int64_t size_or(const Dims& dims, const char* name, int64_t fallback) {
  const auto found = dims.find(name);
  return found == dims.end() ? fallback : found->second;
}

/// Pairs of a query and a key that it sees.
double visible_pairs(int64_t queries, int64_t keys, bool causal) {
  if (!causal) return double(queries) * double(keys);
  // Query i sees i + 1 + keys - queries keys, from 0 upwards.
  const double last = double(keys), first = double(std::max<int64_t>(0, keys - queries));
  return (last * (last + 1) - first * (first + 1)) / 2;
}

enum class Lengths : uint8_t { even, rising, falling };

/// Where `count` sequences in `rows` rows start: of one length, or each longer (shorter) than the one before,
/// so that some are empty where there are many.
std::vector<int64_t> starts_of(int64_t count, int64_t rows, Lengths lengths) {
  check_listed("attention", double(count));
  std::vector<int64_t> starts;
  for (int64_t s = 0; s <= count; ++s) {
    const int64_t left = count - s, square = count * count;
    starts.push_back(lengths == Lengths::even     ? rows * s / count
                     : lengths == Lengths::rising ? rows * s * s / square
                                                  : rows - rows * left * left / square);
  }
  return starts;
}

/// Lengths: Lq and Lk, or, as a Transformer Neural Process has them, M context and N target tokens: queries
/// are all M + N, keys the first M. With S, these are the rows of S sequences (even: of one length; else the
/// queries' grow, and the keys' with them if Lq = Lk, where one tensor of starts is given for both, or else
/// shrink), and `rest` more belong to none. With bias = 1 there is a bias, with mask = 1 a mask, of the sizes
/// Bb, Hb, Lqb and Lkb: 1 where it broadcasts, those of the scores if not given.
Problem attention_problem(const Dims& dims, const Attrs& attrs) {
  const int64_t batch = size_or(dims, "B", 1), heads = size_or(dims, "H", 8), dim = size_or(dims, "D", 64);
  const int64_t kv_heads = size_or(dims, "Hk", heads), sequences = size_or(dims, "S", 0);
  const int64_t context = size_or(dims, "M", 1024), targets = size_or(dims, "N", 0);
  const int64_t keys = size_or(dims, "Lk", context), queries = size_or(dims, "Lq", context + targets);
  const bool causal = attrs.flag("causal");
  const InputCase none{.shape = {1}, .fill = Fill::absent};
  Problem made;
  double pairs = double(batch) * visible_pairs(queries, keys, causal);
  if (sequences > 0) {
    const bool even = size_or(dims, "even", 0) != 0, self = queries == keys;
    const int64_t rest = size_or(dims, "rest", 0);
    const auto cu_seqlens_q = starts_of(sequences, queries, even ? Lengths::even : Lengths::rising);
    const auto cu_seqlens_k =
        self ? cu_seqlens_q : starts_of(sequences, keys, even ? Lengths::even : Lengths::falling);
    pairs = 0;
    for (size_t s = 0; s < size_t(sequences); ++s)
      pairs +=
          visible_pairs(cu_seqlens_q[s + 1] - cu_seqlens_q[s], cu_seqlens_k[s + 1] - cu_seqlens_k[s], causal);
    InputCase q_case{.shape = {sequences + 1}, .fill = Fill::index, .values = cu_seqlens_q}, k_case = q_case;
    k_case.values = cu_seqlens_k;
    if (self) k_case = {.shape = {sequences + 1}, .fill = Fill::absent};
    made.inputs = {{.shape = {queries + rest, heads, dim}},
                   {.shape = {keys + rest, kv_heads, dim}},
                   {.shape = {keys + rest, kv_heads, dim}},
                   q_case,
                   k_case};
  } else {
    made.inputs = {{.shape = {batch, queries, heads, dim}},
                   {.shape = {batch, keys, kv_heads, dim}},
                   {.shape = {batch, keys, kv_heads, dim}},
                   none,
                   none};
  }
  InputCase bias{.shape = {size_or(dims, "Bb", batch), size_or(dims, "Hb", heads),
                           size_or(dims, "Lqb", queries), size_or(dims, "Lkb", keys)}};
  InputCase mask = bias;
  mask.fill = Fill::index, mask.high = 2;
  const bool has_bias = is_set(dims, "bias"), has_mask = is_set(dims, "mask");
  made.inputs.push_back(has_bias ? bias : none);
  made.inputs.push_back(has_mask ? mask : none);
  const double bias_elements = has_bias ? double(bias.shape.count()) : 0;
  const double q_elements = double(batch * queries) * double(heads * dim),
               k_elements = double(batch * keys) * double(kv_heads * dim);
  made.forward_flops = 4 * double(heads * dim) * pairs;
  made.backward_flops = 10 * double(heads * dim) * pairs;
  made.forward_elements = 2 * q_elements + 2 * k_elements + bias_elements;
  made.backward_elements = 4 * q_elements + 4 * k_elements + 2 * bias_elements;
  made.forward_bytes = made.backward_bytes = has_mask ? double(mask.shape.count()) : 0;
  return made;
}

Case lengths(int64_t queries, int64_t keys, int64_t dim, bool causal,
             Placement placement = Placement::pitched) {
  // Lengths about the CUDA tiles (64 and 128) are too large for central differences.
  const bool small = queries <= 16 && keys <= 16 && dim <= 40;
  return {.dims = {{"B", 2}, {"Lq", queries}, {"Lk", keys}, {"H", small ? 2 : 1}, {"D", dim}},
          .attrs = {{"causal", causal}},
          .placement = placement,
          .gradcheck = small};
}

Case grouped(int64_t batch, int64_t queries, int64_t keys, int64_t heads, int64_t kv_heads, int64_t dim,
             bool causal) {
  return {.dims = {{"B", batch}, {"Lq", queries}, {"Lk", keys}, {"H", heads}, {"Hk", kv_heads}, {"D", dim}},
          .attrs = {{"causal", causal}},
          .gradcheck = queries <= 16 && keys <= 16};
}

Case sequences(int64_t count, int64_t queries, int64_t keys, int64_t heads, int64_t kv_heads, int64_t dim,
               bool causal, int64_t rest = 0, Placement placement = Placement::pitched) {
  return {.dims = {{"S", count},
                   {"Lq", queries},
                   {"Lk", keys},
                   {"H", heads},
                   {"Hk", kv_heads},
                   {"D", dim},
                   {"rest", rest}},
          .attrs = {{"causal", causal}},
          .placement = placement,
          .gradcheck = queries <= 16 && keys <= 16};
}

/// With dropout: the same mask from every kernel, whatever its tiles.
void add_dropout(std::vector<Case>& all) {
  const auto dropped = [&](Case base, double p, int64_t seed) {
    base.attrs.set("dropout", p);
    base.attrs.set("dropout_seed", seed);
    all.push_back(base);
  };
  dropped(lengths(5, 7, 32, false), 0.5, 1);
  dropped(lengths(9, 16, 8, true), 0.3, 2);
  dropped(lengths(4, 1, 32, false), 0.25, 3);
  dropped(lengths(6, 5, 32, false, Placement::transposed), 0.998, 4);
  dropped(grouped(2, 5, 7, 4, 2, 32, false), 0.5, 5);
  dropped(sequences(4, 9, 13, 4, 2, 16, true, 2), 0.4, 6);
  for (const bool causal : {false, true}) {
    dropped(lengths(131, 71, 64, causal), 0.1, 7);
    dropped(lengths(131, 71, 36, causal), 0.1, 21);
    dropped(lengths(67, 97, 40, causal, Placement::strided), 0.6, 8);
    dropped(lengths(193, 191, 128, causal), 0.1, 9);
    dropped(lengths(70, 150, 96, causal), 0.2, -10);
    dropped(grouped(1, 300, 270, 4, 2, 64, causal), 0.1, 11);
    dropped(grouped(2, 200, 120, 6, 3, 128, causal), 0.3, 12);
    dropped(sequences(5, 517, 517, 4, 2, 64, causal), 0.1, 13);
    dropped(sequences(3, 260, 190, 3, 3, 96, causal, 5), 0.5, 14);
    dropped(sequences(70, 300, 290, 2, 2, 64, causal, 1), 0.1, 15);
    dropped(lengths(3, 700, 64, causal), 0.1, 17);
    dropped(grouped(2, 20, 600, 4, 2, 128, causal), 0.3, 18);
    dropped(sequences(5, 17, 800, 4, 2, 32, causal, 2), 0.2, 19);
    dropped(grouped(1, 600, 70, 4, 1, 64, causal), 0.1, 20);
    dropped({.dims = {{"B", 2}, {"Lq", 515}, {"Lk", 259}, {"H", 2}, {"D", 64}},
             .attrs = {{"causal", causal}},
             .gradcheck = false},
            0.1, 16);
  }
}

/// Fewer key heads, and sequences of any lengths: all kernels of each row, tiles that end within a sequence
/// and at its end, sequences that are empty or see nothing, padding rows, and more sequences than lanes.
void add_groups_and_sequences(std::vector<Case>& all, bool causal) {
  all.push_back(grouped(2, 5, 7, 4, 2, 32, causal));
  all.push_back(grouped(1, 6, 3, 3, 1, 8, causal));
  all.push_back(grouped(2, 130, 62, 6, 2, 64, causal));
  all.push_back(grouped(1, 70, 64, 4, 1, 40, causal));
  all.push_back(grouped(2, 200, 120, 6, 3, 128, causal));
  all.push_back(grouped(1, 300, 270, 4, 2, 64, causal));
  all.push_back(grouped(1, 200, 333, 8, 2, 128, causal));
  all.push_back(grouped(2, 200, 333, 6, 3, 64, causal));
  all.push_back(sequences(3, 11, 11, 2, 2, 8, causal));
  all.push_back(sequences(4, 9, 13, 4, 2, 16, causal, 2));
  all.push_back(sequences(3, 7, 1, 2, 1, 8, causal));
  all.push_back(sequences(1, 150, 150, 2, 2, 64, causal));
  all.push_back(sequences(5, 517, 517, 4, 2, 64, causal));
  all.push_back(sequences(3, 700, 700, 2, 1, 128, causal, 5));
  all.push_back(sequences(4, 300, 450, 2, 2, 40, causal, 70));
  all.push_back(sequences(3, 260, 190, 3, 3, 96, causal, 0, Placement::strided));
  all.push_back(sequences(2, 140, 270, 2, 2, 64, causal, 0, Placement::transposed));
  all.push_back(sequences(70, 300, 290, 2, 2, 64, causal, 1));
}

/// Heads that are not whole packs of 8 elements, which are padded on a GPU: all kernels of each row.
void add_padded(std::vector<Case>& all, bool causal) {
  for (const int64_t dim : {1, 20, 36, 44}) all.push_back(lengths(5, 7, dim, causal));
  for (const int64_t dim : {20, 36, 44, 100}) all.push_back(lengths(131, 71, dim, causal));
  all.push_back(lengths(9, 6, 36, causal, Placement::strided));
  all.push_back(lengths(71, 131, 36, causal, Placement::transposed));
  all.push_back(lengths(2, 700, 36, causal));  // few queries
  all.push_back(grouped(2, 5, 7, 4, 2, 36, causal));
  all.push_back(grouped(2, 200, 120, 6, 3, 100, causal));
  all.push_back(sequences(4, 9, 13, 4, 2, 36, causal, 2));
  all.push_back(sequences(5, 517, 517, 4, 2, 36, causal));
  all.push_back(sequences(70, 300, 290, 2, 2, 44, causal, 1));
}

/// Few queries over many keys, whose dQ is summed from ranges of keys, and few keys under many queries, whose
/// dK and dV are summed from chunks of queries: one and several of them, in all kernels of each row.
void add_few(std::vector<Case>& all, bool causal) {
  all.push_back(lengths(1, 700, 64, causal));
  all.push_back(lengths(3, 1300, 8, causal, Placement::strided));
  all.push_back(lengths(17, 650, 128, causal));
  all.push_back(lengths(64, 515, 96, causal, Placement::transposed));
  all.push_back(lengths(100, 1100, 64, causal));
  all.push_back(grouped(2, 5, 900, 6, 2, 40, causal));
  all.push_back(grouped(1, 9, 600, 8, 2, 128, causal));
  all.push_back(grouped(1, 70, 1300, 4, 1, 128, causal));
  all.push_back(grouped(40, 2, 130, 4, 4, 32, causal));
  all.push_back(sequences(3, 12, 700, 4, 2, 64, causal, 3));
  all.push_back(sequences(40, 30, 650, 2, 2, 128, causal));
  all.push_back(sequences(2, 200, 1500, 2, 1, 72, causal));
  all.push_back(grouped(1, 700, 70, 8, 1, 128, causal));
  all.push_back(lengths(900, 33, 96, causal));
  all.push_back(sequences(1, 600, 40, 6, 3, 64, causal, 2));
  all.push_back(sequences(40, 700, 60, 8, 2, 64, causal));
}

/// A bias, a mask or both, whole and broadcast in each dimension: all kernels that take one, pairs of an odd
/// number of keys, queries that a mask hides from every key (Lkb = 1: half of them), and tiles that
/// broadcast.
void add_bias(std::vector<Case>& all, bool causal) {
  const auto biased = [&](Case base, const Dims& sizes) {
    for (const auto& [name, size] : sizes) base.dims[name] = size;
    all.push_back(base);
  };
  const Dims bias{{"bias", 1}}, mask{{"mask", 1}}, both{{"bias", 1}, {"mask", 1}};
  biased(lengths(5, 7, 32, causal), bias);
  biased(lengths(4, 6, 36, causal), mask);
  biased(lengths(6, 5, 8, causal, Placement::strided), both);
  biased(lengths(5, 6, 16, causal, Placement::transposed), bias);
  biased(lengths(1, 9, 32, causal), both);
  biased(lengths(7, 1, 32, causal), both);
  biased(lengths(0, 5, 32, causal), bias);
  biased(lengths(5, 0, 32, causal), bias);
  for (const char* broadcast : {"Bb", "Hb", "Lqb", "Lkb"}) {
    biased(lengths(5, 7, 16, causal), {{"bias", 1}, {broadcast, 1}});
    biased(lengths(5, 7, 16, causal), {{"mask", 1}, {broadcast, 1}});
    biased(lengths(131, 71, 64, causal), {{"bias", 1}, {broadcast, 1}});
    biased(lengths(70, 150, 72, causal), {{"bias", 1}, {"mask", 1}, {broadcast, 1}});
  }
  biased(lengths(3, 6, 8, causal), {{"bias", 1}, {"Bb", 1}, {"Hb", 1}, {"Lqb", 1}, {"Lkb", 1}});
  biased(grouped(2, 5, 7, 4, 2, 32, causal), {{"bias", 1}, {"Bb", 1}});
  biased(grouped(2, 5, 6, 4, 2, 12, causal), {{"mask", 1}, {"Hb", 1}, {"Lqb", 1}});
  biased(grouped(3, 130, 62, 6, 2, 64, causal), {{"bias", 1}, {"Bb", 1}});
  biased(grouped(2, 200, 120, 6, 3, 128, causal), {{"bias", 1}, {"mask", 1}, {"Bb", 1}, {"Hb", 1}});
  biased(lengths(1, 257, 64, causal), both);
  biased(lengths(3, 700, 64, causal), {{"bias", 1}, {"Bb", 1}});
  biased(lengths(131, 71, 36, causal), both);
  biased(lengths(193, 191, 128, causal, Placement::strided), both);
  biased(lengths(89, 66, 96, causal, Placement::transposed), bias);
  biased({.dims = {{"B", 2}, {"Lq", 300}, {"Lk", 514}, {"H", 3}, {"D", 64}},
          .attrs = {{"causal", causal}},
          .gradcheck = false},
         both);
  // Gradients that add up over more batches, heads and tiles of queries than there are pieces.
  const Case many{.dims = {{"B", 40}, {"Lq", 70}, {"Lk", 18}, {"H", 12}, {"D", 16}},
                  .attrs = {{"causal", causal}},
                  .gradcheck = false};
  biased(many, {{"bias", 1}, {"Bb", 1}, {"Hb", 1}});
  biased(many, {{"bias", 1}, {"Bb", 1}, {"Hb", 1}, {"Lqb", 1}});
  const auto dropped = [](Case base, double p) {
    base.attrs.set("dropout", p);
    base.attrs.set("dropout_seed", int64_t{22});
    return base;
  };
  biased(dropped(lengths(5, 7, 32, causal), 0.5), bias);
  biased(dropped(grouped(2, 5, 7, 4, 2, 36, causal), 0.3), {{"bias", 1}, {"mask", 1}, {"Bb", 1}});
  biased(dropped(lengths(131, 71, 64, causal), 0.1), both);
  biased(dropped(grouped(2, 200, 120, 6, 3, 128, causal), 0.3), {{"bias", 1}, {"Bb", 1}});
}

std::vector<Case> attention_cases() {
  std::vector<Case> all;
  for (const bool causal : {false, true}) {
    for (const auto& [queries, keys] : {std::pair<int64_t, int64_t>{5, 7},
                                        {7, 5},
                                        {1, 1},
                                        {1, 11},
                                        {11, 1},
                                        {0, 5},
                                        {5, 0},
                                        {0, 0},
                                        {2, 2}})
      all.push_back(lengths(queries, keys, 32, causal));
    all.push_back(lengths(3, 13, 40, causal));
    all.push_back(lengths(13, 3, 40, causal, Placement::strided));
    all.push_back(lengths(6, 5, 32, causal, Placement::transposed));
    for (const auto& [queries, keys] : {std::pair<int64_t, int64_t>{63, 65},
                                        {65, 63},
                                        {64, 64},
                                        {64, 128},
                                        {128, 64},
                                        {127, 129},
                                        {129, 127},
                                        {1, 257},
                                        {257, 1},
                                        {131, 71},
                                        {71, 131}})
      all.push_back(lengths(queries, keys, 64, causal));
    all.push_back(lengths(67, 97, 32, causal));
    all.push_back(lengths(97, 67, 40, causal));
    all.push_back(lengths(131, 73, 40, causal, Placement::strided));
    all.push_back(lengths(89, 65, 64, causal, Placement::transposed));
    all.push_back(lengths(130, 66, 96, causal));
    all.push_back(lengths(65, 130, 128, causal));
    all.push_back(lengths(193, 191, 128, causal, Placement::strided));
    all.push_back({.dims = {{"B", 1}, {"Lq", 515}, {"Lk", 259}, {"H", 2}, {"D", 64}},
                   .attrs = {{"causal", causal}},
                   .gradcheck = false});
    add_groups_and_sequences(all, causal);
    add_few(all, causal);
    add_padded(all, causal);
    add_bias(all, causal);
  }
  all.push_back({.dims = {{"B", 2}, {"Lq", 4}, {"Lk", 6}, {"H", 2}, {"D", 32}}, .attrs = {{"scale", 0.37}}});
  all.push_back({.dims = {{"B", 1}, {"M", 50}, {"N", 14}, {"H", 2}, {"D", 64}},
                 .attrs = {{"scale", 0.5}},
                 .gradcheck = false});
  add_dropout(all);
  // Fewer heads than rows of a tile, and many small problems.
  all.push_back({.dims = {{"B", 33}, {"Lq", 17}, {"Lk", 9}, {"H", 5}, {"D", 64}}, .gradcheck = false});
  return all;
}

/// A bias, a mask or both, each dimension whole or broadcast.
void draw_bias(Draw& draw, Case& drawn) {
  const bool bias = draw.chance(0.7);
  if (bias) drawn.dims["bias"] = 1;
  if (!bias || draw.chance(0.3)) drawn.dims["mask"] = 1;
  for (const char* const broadcast : {"Bb", "Hb", "Lqb", "Lkb"})
    if (draw.chance(0.3)) drawn.dims[broadcast] = 1;
}

/// Half of the head sizes are those that models use. Both lengths are drawn on their own, but for half of the
/// causal problems, which are square. A third has grouped queries, a quarter sequences, one in
/// seven a bias or a mask.
Case attention_sweep(Draw& draw) {
  const bool causal = draw.chance(0.35);
  const int64_t dim =
      draw.chance(0.7) ? draw.pick({64, 128}) : 8 * draw.pick({1, 2, 3, 4, 5, 7, 9, 10, 12, 15});
  const int64_t queries = draw.size(1, 16384);
  const int64_t keys = causal && draw.chance(0.5) ? queries : draw.size(1, 16384);
  const int64_t kv_heads = draw.size(1, 32), group = draw.chance(0.33) ? draw.pick({2, 3, 4, 8}) : 1;
  Case drawn{.dims = {{"Lq", queries}, {"Lk", keys}, {"H", kv_heads * group}, {"D", dim}},
             .attrs = {{"causal", causal}}};
  if (group > 1) drawn.dims["Hk"] = kv_heads;
  if (draw.chance(0.25))
    drawn.dims["S"] = draw.size(1, 256);
  else
    drawn.dims["B"] = draw.size(1, 64);
  if (!drawn.dims.contains("S") && draw.chance(0.2)) draw_bias(draw, drawn);
  return drawn;
}

/// The shapes that `bench op attention` times by default.
std::vector<Case> attention_benches() {
  const auto rectangle = [](int64_t context, int64_t targets, int64_t batch) {
    return Case{.dims = {{"B", batch}, {"M", context}, {"N", targets}, {"H", 8}, {"D", 64}}};
  };
  const auto square = [](int64_t batch, int64_t length, int64_t heads, int64_t dim, bool causal) {
    return Case{.dims = {{"B", batch}, {"M", length}, {"N", 0}, {"H", heads}, {"D", dim}},
                .attrs = {{"causal", causal}}};
  };
  const auto group = [](int64_t batch, int64_t length, bool causal) {
    return Case{.dims = {{"B", batch}, {"M", length}, {"N", 0}, {"H", 32}, {"Hk", 8}, {"D", 128}},
                .attrs = {{"causal", causal}}};
  };
  const auto packed = [](int64_t count, int64_t length, int64_t heads, int64_t dim, bool causal, bool even) {
    return Case{.dims = {{"S", count},
                         {"Lq", count * length},
                         {"Lk", count * length},
                         {"H", heads},
                         {"D", dim},
                         {"even", even}},
                .attrs = {{"causal", causal}}};
  };
  const auto dropped = [](Case base) {
    base.attrs.set("dropout", 0.1);
    return base;
  };
  const auto biased = [](Case base, const Dims& sizes) {
    for (const auto& [name, size] : sizes) base.dims[name] = size;
    return base;
  };
  return {rectangle(64, 500, 64),
          rectangle(10000, 1000, 1),
          rectangle(10000, 1000, 4),
          rectangle(200000, 5000, 1),
          square(16, 1024, 32, 64, false),
          square(16, 1024, 32, 64, true),
          square(4, 4096, 32, 64, false),
          square(4, 4096, 32, 64, true),
          square(1, 16384, 32, 64, false),
          square(1, 16384, 32, 64, true),
          square(16, 1024, 16, 128, false),
          square(16, 1024, 16, 128, true),
          square(4, 4096, 16, 128, false),
          square(4, 4096, 16, 128, true),
          square(1, 16384, 16, 128, false),
          square(1, 16384, 16, 128, true),
          square(4, 4096, 32, 128, true),
          group(4, 4096, true),
          group(1, 4096, true),
          packed(16, 1024, 32, 64, false, true),
          packed(16, 1024, 32, 64, true, true),
          packed(4, 4096, 16, 128, false, true),
          packed(4, 4096, 16, 128, true, true),
          packed(16, 1024, 32, 64, true, false),
          packed(4, 4096, 16, 128, true, false),
          packed(32, 512, 12, 64, false, false),
          dropped(square(16, 512, 12, 64, false)),
          dropped(square(32, 128, 12, 64, false)),
          dropped(packed(16, 512, 12, 64, false, true)),
          dropped(square(16, 1024, 16, 128, true)),
          biased(square(16, 1024, 32, 64, false), {{"bias", 1}}),
          biased(square(16, 1024, 32, 64, false), {{"bias", 1}, {"Bb", 1}}),
          biased(square(16, 1024, 32, 64, true), {{"mask", 1}, {"Hb", 1}, {"Lqb", 1}}),
          biased(square(4, 4096, 16, 128, false), {{"bias", 1}, {"Bb", 1}})};
}

}  // namespace

std::vector<OpSpec> attention_specs() {
  return {{
      .name = "attention",
      .summary = "o = softmax(scale q k^T + bias) v for every batch (or sequence) and head; lse = log sum "
                 "exp(scale q k^T + "
                 "bias)",
      .inputs = {{.name = "q", .shape = "[B, Lq, H, D], or [N, H, D] of sequences"},
                 {.name = "k", .shape = "[B, Lk, Hk, D], or [M, Hk, D]"},
                 {.name = "v", .shape = "as k"},
                 {.name = "cu_seqlens_q",
                  .shape = "[S + 1], of sequences: 0, where each next one starts, the end",
                  .optional = true,
                  .differentiable = false,
                  .dtypes = index_dtypes()},
                 {.name = "cu_seqlens_k",
                  .shape = "[S + 1]; absent: as cu_seqlens_q",
                  .optional = true,
                  .differentiable = false,
                  .dtypes = index_dtypes()},
                 {.name = "bias", .shape = "[B, H, Lq, Lk], each of them or 1", .optional = true},
                 {.name = "mask",
                  .shape = "as bias: a pair counts where it is true",
                  .optional = true,
                  .differentiable = false,
                  .dtypes = {DType::boolean}}},
      .attrs = {{"causal", false, "query i sees the keys j <= i + Lk - Lq"},
                {"scale", 0.0, "factor of the scores; 0: 1 / sqrt(D)"},
                {"dropout", 0.0, "chance of a probability to be dropped, in [0, 1)"},
                {"dropout_seed", int64_t{0}, "of the random numbers of dropout"}},
      .outputs = {{"o", "as q"}, {"lse", "[B, H, Lq] or [H, N]", false, sum_dtypes()}},
      .run =
          [](const std::vector<Tensor>& in, const Attrs& attrs) {
            SeededRng random(attrs.integer("dropout_seed"));
            Tensor bias = in[5];
            if (in[6].defined() && bias.defined())
              bias = where(in[6], bias, mask_bias(in[6], bias.dtype()));
            else if (in[6].defined())
              bias = mask_bias(in[6], in[0].dtype());
            const AttentionOptions options{.causal = attrs.flag("causal"),
                                           .scale = attrs.number("scale"),
                                           .dropout = attrs.number("dropout"),
                                           .rng = random.rng(),
                                           .bias = bias};
            check(in[3].defined() || !in[4].defined(), "attention: cu_seqlens_k without cu_seqlens_q");
            const AttentionResult result =
                in[3].defined()
                    ? attention_with_lse(in[0], in[1], in[2], AttentionSequences{in[3], in[4]}, options)
                    : attention_with_lse(in[0], in[1], in[2], options);
            return std::vector{result.o, result.lse};
          },
      .seed = "dropout_seed",
      .problem = attention_problem,
      .cases = attention_cases(),
      .benches = attention_benches(),
      .sweep = attention_sweep,
      .honours_f32_math = true,
      .tolerance_factor_f32 = 6,
      .tolerance_reason = "the kernels take exp2 from the special-function unit (2 ulp), rebuild the "
                          "probabilities in backward "
                          "from the rounded log-sum-exp, and in f32 add dK and dV up over all queries of a "
                          "group in one chain",
      .variants = attention_variants(),
      .variant_dtypes = {{}, {DType::bf16, DType::f16}},
  }};
}

}  // namespace tessera::ops
