#include "models/bert.h"

#include <algorithm>

#include "nn/drop_bp.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"
#include "ops/select/select.h"
#include "plan/sizes_internal.h"
#include "runtime/integers.h"

namespace tessera::plan {
namespace {

using models::BertConfig;
using models::BertHead;
using Trained = BertStep::Trained;

bool reads_first(const BertConfig& c) {
  return c.head == BertHead::classify || c.head == BertHead::regress;
}

int64_t head_parameters(const BertConfig& c) {
  const int64_t d = c.d_model, dense = d * d + d;
  if (reads_first(c)) return dense + c.outputs() * (d + 1);
  return c.head == BertHead::masked_lm ? dense + 2 * d + c.vocabulary : 0;
}

Sizes sizes_of(const BertConfig& c) {
  const int64_t d = c.d_model;
  return {.vocabulary = c.vocabulary,
          .d = d,
          .layers = c.layers,
          .q = d,
          .kv = d,
          .head_dim = d / c.heads,
          .ff = c.d_ff,
          .up = c.d_ff,
          .biases = 3 * d + d + c.d_ff + d,
          .norms = 4 * d,
          .tables = (c.vocabulary + c.positions + c.types) * d,
          .rest = 2 * d + head_parameters(c),
          .gated = false,
          .rope = false,
          .dtype = c.dtype,
          .fused = false};
}

/// The tokens that the head reads.
double rows_read(const BertConfig& c, const BertStep& step) {
  const double each = reads_first(c)                                     ? 1
                      : c.head == BertHead::masked_lm && step.masked > 0 ? double(step.masked)
                                                                         : double(step.length);
  return double(step.batch) * each;
}

/// Multiply-adds per row of the linear layers of a block.
struct BlockGemms {
  nn::FactorCounts qkv, out, up, down;
  BlockGemms(const BertConfig& c, const Forms& forms)
      : qkv(nn::count_factors(forms.attention, c.d_model, c.d_model)),
        out(qkv),
        up(nn::count_factors(forms.mlp, c.d_ff, c.d_model)),
        down(nn::count_factors(forms.mlp, c.d_model, c.d_ff)) {
    qkv.multiply_adds *= 3, qkv.saved *= 3;
  }
};

/// What a sliced layer, or one that is not, does with `rows` rows.
struct LayerRows {
  double dx, dweight;   // that backward multiplies
  double kept = 0;      // of the input, for the weight's gradient
  bool copies = false;  // these are gathered in forward
  bool slices = false;  // some rows are multiplied, or the weight gets no gradient
  bool known = false;   // before backward

  LayerRows(const BertStep& step, bool is_sliced, double rows)
      : dx(rows), dweight(step.trained == Trained::all ? rows : 0), kept(dweight) {
    if (!is_sliced || !step.slice) return;
    using Mode = ops::SelectMode;
    const nn::SlicedBackward& slice = *step.slice;
    if (slice.n) dx = std::min(double(*slice.n), rows);
    if (slice.share) dx = double(ops::share_of_rows(int64_t(rows), *slice.share));
    const bool all = dx == rows && slice.rows != Mode::threshold;
    slices = !all || slice.weight_grad == ops::WeightGrad::none;
    known = all || slice.rows == Mode::first || slice.rows == Mode::random;
    if (!slices) return;
    copies = slice.weight_grad == ops::WeightGrad::slice && known;
    dweight = slice.weight_grad == ops::WeightGrad::none   ? 0
              : slice.weight_grad == ops::WeightGrad::full ? rows
                                                           : dx;
    kept = slice.weight_grad == ops::WeightGrad::none ? 0 : copies ? dx : rows;
  }
};

/// One step, with some branches dropped from backward: bytes that are kept for it and the most that is alive
/// at a time, next to parameters, gradients and states; and FLOPs.
class Walk {
 public:
  Walk(const BertConfig& config, const BertStep& step, const std::vector<bool>& dropped)
      : c_(config),
        step_(step),
        dropped_(dropped),
        gemms_(config, step.forms),
        element_(double(size_of(config.dtype))),
        d_(double(config.d_model)),
        ff_(double(config.d_ff)),
        tokens_(double(step.batch) * double(step.length)) {
    const Flops forward = count_flops(config, step);
    flops = forward.forward() + 2 * forward.heads;
    if (step.trained == Trained::head)
      walk_frozen();
    else
      walk();
  }

