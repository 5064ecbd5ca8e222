#include "comm/communicator.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "autograd/tape.h"
#include "comm/dry.h"
#include "comm/threads.h"
#include "tests/comm/ranks.h"
#include "tests/errors.h"

// One contract, whatever carries the messages: ranks that are threads, and ranks that are processes.

namespace tessera::comm {
namespace {

using Main = std::function<void(Communicator&)>;

void on_threads(int size, const Main& main) {
  run_threads(size, main);
}

void on_processes(int size, const Main& main) {
  test::Ranks ranks(size, [&](Communicator& c, const test::Rank&) { main(c); });
  for (const test::Ended& end : ranks.wait_all()) EXPECT_EQ(end.code, 0) << end.signal << " " << end.said;
}

struct Way {
  const char* name;
  void (*run)(int, const Main&);
};

class Collectives : public ::testing::TestWithParam<Way> {
 protected:
  void run(int size, const Main& main) { GetParam().run(size, main); }
};

/// Values of a rank whose sums depend on their order.
std::vector<float> values_of(int rank, int64_t count) {
  std::mt19937 engine(unsigned(rank) * 7919 + 1);
  std::vector<float> values(size_t(count), 0);
  for (float& v : values) v = std::ldexp(float(int(engine() % 2001) - 1000) / 1000, int(engine() % 40) - 20);
  return values;
}

/// The sum over the tree: ((0 + 1) + (2 + 3)) + ..., each addition rounded.
template <class T>
std::vector<T> tree_sum(std::vector<std::vector<T>> parts) {
  if (parts.size() == 1) return parts[0];
  std::vector<std::vector<T>> next;
  for (size_t i = 0; i < parts.size(); i += 2) {
    next.push_back(parts[i]);
    if (i + 1 < parts.size())
      for (size_t k = 0; k < parts[i].size(); ++k)
        next.back()[k] = T(Compute<T>(parts[i][k]) + Compute<T>(parts[i + 1][k]));
  }
  return tree_sum(next);
}

template <class T>
std::vector<T> as(const std::vector<float>& values) {
  std::vector<T> out;
  for (const float v : values) out.push_back(T(v));
  return out;
}

template <class T>
bool same_bits(const Tensor& tensor, const std::vector<T>& values) {
  const std::vector<T> own = tensor.to_vector<T>();
  return own.size() == values.size() && std::memcmp(own.data(), values.data(), own.size() * sizeof(T)) == 0;
}

template <class T>
void check_sums(const Communicator& c, int64_t count) {
  std::vector<std::vector<T>> parts;
  for (int r = 0; r < c.size(); ++r) parts.push_back(as<T>(values_of(r, count)));
  const std::vector<T> sum = tree_sum(parts);
  const Tensor x = Tensor::from(parts[size_t(c.rank())], {count});
  c.all_reduce(x);
  EXPECT_TRUE(same_bits(x, sum)) << "all_reduce of " << count << " on " << c.size();
}

TEST_P(Collectives, SumsAreThoseOfTheTree) {
  for (const int size : {1, 2, 3, 4, 5, 8})
    run(size, [](Communicator& c) {
      for (const int64_t count : {0, 1, 2, 7, 1000}) {
        check_sums<float>(c, count);
        check_sums<double>(c, count);
        check_sums<bf16>(c, count);
        check_sums<f16>(c, count);
      }
    });
}

TEST_P(Collectives, ATreeIsNotARow) {  // else the test above would not see the order
  std::vector<std::vector<float>> parts;
  for (int r = 0; r < 4; ++r) parts.push_back(values_of(r, 1000));
  std::vector<float> row = parts[0];
  for (int r = 1; r < 4; ++r)
    for (size_t k = 0; k < row.size(); ++k) row[k] += parts[size_t(r)][k];
  EXPECT_NE(tree_sum(parts), row);
}

TEST_P(Collectives, MoreThanABlock) {
  run(2, [](Communicator& c) { check_sums<float>(c, (int64_t{1} << 22) + 3); });
}

TEST_P(Collectives, ReduceScatterGivesTheRanksPart) {
  run(3, [](Communicator& c) {
    std::vector<std::vector<float>> parts;
    for (int r = 0; r < 3; ++r) parts.push_back(values_of(r, 3 * 2 * 5));
    const std::vector<float> sum = tree_sum(parts);
    const Tensor out = Tensor::empty_packed({2, 5}, DType::f32, Device::cpu());
    const Tensor in = Tensor::from(parts[size_t(c.rank())], {6, 5}).packed();
    c.reduce_scatter(in, out);
    EXPECT_TRUE(
        same_bits(out, std::vector<float>(sum.begin() + c.rank() * 10, sum.begin() + (c.rank() + 1) * 10)));
    EXPECT_TRUE(same_bits(in, parts[size_t(c.rank())])) << "the input was changed";
  });
}

TEST_P(Collectives, ReducePartsGivesEachRankItsOwn) {
  run(4, [](Communicator& c) {
    std::vector<std::vector<float>> parts;
    for (int r = 0; r < 4; ++r) parts.push_back(values_of(r, 1000));
    const std::vector<float> sum = tree_sum(parts);
    for (const std::vector<int64_t>& ends :
         {std::vector<int64_t>{250, 500, 750, 1000}, {0, 999, 999, 1000}, {1000, 1000, 1000, 1000}}) {
      const Tensor x = Tensor::from(parts[size_t(c.rank())], {1000});
      c.reduce_parts(x, ends);
      const int64_t begin = c.rank() == 0 ? 0 : ends[size_t(c.rank() - 1)], end = ends[size_t(c.rank())];
      EXPECT_TRUE(
          same_bits(x.slice(0, begin, end), std::vector<float>(sum.begin() + begin, sum.begin() + end)))
          << begin << " to " << end;
    }
    const Tensor x = Tensor::zeros({3}, DType::f32, Device::cpu());
    const auto refuses = [&](const Tensor& tensor, std::vector<int64_t> ends) {
      expect_error([&] { c.reduce_parts(tensor, ends); }, {"reduce_parts"});
    };
    refuses(x, {1, 2, 3});
    refuses(x, {0, 2, 1, 3});
    refuses(x, {0, 1, 2, 2});
    refuses(x, {-1, 1, 2, 3});
    refuses(Tensor::zeros({3, 1}, DType::f32, Device::cpu()), {0, 1, 2, 3});
    refuses(Tensor::zeros({3}, DType::i32, Device::cpu()), {0, 1, 2, 3});
    c.barrier();
  });
}

TEST_P(Collectives, ShareGivesAllRanksWhatEachOwns) {
  run(3, [](Communicator& c) {
    const std::vector<int> owners = {2, 0, 2, 1, 0};
    std::vector<Tensor> tensors;
    for (size_t i = 0; i < owners.size(); ++i)
      tensors.push_back(Tensor::full({int64_t(3 * i)}, double(10 * c.rank()) + double(i),
                                     i % 2 ? DType::f32 : DType::bf16, Device::cpu()));
    c.share(tensors, owners);
    for (size_t i = 0; i < owners.size(); ++i)
      for (const double value : tensors[i].to(DType::f64).to_vector<double>())
        EXPECT_EQ(value, double(10 * owners[i]) + double(i)) << i;
    c.share({}, {});
    const Tensor one = Tensor::full({3}, c.rank(), DType::f32, Device::cpu());
    c.share(std::vector{one}, std::vector{2 % c.size()});  // the others own nothing
    EXPECT_EQ(one.to_vector<float>(), std::vector<float>(3, float(2 % c.size())));
    expect_error([&] { c.share(tensors, std::vector<int>{0}); }, {"share: 5 tensors of 1 owners"});
    expect_error(
        [&] {
          c.share(tensors, std::vector<int>{0, 1, 2, 3, 0});
        },
        {"share: there is no rank 3 of 3"});
  });
}

TEST_P(Collectives, GatherBroadcastAndExchange) {
  run(4, [](Communicator& c) {
    const int64_t rank = c.rank();
    const Tensor all = Tensor::empty_packed({8}, DType::i64, Device::cpu());
    c.all_gather(Tensor::from(std::vector<int64_t>{rank, 10 + rank}, {2}), all);
    EXPECT_EQ(all.to_vector<int64_t>(), (std::vector<int64_t>{0, 10, 1, 11, 2, 12, 3, 13}));
    for (int root = 0; root < 4; ++root) {
      const Tensor x = Tensor::from(std::vector<int64_t>{rank * 100}, {1});
      c.broadcast(x, root);
      EXPECT_EQ(x.item<int64_t>(), root * 100);
    }
    std::vector<int64_t> given;
    for (int64_t to = 0; to < 4; ++to) given.push_back(rank * 10 + to);
    const Tensor got = Tensor::empty_packed({4}, DType::i64, Device::cpu());
    c.all_to_all(Tensor::from(given, {4}), got);
    EXPECT_EQ(got.to_vector<int64_t>(), (std::vector<int64_t>{rank, 10 + rank, 20 + rank, 30 + rank}));
    EXPECT_EQ(c.largest(rank == 2 ? 77 : -rank), 77);
    const std::vector<std::string> texts = c.gather_texts(std::string(size_t(rank), 'x'));
    EXPECT_EQ(texts, (std::vector<std::string>{"", "x", "xx", "xxx"}));
    c.barrier();
  });
}

TEST_P(Collectives, MessagesBetweenTwo) {
  run(3, [](Communicator& c) {
    const Tensor x = Tensor::full({3}, c.rank(), DType::f32, Device::cpu());
    if (c.rank() == 0) c.send(x, 2), c.send(Tensor::full({3}, 9, DType::f32, Device::cpu()), 2);
    if (c.rank() == 2) {
      c.receive(x, 0);
      EXPECT_EQ(x.to_vector<float>(), (std::vector<float>{0, 0, 0}));
      c.receive(x, 0);
      EXPECT_EQ(x.to_vector<float>(), (std::vector<float>{9, 9, 9}));
    }
    c.barrier();
  });
}

TEST_P(Collectives, PartsOfTheRanks) {
  run(5, [](Communicator& c) {
    // Even and odd ranks, each in reverse order.
    const Communicator part = c.split(c.rank() % 2, -c.rank());
    EXPECT_EQ(part.size(), c.rank() % 2 == 0 ? 3 : 2);
    const Tensor all = Tensor::empty_packed({part.size()}, DType::i64, Device::cpu());
    part.all_gather(Tensor::from(std::vector<int64_t>{c.rank()}, {1}), all);
    EXPECT_EQ(all.to_vector<int64_t>(),
              (c.rank() % 2 == 0 ? std::vector<int64_t>{4, 2, 0} : std::vector<int64_t>{3, 1}));
    const Communicator alone = c.split(c.rank());
    EXPECT_EQ(alone.size(), 1);
    alone.barrier();
    const Communicator inner = part.split(0);
    EXPECT_EQ(inner.largest(c.rank()), c.rank() % 2 == 0 ? 4 : 3);
    c.barrier();
  });
}

/// All ranks throw an error with these parts.
void expect_all(void (*run)(int, const Main&), int size, std::initializer_list<const char*> parts,
                const Main& main) {
  // After the barrier all have connected: before, this error would meet some of them there.
  run(size, [&](Communicator& c) { expect_error([&] { c.barrier(), main(c); }, parts); });
}

TEST_P(Collectives, DifferentCallsAreNamedOnAllRanks) {
  const auto run = GetParam().run;
  const auto floats = [](int64_t count) { return Tensor::zeros({count}, DType::f32, Device::cpu()); };
  expect_all(run, 3, {"the ranks disagree", "all_reduce f32[5] (call 2)", "all_reduce f32[4] (call 2)"},
             [&](Communicator& c) { c.all_reduce(floats(c.rank() == 1 ? 5 : 4)); });
  expect_all(run, 2, {"rank 0 calls all_reduce f32[4]", "rank 1 calls all_reduce f64[4]"},
             [&](Communicator& c) {
               c.all_reduce(Tensor::zeros({4}, c.rank() ? DType::f64 : DType::f32, Device::cpu()));
             });
  expect_all(run, 2, {"rank 0 calls all_reduce f32[4] (call 2)", "rank 1 calls barrier (call 2)"},
             [&](Communicator& c) {
               if (c.rank() == 0) c.all_reduce(floats(4));
               c.barrier();
             });
  expect_all(run, 2, {"broadcast f32[4] from rank 0", "broadcast f32[4] from rank 1"}, [&](Communicator& c) {
    c.broadcast(floats(4), c.rank());
    c.barrier();
  });
  expect_all(run, 2, {"send f32[3] to rank 1", "receive f32[4] from rank 0"}, [&](Communicator& c) {
    c.rank() == 0 ? c.send(floats(3), 1) : c.receive(floats(4), 0);
    c.barrier();
  });
  expect_all(
      run, 2, {"rank 0 calls all_reduce f32[2, 3]", "rank 1 calls all_reduce f32[3, 2]"},
      [&](Communicator& c) {
        c.all_reduce(Tensor::empty_packed(c.rank() ? Shape{3, 2} : Shape{2, 3}, DType::f32, Device::cpu()));
      });
}

TEST_P(Collectives, PartsThatDifferBetweenRanksAreNamed) {
  const auto f32 = [](const Shape& shape) { return Tensor::zeros(shape, DType::f32, Device::cpu()); };
  const auto run = GetParam().run;
  expect_all(run, 2, {"rank 0 calls reduce_parts", "rank 1 calls reduce_parts", "with other ends"},
             [&](Communicator& c) {
               c.reduce_parts(f32({6}), std::vector<int64_t>{c.rank() ? 2 : 3, 6});
             });
  expect_all(run, 2, {"rank 0 calls share", "rank 1 calls share", "with other owners"}, [&](Communicator& c) {
    c.share(std::vector{f32({3}), f32({3})}, std::vector{c.rank(), 1 - c.rank()});
  });
  // Each rank takes the other for the owner of everything.
  expect_all(run, 3, {"calls share", "with other owners"},
             [&](Communicator& c) { c.share(std::vector{f32({3})}, std::vector{(c.rank() + 1) % 3}); });
  expect_all(run, 2, {"rank 0 calls share", "with other owners, shapes"}, [&](Communicator& c) {
    c.share(std::vector{f32(c.rank() ? Shape{2, 3} : Shape{3, 2}), f32({1})}, std::vector{0, 1});
  });
}

TEST_P(Collectives, AnotherCommunicatorIsAnotherCall) {
  expect_all(GetParam().run, 2, {"of another communicator"}, [&](Communicator& c) {
    const Communicator a = c.split(0), b = c.split(0);
    (c.rank() == 0 ? a : b).barrier();
  });
}

TEST_P(Collectives, AnErrorOfOneRankIsTheCauseOnAll) {
  GetParam().run(3, [&](Communicator& c) {
    if (c.rank() == 1) {
      c.barrier();
      return c.fail("the disk is full");
    }
    expect_error([&] { c.barrier(), c.all_reduce(Tensor::zeros({4}, DType::f32, Device::cpu())); },
                 {"rank 1", "failed: the disk is full", "; rank ", " was in "});
    expect_error([&] { c.barrier(); }, {"the disk is full"});
  });
}

TEST_P(Collectives, WrongTensorsAreRefusedBeforeAnythingIsSent) {
  run(2, [](Communicator& c) {
    const auto f32 = [](const Shape& shape) {
      return Tensor::empty_packed(shape, DType::f32, Device::cpu());
    };
    expect_error([&] { c.all_reduce(Tensor()); }, {"all_reduce", "undefined"});
    expect_error([&] { c.all_reduce(f32({4, 6}).slice(1, 0, 3)); }, {"not packed", "packed()"});
    expect_error([&] { c.all_reduce(Tensor::zeros({3}, DType::i64, Device::cpu())); },
                 {"i64[3]", "cannot be summed"});
    expect_error([&] { c.reduce_scatter(f32({5}), f32({2})); }, {"is not 2 times", "for each rank"});
    expect_error([&] { c.all_gather(f32({3}), f32({5})); }, {"all_gather", "is not 2 times"});
    expect_error([&] { c.all_gather(f32({3}), Tensor::zeros({6}, DType::f64, Device::cpu())); }, {"f64[6]"});
    expect_error([&] { c.all_to_all(f32({3}), f32({3})); }, {"2 ranks divide"});
    expect_error([&] { c.broadcast(f32({3}), 2); }, {"no rank 2 of 2"});
    expect_error([&] { c.broadcast(f32({3}), -1); }, {"no rank -1"});
    expect_error([&] { c.send(f32({3}), c.rank()); }, {"cannot send to rank"});
    expect_error([&] { c.receive(f32({3}), 7); }, {"cannot receive from rank 7"});
    const Tensor x = f32({4});
    expect_error([&] { c.all_to_all(x, x); }, {"all_to_all", "overlap"});
    expect_error([&] { c.reduce_scatter(x, x.slice(0, 1, 3)); }, {"reduce_scatter", "overlaps"});
    c.reduce_scatter(x, x.slice(0, 2 * c.rank(), 2 * c.rank() + 2));
    expect_error([&] { c.all_gather(x.slice(0, 1, 3), x); }, {"all_gather", "overlaps"});
    c.all_gather(x.slice(0, 2 * c.rank(), 2 * c.rank() + 2), x);
    Tensor parameter = f32({4});
    require_grad(parameter);
    Tape tape;
    Tensor result = f32({4});
    tape.record("twice", {&parameter}, {&result}, [](Backward&) {});
    expect_error([&] { c.all_reduce(result); }, {"all_reduce", "result of the tape"});
    c.all_reduce(result.detach());
    c.barrier();  // all is well
  });
}

INSTANTIATE_TEST_SUITE_P(Over, Collectives,
                         ::testing::Values(Way{"threads", on_threads}, Way{"tcp", on_processes}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(CommunicatorAlone, CallsCopy) {
  const Communicator c;
  EXPECT_EQ(c.size(), 1);
  const Tensor x = Tensor::from(std::vector<float>{1, 2}, {2}),
               y = Tensor::zeros({2}, DType::f32, Device::cpu());
  c.all_reduce(x);
  c.all_gather(x, y);
  EXPECT_EQ(y.to_vector<float>(), (std::vector<float>{1, 2}));
  c.barrier();
  EXPECT_EQ(c.split(3).largest(5), 5);
}

TEST(CommunicatorThreads, ThrowsWhatTheFirstRankThrew) {
  expect_error(
      [] {
        run_threads(3, [](Communicator& c) {
          if (c.rank() == 2) throw Error("out of luck", __FILE__, __LINE__);
          c.barrier();
        });
      },
      {"out of luck"});
}

TEST(CommunicatorThreads, ARankThatReturnsEarlyIsNamed) {
  for (const int early : {0, 2})
    expect_error(
        [&] {
          run_threads(3, [&](Communicator& c) {
            const Tensor x = Tensor::zeros({4}, DType::f32, Device::cpu());
            c.all_reduce(x);
            if (c.rank() != early) c.all_reduce(x);
          });
        },
        {("rank " + std::to_string(early) + " failed: it left before all_reduce f32[4] (call 2)").c_str()});
}

TEST(CommunicatorThreads, ThrowsWhatIsNoException) {
  const auto main = [](Communicator& c) {
    if (c.rank() == 1) throw 5;
    c.barrier();
  };
  EXPECT_THROW(run_threads(2, main), int);
}

TEST(CommunicatorThreads, AFailureLeavesMessagesThatAreBeingCopiedAlone) {
  // A rank that leaves its call frees what others still copy from; many times, since that needs the moment.
  for (int round = 0; round < 40; ++round)
    expect_error(
        [] {
          run_threads(4, [](Communicator& c) {
            const Tensor x = Tensor::zeros({1 << 20}, DType::f32, Device::cpu());
            c.all_reduce(x);
            if (c.rank() == 2) throw Error("out of luck", __FILE__, __LINE__);
            c.all_reduce(x), c.all_reduce(x);
          });
        },
        {"out of luck"});
}

TEST(CommunicatorDry, CountsCallsAndBytes) {
  const DryRun dry(1, 4);
  const Communicator& c = dry.communicator();
  const Tensor x = Tensor::full({8}, 2, DType::f32, Device::cpu()),
               wide = Tensor::zeros({32}, DType::f32, Device::cpu());
  c.all_reduce(x);
  c.all_reduce(x);
  c.all_gather(x, wide);
  c.reduce_scatter(wide, x);
  c.broadcast(x, 0), c.broadcast(x, 1);
  c.barrier();
  const auto counts = dry.counts();
  EXPECT_EQ(counts.at("all_reduce").calls, 2);
  EXPECT_EQ(counts.at("all_reduce").bytes, 2 * 2 * 3 * 32 / 4);
  EXPECT_EQ(counts.at("all_gather").bytes, 3 * 32);
  EXPECT_EQ(counts.at("reduce_scatter").bytes, 3 * 128 / 4);
  EXPECT_EQ(counts.at("broadcast").calls, 2);
  EXPECT_EQ(counts.at("broadcast").bytes, 3 * 32) << "only the root sends";
  EXPECT_EQ(counts.at("barrier").bytes, 0);
  EXPECT_EQ(x.to_vector<float>(), std::vector<float>(8, 2)) << "this rank's own part";
  expect_error([&] { DryRun(4, 4); }, {"rank 4 of 4"});
}

TEST(CommunicatorDry, SplitsIntoOneGroupOfAllRanks) {
  const DryRun dry(1, 4);
  const Communicator part = dry.communicator().split(7, 0);
  EXPECT_EQ(part.size(), 4);
  EXPECT_EQ(part.rank(), 1);
  part.all_reduce(Tensor::zeros({8}, DType::f32, Device::cpu()));
  EXPECT_EQ(dry.counts().at("all_reduce").calls, 1);
}

}  // namespace
}  // namespace tessera::comm
