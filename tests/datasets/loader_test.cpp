#include "datasets/loader.h"

#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <set>
#include <thread>

#include "datasets/prior.h"
#include "tests/errors.h"

namespace tessera::datasets {
namespace {

struct Numbers {
  Tensor items;  // i64
  void fields(auto&& visit) { visit("items", items); }
};

/// Items 0 ... n-1; a batch is its indices.
struct Range {
  int64_t count;
  int64_t fails_at = -1;
  int64_t size() const { return count; }
  Numbers batch(std::span<const int64_t> indices) const {
    for (const int64_t index : indices) check(index != fails_at, "item ", index, " cannot be read");
    return {Tensor::from(indices, {int64_t(indices.size())})};
  }
};

std::vector<int64_t> items(const Numbers& batch) {
  return batch.items.to_vector<int64_t>();
}

std::vector<std::vector<int64_t>> take(Loader<Range>& loader, int count) {
  std::vector<std::vector<int64_t>> list;
  for (int i = 0; i < count; ++i) list.push_back(items(loader.next()));
  return list;
}

TEST(Loader, GivesBatchesInOrderWhateverTheNumberOfWorkers) {
  const Range range{10};
  for (const int workers : {1, 4}) {
    for (const int depth : {1, 5}) {
      Loader loader(range, {.size = 4, .workers = workers, .depth = depth});
      EXPECT_EQ(loader.batches_per_epoch(), 3);
      const std::vector<std::vector<int64_t>> expected{{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9}, {0, 1, 2, 3}};
      EXPECT_EQ(take(loader, 4), expected);
      EXPECT_EQ(loader.epoch_number(), 1u);
    }
  }
}

TEST(Loader, LeavesOutTheRestOfAnEpochIfAsked) {
  const Range range{10};
  Loader loader(range, {.size = 4, .drop_last = true});
  EXPECT_EQ(take(loader, 3), (std::vector<std::vector<int64_t>>{{0, 1, 2, 3}, {4, 5, 6, 7}, {0, 1, 2, 3}}));
}

TEST(Loader, ShufflesEachEpochAnewAndLosesNoItem) {
  const Range range{101};
  Rng rng(5);
  Loader loader(range, {.size = 10, .shuffle = &rng, .workers = 3});
  std::vector<int64_t> first, second;
  for (std::vector<int64_t>* epoch : {&first, &second})
    for (const auto& batch : take(loader, 11)) epoch->insert(epoch->end(), batch.begin(), batch.end());
  EXPECT_NE(first, second);
  for (const auto* epoch : {&first, &second}) {
    EXPECT_EQ(epoch->size(), 101u);
    EXPECT_EQ(std::set<int64_t>(epoch->begin(), epoch->end()).size(), 101u);
  }
}

TEST(Loader, ResumesAtExactlyTheNextBatch) {
  const Range range{37};
  Rng rng(5);
  Loader whole(range, {.size = 5, .shuffle = &rng, .workers = 2, .depth = 4});
  take(whole, 11);
  const LoaderState state = whole.state();
  const auto expected = take(whole, 20);

  Rng other(99);  // a new process: its generator is elsewhere
  Loader resumed(range, {.size = 5, .shuffle = &other});
  take(resumed, 2);
  resumed.set_state(state);
  EXPECT_EQ(take(resumed, 20), expected);

  Loader by_fields(range, {.size = 5, .shuffle = &other});
  std::vector<uint64_t> saved{state.batch, state.seed, state.stream};
  size_t next = 0;
  for_each_field(by_fields, [&](const std::string&, auto& leaf) { leaf = saved[next++]; });
  EXPECT_EQ(take(by_fields, 20), expected);
}

TEST(Loader, AnErrorReachesTheConsumerInItsPlace) {
  const Range range{12, 5};
  Loader loader(range, {.size = 3, .workers = 3});
  EXPECT_EQ(items(loader.next()), (std::vector<int64_t>{0, 1, 2}));
  try {
    loader.next();
    FAIL() << "expected an error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("item 5"), std::string::npos) << error.what();
  }
  EXPECT_EQ(items(loader.next()), (std::vector<int64_t>{6, 7, 8}));
}

TEST(Loader, BatchesThatAreMadeOutOfOrderComeInOrder) {
  static constexpr uint64_t kBatches = 30;
  /// Every third batch is finished only after the two after it, of those that are asked for.
  struct OutOfOrder {
    mutable std::mutex mutex;
    mutable std::condition_variable changed;
    mutable std::set<uint64_t> made;
    Numbers batch(uint64_t number) const {
      std::unique_lock lock(mutex);
      if (number % 3 == 0 && number < kBatches)
        changed.wait(lock, [&] { return made.contains(number + 1) && made.contains(number + 2); });
      made.insert(number);
      changed.notify_all();
      return {Tensor::full({1}, double(number), DType::i64, Device::cpu())};
    }
  } source;
  Loader loader(source, {.workers = 3, .depth = 3});
  for (uint64_t number = 0; number < kBatches; ++number)
    EXPECT_EQ(items(loader.next()), std::vector<int64_t>{int64_t(number)});
}

TEST(Loader, MakesAsManyAheadAsItsDepthAndNoMore) {
  static constexpr int64_t kDepth = 3;
  struct Counted {
    mutable std::atomic<int64_t> asked = 0, begun = 0, beyond = 0;
    Numbers batch(uint64_t number) const {
      beyond += int64_t(number) >= asked + kDepth;
      begun += 1;
      return {Tensor::zeros({1}, DType::i64, Device::cpu())};
    }
  } source;
  Loader loader(source, {.workers = 4, .depth = int(kDepth)});
  for (int round = 0; round < 200; ++round) {
    source.asked += 1;
    loader.next();
    while (source.begun < source.asked + kDepth) std::this_thread::yield();
  }
  EXPECT_EQ(source.beyond, 0);
}

TEST(Loader, EndsAtOnceWithBatchesWaitingOrUnmade) {
  const Range range{1000};
  for (int i = 0; i < 50; ++i) {
    Loader loader(range, {.size = 2, .workers = 3});
    if (i % 2) loader.next();
  }
}

TEST(Loader, CountsItsBatches) {
  const Range range{10};
  Loader loader(range, {.size = 2});
  take(loader, 3);
  EXPECT_EQ(loader.stats().batches, 3u);
}

TEST(Prefetcher, CountsWhatItWaitedForAndWhatTheWorkTook) {
  // Time passes only while the thing is made, which is after the consumer has begun to wait.
  std::mutex mutex;
  std::condition_variable changed;
  double now = 100;
  bool waits = false;
  const auto consumer = std::this_thread::get_id();
  Prefetcher prefetcher(1, 1, [&] {
    const std::lock_guard lock(mutex);
    if (std::this_thread::get_id() == consumer) {
      waits = true;
      changed.notify_all();
    }
    return now;
  });
  prefetcher.start(
      [&](uint64_t) {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return waits; });
        now += 20;
        return std::make_shared<int>(7);
      },
      0, 1);
  EXPECT_EQ(*std::static_pointer_cast<int>(prefetcher.next()), 7);
  EXPECT_EQ(prefetcher.stats().batches, 1u);
  EXPECT_EQ(prefetcher.stats().wait_seconds, 20);
  EXPECT_EQ(prefetcher.stats().work_seconds, 20);
}