  double saved = 0, sliced = 0, peak = 0, flops = 0;

 private:
  void walk() {
    embed();
    for (int64_t i = 0; i < c_.layers; ++i) add_block(i);
    pass_head();
    saved = live_;
    for (int64_t i = c_.layers; i-- > 0;) leave_block(blocks_[size_t(i)]);
  }

  struct Block {
    double rows;  // of its second half
    bool drops_attention, drops_mlp;
    double input, attention, norm, mlp;   // bytes kept: of x, the rest of the attention branch, one norm
    double in_attention = 0, in_mlp = 0;  // bytes at a time in their backward passes
  };

  void keep(double bytes) { live_ += bytes, at(0); }
  void release(double bytes) { live_ -= bytes; }
  void at(double temporaries) { peak = std::max(peak, live_ + temporaries); }
  double wide(double rows) const { return rows * d_ * element_; }  // bytes of [rows, d]

  /// Kept by a norm with a residual: their sum, mean and reciprocal deviation, and bits of the dropout mask.
  double norm_bytes(double rows) const {
    const double mask = step_.on_gpu && c_.hidden_dropout > 0 ? wide(rows) / 16 : 0;
    return wide(rows) + 8 * rows + mask;
  }

  void embed() {
    keep(wide(tokens_) + 8 * tokens_ + 24 * tokens_);  // and the indices of tokens, types and positions
    at(5 * wide(tokens_));
  }

  void add_backward(const nn::FactorCounts& gemm, double rows) { flops += 2 * rows * gemm.multiply_adds; }

  void add_block(int64_t i) {
    const SlicedLayers layers = step_.slice ? step_.sliced[size_t(i)] : SlicedLayers();
    const double rows = i + 1 < c_.layers ? tokens_ : rows_read(c_, step_);
    Block block{.rows = rows,
                .drops_attention = dropped_[size_t(2 * i)],
                .drops_mlp = dropped_[size_t(2 * i + 1)],
                .input = 0,
                .attention = 0,
                .norm = norm_bytes(rows),
                .mlp = 0};
    if (!block.drops_attention) add_attention(block, layers);
    if (!block.drops_mlp) add_mlp(block, layers);
    blocks_.push_back(block);
    keep(block.input + block.attention + block.norm);
    // Forward's widest moment: x unless it is kept, attention's result after its projection, the network's
    // input and output, and its hidden rows, of which a dropped or sliced one keeps none or a few.
    const double hidden = (block.drops_mlp ? 1 : 2) * rows * ff_ * element_;
    at(wide(tokens_) - std::min(block.input, wide(tokens_)) + 3 * wide(rows) + hidden);
    keep(block.norm + block.mlp);
  }

  void add_attention(Block& block, const SlicedLayers& layers) {
    const LayerRows qkv(step_, layers.qkv, tokens_), out(step_, layers.out, block.rows);
    block.input = wide(qkv.kept);
    // On a GPU a head_dim that is not a multiple of 8 is padded: attention keeps copies of q, k, v and o.
    const int64_t head_dim = c_.d_model / c_.heads, whole = round_up(head_dim, 8);
    const bool pads = step_.on_gpu && whole != head_dim;
    const double operands = pads ? 4 * wide(tokens_) * double(whole) / double(head_dim) : 3 * wide(tokens_);
    // Attention's result is the second layer's input, unless rows are gathered from it.
    const bool shares = block.rows == tokens_ && !out.copies;
    const double own = shares ? 0 : wide(out.kept);
    block.attention = operands + wide(tokens_) + tokens_ * double(c_.heads) * 4 + own +
                      (tokens_ * gemms_.qkv.saved + block.rows * gemms_.out.saved) * element_;
    // The gradients of x, of attention's result and of its operands; dq in f32.
    block.in_attention = 5 * wide(tokens_) + (pads ? operands : 0) + (step_.on_gpu ? tokens_ * d_ * 4 : 0);
    if (layers.qkv) sliced += block.input;
    if (layers.out) sliced += shares ? wide(out.kept) : own;
    add_backward(gemms_.qkv, qkv.dx + qkv.dweight), add_backward(gemms_.out, out.dx + out.dweight);
    flops += 2.5 * tokens_ * 4 * double(step_.length) * d_;
  }

