#include "datasets/glue_synthetic.h"

#include <algorithm>
#include <filesystem>
#include <vector>

#include "io/file.h"
#include "runtime/error.h"
#include "runtime/philox.h"
#include "runtime/text.h"

namespace tessera::datasets {
namespace {

constexpr uint64_t kGlueDomain = 0x676c756573796e01;  // "gluesyn"
constexpr uint32_t kNoise = 32;                       // one label in so many is wrong

/// Random numbers of one example: a pure function of (seed, task and part, index).
class Draw {
 public:
  Draw(uint64_t seed, uint64_t stream, uint64_t index)
      : seed_(seed ^ kGlueDomain), stream_(stream), index_(index) {}
  uint32_t below(uint32_t n) {
    const Uint4 random = philox(seed_, stream_, index_ << 16 | count_++);
    return uint32_t((uint64_t{random.word[0]} * n) >> 32);
  }
  bool chance(uint32_t percent) { return below(100) < percent; }
  template <class List>
  auto& of(const List& list) {
    return list[below(uint32_t(std::size(list)))];
  }

 private:
  uint64_t seed_, stream_, index_, count_ = 0;
};

struct Noun {
  const char *one, *many, *kind;
};
constexpr Noun kPeople[] = {{"doctor", "doctors", "person"},   {"teacher", "teachers", "person"},
                            {"farmer", "farmers", "person"},   {"sailor", "sailors", "person"},
                            {"painter", "painters", "person"}, {"dog", "dogs", "animal"},
                            {"horse", "horses", "animal"},     {"cat", "cats", "animal"}};
constexpr Noun kThings[] = {{"hammer", "hammers", "tool"},       {"saw", "saws", "tool"},
                            {"violin", "violins", "instrument"}, {"flute", "flutes", "instrument"},
                            {"apple", "apples", "fruit"},        {"pear", "pears", "fruit"},
                            {"boat", "boats", "vehicle"},        {"bicycle", "bicycles", "vehicle"}};
struct Verb {
  const char *past, *again, *base, *again_base;  // two of one meaning
};
constexpr Verb kVerbs[] = {
    {"found", "discovered", "find", "discover"}, {"bought", "purchased", "buy", "purchase"},
    {"fixed", "repaired", "fix", "repair"},      {"hid", "concealed", "hide", "conceal"},
    {"lost", "mislaid", "lose", "mislay"},       {"moved", "shifted", "move", "shift"}};
struct Adjective {
  const char *word, *again, *opposite;
};
constexpr Adjective kAdjectives[] = {{"big", "large", "small"},
                                     {"old", "ancient", "new"},
                                     {"quick", "fast", "slow"},
                                     {"quiet", "silent", "loud"}};
constexpr const char* kPlaces[] = {"garden", "harbour", "kitchen", "market", "school", "forest"};
constexpr const char* kTimes[] = {"at night", "on monday", "in winter", "before lunch"};
constexpr const char* kGood[] = {"funny", "moving", "clever", "charming", "gripping", "fresh"};
constexpr const char* kBad[] = {"dull", "clumsy", "boring", "empty", "noisy", "stale"};
constexpr const char* kParts[] = {"plot", "acting", "music", "ending", "dialogue"};

/// Who did what to what, where.
struct Scene {
  Noun who, what;
  Verb verb;
  Adjective how;
  const char* place;
};

Scene scene(Draw& draw) {
  return {draw.of(kPeople), draw.of(kThings), draw.of(kVerbs), draw.of(kAdjectives), draw.of(kPlaces)};
}

/// Another element of the list.
template <class List, class Same>
auto other(Draw& draw, const List& list, Same&& same) {
  for (;;) {
    const auto& candidate = draw.of(list);
    if (!same(candidate)) return candidate;
  }
}

Noun other_noun(Draw& draw, std::span<const Noun> list, const Noun& than) {
  return other(draw, list, [&](const Noun& noun) { return noun.one == than.one; });
}
Verb other_verb(Draw& draw, const Verb& than) {
  return other(draw, kVerbs, [&](const Verb& verb) { return verb.past == than.past; });
}
Adjective other_adjective(Draw& draw, const Adjective& than) {
  return other(draw, kAdjectives, [&](const Adjective& a) { return a.word == than.word; });
}
const char* other_place(Draw& draw, const char* than) {
  return other(draw, kPlaces, [&](const char* place) { return place == than; });
}

template <class... Parts>
std::string text(const Parts&... parts) {
  std::string whole;
  ((whole += whole.empty() ? "" : " ", whole += parts), ...);
  return whole;
}

std::string active(const Scene& s, bool again = false) {
  return text("the", again ? s.how.again : s.how.word, s.who.one, again ? s.verb.again : s.verb.past, "the",
              s.what.one, "in the", s.place);
}
std::string passive(const Scene& s, bool again = false) {
  const char* const done = again ? s.verb.again : s.verb.past;
  return text("the", s.what.one, "was", std::string_view(done) == "hid" ? "hidden" : done, "by the",
              again ? s.how.again : s.how.word, s.who.one, "in the", s.place);
}
std::string either(Draw& draw, const Scene& s) {
  const bool again = draw.chance(50);
  return draw.chance(50) ? passive(s, again) : active(s, again);
}

/// One part of a scene changed, so that the sentences say different things.
Scene changed(Draw& draw, Scene s) {
  const uint32_t part = draw.below(4);
  if (part == 0) s.who = other_noun(draw, kPeople, s.who);
  if (part == 1) s.what = other_noun(draw, kThings, s.what);
  if (part == 2) s.verb = other_verb(draw, s.verb);
  if (part == 3) s.how = other_adjective(draw, s.how);
  return s;
}

struct Example {
  std::string first, second;
  int label = 0;
  double score = 0;
};

Example cola(Draw& draw) {
  const Noun noun = draw.of(kPeople);
  const bool many = draw.chance(50);
  const bool far = draw.chance(60);  // another noun stands between, in the other number as often
  const bool other_many = draw.chance(50);
  const Noun thing = draw.of(kThings);
  const std::string alone = text("the", many ? noun.many : noun.one);
  const std::string subject = far ? text(alone, "near the", other_many ? thing.many : thing.one) : alone;
  const char *is = many ? "are" : "is", *wrong = many ? "is" : "are";
  const std::string adjective = draw.of(kAdjectives).word, place = draw.of(kPlaces);
  if (draw.chance(60)) return {text(subject, is, adjective, "in the", place), "", 1};
  switch (draw.below(3)) {
    case 0:
      return {text(subject, wrong, adjective, "in the", place), "", 0};
    case 1:
      return {text(subject, is, adjective, "the in", place), "", 0};
    default:
      return {text(subject, adjective, is, "in the", place), "", 0};
  }
}

Example sst2(Draw& draw) {
  const auto judged = [&](bool good) {  // by the adjective, or by the opposite one and a "not"
    const bool negated = draw.chance(40);
    return text(negated ? "is not" : "is", good != negated ? draw.of(kGood) : draw.of(kBad));
  };
  const bool good = draw.chance(50);
  const char *one = draw.of(kParts), *two = draw.of(kParts);
  switch (draw.below(3)) {
    case 0:
      return {text("the", one, judged(good)), "", good};
    case 1:
      return {text("although the", one, judged(!good), ", the", two, judged(good)), "", good};
    default:
      return {text("the", one, judged(good), "although the", two, judged(!good)), "", good};
  }
}

Example mrpc(Draw& draw) {
  const Scene s = scene(draw);
  const bool same = draw.chance(60);
  return {active(s), either(draw, same ? s : changed(draw, s)), same};
}

Example stsb(Draw& draw) {
  const Scene a = scene(draw);
  Scene b = a;
  int shared = 5;
  if (draw.chance(40)) b.who = other_noun(draw, kPeople, a.who), --shared;
  if (draw.chance(40)) b.what = other_noun(draw, kThings, a.what), --shared;
  if (draw.chance(40)) b.verb = other_verb(draw, a.verb), --shared;
  if (draw.chance(40)) b.how = other_adjective(draw, a.how), --shared;
  if (draw.chance(40)) b.place = other_place(draw, a.place), --shared;
  Example example{active(a), either(draw, b)};
  example.score = std::clamp(shared + (int(draw.below(5)) - 2) * 0.1, 0.0, 5.0);
  return example;
}

Example qqp(Draw& draw) {
  const Verb verb = draw.of(kVerbs);
  const Noun thing = draw.of(kThings);
  const char* const place = draw.of(kPlaces);
  const bool same = draw.chance(40);
  const bool other_thing = draw.chance(50);
  const Noun asked = same || !other_thing ? thing : other_noun(draw, kThings, thing);
  const Verb meant = same || other_thing ? verb : other_verb(draw, verb);
  return {text("how do i", verb.base, "a", thing.one, "in the", place, "?"),
          text("what is the best way to", draw.chance(50) ? meant.base : meant.again_base, "a", asked.one,
               "in the", place, "?"),
          same};
}

/// `mismatched`: with the passive voice and synonyms, which the other genre has not.
Example mnli(Draw& draw, bool mismatched) {
  const Scene s = scene(draw);
  const std::string premise = mismatched ? passive(s, true) : active(s);
  switch (draw.below(3)) {
    case 0: {  // follows: less is said, or a hypernym
      const bool general = draw.chance(50);
      return {premise,
              general ? text("the", s.who.kind, s.verb.past, "a", s.what.kind)
                      : text("the", s.who.one, s.verb.past, "the", s.what.one),
              0};
    }
    case 1: {  // cannot be told: more is said
      return {premise,
              draw.chance(50)
                  ? text("the", s.who.one, s.verb.past, "the", s.what.one, draw.of(kTimes))
                  : text("the", s.who.one, s.verb.past, "the", other_adjective(draw, s.how).word, s.what.one),
              1};
    }
    default: {  // contradicts
      const uint32_t how = draw.below(3);
      if (how == 0)
        return {premise, text("the", s.how.opposite, s.who.one, s.verb.past, "the", s.what.one), 2};
      if (how == 1) return {premise, text("the", s.who.one, "never", s.verb.past, "the", s.what.one), 2};
      return {premise, text("nobody", s.verb.past, "the", s.what.one, "in the", s.place), 2};
    }
  }
}

Example qnli(Draw& draw) {
  const Scene s = scene(draw);
  const uint32_t asked = draw.below(3);
  const std::string question =
      asked == 0   ? text("who", s.verb.past, "the", s.what.one, "?")
      : asked == 1 ? text("what did the", s.who.one, s.verb.base, "?")
                   : text("where was the", s.what.one, "that the", s.who.one, s.verb.past, "?");
  if (draw.chance(50)) return {question, either(draw, s), 0};
  // As many words in common, but not the answer.
  Scene far = s;
  if (asked == 0)
    far.verb = other_verb(draw, s.verb);
  else if (asked == 1)
    far.who = other_noun(draw, kPeople, s.who);
  else if (draw.chance(50))
    return {question, text("the", s.how.word, s.who.one, s.verb.past, "the", s.what.one, draw.of(kTimes)), 1};
  else
    far.what = other_noun(draw, kThings, s.what);
  return {question, either(draw, far), 1};
}

Example rte(Draw& draw) {
  const Scene s = scene(draw);
  const std::string text_of =
      text(either(draw, s), "and the", other_noun(draw, kPeople, s.who).one, "saw it");
  if (draw.chance(50))
    return {text_of,
            draw.chance(50) ? text("a", s.who.kind, s.verb.again, "a", s.what.one)
                            : text("the", s.what.one, "was in the", s.place),
            0};
  switch (draw.below(3)) {
    case 0:
      return {text_of, text("a", s.who.kind, other_verb(draw, s.verb).past, "a", s.what.one), 1};
    case 1:
      return {text_of, text("the", s.what.one, "was in the", other_place(draw, s.place)), 1};
    default:
      return {text_of, text("a", s.who.kind, s.verb.again, "a", other_noun(draw, kThings, s.what).one), 1};
  }
}

Example wnli(Draw& draw) {
  const Noun inner = draw.of(kThings), outer = other_noun(draw, kThings, inner);
  const bool negated = draw.chance(50), big = draw.chance(50);
  // "does not fit because it is too big": the inner one; "... too small": the outer one. "fits": the reverse.
  const bool is_inner = negated == big;
  const std::string premise = text("the", inner.one, negated ? "does not fit" : "fits", "in the", outer.one,
                                   "because it is", negated ? "too" : "so", big ? "big" : "small", ".");
  const bool right = draw.chance(50);
  const Noun named = right == is_inner ? inner : outer;
  return {premise, text("the", named.one, "is", negated ? "too" : "so", big ? "big" : "small", "."), right};
}

Example example_of(GlueTask task, Draw& draw, bool mismatched) {
  switch (task) {
    case GlueTask::cola:
      return cola(draw);
    case GlueTask::sst2:
      return sst2(draw);
    case GlueTask::mrpc:
      return mrpc(draw);
    case GlueTask::stsb:
      return stsb(draw);
    case GlueTask::qqp:
      return qqp(draw);
    case GlueTask::mnli:
      return mnli(draw, mismatched);
    case GlueTask::qnli:
      return qnli(draw);
    case GlueTask::rte:
      return rte(draw);
    case GlueTask::wnli:
      return wnli(draw);
  }
  return {};
}

std::string fields_of(std::initializer_list<std::string> fields) {
  std::string line;
  for (const std::string& field : fields)
    line += (line.empty() && &field == fields.begin() ? "" : "\t") + field;
  return line + "\n";
}

std::string header(GlueTask task, bool test) {
  switch (task) {
    case GlueTask::cola:
      return test ? "index\tsentence\n" : "";
    case GlueTask::sst2:
      return test ? "index\tsentence\n" : "sentence\tlabel\n";
    case GlueTask::mrpc:
      return std::string(test ? "index" : "Quality") + "\t#1 ID\t#2 ID\t#1 String\t#2 String\n";
    case GlueTask::stsb:
      return std::string("index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2") +
             (test ? "\n" : "\tscore\n");
    case GlueTask::qqp:
      return test ? "id\tquestion1\tquestion2\n" : "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n";
    case GlueTask::mnli:
      return std::string(
                 "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\t"
                 "sentence1_parse\tsentence2_parse\tsentence1\tsentence2") +
             (test ? "\n" : "\tlabel1\tgold_label\n");
    case GlueTask::qnli:
      return test ? "index\tquestion\tsentence\n" : "index\tquestion\tsentence\tlabel\n";
    case GlueTask::rte:
    case GlueTask::wnli:
      return test ? "index\tsentence1\tsentence2\n" : "index\tsentence1\tsentence2\tlabel\n";
  }
  return "";
}

std::string line_of(GlueTask task, const Example& e, int64_t index, bool test) {
  const GlueInfo& info = glue_info(task);
  const std::string number = std::to_string(index), label = std::to_string(e.label);
  const std::string score = decimals(e.score, 3);
  const std::string name = info.labels.empty() ? score : info.labels[size_t(e.label)];
  switch (task) {
    case GlueTask::cola:
      return test ? fields_of({number, e.first}) : fields_of({"syn", label, e.label ? "" : "*", e.first});
    case GlueTask::sst2:
      return test ? fields_of({number, e.first}) : fields_of({e.first, label});
    case GlueTask::mrpc:
      return fields_of({test ? number : label, "1" + number, "2" + number, e.first, e.second});
    case GlueTask::stsb: {
      const std::string row = fields_of(
          {number, "main-captions", "synthetic", "2024", number, "none", "none", e.first, e.second});
      return test ? row : row.substr(0, row.size() - 1) + "\t" + score + "\n";
    }
    case GlueTask::qqp:
      return test ? fields_of({number, e.first, e.second})
                  : fields_of({number, "1" + number, "2" + number, e.first, e.second, label});
    case GlueTask::mnli: {
      const std::string row =
          fields_of({number, number, number + "n", "synthetic", "", "", "", "", e.first, e.second});
      return test ? row : row.substr(0, row.size() - 1) + "\t" + name + "\t" + name + "\n";
    }
    case GlueTask::wnli:
      return test ? fields_of({number, e.first, e.second}) : fields_of({number, e.first, e.second, label});
    case GlueTask::qnli:
    case GlueTask::rte:
      return test ? fields_of({number, e.first, e.second}) : fields_of({number, e.first, e.second, name});
  }
  return "";
}

}  // namespace

void write_synthetic_glue(GlueTask task, const std::string& folder, const SyntheticGlueOptions& options) {
  check(options.train >= 1 && options.dev >= 1 && options.test >= 1, "glue: ", options.train,
        " examples to train, ", options.dev, " to develop and ", options.test,
        " to test; expected at least 1 of each");
  const GlueInfo& info = glue_info(task);
  const std::string place = (std::filesystem::path(folder) / info.folder).string();
  struct Part {
    std::string name;
    int64_t count;
    bool test = false, mismatched = false;
  };
  std::vector<Part> parts = {{"train", options.train}};
  if (task == GlueTask::mnli)
    parts.insert(parts.end(), {{"dev_matched", options.dev},
                               {"dev_mismatched", options.dev, false, true},
                               {"test_matched", options.test, true},
                               {"test_mismatched", options.test, true, true}});
  else
    parts.insert(parts.end(), {{"dev", options.dev}, {"test", options.test, true}});
  std::vector<std::pair<std::string, std::string>> files;
  for (size_t p = 0; p < parts.size(); ++p) {
    const Part& part = parts[p];
    std::string content = header(task, part.test);
    for (int64_t i = 0; i < part.count; ++i) {
      Draw draw(options.seed, uint64_t(task) << 8 | p, uint64_t(i));
      Example example = example_of(task, draw, part.mismatched);
      const auto classes = uint32_t(info.labels.size());
      if (classes > 0 && draw.below(kNoise) == 0)
        example.label = int((uint32_t(example.label) + 1 + draw.below(classes - 1)) % classes);
      content += line_of(task, example, i, part.test);
    }
    files.emplace_back((std::filesystem::path(place) / (part.name + ".tsv")).string(), std::move(content));
  }
  std::error_code ignored;
  for (const auto& [path, content] : files)  // the benchmark's own files are named so too
    check(!std::filesystem::exists(path, ignored) ||
              (std::filesystem::file_size(path, ignored) == content.size() &&
               io::read_file(path, content.size()) == content),
          "glue: ", path, " is there already and holds something else; name another folder or remove it");
  io::AtomicFolder folder_of_task(place, io::AtomicFolder::Existing::merge);
  for (const auto& [path, content] : files)
    io::write_file(folder_of_task.path() + "/" + std::filesystem::path(path).filename().string(), content);
  folder_of_task.publish();
}

}  // namespace tessera::datasets