TEST(Loader, APriorGivesTheSameBatchesThroughIt) {
  const Prior prior({.kind = PriorKind::rbf, .batch = 3, .context = 8, .targets = 8});
  Loader loader(prior, {.workers = 3, .depth = 5});
  for (uint64_t i = 0; i < 6; ++i)
    EXPECT_EQ(loader.next().yt.to_vector<float>(), prior.batch(i).yt.to_vector<float>());
}

std::vector<int64_t> items_of_epoch(Loader<Range>& loader) {
  std::vector<int64_t> seen;
  for (auto& [numbers] : loader.epoch()) {
    const std::vector<int64_t> now = numbers.template to_vector<int64_t>();
    seen.insert(seen.end(), now.begin(), now.end());
  }
  return seen;
}

TEST(Loader, AnEpochIsARangeOfWhatNextGives) {
  const Range range{7};
  Rng rng(1), same(1);
  Loader loader(range, {.size = 3, .shuffle = &rng, .workers = 2});
  Loader by_next(range, {.size = 3, .shuffle = &same, .workers = 2});
  for (uint64_t epoch = 0; epoch < 3; ++epoch) {
    EXPECT_EQ(loader.epoch_number(), epoch);
    const std::vector<int64_t> seen = items_of_epoch(loader);
    std::vector<int64_t> wanted;
    for (const auto& batch : take(by_next, 3)) wanted.insert(wanted.end(), batch.begin(), batch.end());
    EXPECT_EQ(seen, wanted);
    EXPECT_EQ(std::set<int64_t>(seen.begin(), seen.end()).size(), 7u);
    EXPECT_EQ(loader.state(), by_next.state());
  }
}