  void add_mlp(Block& block, const SlicedLayers& layers) {
    const double rows = block.rows, hidden = rows * ff_ * element_;
    LayerRows up(step_, layers.up, rows), down(step_, layers.down, rows);
    block.in_mlp = 2 * wide(rows) + hidden;  // the gradients of the branch's input and output
    if (layers.up && layers.down && up.slices) {
      const bool full = step_.slice->weight_grad == ops::WeightGrad::full,
                 trains = step_.slice->weight_grad == ops::WeightGrad::slice;
      const double n = up.dx, part = n * ff_ * element_;
      if (full) up.dweight = n;
      // x and the hidden rows before the activation; after it, if all rows give the second weight's gradient.
      const bool keeps_x = up.kept > 0;
      block.mlp =
          (keeps_x ? wide(up.known ? n : rows) : 0) + (up.known ? part : hidden) + (full ? hidden : 0);
      // Rows of dy and their hidden gradients and activations, the rows of x and h unless they were kept, and
      // those of dx before they are added.
      block.in_mlp =
          2 * wide(rows) + wide(n) + (trains ? 2 : 1) * part + (up.known ? 0 : wide(n) + part) + n * d_ * 4;
    } else if (up.slices || down.slices || step_.forms.mlp.kind != nn::FactorKind::dense) {  // layer by layer
      block.mlp = wide(up.kept) + hidden + down.kept * ff_ * element_ +
                  rows * (gemms_.up.saved + gemms_.down.saved) * element_;
    } else {
      block.mlp = wide(rows) + (step_.trained == Trained::all ? 2 : 1) * hidden;
    }
    if (layers.up || layers.down) sliced += block.mlp;
    add_backward(gemms_.up, up.dx + up.dweight), add_backward(gemms_.down, down.dx + down.dweight);
  }

  /// What the head keeps, and what it holds for a moment.
  void pass_head() {
    const double rows = rows_read(c_, step_);
    head_ = 3 * wide(rows);
    keep(head_);
    if (c_.head == BertHead::masked_lm) {
      const double chunk = std::min(rows, double(ops::linear_cross_entropy_chunk(c_.vocabulary, DType::f32)));
      const double v = double(c_.vocabulary);
      const double logits = c_.dtype == DType::bf16 && step_.on_gpu ? chunk * (v * 2 + d_ * 6)
                                                                    : chunk * v * (element_ == 2 ? 6 : 4);
      at(2 * wide(rows) + v * (d_ + 1) * 4 + logits);
    }
    at(2 * wide(rows));
    release(head_);
  }

  void leave_block(const Block& block) {
    const double norm = (c_.hidden_dropout > 0 ? 3 : 2) * wide(block.rows);
    at(norm);
    release(block.norm);
    at(block.in_mlp);
    release(block.mlp);
    at(wide(block.rows) + norm);
    release(block.norm);
    at(block.in_attention);
    release(block.attention);
    at(block.drops_attention ? 0 : 4 * wide(tokens_));
    release(block.input);
  }

  /// Nothing is recorded before the head: the widest moment of a block's forward pass.
  void walk_frozen() {
    at(std::max(4 * wide(tokens_) + tokens_ * ff_ * element_, 6 * wide(tokens_)));
    saved = 3 * wide(rows_read(c_, step_));
  }

