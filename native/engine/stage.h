// Staging: the contents of dirty files become slots (private copies under safe names), each of them a state that the
// file really had.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace sv {

struct StageOptions {
  std::string root;          // tree that is read
  std::string slots;         // folder of the slots; unused with hashOnly
  std::string base;          // tree with the versions of the last generation; empty: none
  bool hashOnly = false;     // describe and hash, copy nothing
  unsigned retries = 3;      // for a file that changes while it is read
};

// Stages the items (docs/formats.md, "stage items") and returns the results in the same order.
// Throws when the slots' side fails (ENOSPC, EIO ...): the slots of this call are removed then.
// What concerns one source file only goes to that file's result.
std::string stage(const StageOptions& options, std::string_view items);

// BLAKE3 of a file, streamed.
std::string hashFile(std::string_view path);

}  // namespace sv