TEST(Loader, ALoopOverAnEpochGoesOnWhereTheOneBeforeStopped) {
  const Range range{7};
  Loader loader(range, {.size = 3});
  for (const auto& batch : loader.epoch()) {
    EXPECT_EQ(items(batch), (std::vector<int64_t>{0, 1, 2}));
    break;
  }
  const LoaderState state = loader.state();
  EXPECT_EQ(items_of_epoch(loader), (std::vector<int64_t>{3, 4, 5, 6}));
  EXPECT_EQ(items_of_epoch(loader).size(), 7u);
  Loader resumed(range, {.size = 3});
  resumed.set_state(state);
  EXPECT_EQ(items_of_epoch(resumed), (std::vector<int64_t>{3, 4, 5, 6}));
}

TEST(Loader, AnErrorEndsTheLoopOverAnEpochAndLosesOneBatch) {
  const Range range{.count = 7, .fails_at = 4};
  Loader loader(range, {.size = 3});
  int64_t seen = 0;
  expect_error(
      [&] {
        for (const auto& batch : loader.epoch()) seen += batch.items.size(0);
      },
      {"item 4 cannot be read"});
  EXPECT_EQ(seen, 3);
  EXPECT_EQ(items_of_epoch(loader), (std::vector<int64_t>{6}));
}

TEST(Loader, ThereAreNoMoreEpochsThanItsOptionsSay) {
  const Range range{7};
  Loader loader(range, {.size = 3, .epochs = 2});
  for (int epoch = 0; epoch < 2; ++epoch) EXPECT_EQ(items_of_epoch(loader).size(), 7u);
  expect_error([&] { items_of_epoch(loader); }, {"no batch after batch 6", "LoaderOptions::epochs = 2"});
}

TEST(Loader, AnEpochOfAShareIsThatOfAllConsumers) {  // 7 items in 3 batches, for 1 to 5 consumers
  const Range range{7};
  for (uint64_t consumers = 1; consumers <= 5; ++consumers) {
    std::vector<std::multiset<int64_t>> seen(4);
    for (uint64_t i = 0; i < consumers; ++i) {
      Loader loader(range, {.size = 3, .share = {.period = consumers, .first = i}});
      for (std::multiset<int64_t>& epoch : seen)
        for (const int64_t number : items_of_epoch(loader)) epoch.insert(number);
      EXPECT_EQ(loader.epoch_number(), 4u);
    }
    for (const auto& epoch : seen)
      EXPECT_EQ(epoch, (std::multiset<int64_t>{0, 1, 2, 3, 4, 5, 6})) << consumers;
  }
}

