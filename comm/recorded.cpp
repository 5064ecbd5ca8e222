#include "comm/recorded.h"

#include <algorithm>

#include "autograd/tape.h"
#include "comm/links.h"

namespace tessera::comm {
namespace {

/// Elements of a sum in f32 at a time: what its terms take in f32 is scratch memory, 16 MiB each.
constexpr int64_t kBlock = int64_t{1} << 22;

void check_rows(const char* op, const Communicator& group, const Tensor& x, const RowSplit& rows,
                int64_t expected) {
  check(x.defined(), op, ": x is undefined");
  check(rows.ranks() == group.size(), op, ": the rows are divided over ", rows.ranks(),
        " ranks, and the group has ", group.size());
  check(x.rank() >= 1 && x.size(0) == expected, op, ": x is ", describe(x), " on rank ", group.rank(), " of ",
        group.size(), "; expected ", expected, " rows, of ", rows.total(), " in all");
}

/// terms[0] = the sum of equally long tensors by the binary tree, in f32 (f64 for f64), rounded once.
void sum_terms(std::vector<Tensor>& terms) {
  // A sum of two terms is rounded once anyway.
  if (size_of(terms[0].dtype()) >= 4 || terms.size() <= 2) return sum_in_tree(terms);
  for (int64_t begin = 0; begin < terms[0].count(); begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, terms[0].count());
    std::vector<Tensor> wide;
    for (const Tensor& term : terms) wide.push_back(term.slice(0, begin, end).to(DType::f32));
    sum_in_tree(wide);
    terms[0].slice(0, begin, end).copy_from(wide[0]);
  }
}

/// Of gradients dy [n, ...] on all ranks the sum of this rank's rows, [n_r, ...].
Tensor reduce_rows(const Communicator& group, const Tensor& dy, const RowSplit& rows) {
  const int64_t width = dy.count() / rows.total();
  int64_t most = 0;  // rows of a message
  bool even = rows.segments() == 1;
  for (size_t i = 0; i < rows.segments(); ++i) most += rows.largest(i);
  even = even && most * rows.ranks() == rows.total();
  const Shape messages{rows.ranks(), most * width};
  Tensor sent = even ? dy.packed().reshape(messages) : Tensor();
  if (!even) {
    sent = Tensor::empty_packed(messages, dy.dtype(), dy.device());
    for (int rank = 0; rank < rows.ranks(); ++rank)
      for (size_t i = 0; i < rows.segments(); ++i) {
        const RowSplit::Range from = rows.in_whole(i, rank), to = rows.in_part(i, rank);
        sent.select(0, rank)
            .slice(0, to.begin * width, to.end * width)
            .reshape(dy.shape().with(0, to.count()))
            .copy_from(dy.slice(0, from.begin, from.end));
      }
    // The unused end of a message is sent as well: zero it.
    for (int rank = 0; rank < rows.ranks(); ++rank)
      if (const int64_t used = rows.count(rank) * width; used < most * width)
        sent.select(0, rank).slice(0, used, most * width).fill(0);
  }
  const Tensor received = Tensor::empty_packed(messages, dy.dtype(), dy.device());
  group.all_to_all(sent, received);
  const int64_t own = rows.count(group.rank());
  std::vector<Tensor> terms;
  for (int rank = 0; rank < rows.ranks(); ++rank)
    terms.push_back(received.select(0, rank).slice(0, 0, own * width));
  sum_terms(terms);
  return terms[0].reshape(dy.shape().with(0, own));
}

/// Messages that convert between a split by rows and one by heads, one per rank: for each tensor and segment
/// as many rows as its largest share, so that all messages have the same size.
class HeadMessages {
 public:
  HeadMessages(const Communicator& group, const std::vector<RowSplit>& rows, int64_t batch, int64_t heads,
               int64_t dim, DType dtype, Device device)
      : group_(group), rows_(rows), row_({batch, heads, dim}) {
    for (const RowSplit& split : rows) {
      first_.push_back(most_);
      for (size_t i = 0; i < split.segments(); ++i) most_ += split.largest(i);
    }
    const Shape shape{group.size(), most_ * row_.count()};
    sent_ = Tensor::empty_packed(shape, dtype, device);
    received_ = Tensor::empty_packed(shape, dtype, device);
  }

  void exchange() const { group_.all_to_all(sent_, received_); }
  /// Rows [count, batch, heads, dim] of segment i of a tensor.
  Tensor to(int rank, size_t tensor, size_t i, int64_t count) const {
    return part(sent_, rank, tensor, i, count);
  }
  Tensor from(int rank, size_t tensor, size_t i, int64_t count) const {
    return part(received_, rank, tensor, i, count);
  }
  /// Zeroes the rows of a message that segment i of a rank's share leaves unused.
  void clear_rest(int rank, size_t tensor, size_t i, int64_t count) const {
    if (const int64_t most = rows_[tensor].largest(i); count < most)
      elements(sent_, rank, tensor, i, count, most).fill(0);
  }