  const BertConfig& c_;
  const BertStep& step_;
  const std::vector<bool>& dropped_;
  BlockGemms gemms_;
  double element_, d_, ff_, tokens_;
  double live_ = 0, head_ = 0;
  std::vector<Block> blocks_;
};

struct Means {
  double saved = 0, sliced = 0, peak = 0, flops = 0;
};

/// The mean over the branches that steps draw.
Means mean_walk(const BertConfig& c, const BertStep& step) {
  const auto branches = size_t(2 * c.layers);
  check(!step.slice || int64_t(step.sliced.size()) == c.layers, "plan: there are sliced layers for ",
        step.sliced.size(), " blocks, but the model has ", c.layers);
  constexpr int kDraws = 256;  // a mean is within 1 % of that of 100,000
  const int draws = step.drop > 0 ? kDraws : 1;
  const BlockGemms gemms(c, step.forms);
  const double products = 4 * double(step.length) * double(c.d_model);
  std::vector<double> flops;
  for (size_t i = 0; i < branches; ++i)
    flops.push_back(i % 2 == 0 ? 2 * (gemms.qkv.multiply_adds + gemms.out.multiply_adds) + products
                               : 2 * (gemms.up.multiply_adds + gemms.down.multiply_adds));
  Means means;
  for (int i = 0; i < draws; ++i) {
    const std::vector<bool> dropped =
        nn::draw_branches(std::vector<double>(branches, step.drop), flops, step.drop, 0, uint64_t(i));
    const Walk walk(c, step, dropped);
    means.saved += walk.saved / draws, means.sliced += walk.sliced / draws;
    means.peak += walk.peak / draws, means.flops += walk.flops / draws;
  }
  return means;
}

}  // namespace

int64_t count_parameters(const BertConfig& config, const Forms& forms) {
  return count_parameters(sizes_of(config), forms);
}

int64_t count_trained(const BertConfig& config, const BertStep& step) {
  const Sizes s = sizes_of(config);
  if (step.trained == Trained::all) return count_parameters(s, step.forms);
  const int64_t biases = s.d + s.layers * (s.biases + 2 * s.d);  // and those of norms
  return head_parameters(config) + (step.trained == Trained::biases ? biases : 0);
}

Flops count_flops(const BertConfig& config, double tokens, double length, double read, const Forms& forms) {
  const BlockGemms block(config, forms);
  const double d = double(config.d_model), layers = double(config.layers);
  const double after_attention = block.out.multiply_adds + block.up.multiply_adds + block.down.multiply_adds;
  double head = 0;
  if (reads_first(config)) head = d * d + d * double(config.outputs());
  if (config.head == BertHead::masked_lm) head = d * d + d * double(config.vocabulary);
  return {.gemms = 2 * layers * tokens * (block.qkv.multiply_adds + after_attention) -
                   2 * (tokens - read) * after_attention,
          .attention = layers * tokens * 4 * length * d,
          .heads = 2 * read * head};
}

Flops count_flops(const BertConfig& config, const BertStep& step) {
  return count_flops(config, double(step.batch) * double(step.length), double(step.length),
                     rows_read(config, step), step.forms);
}

double step_flops(const BertConfig& config, double tokens, double length) {
  Flops flops = count_flops(config, tokens, length, reads_first(config) ? tokens / length : tokens);
  flops.heads = 0;
  return flops.step();
}

double step_flops(const BertConfig& config, const BertStep& step) {
  return mean_walk(config, step).flops;
}

double sliced_bytes(const BertConfig& config, const BertStep& step) {
  return mean_walk(config, step).sliced;
}

Memory count_memory(const BertConfig& config, const BertStep& step) {
  const Means means = mean_walk(config, step);
  const double trained = double(count_trained(config, step));
  return {.parameters = double(count_parameters(config, step.forms)) * double(size_of(config.dtype)),
          .gradients = trained * 4,
          .optimizer = trained * (size_of(config.dtype) == 2 ? 12 : 8),
          .saved = means.saved,
          .transient = means.peak - means.saved};
}

std::vector<HiddenMatrix> hidden_matrices(const BertConfig& config, const Forms& forms) {
  return hidden_matrices(sizes_of(config), forms);
}

ArenaSizes arena_sizes(const BertConfig& config, const BertStep& step) {
  if (step.trained != Trained::all) return {{double(count_trained(config, step))}, false};
  ArenaSizes sizes = arena_sizes(sizes_of(config), step.forms);
  sizes.tied = config.head == BertHead::masked_lm;
  if (config.head != BertHead::none) sizes.elements.push_back(double(head_parameters(config)));
  return sizes;
}

double count_block_weights(const BertConfig& config, const Forms& forms) {
  return double(config.layers) * matrices(sizes_of(config), forms).parameters;
}

}  // namespace tessera::plan