TEST(Loader, GivesBatchesThatCanOnlyBeMoved) {
  struct Boxes {
    int64_t size() const { return 3; }
    std::unique_ptr<int64_t> batch(std::span<const int64_t> items) const {
      return std::make_unique<int64_t>(items[0]);
    }
  };
  const Boxes boxes;
  Loader loader(boxes, {.device = Device::cpu()});
  for (int64_t i = 0; i < 3; ++i) EXPECT_EQ(*loader.next(), i);
}

TEST(Loader, SaysThatItWasMovedFrom) {
  const Range range{10};
  Loader loader(range, {.size = 2});
  take(loader, 2);
  Loader moved = std::move(loader);
  expect_error([&] { loader.next(); }, {"loader", "moved from"});
  EXPECT_EQ(loader.stats().batches, 0u);
  EXPECT_EQ(items(moved.next()), (std::vector<int64_t>{4, 5}));
}

// Which would be gone before the first batch.
static_assert(!std::is_constructible_v<Loader<Range>, Range>);
static_assert(!std::is_constructible_v<Loader<Range>, Range, LoaderOptions>);
static_assert(std::is_constructible_v<Loader<Range>, Range&, LoaderOptions>);

TEST(Loader, RefusesWhatGivesNoBatch) {
  const Range empty{0}, three{3};
  EXPECT_THROW(Loader(empty, {.size = 2}), Error);
  EXPECT_THROW(Loader(three, {.size = 4, .drop_last = true}), Error);
  EXPECT_THROW(Loader(three, {.size = 0}), Error);
  EXPECT_THROW(Loader(three, {.workers = 0}), Error);
  EXPECT_THROW(Loader(three, {.depth = 0}), Error);
  EXPECT_THROW(Loader(three, {.epochs = -1}), Error);
  Loader once(three, {.size = 3, .epochs = 1});
  once.next();
  expect_error([&] { once.next(); }, {"no batch after batch 1", "LoaderOptions::epochs = 1"});
}

struct Counter {
  Numbers batch(uint64_t number) const { return {Tensor::from(std::vector{int64_t(number)}, {1})}; }
};

TEST(Loader, RefusesOptionsForItemsOfASourceWithoutEnd) {
  const Counter counter;
  Rng rng(1);
  const LoaderOptions wrong[] = {{.size = 32}, {.shuffle = &rng}, {.epochs = 2}, {.drop_last = true}};
  for (const LoaderOptions& options : wrong) EXPECT_THROW(Loader(counter, options), Error);
  Loader loader(counter, {.workers = 2});
  for (int64_t i = 0; i < 3; ++i) EXPECT_EQ(items(loader.next()), (std::vector{i}));
}

TEST(Loader, RefusesAShareThatDoesNotLieWithinItsPeriod) {
  const Range three{3};
  const LoaderShare wrong[] = {
      {.period = 0}, {.count = 0}, {.period = 2, .first = 2}, {.period = 2, .first = 1, .count = 2}};
  for (const LoaderShare& share : wrong) EXPECT_THROW(Loader(three, {.share = share}), Error);
  const LoaderShare right[] = {{}, {.period = 2, .first = 1}, {.period = 4, .first = 1, .count = 3}};
  for (const LoaderShare& share : right) EXPECT_NO_THROW(Loader(three, {.share = share}));
}

TEST(Loader, PageLockedMemoryIsNotReusedUnderACopy) {
  if (Device::cuda_count() == 0) GTEST_SKIP() << "no GPU";
  const Device gpu = Device::cuda();
  const Prior prior({.batch = 64, .context = 256, .targets = 256, .features = 8});
  Loader loader(prior, {.workers = 2, .device = gpu});
  std::vector<Tensor> copies;
  for (int i = 0; i < 50; ++i) copies.push_back(loader.next().xc.to(gpu));  // the host copy goes at once
  for (uint64_t i = 0; i < 50; ++i)
    ASSERT_EQ(copies[i].to_vector<float>(), prior.batch(i).xc.to_vector<float>()) << i;
}

