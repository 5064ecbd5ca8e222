#pragma once

#include <algorithm>
#include <iterator>
#include <limits>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "datasets/prefetcher.h"
#include "datasets/shuffle.h"
#include "runtime/device.h"
#include "runtime/integers.h"
#include "runtime/rng.h"
#include "tensor/fields.h"

/// Batches made in the background, in an order that depends on nothing but the state.

namespace tessera::datasets {

/// A source of batches without end: batch(i) is a pure function of i (the priors). Both kinds of source are
/// called from several threads at once.
template <class Source>
concept EndlessSource = requires(const Source& source) {
  source.batch(uint64_t{0});
};

/// A source of `size()` items, from which batch(indices) collects some.
template <class Source>
concept ItemSource = requires(const Source& source, std::span<const int64_t> indices) {
  int64_t(source.size());
  source.batch(indices);
};

/// The batches of one consumer among several: of every `period` consecutive batches, the `count` ones from
/// `first` on.
struct LoaderShare {
  uint64_t period = 1, first = 0, count = 1;
  /// The number of the consumer's k-th batch.
  uint64_t number(uint64_t k) const { return k / count * period + first + k % count; }
  /// Which of the consumer's batches is the first one not before `number`.
  uint64_t index(uint64_t number) const {
    const uint64_t within = number % period;
    return number / period * count + (within < first ? 0 : std::min(within - first, count));
  }
};

struct LoaderOptions {
  int64_t size = 1;              // items per batch; ItemSource only
  const Rng* shuffle = nullptr;  // a new order each epoch, from one stream of this generator; ItemSource only
  int64_t epochs = 0;            // after which next() throws; 0: no end; ItemSource only
  bool drop_last = false;        // leaves out the last batch of an epoch if it is smaller; ItemSource only
  int workers = 1;               // threads; each makes whole batches on one core
  int depth = 3;                 // batches that wait or are being made
  int64_t order = kDataOrder;    // version of the orders of `shuffle`; ItemSource only
  LoaderShare share = {};        // the batches that next() returns; default: all
  /// Where batches go: for a GPU their tensors are page-locked (Tensor::empty_pinned), so that copies run
  /// next to the host. A batch, and the loader, may be dropped while copies from it run.
  Device device = Device::best();
};

/// The loader's position: next() will return the first batch of its share that is not before `batch`. Enough
/// to resume exactly, in another process too.
struct LoaderState {
  uint64_t batch = 0;             // number of the next batch, counted over all epochs
  uint64_t seed = 0, stream = 0;  // of the shuffling
  bool operator==(const LoaderState&) const = default;
  void fields(auto&& visit) { visit("batch", batch), visit("seed", seed), visit("stream", stream); }
};

/// One consumer. It refers to the source, which must outlive it and stay where it is: a struct that has both
/// as members must not be moved or copied, and its loader must be declared after the source. Epochs follow
/// each other without end.
template <class Source>
class Loader {
 public:
  static constexpr bool kItems = !EndlessSource<Source>;
  static_assert(EndlessSource<Source> || ItemSource<Source>,
                "Loader: the source has neither batch(uint64_t) nor size() and batch(span<const int64_t>)");
  /// @cond
  using Batch = typename decltype([] {
    if constexpr (kItems)
      return std::type_identity<
          std::remove_cvref_t<decltype(std::declval<const Source&>().batch(std::span<const int64_t>()))>>{};
    else
      return std::type_identity<
          std::remove_cvref_t<decltype(std::declval<const Source&>().batch(uint64_t{0}))>>{};
  }())::type;
  /// @endcond

  /// Throws unless size, workers and depth are at least 1, the share lies within its period, and the source
  /// has items for a batch; and for options for items with a source without end.
  explicit Loader(const Source& source, const LoaderOptions& options = {})
      : source_(&source),
        options_(options),
        prefetcher_(std::make_unique<Prefetcher>(options.workers, options.depth)) {
    check(options.size >= 1, "loader: a batch of ", options.size, " items; expected at least 1");
    const auto& [period, first, count] = options.share;
    check(count >= 1 && first < period && count <= period - first, "loader: a share of ", count,
          " batches from ", first, " on, of every ", period, "; expected at least one, all below ", period);
    check(options.epochs >= 0, "loader: ", options.epochs, " epochs; expected at least 1, or 0 for no end");
    if constexpr (kItems) {
      check(batches_per_epoch() >= 1, "loader: ", source.size(), " items give no batch of ", options.size);
      if (options.shuffle) {
        const RandomStream stream = options.shuffle->reserve(Device::cpu());
        state_.seed = stream.seed, state_.stream = stream.offset();
      }
    } else {
      check(!options.shuffle, "loader: a source without end has no order to shuffle");
      check(options.size == 1 && options.epochs == 0 && !options.drop_last,
            "loader: size, epochs and drop_last are for sources of items; a source without end makes batches "
            "of its own size, and has no epochs");
    }
  }

  Loader(const Source&& temporary,
         const LoaderOptions& options = {}) = delete;  // the loader would outlive it

