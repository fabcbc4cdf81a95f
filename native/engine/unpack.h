// Receiving contents: a pack stream becomes verified slots. Nothing but the slots folder is written.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/fs.h"
#include "engine/hash.h"
#include "engine/record.h"

namespace sv {

struct UnpackOptions {
  std::string slots;
  std::string base;   // the replica's tree, for patches; may be empty
  std::string items;  // docs/formats.md, "unpack items"
};

class Unpacker {
 public:
  explicit Unpacker(UnpackOptions options);
  // Takes bytes at any split. Throws FORMAT_INVALID on anything that the items don't announce, ENOSPC ...
  // After an exception only abort() makes sense.
  void write(std::string_view bytes);
  // All must have arrived. Verifies and returns the results (docs/formats.md, "unpack results").
  std::string end();
  // Removes the slots that were made.
  void abort() noexcept;

 private:
  enum Status : std::uint8_t { kOk = 0, kHash = 1, kSize = 2, kBase = 3, kMissing = 4, kIo = 5 };
  struct Item {
    std::uint32_t ordinal;
    bool patch;
    std::uint64_t slot;
    std::string record;
    std::string base;
    Status status = kMissing;
    int err = 0;
    std::string full;  // new full chunk list
  };
  struct Run {
    std::uint64_t offset;
    std::uint32_t length;
    std::uint64_t at;  // of the data in the patch slot, 0: zeros
  };

  void head(std::string_view bytes);
  void begin(std::size_t index);
  void finish();
  void finishPatch(Item& item, const RecordView& record);
  void data(std::string_view bytes);

  UnpackOptions options_;
  Fd slots_;
  std::vector<Item> items_;
  std::size_t current_ = 0;   // item being filled; items_.size(): none yet begun beyond
  bool begun_ = false;
  bool ended_ = false;
  Fd slot_;
  std::unique_ptr<ContentHasher> hasher_;
  std::unique_ptr<CacheWindow> window_;
  std::uint64_t position_ = 0;  // next offset allowed in the file
  std::uint64_t slotAt_ = 0;    // bytes in a patch slot
  std::vector<Run> runs_;
  // the parser
  bool headSeen_ = false;
  std::string partial_;         // of a head that is cut by the split
  std::uint64_t dataLeft_ = 0;
  std::uint64_t dataAt_ = 0;
  std::uint64_t dataTotal_ = 0;
};

}  // namespace sv
