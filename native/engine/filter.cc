#include "engine/filter.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace sv {
namespace {

// Offset behind the `[...]` that starts at `at`. Throws when it is not closed.
std::size_t skipSet(std::string_view whole, std::string_view text, std::size_t at) {
  std::size_t i = at + 1;
  if (i < text.size() && (text[i] == '!' || text[i] == '^')) ++i;
  if (i < text.size() && text[i] == ']') ++i;  // first in the set: itself
  for (; i < text.size(); ++i) {
    if (text[i] == ']') return i + 1;
    if (text[i] == '\\' && i + 1 < text.size()) ++i;
    if (text[i] == '/') {
      throw PatternError(whole, "'/' between '[' and ']'");
    }
  }
  throw PatternError(whole, "'[' without ']'");
}

// Offset behind what stands at `at`: an escaped byte, a set or one byte.
std::size_t skipOne(std::string_view whole, std::string_view text, std::size_t at) {
  if (text[at] == '[') return skipSet(whole, text, at);
  if (text[at] == '\\') {
    if (at + 1 >= text.size()) throw PatternError(whole, "nothing after the last backslash");
    if (text[at + 1] == '/') throw PatternError(whole, "'/' cannot be escaped");
    return at + 2;
  }
  return at + 1;
}

// Writes out `{a,b}`: every alternative of `text` is appended to `out`.
void expandBraces(std::string_view whole, const std::string& text, std::size_t limit, std::vector<std::string>& out) {
  std::vector<std::string> todo{text};
  while (!todo.empty()) {
    const std::string current = std::move(todo.back());
    todo.pop_back();
    std::size_t open = 0;
    while (open < current.size() && current[open] != '{') {
      if (current[open] == '}') throw PatternError(whole, "'}' without '{'");
      open = skipOne(whole, current, open);
    }
    if (open >= current.size()) {
      out.push_back(current);
      if (out.size() > limit) throw PatternError(whole, "'{...}' stands for too many alternatives");
      continue;
    }
    std::vector<std::string_view> choices;
    const std::string_view view = current;
    std::size_t depth = 1;
    std::size_t from = open + 1;
    std::size_t i = open + 1;
    while (i < view.size() && depth > 0) {
      if (view[i] == '{') {
        ++depth;
        ++i;
      } else if (view[i] == '}') {
        if (--depth == 0) choices.push_back(view.substr(from, i - from));
        ++i;
      } else if (view[i] == ',' && depth == 1) {
        choices.push_back(view.substr(from, i - from));
        from = ++i;
      } else {
        i = skipOne(whole, view, i);
      }
    }
    if (depth > 0) throw PatternError(whole, "'{' without '}'");
    for (auto choice = choices.rbegin(); choice != choices.rend(); ++choice) {
      std::string next(view.substr(0, open));
      next += *choice;
      next += view.substr(i);
      todo.push_back(std::move(next));
    }
    // Every entry of `todo` ends as at least one alternative.
    if (out.size() + todo.size() > limit) throw PatternError(whole, "'{...}' stands for too many alternatives");
  }
}

}  // namespace

std::shared_ptr<const Filter> Filter::compile(const std::vector<std::string>& include,
                                              const std::vector<std::string>& exclude) {
  const std::shared_ptr<Filter> filter(new Filter);
  if (include.size() + exclude.size() > kMaxPatterns) {
    const std::size_t over = kMaxPatterns;
    throw PatternError(over < include.size() ? include[over] : exclude[over - include.size()],
                       "more than " + std::to_string(kMaxPatterns) + " patterns");
  }
  filter->everything_ = include.empty();
  for (const std::string& pattern : include) filter->addPattern(filter->include_, pattern);
  for (const std::string& pattern : exclude) filter->addPattern(filter->exclude_, pattern);
  return filter;
}

void Filter::addPattern(Side& side, std::string_view pattern) {
  if (pattern.empty()) throw PatternError(pattern, "empty pattern");
  if (pattern.size() > kMaxPatternBytes) {
    throw PatternError(pattern.substr(0, 64), "longer than " + std::to_string(kMaxPatternBytes) + " bytes");
  }
  if (pattern.find('\0') != std::string_view::npos) throw PatternError(pattern, "a NUL byte");
  if (pattern.front() == '/') throw PatternError(pattern, "patterns are relative to the volume: no '/' at the start");
  std::vector<std::string> alternatives;
  expandBraces(pattern, std::string(pattern), kMaxAlternatives - alternatives_, alternatives);
  alternatives_ += alternatives.size();
  for (const std::string& alternative : alternatives) addAlternative(side, pattern, alternative);
}