  /// The next batch; waits for it. Rethrows what the source threw while making it; the call after that gives
  /// the batch after it.
  Batch next() {
    check(prefetcher_ != nullptr, "loader: next() of a loader that was moved from; call the one it moved to");
    if (!running_ || *running_ != state_) {
      const LoaderShare& share = options_.share;
      prefetcher_->start([make = Maker{source_, options_, state_}](
                             uint64_t k) { return make(make.options.share.number(k)); },
                         share.index(state_.batch), share.index(end()));
      running_ = state_;
    }
    const uint64_t number = next_number();
    check(number < end(), "loader: there is no batch after batch ", end(),
          ", the last one of LoaderOptions::epochs = ", options_.epochs,
          "; ask for no more, or set epochs to 0 for no end");
    state_.batch = number + 1;
    running_->batch = state_.batch;
    return std::move(*std::static_pointer_cast<Batch>(prefetcher_->next()));
  }

  /// ItemSource only.
  int64_t batches_per_epoch() const requires kItems {
    const int64_t items = source_->size();
    return options_.drop_last ? items / options_.size : ceil_div(items, options_.size);
  }
  /// Number of whole epochs before the next batch.
  uint64_t epoch_number() const requires kItems { return state_.batch / uint64_t(batches_per_epoch()); }

  /// The batches of one epoch, or of what is left of it, as next() gives them:
  ///
  ///   for (int epoch = 0; epoch < 10; ++epoch)
  ///     for (auto& [images, labels] : loader.epoch()) ...
  ///
  /// With a share, those of the share in that epoch, maybe none. After a loop that is left early or by an
  /// error the next one goes on with the rest of its epoch.
  class Epoch {
   public:
    class Iterator {
     public:
      explicit Iterator(Epoch* epoch) : epoch_(epoch) {}
      Batch& operator*() const { return *epoch_->batch_; }
      Iterator& operator++() {
        epoch_->advance();
        return *this;
      }
      bool operator==(std::default_sentinel_t) const { return !epoch_->batch_; }

     private:
      Epoch* epoch_;
    };

    explicit Epoch(Loader* loader) : loader_(loader) {}
    Iterator begin() {
      const uint64_t each = uint64_t(loader_->batches_per_epoch());
      end_ = (loader_->epoch_number() + 1) * each;
      advance();
      return Iterator(this);
    }
    std::default_sentinel_t end() const { return {}; }

   private:
    void advance() {
      batch_.reset();  // before the next one is waited for
      if (loader_->next_number() < end_)
        batch_.emplace(loader_->next());
      else
        loader_->skip_to(end_);
    }

    Loader* loader_;
    uint64_t end_ = 0;  // number of the first batch of the next epoch
    std::optional<Batch> batch_;
  };
  Epoch epoch() requires kItems { return Epoch(this); }

  /// Saving and resuming; what was made ahead is recomputed.
  const LoaderState& state() const { return state_; }
  void set_state(const LoaderState& state) { state_ = state; }
  void fields(auto&& visit) { state_.fields(visit); }
  LoaderStats stats() const { return prefetcher_ ? prefetcher_->stats() : LoaderStats(); }

 private:
  /// Makes a batch by its number; a copy runs on the workers.
  struct Maker {
    const Source* source;
    LoaderOptions options;
    LoaderState state;

    std::shared_ptr<void> operator()(uint64_t number) const {
      auto batch = std::make_shared<Batch>(collect(number));
      if (options.device.is_cuda()) {
        options.device.activate();
        for_each_field(*batch, [](const std::string&, auto& leaf) {
          if constexpr (std::is_same_v<std::remove_cvref_t<decltype(leaf)>, Tensor>) {
            Tensor pinned = Tensor::empty_pinned(leaf.shape(), leaf.dtype());
            pinned.copy_from(leaf);
            leaf = pinned;
          }
        });
      }
      return batch;
    }

    Batch collect(uint64_t number) const {
      if constexpr (kItems) {
        const int64_t items = source->size();
        const int64_t used = options.drop_last ? items - items % options.size : items;
        const uint64_t per_epoch = uint64_t(ceil_div(used, options.size));
        const int64_t first = int64_t(number % per_epoch) * options.size;
        std::vector<int64_t> indices;
        if (options.shuffle) {
          const Permutation order(items, state.seed, state.stream, number / per_epoch, options.order);
          for (int64_t i = first; i < std::min(first + options.size, used); ++i) indices.push_back(order(i));
        } else {
          for (int64_t i = first; i < std::min(first + options.size, used); ++i) indices.push_back(i);
        }
        return source->batch(std::span<const int64_t>(indices));
      } else {
        return source->batch(number);
      }
    }
  };

  uint64_t next_number() const { return options_.share.number(options_.share.index(state_.batch)); }

  /// Over batches of other shares: the next one stays the same.
  void skip_to(uint64_t batch) {
    const bool runs = running_ == state_;
    state_.batch = std::max(state_.batch, batch);
    if (runs) running_->batch = state_.batch;
  }

  uint64_t end() const {
    if constexpr (kItems)
      if (options_.epochs > 0) return uint64_t(options_.epochs) * uint64_t(batches_per_epoch());
    return std::numeric_limits<uint64_t>::max();
  }

  const Source* source_;
  LoaderOptions options_;
  LoaderState state_;
  std::optional<LoaderState> running_;  // what the prefetcher will give next; none before the first batch
  std::unique_ptr<Prefetcher> prefetcher_;
};

}  // namespace tessera::datasets