 private:
  Tensor elements(const Tensor& all, int rank, size_t tensor, size_t i, int64_t begin, int64_t end) const {
    int64_t at = first_[tensor];
    for (size_t before = 0; before < i; ++before) at += rows_[tensor].largest(before);
    return all.select(0, rank).slice(0, (at + begin) * row_.count(), (at + end) * row_.count());
  }
  Tensor part(const Tensor& all, int rank, size_t tensor, size_t i, int64_t count) const {
    return elements(all, rank, tensor, i, 0, count).reshape({count, row_[0], row_[1], row_[2]});
  }

  const Communicator& group_;
  const std::vector<RowSplit>& rows_;
  const Shape row_;
  std::vector<int64_t> first_;  // by tensor: its first row in a message
  int64_t most_ = 0;
  Tensor sent_, received_;
};

/// x[i] [n_r, B, H, D] -> out[i] [n, B, H / p, D].
void move_to_heads(const Communicator& group, const std::vector<Tensor>& x, const std::vector<Tensor>& out,
                   const std::vector<RowSplit>& rows) {
  const int64_t heads = out[0].size(2);
  const HeadMessages messages(group, rows, x[0].size(1), heads, x[0].size(3), x[0].dtype(), x[0].device());
  for (int rank = 0; rank < group.size(); ++rank)
    for (size_t t = 0; t < x.size(); ++t)
      for (size_t i = 0; i < rows[t].segments(); ++i) {
        const RowSplit::Range own = rows[t].in_part(i, group.rank());
        messages.to(rank, t, i, own.count())
            .copy_from(x[t].slice(0, own.begin, own.end).slice(2, rank * heads, (rank + 1) * heads));
        messages.clear_rest(rank, t, i, own.count());
      }
  messages.exchange();
  for (int rank = 0; rank < group.size(); ++rank)
    for (size_t t = 0; t < x.size(); ++t)
      for (size_t i = 0; i < rows[t].segments(); ++i) {
        const RowSplit::Range theirs = rows[t].in_whole(i, rank);
        out[t].slice(0, theirs.begin, theirs.end).copy_from(messages.from(rank, t, i, theirs.count()));
      }
}

/// x[i] [n, B, H / p, D] -> out[i] [n_r, B, H, D].
void move_to_rows(const Communicator& group, const std::vector<Tensor>& x, const std::vector<Tensor>& out,
                  const std::vector<RowSplit>& rows) {
  const int64_t heads = x[0].size(2);
  const HeadMessages messages(group, rows, x[0].size(1), heads, x[0].size(3), x[0].dtype(), x[0].device());
  for (int rank = 0; rank < group.size(); ++rank)
    for (size_t t = 0; t < x.size(); ++t)
      for (size_t i = 0; i < rows[t].segments(); ++i) {
        const RowSplit::Range theirs = rows[t].in_whole(i, rank);
        messages.to(rank, t, i, theirs.count()).copy_from(x[t].slice(0, theirs.begin, theirs.end));
        messages.clear_rest(rank, t, i, theirs.count());
      }
  messages.exchange();
  for (int rank = 0; rank < group.size(); ++rank)
    for (size_t t = 0; t < x.size(); ++t)
      for (size_t i = 0; i < rows[t].segments(); ++i) {
        const RowSplit::Range own = rows[t].in_part(i, group.rank());
        out[t]
            .slice(0, own.begin, own.end)
            .slice(2, rank * heads, (rank + 1) * heads)
            .copy_from(messages.from(rank, t, i, own.count()));
      }
}

/// [rows, B, heads, D]; the last two dimensions are contiguous in memory.
Tensor empty_heads(int64_t rows, int64_t heads, const Tensor& like) {
  return Tensor::empty({rows, like.size(1), heads * like.size(3)}, like.dtype(), like.device())
      .reshape({rows, like.size(1), heads, like.size(3)});
}

/// Zeros where nothing has arrived: all ranks make the call.
std::vector<Tensor> gradients_of(Backward& b, const std::vector<Shape>& shapes, DType dtype, Device device) {
  std::vector<Tensor> grads;
  for (size_t i = 0; i < shapes.size(); ++i)
    grads.push_back(b.has_grad(int(i)) ? b.grad(int(i)).to(dtype) : Tensor::zeros(shapes[i], dtype, device));
  return grads;
}

}  // namespace