void Filter::addAlternative(Side& side, std::string_view pattern, std::string_view alternative) {
  bool directoryOnly = false;
  if (!alternative.empty() && alternative.back() == '/') {
    alternative.remove_suffix(1);
    directoryOnly = true;
  }
  if (alternative.empty()) throw PatternError(pattern, "an alternative of '{...}' leaves an empty pattern");
  const auto first = static_cast<std::uint32_t>(side.segments.size());
  for (std::size_t from = 0; from <= alternative.size();) {
    // A '/' is never inside a set and never escaped (checked when braces were written out).
    const std::size_t slash = std::min(alternative.find('/', from), alternative.size());
    const Segment segment = compileSegment(pattern, alternative.substr(from, slash - from));
    const bool again = segment.type == Type::kDeep && side.segments.size() > first &&
                       side.segments.back().type == Type::kDeep;
    if (!again) side.segments.push_back(segment);
    from = slash + 1;
  }
  Segment end;
  end.directoryOnly = directoryOnly;
  side.segments.push_back(end);
  // From the back: `**` or `*` before the end takes every name, `**` before something universal too.
  for (std::size_t i = side.segments.size() - 1; i-- > first;) {
    Segment& segment = side.segments[i];
    const Segment& after = side.segments[i + 1];
    const bool last = after.type == Type::kEnd && !directoryOnly;
    segment.universal = (segment.type == Type::kDeep && (last || after.universal)) ||
                        (segment.type == Type::kAll && last);
  }
  close(side, first, side.start);
}

Filter::Segment Filter::compileSegment(std::string_view pattern, std::string_view text) {
  if (text.empty()) throw PatternError(pattern, "an empty segment ('//')");
  Segment segment;
  if (text == "**") {
    segment.type = Type::kDeep;
    return segment;
  }
  const std::size_t firstStep = steps_.size();
  bool literal = true;
  std::string plain;
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t next = skipOne(pattern, text, i);
    const char c = text[i];
    if (c == '\\') {
      steps_.push_back({Token::kByte, static_cast<std::uint8_t>(text[i + 1]), 0});
      plain.push_back(text[i + 1]);
    } else if (c == '*') {
      literal = false;
      if (steps_.size() == firstStep || steps_.back().token != Token::kStar) steps_.push_back({Token::kStar, 0, 0});
    } else if (c == '?') {
      literal = false;
      steps_.push_back({Token::kAny, 0, 0});
    } else if (c == '[') {
      literal = false;
      std::size_t k = i + 1;
      const std::size_t end = next - 1;  // the ']'
      const bool negated = text[k] == '!' || text[k] == '^';
      if (negated) ++k;
      std::bitset<256> set;
      const auto member = [&] {
        if (text[k] == '\\') {
          k += 2;
          return static_cast<std::uint8_t>(text[k - 1]);
        }
        if (text[k] == '[' && k + 1 < end && (text[k + 1] == ':' || text[k + 1] == '.' || text[k + 1] == '=')) {
          throw PatternError(pattern, "named sets such as [:alpha:] are not supported");
        }
        return static_cast<std::uint8_t>(text[k++]);
      };
      while (k < end) {
        const std::uint8_t low = member();
        std::uint8_t high = low;
        if (k + 1 < end && text[k] == '-') {
          ++k;
          high = member();
        }
        if (high < low) throw PatternError(pattern, "a range in '[...]' that runs backwards");
        for (unsigned byte = low; byte <= high; ++byte) set.set(byte);
      }
      if (negated) set.flip();
      if (sets_.size() >= std::numeric_limits<std::uint16_t>::max()) throw PatternError(pattern, "too many '[...]'");
      steps_.push_back({Token::kSet, 0, static_cast<std::uint16_t>(sets_.size())});
      sets_.push_back(set);
    } else {
      steps_.push_back({Token::kByte, static_cast<std::uint8_t>(c), 0});
      plain.push_back(c);
    }
    i = next;
  }
  if (literal) {
    if (plain == "." || plain == "..") throw PatternError(pattern, "'.' and '..' are not allowed");
    steps_.resize(firstStep);
    segment.type = Type::kLiteral;
    segment.at = static_cast<std::uint32_t>(text_.size());
    segment.length = static_cast<std::uint32_t>(plain.size());
    text_ += plain;
    return segment;
  }
  const std::size_t count = steps_.size() - firstStep;
  if (count == 1 && steps_.back().token == Token::kStar) {
    steps_.resize(firstStep);
    segment.type = Type::kAll;
    return segment;
  }
  segment.type = Type::kGlob;
  segment.at = static_cast<std::uint32_t>(firstStep);
  segment.length = static_cast<std::uint32_t>(count);
  return segment;
}

// `**` in the middle may also stand for no segment at all.
void Filter::close(const Side& side, std::uint32_t position, std::vector<std::uint32_t>& out) const {
  out.push_back(position);
  if (side.segments[position].type == Type::kDeep && side.segments[position + 1].type != Type::kEnd) {
    out.push_back(position + 1);
  }
}

