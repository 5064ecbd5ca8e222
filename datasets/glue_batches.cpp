#include "datasets/glue_batches.h"

#include <algorithm>

#include "io/checksum.h"
#include "runtime/error.h"
#include "runtime/integers.h"
#include "runtime/interrupt.h"

namespace tessera::datasets {

GlueItems::GlueItems(const GlueData& data, const io::Tokenizer& tokenizer, const GlueBatchOptions& options)
    : info_(&glue_info(data.task())), options_(options), has_labels_(data.has_labels()) {
  check(options.max_length >= 1 && options.pad_multiple >= 1, "glue: at most ", options.max_length,
        " tokens, padded to multiples of ", options.pad_multiple, "; both must be at least 1");
  check(options.pad_to == 0 || options.pad_to >= options.max_length, "glue: texts of up to ",
        options.max_length, " tokens do not fit into ", options.pad_to);
  const std::optional<int32_t> pad = tokenizer.special().pad;
  check(options.packed || pad.has_value(), "glue: ", tokenizer.path(),
        " has no padding token; use packed batches");
  pad_ = pad.value_or(0);
  const size_t special = (info_->is_pair ? tokenizer.encode_pair("", "") : tokenizer.encode("")).ids.size();
  check(uint64_t(options.max_length) > special, "glue: max_length (--max-length) is ", options.max_length,
        "; the ", special, " special tokens around a ", info_->is_pair ? "pair" : "text",
        " and a token of text need ", special + 1);
  for (int64_t i = 0; i < data.size(); ++i) {
    check_interrupt();
    // One more than allowed tells whether the text was cut.
    const auto encode = [&](int64_t most) {
      const io::EncodeOptions limit{.max_length = most};
      return info_->is_pair ? tokenizer.encode_pair(data.first(i), data.second(i), limit)
                            : tokenizer.encode(data.first(i), limit);
    };
    io::Encoding encoding = encode(options.max_length + 1);
    if (int64_t(encoding.ids.size()) > options.max_length) {
      encoding = encode(options.max_length);
      cut_ += 1;
    }
    ids_.insert(ids_.end(), encoding.ids.begin(), encoding.ids.end());
    for (const int32_t type : encoding.types) {
      check(type >= 0 && type < 256, "glue: ", tokenizer.path(), " gives the token type ", type);
      types_.push_back(uint8_t(type));
    }
    ends_.push_back(ids_.size());
    labels_.push_back(has_labels_ ? float(data.label(i)) : 0);
  }
}

std::string GlueItems::fingerprint() const {
  io::Xxh3 sum;
  sum.add(ids_.data(), ids_.size() * sizeof ids_[0]);
  sum.add(types_.data(), types_.size() * sizeof types_[0]);
  sum.add(ends_.data(), ends_.size() * sizeof ends_[0]);
  sum.add(labels_.data(), labels_.size() * sizeof labels_[0]);
  return sum.digits();
}

GlueBatch GlueItems::batch(std::span<const int64_t> indices) const {
  const int64_t count = int64_t(indices.size());
  const auto begin_of = [&](int64_t i) { return i == 0 ? uint64_t{0} : ends_[size_t(i) - 1]; };
  std::vector<int32_t> lengths{0};
  int64_t longest = 0, total = 0;
  for (const int64_t i : indices) {
    check(i >= 0 && i < size(), "glue: there is no example ", i, " of ", size());
    const int64_t tokens = int64_t(ends_[size_t(i)] - begin_of(i));
    longest = std::max(longest, tokens);
    total += tokens;
    check(total <= INT32_MAX,
          "glue: a batch of more than 2^31 tokens; their cumulative lengths have 32 bits");
    lengths.push_back(int32_t(total));
  }
  const int64_t multiple = options_.pad_multiple;
  const int64_t width =
      options_.pad_to > 0 ? options_.pad_to : round_up(std::max<int64_t>(longest, 1), multiple);
  const Shape shape = options_.packed ? Shape({total}) : Shape({count, width});
  const Tensor ids = Tensor::empty_packed(shape, DType::i64, Device::cpu());
  const Tensor types = Tensor::empty_packed(shape, DType::i64, Device::cpu());
  const Tensor mask =
      Tensor::empty_packed(options_.packed ? Shape({0}) : shape, DType::boolean, Device::cpu());
  const Tensor labels = Tensor::empty_packed({has_labels_ ? count : 0},
                                             info_->labels.empty() ? DType::f32 : DType::i64, Device::cpu());
  for (int64_t row = 0; row < count; ++row) {
    const int64_t item = indices[size_t(row)];
    const int64_t tokens = int64_t(ends_[size_t(item)] - begin_of(item));
    const int64_t to = options_.packed ? lengths[size_t(row)] : row * width;
    for (int64_t k = 0; k < tokens; ++k) {
      ids.data<int64_t>()[to + k] = ids_[size_t(begin_of(item)) + size_t(k)];
      types.data<int64_t>()[to + k] = types_[size_t(begin_of(item)) + size_t(k)];
    }
    if (!options_.packed) {
      std::fill_n(mask.data<bool>() + to, tokens, true);
      std::fill_n(mask.data<bool>() + to + tokens, width - tokens, false);
      std::fill_n(ids.data<int64_t>() + to + tokens, width - tokens, int64_t{pad_});
      std::fill_n(types.data<int64_t>() + to + tokens, width - tokens, int64_t{0});
    }
    if (!has_labels_) continue;
    if (info_->labels.empty())
      labels.data<float>()[row] = labels_[size_t(item)];
    else
      labels.data<int64_t>()[row] = int64_t(labels_[size_t(item)]);
  }
  return {ids, types, mask, Tensor::from(lengths, {int64_t(lengths.size())}), labels};
}

}  // namespace tessera::datasets
