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

// Checks one pack while it arrives, in bounded memory: one chunk, and the items that were announced.
//
// A whole file is written with its holes and hashed on the way. Of a patch every chunk that it touches, and every chunk
// that the manifest calls changed, is put together from the base and hashed; the other chunks are the base's, whose
// list and identity are checked. Slots of items that did not come out right are removed.
class Unpacker {
 public:
  // Throws FORMAT_INVALID for items that make no sense, ENOSPC when what was announced cannot fit.
  explicit Unpacker(UnpackOptions options);
  ~Unpacker();

  // Takes bytes at any split. Throws FORMAT_INVALID on anything that the items don't announce, ENOSPC ...; then all
  // slots of this pack are gone and the object is of no more use (CLOSED).
  void write(std::string_view bytes);

  // All must have arrived. Returns the results (docs/formats.md, "unpack results"); the slots are the caller's from
  // then on. FORMAT_INVALID when the pack was cut short; the slots are removed then.
  std::string end();

  // Removes the slots that were made. Nothing after end().
  void abort() noexcept;

 private:
  enum Status : std::uint8_t { kOk = 0, kHash = 1, kSize = 2, kBase = 3, kMissing = 4, kIo = 5 };
  struct Item {
    std::uint32_t ordinal;
    bool patch;
    std::uint64_t slot;
    std::string recordBytes;
    std::string baseBytes;
    RecordView record;
    RecordView base;
    Status status = kMissing;
    int err = 0;
    std::string full;   // new full chunk list
    bool made = false;  // its slot exists
  };
  struct Patch;

  void take(std::string_view bytes);
  void head(std::string_view bytes);
  void data(std::string_view bytes);
  void writeWhole(const Item& item, std::string_view bytes);
  void begin();
  void finish();
  void drop(Item& item) noexcept;

  UnpackOptions options_;
  Fd slots_;
  std::vector<Item> items_;
  std::size_t current_ = 0;  // the item being filled, or the next one
  bool begun_ = false;       // current_ is being filled
  bool complete_ = false;    // the end record came
  bool done_ = false;        // end() gave the results
  bool failed_ = false;
  // of the current item
  Fd slot_;
  std::unique_ptr<ContentHasher> hasher_;
  std::unique_ptr<CacheWindow> window_;
  std::unique_ptr<Patch> patch_;
  std::uint64_t position_ = 0;    // lowest offset that may come next
  std::uint64_t writtenTo_ = 0;   // end of what was written to a whole slot
  std::uint64_t patchBytes_ = 0;  // data bytes in a patch slot
  // the parser
  bool headSeen_ = false;
  std::string partial_;  // of a head that a split cuts
  std::uint64_t dataLeft_ = 0;
  std::uint64_t dataAt_ = 0;
  std::uint64_t dataTotal_ = 0;
};

}  // namespace sv
