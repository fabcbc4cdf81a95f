// Serving contents: one pack stream made from files as it is read, at any offset.
//
// Which file counts: with an inode, the regular file of that inode and size (a pinned file can get new times or owners
// while it is offered; whoever receives it checks the content hash); without one, size and mtime; strict, all of
// size, mtime, ctime and inode, and once more after the last byte.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/fs.h"
#include "engine/record.h"

namespace sv {

inline constexpr std::uint32_t kPackEnd = 0xFFFFFFFFU;
inline constexpr std::uint32_t kZeroRun = 0x80000000U;     // bit of a record's length: zeros without data
inline constexpr std::uint32_t kPackPiece = 1024 * 1024;   // data of one record at most
inline constexpr std::size_t kPackHead = 8;                // "SVPK", version, 0
inline constexpr std::size_t kPackRecordHead = 16;

// The 8 bytes that a pack begins with.
std::string packHead();
// {ordinal, length, offset}
std::string packRecordHead(std::uint32_t ordinal, std::uint32_t length, std::uint64_t offset);

struct PackOptions {
  std::string root;         // tree with the newest versions
  std::string retired;      // folder of folders named by seq with replaced files; empty: none
  std::uint64_t seq = 0;    // generation that is served
  std::string items;        // docs/formats.md, "pack items"
  bool strict = false;      // the ctime must match too (live consistency)
};

class PackReader {
 public:
  explicit PackReader(PackOptions options);

  // Finds the data of every file that can have holes; the length of the stream in bytes. CONTENT_CHANGED when a file is
  // not the one described (files under 64 KiB are looked at when they are read, unless `strict`).
  std::uint64_t plan();

  // At most `max` (> 0) bytes from `offset`; empty at the end. Plans first if nobody has. The same bytes for the same
  // offset however the stream is cut. A file that got shorter or other meanwhile: CONTENT_CHANGED, never padding.
  std::string read(std::uint64_t offset, std::size_t max);

 private:
  struct Item {
    std::uint32_t ordinal;
    std::uint64_t ino;
    std::string path;
    std::uint64_t size;
    std::int64_t mtimeNs;
    std::int64_t ctimeNs;
    std::uint64_t recordIno;
    bool whole;
    std::vector<std::pair<std::uint64_t, std::uint64_t>> runs;  // offset, length
  };
  // A stretch of a file that is sent, as records of at most kPackPiece bytes.
  struct Extent {
    std::uint64_t at;      // in the stream
    std::uint64_t offset;  // in the file
    std::uint64_t length;  // bytes of data
    std::uint32_t item;
    bool zeros = false;         // a hole inside a run: one record without data
    std::uint64_t end() const;  // in the stream
  };

  Fd find(const Item& item) const;
  Fd tryOpen(int root, const Item& item) const;
  bool fits(const Item& item, const Stat& stat) const;
  [[noreturn]] static void changed(const Item& item);
  void addExtent(std::uint32_t index, std::uint64_t begin, std::uint64_t end);
  void addZeros(std::uint32_t index, std::uint64_t begin, std::uint64_t end);
  void use(std::uint32_t index);
  void verify(std::uint32_t index) const;

  PackOptions options_;
  std::vector<Item> items_;
  std::vector<Extent> extents_;
  std::uint64_t end_ = 0;    // where the end record begins
  std::uint64_t data_ = 0;
  bool planned_ = false;
  Fd open_;                  // of openItem_; the only file that is held open
  std::uint32_t openItem_ = 0;
  std::unique_ptr<CacheWindow> window_;
};

}  // namespace sv