Tensor gather_rows(const Communicator& group, const Tensor& x, const RowSplit& rows, Site site) {
  const CallScope call(site);
  check_rows("gather_rows", group, x, rows, rows.count(group.rank()));
  Tensor whole = Tensor::empty_packed(x.shape().with(0, rows.total()), x.dtype(), x.device());
  std::vector<Tensor> parts;
  std::vector<int> owners;
  for (int rank = 0; rank < rows.ranks(); ++rank)
    for (size_t i = 0; i < rows.segments(); ++i) {
      const RowSplit::Range range = rows.in_whole(i, rank);
      parts.push_back(whole.slice(0, range.begin, range.end));
      owners.push_back(rank);
      if (rank != group.rank()) continue;
      const RowSplit::Range own = rows.in_part(i, rank);
      parts.back().copy_from(x.detach().slice(0, own.begin, own.end));
    }
  group.share(parts, owners);
  if (Tape* const tape = Tape::recording(x))
    tape->record("gather_rows", {&x}, {&whole}, [group, rows](Backward& b) {
      if (b.needs(0)) b.give(0, reduce_rows(group, b.grad(), rows));
    });
  return whole;
}

std::vector<Tensor> rows_to_heads(const Communicator& group, const std::vector<Tensor>& x,
                                  const std::vector<RowSplit>& rows, Site site) {
  const CallScope call(site);
  check(!x.empty() && x.size() == rows.size(), "rows_to_heads: ", x.size(), " tensors, and the rows of ",
        rows.size());
  std::vector<Tensor> from, out;
  std::vector<Shape> shapes;
  for (size_t i = 0; i < x.size(); ++i) {
    check_rows("rows_to_heads", group, x[i], rows[i], rows[i].count(group.rank()));
    check(x[i].rank() == 4 && x[i].size(2) % group.size() == 0, "rows_to_heads: x is ", describe(x[i]),
          "; expected [rows, B, H, D], and heads that ", group.size(), " ranks divide");
    check(x[i].dtype() == x[0].dtype() && x[i].device() == x[0].device() && x[i].size(1) == x[0].size(1) &&
              x[i].size(2) == x[0].size(2) && x[i].size(3) == x[0].size(3),
          "rows_to_heads: ", describe(x[0]), " and ", describe(x[i]), " differ in more than their rows");
    from.push_back(x[i].detach());
    out.push_back(empty_heads(rows[i].total(), x[i].size(2) / group.size(), x[i]));
    shapes.push_back(out.back().shape());
  }
  move_to_heads(group, from, out, rows);
  if (Tape* const tape = Tape::recording_any(x)) {
    std::vector<const Tensor*> inputs;
    std::vector<Tensor*> outputs;
    for (const Tensor& one : x) inputs.push_back(&one);
    for (Tensor& one : out) outputs.push_back(&one);
    tape->record("rows_to_heads", inputs, outputs,
                 [group, rows, shapes, heads = x[0].size(2), dtype = x[0].dtype(),
                  device = x[0].device()](Backward& b) {
                   const std::vector<Tensor> dy = gradients_of(b, shapes, dtype, device);
                   std::vector<Tensor> dx;
                   std::vector<GradTarget> targets;
                   for (size_t i = 0; i < rows.size(); ++i) {
                     const bool needed = b.needs(int(i));
                     targets.push_back(needed ? b.target(int(i)) : GradTarget());
                     GradTarget& target = targets.back();
                     // A part of a larger gradient (keys and values of one projection) is written in place.
                     if (!target.part || target.grad.dtype() != dtype)
                       target = {.grad = empty_heads(rows[i].count(group.rank()), heads, dy[i])};
                     dx.push_back(target.grad);
                   }
                   move_to_rows(group, dy, dx, rows);
                   dx.clear();
                   for (size_t i = 0; i < rows.size(); ++i)
                     if (b.needs(int(i))) b.written(int(i), targets[i]);
                 });
  }
  return out;
}

Tensor heads_to_rows(const Communicator& group, const Tensor& x, const RowSplit& rows, Site site) {
  const CallScope call(site);
  check_rows("heads_to_rows", group, x, rows, rows.total());
  check(x.rank() == 4, "heads_to_rows: x is ", describe(x), "; expected [rows, B, H, D]");
  Tensor out = empty_heads(rows.count(group.rank()), x.size(2) * group.size(), x);
  move_to_rows(group, {x.detach()}, {out}, {rows});
  if (Tape* const tape = Tape::recording(x))
    tape->record("heads_to_rows", {&x}, {&out},
                 [group, rows, heads = x.size(2), dtype = x.dtype()](Backward& b) {
                   if (!b.needs(0)) return;
                   const Tensor dy = b.grad().to(dtype);
                   Tensor dx = empty_heads(rows.total(), heads, dy);
                   move_to_heads(group, {dy}, {dx}, {rows});
                   b.give(0, std::move(dx));
                 });
  return out;
}

}  // namespace tessera::comm