TEST(Loader, MayBeDestroyedWithCopiesInFlight) {
  if (Device::cuda_count() == 0) GTEST_SKIP() << "no GPU";
  const Device gpu = Device::cuda();
  const Prior prior({.batch = 64, .context = 256, .targets = 256, .features = 8});
  const Tensor busy = Tensor::empty({64 << 20}, DType::f32, gpu);
  std::vector<Tensor> copies, others;
  for (int round = 0; round < 20; ++round) {
    Loader loader(prior, {.workers = 2, .device = gpu});
    for (int i = 0; i < 4; ++i) busy.fill(0);  // the copy is pending when the loader goes
    copies.push_back(loader.next().xc.to(gpu));
  }
  for (int i = 0; i < 40; ++i) {  // the next user of the memory writes it
    others.push_back(Tensor::empty_pinned(copies[0].shape(), DType::f32));
    others.back().fill(-1);
  }
  const auto expected = prior.batch(0).xc.to_vector<float>();
  for (const Tensor& copy : copies) EXPECT_EQ(copy.to_vector<float>(), expected);
}

TEST(Permutation, IsABijectionAndLooksUniform) {
  for (const int64_t n : {1, 2, 3, 5, 16, 17, 100, 1025}) {
    const Permutation order(n, 1, 2, 3);
    std::set<int64_t> seen;
    for (int64_t i = 0; i < n; ++i) seen.insert(order(i));
    EXPECT_EQ(seen.size(), size_t(n));
    EXPECT_EQ(*seen.begin(), 0);
    EXPECT_EQ(*seen.rbegin(), n - 1);
  }
  // Where item 3 of 10 goes over 5,000 epochs: 500 a place with a deviation of 21.2; six of them.
  std::vector<int> hits(10);
  for (uint64_t epoch = 0; epoch < 5000; ++epoch) ++hits[size_t(Permutation(10, 7, 0, epoch)(3))];
  for (const int hit : hits) EXPECT_NEAR(hit, 500, 128);
  EXPECT_THROW(Permutation(0, 1, 1, 1), Error);
  for (const int64_t outside : {-1, 3}) EXPECT_THROW(Permutation(3, 1, 1, 1)(outside), Error);
  EXPECT_THROW(Permutation(3, 1, 1, uint64_t{1} << 29), Error);
}

std::vector<int64_t> order_of(uint64_t seed, uint64_t epoch, int64_t version = kDataOrder) {
  const Permutation order(100, seed, 0, epoch, version);
  std::vector<int64_t> items;
  for (int64_t i = 0; i < 100; ++i) items.push_back(order(i));
  return items;
}

TEST(Permutation, NeighbouringSeedsShareNoOrder) {
  std::set<std::vector<int64_t>> orders;
  for (uint64_t seed = 0; seed < 8; ++seed)
    for (uint64_t epoch = 0; epoch < 8; ++epoch) orders.insert(order_of(seed, epoch));
  EXPECT_EQ(orders.size(), 64u);
}

/// Runs of before go on with the orders that they began with.
TEST(Permutation, OfVersionOneIsAsItWas) {
  EXPECT_EQ(order_of(4, 0, 1), order_of(4, 0));
  EXPECT_NE(order_of(4, 1, 1), order_of(4, 1));
  const std::vector<int64_t> first = order_of(4, 1, 1);
  EXPECT_EQ(std::vector<int64_t>(first.begin(), first.begin() + 8),
            (std::vector<int64_t>{15, 50, 67, 81, 16, 46, 43, 53}));
}

TEST(Loader, ShufflesInTheOrdersOfItsVersion) {
  const Range range{100};
  Rng rng(4);
  Loader loader(range, {.size = 100, .shuffle = &rng, .order = 1});
  const LoaderState state = loader.state();
  const Permutation order(100, state.seed, state.stream, 1, 1);
  const std::vector<int64_t> second = take(loader, 2)[1];
  for (int64_t i = 0; i < 100; ++i) ASSERT_EQ(second[size_t(i)], order(i));
}

}  // namespace
}  // namespace tessera::datasets
