// The one implementation of include and exclude patterns: watch, scan, staging, prune and TypeScript all ask it.
//
// A pattern is relative to the volume's root and '/'-separated. Within a segment: `*` any bytes, `?` one byte,
// `[abc]`, `[a-z]`, `[!a]`, `[^a]` one byte of (or not of) a set, `\x` the byte x itself. A whole segment `**` stands
// for any number of segments (at the end of a pattern: at least one). `{a,b}` is written out before anything else,
// nested or with a '/' inside. A pattern that ends in '/' names directories only. A pattern that names a directory
// covers all below it. Exclude beats include; no include pattern at all means everything. Bytes, not characters.
#pragma once

#include <array>
#include <bitset>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/error.h"

namespace sv {

// A pattern that cannot be compiled; code PATTERN_INVALID.
struct PatternError : Error {
  std::string pattern;
  std::string reason;
  PatternError(std::string_view badPattern, std::string_view why)
      : Error("PATTERN_INVALID", "PATTERN_INVALID: " + printablePath(badPattern) + ": " + std::string(why)),
        pattern(badPattern),
        reason(why) {}
};

enum class Verdict : std::uint8_t {
  kNone = 0,  // not part of the volume's state, and nothing below it is
  kPart = 1,  // part of the state
  kWay = 2,   // a directory on the way to something that may be part of the state
};

class Filter {
 public:
  static constexpr std::size_t kMaxPatternBytes = 1024;
  static constexpr std::size_t kMaxPatterns = 1000;      // include and exclude together
  static constexpr std::size_t kMaxAlternatives = 4096;  // after `{a,b}` was written out, per filter

  // Throws PatternError.
  static std::shared_ptr<const Filter> compile(const std::vector<std::string>& include,
                                               const std::vector<std::string>& exclude);

  // What the filter knows of one directory, so that each of its children costs one name and not a whole path.
  struct Cursor {
    std::vector<std::uint32_t> include;  // positions in patterns that may still match below
    std::vector<std::uint32_t> exclude;
    bool covered = false;  // the directory or one above it is included: all below is
    bool reaches = false;  // something below may be part of the state: worth reading and watching
  };

  Cursor root() const;
  // The verdict on a child of `parent`. `child` is filled for directories with a verdict other than kNone; may be null.
  Verdict step(const Cursor& parent, std::string_view name, bool isDirectory, Cursor* child) const;

  // The verdict on a path relative to the root ('' = the root itself). Independent of what is on the disk.
  Verdict match(std::string_view path, bool isDirectory) const;
  // Keeps everything: no pattern at all.
  bool everything() const { return everything_ && exclude_.segments.empty(); }
  // Whether anything below the directory `path` may be part of the state. `cursor`, if given, is the directory's own.
  bool reaches(std::string_view path, Cursor* cursor = nullptr) const;

 private:
  enum class Token : std::uint8_t { kByte, kAny, kSet, kStar };
  struct Step {
    Token token;
    std::uint8_t byte;   // kByte
    std::uint16_t set;   // kSet: index into sets_
  };
  enum class Type : std::uint8_t { kLiteral, kAll /* * */, kGlob, kDeep /* ** */, kEnd };
  struct Segment {
    Type type = Type::kEnd;
    bool directoryOnly = false;  // of kEnd
    // Of a position: whatever comes, all names below match (`**`, `*`, `**/*` to the end of the pattern).
    bool universal = false;
    std::uint32_t at = 0;  // kLiteral: offset in text_; kGlob: offset in steps_
    std::uint32_t length = 0;
  };
  struct Side {
    std::vector<Segment> segments;     // alternatives one after the other, each closed by kEnd
    std::vector<std::uint32_t> start;  // closure of the first positions
  };

  Filter() = default;
  void addPattern(Side& side, std::string_view pattern);
  void addAlternative(Side& side, std::string_view pattern, std::string_view alternative);
  Segment compileSegment(std::string_view pattern, std::string_view text);
  void close(const Side& side, std::uint32_t position, std::vector<std::uint32_t>& out) const;
  bool matchSegment(const Segment& segment, std::string_view name) const;
  bool matchGlob(const Segment& segment, std::string_view name) const;
  // True when a pattern ends with this name; the positions after it go to `next` if it is not null.
  bool advance(const Side& side, const std::vector<std::uint32_t>& from, std::string_view name, bool isDirectory,
               std::vector<std::uint32_t>* next) const;
  bool reachesBelow(const Cursor& cursor) const;

  Side include_;
  Side exclude_;
  bool everything_ = true;  // no include pattern
  std::size_t alternatives_ = 0;
  std::string text_;
  std::vector<Step> steps_;
  std::vector<std::bitset<256>> sets_;
};

}  // namespace sv
