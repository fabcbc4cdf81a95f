// Carrying out a plan: slots and metadata become the next generation of a tree. Used for replicas and for the shadow.
#pragma once

#include <cstdint>
#include <string>

namespace sv {

struct ApplyOptions {
  std::string root;
  std::string slots;    // on the same file system
  std::string retired;  // folder for replaced files; empty: they are dropped
  std::string ops;      // file with the plan (docs/formats.md, "Applying a plan")
  std::string out;      // written in phase 2; empty: none
  int phase = 2;        // 1: the takes; 2: all else
};

struct ApplyResult {
  std::uint64_t operations = 0;
  std::uint64_t bytesWritten = 0;
  std::uint64_t notEmpty = 0;      // directories left because of preserved contents
  std::uint64_t xattrsFailed = 0;  // entries whose attributes the file system would not take
};

// Redo-safe: repeated from its start after a crash, a phase gives the same tree. The slots must be durable before phase
// 2 begins (one syncfs), and the result is durable only after the caller's syncfs; slots of patches are not removed,
// they belong to the caller until then.
//
// Before phase 2 changes anything it looks for what would stop it half-way: a plan out of order or cut short
// (OPS_INVALID), a directory with content that the plan does not remove where something else must go (ENOTEMPTY with
// the path of that content, EISDIR), something else where a directory must go (EEXIST).
//
// Throws on the first operation that cannot be done, with its path. Nothing outside `root`, `slots` and `retired` is
// touched whatever the plan says, and no symbolic link is followed.
ApplyResult apply(const ApplyOptions& options);

}  // namespace sv
