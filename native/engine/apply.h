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

// Redo-safe: repeated from its start after a crash, a phase gives the same tree. Durable only after the caller's
// syncfs. Throws on the first operation that cannot be done.
ApplyResult apply(const ApplyOptions& options);

}  // namespace sv
