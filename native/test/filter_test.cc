#include "engine/filter.h"

#include <gtest/gtest.h>

#include <functional>
#include <random>
#include <string>
#include <vector>

namespace sv {
namespace {

std::shared_ptr<const Filter> include(const std::string& pattern) { return Filter::compile({pattern}, {}); }
bool hits(const std::string& pattern, const std::string& path, bool directory = false) {
  return include(pattern)->match(path, directory) == Verdict::kPart;
}

struct Row {
  const char* pattern;
  const char* path;
  bool expected;
};

TEST(FilterPatterns, Table) {
  const Row rows[] = {
      {"a", "a", true},
      {"a", "ab", false},
      {"a", "x/a", false},
      {"a", "a/b/c", true},  // a directory covers all below it (D1)
      {"a/b", "a/b/c", true},
      {"a/b", "a/c", false},
      {"*", "anything", true},
      {"*", "any/thing", true},
      {"*.txt", "x.txt", true},
      {"*.txt", ".txt", true},
      {"*.txt", "x.txtx", false},
      {"*.txt", "d/x.txt", false},
      {"a*b*c", "aXbYc", true},
      {"a*b*c", "abc", true},
      {"a*b*c", "acb", false},
      {"a*b*c", "abXbc", true},
      {"?", "a", true},
      {"?", "ab", false},
      {"?", "\xc3\xa9", false},  // bytes, not characters
      {"??", "\xc3\xa9", true},
      {"[abc]x", "bx", true},
      {"[abc]x", "dx", false},
      {"[a-c]x", "bx", true},
      {"[!a-c]x", "bx", false},
      {"[!a-c]x", "dx", true},
      {"[^a]x", "ax", false},
      {"[^a]x", "bx", true},
      {"[]a]", "]", true},
      {"[!]a]", "]", false},
      {"[a-]", "-", true},
      {"[-a]", "-", true},
      {"[\\]]", "]", true},
      {"[a\\-c]", "b", false},
      {"[a\\-c]", "-", true},
      {"[\x80-\xff]", "\xfe", true},
      {"world/region/*.mca", "world/region/r.0.mca", true},  // D2
      {"world/region/*.mca", "world/region/x/r.mca", false},
      {"**/x", "x", true},  // D3
      {"**/x", "a/x", true},
      {"**/x", "a/b/x", true},
      {"**/x", "a/b/xy", false},
      {"**/cache/**", "cache/f", true},
      {"**/cache/**", "a/b/cache/c/f", true},
      {"**/cache/**", "a/cached/f", false},
      {"a/**/b", "a/b", true},
      {"a/**/b", "a/x/y/b", true},
      {"a/**/b", "a/x/y/c", false},
      {"a/**", "a/b", true},
      {"a/**", "a/b/c", true},
      {"a/**", "a", false},  // a file named a is not below a
      {"**", "a", true},
      {"**", "a/b", true},
      {"**/**/x", "a/x", true},
      {"a**b", "axxb", true},  // two stars inside a segment are one
      {"a**b", "a/b", false},
      {"{a,b}", "b", true},
      {"{a,b}", "c", false},
      {"{a}", "a", true},
      {"x{,y}", "x", true},
      {"x{,y}", "xy", true},
      {"{a,b{c,d}}e", "bde", true},
      {"{a,b{c,d}}e", "be", false},
      {"{a/b,c}/d", "a/b/d", true},
      {"{a/b,c}/d", "c/d", true},
      {"{a/b,c}/d", "a/d", false},
      {"a/{,b/}c", "a/c", true},
      {"a/{,b/}c", "a/b/c", true},
      {"{**/,}x", "q/x", true},
      {"\\*", "*", true},
      {"\\*", "a", false},
      {"\\{x\\}", "{x}", true},
      {"a\\[1\\].txt", "a[1].txt", true},  // D6
      {"a\\[1\\].txt", "a1.txt", false},
      {"[{]", "{", true},
      {"[,]{a,b}", ",b", true},
      {"...", "...", true},
      {"a]", "a]", true},
      {"a,b", "a,b", true},  // D6 of the earlier faults: commas are ordinary
  };
  for (const Row& row : rows) EXPECT_EQ(hits(row.pattern, row.path), row.expected) << row.pattern << " on " << row.path;
}

TEST(FilterPatterns, ATrailingSlashNamesDirectoriesOnly) {
  EXPECT_FALSE(hits("logs/", "logs", false));
  EXPECT_TRUE(hits("logs/", "logs", true));
  EXPECT_TRUE(hits("logs/", "logs/a", false));
  EXPECT_FALSE(hits("*/", "f", false));
}

TEST(FilterVerdicts, NoIncludeIsEverythingAndExcludeBeatsInclude) {
  const auto all = Filter::compile({}, {});
  EXPECT_TRUE(all->everything());
  EXPECT_EQ(all->match("a/b", false), Verdict::kPart);
  EXPECT_EQ(all->match("", true), Verdict::kPart);
  const auto some = Filter::compile({"save"}, {"save/cache", "*.tmp"});
  EXPECT_EQ(some->match("save/x", false), Verdict::kPart);
  EXPECT_EQ(some->match("save/cache", true), Verdict::kNone);
  EXPECT_EQ(some->match("save/cache/x", false), Verdict::kNone);
  EXPECT_EQ(some->match("save/x.tmp", false), Verdict::kPart);  // the pattern names the root's children
  EXPECT_EQ(some->match("x.tmp", false), Verdict::kNone);
}

TEST(FilterVerdicts, DirectoriesOnTheWayAreKept) {
  const auto filter = Filter::compile({"a/b/*.dat", "c/**/d"}, {"c/x", "e/**"});
  EXPECT_EQ(filter->match("", true), Verdict::kWay);
  EXPECT_EQ(filter->match("a", true), Verdict::kWay);
  EXPECT_EQ(filter->match("a", false), Verdict::kNone);
  EXPECT_EQ(filter->match("a/b", true), Verdict::kWay);
  EXPECT_EQ(filter->match("a/b/c", true), Verdict::kNone);
  EXPECT_EQ(filter->match("a/b/c.dat", true), Verdict::kPart);
  EXPECT_EQ(filter->match("a/c", true), Verdict::kNone);
  EXPECT_EQ(filter->match("c/anything", true), Verdict::kWay);
  EXPECT_EQ(filter->match("c/x", true), Verdict::kNone);
  EXPECT_EQ(filter->match("b", true), Verdict::kNone);
}

TEST(FilterVerdicts, WhatCannotHoldAnythingIsNotReached) {
  const auto filter = Filter::compile({}, {"cache/**", "logs/*", "deep/**/*", "half/x"});
  EXPECT_EQ(filter->match("cache", true), Verdict::kPart);
  EXPECT_FALSE(filter->reaches("cache"));
  EXPECT_FALSE(filter->reaches("logs"));
  EXPECT_FALSE(filter->reaches("deep"));
  EXPECT_TRUE(filter->reaches("half"));
  EXPECT_TRUE(filter->reaches(""));
  EXPECT_FALSE(filter->reaches("cache/below"));
  const auto narrow = Filter::compile({"a/b"}, {"a/**"});
  EXPECT_EQ(narrow->match("a", true), Verdict::kNone);
  EXPECT_FALSE(Filter::compile({"x/*.a"}, {})->reaches("x/sub"));
  EXPECT_TRUE(Filter::compile({"x/*.a"}, {})->reaches("x/sub.a"));
}

TEST(FilterErrors, BadPatternsAreNamedWithAReason) {
  const std::pair<std::string, const char*> rows[] = {
      {"", "empty"},
      {"/a", "relative"},
      {"a//b", "empty segment"},
      {"..", "'..'"},
      {"a/../b", "'..'"},
      {"./a", "'..'"},
      {"\\.\\.", "'..'"},
      {"{..,a}/b", "'..'"},
      {"[a", "']'"},
      {"a[]", "']'"},
      {"a[\\]", "']'"},
      {"[a/b]", "'/'"},
      {"[\\/]", "'/'"},
      {"[z-a]", "backwards"},
      {"[[:alpha:]]", "not supported"},
      {"{a", "'}'"},
      {"{a,{b}", "'}'"},
      {"a}", "'{'"},
      {"{,a}", "empty pattern"},
      {"a\\", "backslash"},
      {"a\\/b", "escaped"},
      {std::string("a\0b", 3), "NUL"},
      {std::string(1025, 'a'), "longer"},
      {"{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}", "too many"},
  };
  for (const auto& [pattern, reason] : rows) {
    try {
      (void)include(pattern);
      ADD_FAILURE() << pattern << " was accepted";
    } catch (const PatternError& error) {
      EXPECT_EQ(error.code, "PATTERN_INVALID");
      EXPECT_NE(error.reason.find(reason), std::string::npos) << pattern << ": " << error.reason;
      if (pattern.size() <= 1024) {
        EXPECT_EQ(error.pattern, pattern);
      }
    }
  }
  EXPECT_THROW(Filter::compile(std::vector<std::string>(600, "a"), std::vector<std::string>(401, "b")), PatternError);
  EXPECT_NO_THROW(Filter::compile(std::vector<std::string>(600, "a"), std::vector<std::string>(400, "b")));
}

TEST(FilterCost, NoPatternTakesExponentialTime) {
  std::string stars;
  for (int i = 0; i < 250; ++i) stars += "*a";
  stars += "b";
  EXPECT_FALSE(hits(stars, std::string(255, 'a')));
  std::string deep;
  for (int i = 0; i < 100; ++i) deep += "**/*a*/";
  deep += "b";
  std::string path;
  for (int i = 0; i < 200; ++i) path += "aaa/";
  path += "c";
  EXPECT_FALSE(hits(deep, path));
}

// ---- a second, slow matcher that shares nothing with the first ----

std::vector<std::string> slowExpand(const std::string& text) {
  const std::size_t open = text.find('{');
  if (open == std::string::npos) return {text};
  std::size_t depth = 0;
  std::vector<std::string> choices(1);
  std::size_t i = open;
  for (;; ++i) {
    if (text[i] == '{' && depth++ == 0) continue;
    if (text[i] == '}' && --depth == 0) break;
    if (text[i] == ',' && depth == 1) {
      choices.emplace_back();
    } else {
      choices.back() += text[i];
    }
  }
  std::vector<std::string> out;
  for (const std::string& choice : choices) {
    for (std::string& each : slowExpand(text.substr(0, open) + choice + text.substr(i + 1))) out.push_back(std::move(each));
  }
  return out;
}

std::vector<std::string> split(const std::string& path) {
  std::vector<std::string> out(1);
  for (const char c : path) {
    if (c == '/') {
      out.emplace_back();
    } else {
      out.back() += c;
    }
  }
  return out;
}

bool slowSegment(const std::string& pattern, std::size_t p, const std::string& name, std::size_t n) {
  if (p == pattern.size()) return n == name.size();
  if (pattern[p] == '*') {
    return slowSegment(pattern, p + 1, name, n) || (n < name.size() && slowSegment(pattern, p, name, n + 1));
  }
  if (n == name.size()) return false;
  if (pattern[p] == '[') {
    const std::size_t end = pattern.find(']', p);
    const bool negated = pattern[p + 1] == '!';
    const bool in = pattern.substr(p, end - p).find(name[n]) != std::string::npos;
    return in != negated && slowSegment(pattern, end + 1, name, n + 1);
  }
  return (pattern[p] == '?' || pattern[p] == name[n]) && slowSegment(pattern, p + 1, name, n + 1);
}

bool slowPath(const std::vector<std::string>& pattern, std::size_t p, const std::vector<std::string>& path, std::size_t n) {
  if (p == pattern.size()) return true;  // at or above the path: covers it
  if (n == path.size()) return false;
  if (pattern[p] == "**") {
    if (p + 1 == pattern.size()) return true;
    return slowPath(pattern, p + 1, path, n) || slowPath(pattern, p, path, n + 1);
  }
  return slowSegment(pattern[p], 0, path[n], 0) && slowPath(pattern, p + 1, path, n + 1);
}

bool slowMatch(const std::vector<std::string>& patterns, const std::string& path) {
  for (const std::string& pattern : patterns) {
    for (const std::string& each : slowExpand(pattern)) {
      if (slowPath(split(each), 0, split(path), 0)) return true;
    }
  }
  return false;
}

TEST(FilterRandom, AgreesWithTheSlowMatcherAndReachesAllThatIsIncluded) {
  std::mt19937 random(7);
  const auto pick = [&](unsigned n) { return static_cast<unsigned>(random() % n); };
  const std::function<std::string(int)> piece = [&](int depth) -> std::string {
    switch (pick(depth > 0 ? 12U : 10U)) {
      case 0:
      case 1:
        return "*";
      case 2:
        return "?";
      case 3:
        return "[ab]";
      case 4:
        return "[!a]";
      case 10:
      case 11: {
        std::string out = "{";
        const unsigned count = 1 + pick(3);
        for (unsigned i = 0; i < count; ++i) {
          out += i == 0 ? "" : ",";
          const unsigned length = 1 + pick(2);
          for (unsigned k = 0; k < length; ++k) out += piece(depth - 1);
          if (pick(6) == 0) out += "/" + piece(0);
        }
        return out + "}";
      }
      default:
        return std::string(1, static_cast<char>('a' + pick(3)));
    }
  };
  const auto pattern = [&] {
    std::string out;
    const unsigned segments = 1 + pick(3);
    for (unsigned i = 0; i < segments; ++i) {
      if (i > 0) out += '/';
      if (pick(4) == 0) {
        out += "**";
        continue;
      }
      const unsigned length = 1 + pick(2);
      for (unsigned k = 0; k < length; ++k) out += piece(2);
    }
    return out;
  };
  std::vector<std::string> universe;
  const std::vector<std::string> names{"a", "b", "c", "ab", "ba"};
  for (const std::string& one : names) {
    universe.push_back(one);
    for (const std::string& two : names) {
      universe.push_back(one + "/" + two);
      for (const std::string& three : names) {
        universe.push_back(one + "/" + two + "/" + three);
        universe.push_back(one + "/" + two + "/" + three + "/b");
      }
    }
  }
  for (int round = 0; round < 400; ++round) {
    std::vector<std::string> includes(pick(3));
    std::vector<std::string> excludes(pick(3));
    for (std::string& each : includes) each = pattern();
    for (std::string& each : excludes) each = pattern();
    const auto filter = Filter::compile(includes, excludes);
    std::string shown;
    for (const std::string& each : includes) shown += " +" + each;
    for (const std::string& each : excludes) shown += " -" + each;
    std::vector<std::string> kept;
    for (const std::string& path : universe) {
      const bool excluded = slowMatch(excludes, path);
      const bool expected = !excluded && (includes.empty() || slowMatch(includes, path));
      ASSERT_EQ(filter->match(path, false) == Verdict::kPart, expected) << path << shown;
      ASSERT_EQ(filter->match(path, true) == Verdict::kPart, expected) << path << shown;
      if (expected) kept.push_back(path);
    }
    for (const std::string& path : kept) {
      for (std::size_t slash = path.find('/'); slash != std::string::npos; slash = path.find('/', slash + 1)) {
        const std::string directory = path.substr(0, slash);
        ASSERT_TRUE(filter->reaches(directory)) << directory << " for " << path << shown;
        ASSERT_NE(filter->match(directory, true), Verdict::kNone) << directory << " for " << path << shown;
      }
      ASSERT_TRUE(filter->reaches("")) << shown;
    }
    // Excluded directories are never reached.
    for (const std::string& path : universe) {
      if (slowMatch(excludes, path)) {
        ASSERT_FALSE(filter->reaches(path)) << path << shown;
      }
    }
  }
}

}  // namespace
}  // namespace sv