bool Filter::matchSegment(const Segment& segment, std::string_view name) const {
  switch (segment.type) {
    case Type::kLiteral:
      return segment.length == name.size() && std::memcmp(text_.data() + segment.at, name.data(), name.size()) == 0;
    case Type::kAll:
    case Type::kDeep:
      return true;
    case Type::kGlob:
      return matchGlob(segment, name);
    case Type::kEnd:
      return false;
  }
  return false;
}

// Only the last star ever has to be tried again (there is no alternation left inside a segment), so the cost is at
// most name length times pattern length.
bool Filter::matchGlob(const Segment& segment, std::string_view name) const {
  const Step* const steps = steps_.data() + segment.at;
  std::size_t s = 0;
  std::size_t n = 0;
  std::size_t star = std::string_view::npos;
  std::size_t starAt = 0;
  while (n < name.size()) {
    bool fits = false;
    if (s < segment.length) {
      const Step& step = steps[s];
      const auto byte = static_cast<std::uint8_t>(name[n]);
      if (step.token == Token::kStar) {
        star = s++;
        starAt = n;
        continue;
      }
      fits = step.token == Token::kAny || (step.token == Token::kByte && step.byte == byte) ||
             (step.token == Token::kSet && sets_[step.set].test(byte));
    }
    if (fits) {
      ++s;
      ++n;
    } else if (star != std::string_view::npos) {
      s = star + 1;
      n = ++starAt;
    } else {
      return false;
    }
  }
  while (s < segment.length && steps[s].token == Token::kStar) ++s;
  return s == segment.length;
}

bool Filter::advance(const Side& side, const std::vector<std::uint32_t>& from, std::string_view name, bool isDirectory,
                     std::vector<std::uint32_t>* next) const {
  bool ends = false;
  for (const std::uint32_t position : from) {
    const Segment& segment = side.segments[position];
    if (!matchSegment(segment, name)) continue;
    const Segment& after = side.segments[position + 1];
    if (after.type == Type::kEnd && (isDirectory || !after.directoryOnly)) {
      ends = true;
      if (next == nullptr) return true;
    }
    if (next == nullptr) continue;
    if (segment.type == Type::kDeep) {
      close(side, position, *next);
    } else if (after.type != Type::kEnd) {
      close(side, position + 1, *next);
    }
  }
  if (next != nullptr) {
    std::sort(next->begin(), next->end());
    next->erase(std::unique(next->begin(), next->end()), next->end());
  }
  return ends;
}

bool Filter::reachesBelow(const Cursor& cursor) const {
  for (const std::uint32_t position : cursor.exclude) {
    if (exclude_.segments[position].universal) return false;
  }
  return cursor.covered || !cursor.include.empty();
}

Filter::Cursor Filter::root() const {
  Cursor cursor;
  cursor.include = include_.start;
  cursor.exclude = exclude_.start;
  cursor.covered = everything_;
  cursor.reaches = reachesBelow(cursor);
  return cursor;
}

Verdict Filter::step(const Cursor& parent, std::string_view name, bool isDirectory, Cursor* child) const {
  if (!parent.reaches) return Verdict::kNone;
  Cursor scratch;
  Cursor* next = isDirectory ? (child != nullptr ? child : &scratch) : nullptr;
  if (next != nullptr) {
    next->include.clear();
    next->exclude.clear();
  }
  if (!parent.exclude.empty() &&
      advance(exclude_, parent.exclude, name, isDirectory, next != nullptr ? &next->exclude : nullptr)) {
    return Verdict::kNone;
  }
  bool covered = parent.covered;
  if (!covered) {
    covered = advance(include_, parent.include, name, isDirectory, next != nullptr ? &next->include : nullptr);
  }
  if (next == nullptr) return covered ? Verdict::kPart : Verdict::kNone;
  next->covered = covered;
  if (covered) next->include.clear();
  next->reaches = reachesBelow(*next);
  if (covered) return Verdict::kPart;
  return next->reaches ? Verdict::kWay : Verdict::kNone;
}

Verdict Filter::match(std::string_view path, bool isDirectory) const {
  Cursor here = root();
  if (path.empty()) return here.covered ? Verdict::kPart : Verdict::kWay;
  Cursor next;
  for (;;) {
    const std::size_t slash = path.find('/');
    if (slash == std::string_view::npos) return step(here, path, isDirectory, nullptr);
    if (step(here, path.substr(0, slash), true, &next) == Verdict::kNone) return Verdict::kNone;
    std::swap(here, next);
    path.remove_prefix(slash + 1);
  }
}

bool Filter::reaches(std::string_view path, Cursor* cursor) const {
  Cursor here = root();
  Cursor next;
  while (!path.empty()) {
    const std::size_t slash = std::min(path.find('/'), path.size());
    if (step(here, path.substr(0, slash), true, &next) == Verdict::kNone) return false;
    std::swap(here, next);
    path.remove_prefix(std::min(slash + 1, path.size()));
  }
  const bool out = here.reaches;
  if (cursor != nullptr) *cursor = std::move(here);
  return out;
}

}  // namespace sv
