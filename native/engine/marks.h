// The dirty marks of one volume: which names of which directories have to be looked at again. Memory is bounded
// whatever happens in the tree: many names of one directory become a mark on the directory, too many marks altogether
// a mark on the whole volume.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace sv {

namespace mark {
// Types.
inline constexpr std::uint8_t kPath = 1;
inline constexpr std::uint8_t kDirectory = 2;  // the directory itself and its direct children
inline constexpr std::uint8_t kSubtree = 3;
// Bits.
inline constexpr std::uint8_t kContent = 1;
inline constexpr std::uint8_t kAttributes = 2;
inline constexpr std::uint8_t kCreated = 4;  // or moved in
inline constexpr std::uint8_t kDeleted = 8;  // or moved away
}  // namespace mark

// Names with bits. Small sets are searched from the front, larger ones through a hash table.
class NameSet {
 public:
  // Whether `name` is there with all of `bits`.
  bool has(std::string_view name, std::uint8_t bits) const;
  // True when the name is new.
  bool add(std::string_view name, std::uint8_t bits);
  std::uint32_t size() const { return count_; }
  std::uint8_t allBits() const { return bits_; }
  void clear();

  // f(name, bits)
  template <typename F>
  void each(F f) const {
    for (std::size_t at = 0; at < blob_.size();) {
      const auto length = static_cast<std::uint8_t>(blob_[at + 1]);
      f(std::string_view(blob_.data() + at + 2, length), static_cast<std::uint8_t>(blob_[at]));
      at += 2U + length;
    }
  }

 private:
  static constexpr std::uint32_t kScan = 8;  // up to so many names without a table
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);
  std::size_t find(std::string_view name) const;
  std::string_view at(std::size_t offset) const {
    return {blob_.data() + offset + 2, static_cast<std::uint8_t>(blob_[offset + 1])};
  }
  void place(std::uint32_t offset);

  std::string blob_;                  // {u8 bits, u8 length, name}*
  std::vector<std::uint32_t> table_;  // offset + 1 in blob_, 0 = free; a power of two
  std::uint32_t count_ = 0;
  std::uint8_t bits_ = 0;
};

class Marks {
 public:
  static constexpr std::uint32_t kMaxNamesPerDirectory = 1024;
  static constexpr std::uint32_t kMaxNames = 65536;
  static constexpr std::size_t kMaxDirectories = 32768;

  struct Directory {
    // A mark on the children and one on all below may stand side by side, so that the evidence of a deletion among
    // the children does not pass for evidence of deletions everywhere below.
    bool children = false;
    bool subtree = false;
    std::uint8_t childrenBits = 0;
    std::uint8_t subtreeBits = 0;
    NameSet names;
    bool marked() const { return children || subtree; }
  };

  // A directory is a number (a node of the watcher).
  bool has(std::uint32_t directory, std::string_view name, std::uint8_t bits) const;
  void addName(std::uint32_t directory, std::string_view name, std::uint8_t bits);
  void addDirectory(std::uint32_t directory, std::uint8_t type, std::uint8_t bits);
  // Marks by path, for what has no directory number.
  void addPath(std::string_view path, std::uint8_t type, std::uint8_t bits);
  // The directory is no more: so are its marks.
  void forget(std::uint32_t directory);
  void clear();

  // Too many: the caller clears all and marks the volume's root as a subtree.
  bool overflowing() const { return directories_.size() + paths_.size() > kMaxDirectories; }

  bool empty() const { return directories_.empty() && paths_.empty(); }
  // Names and marked directories.
  std::uint64_t size() const { return names_ + marked_ + paths_.size(); }

  const std::unordered_map<std::uint32_t, Directory>& directories() const { return directories_; }
  // Bits by type and path in one key, since marks of different types on one path say different things.
  const std::unordered_map<std::string, std::uint8_t>& paths() const { return paths_; }
  static std::uint8_t typeOf(std::string_view key) { return static_cast<std::uint8_t>(key.front()); }
  static std::string_view pathOf(std::string_view key) { return key.substr(1); }

 private:
  void collapse(Directory& directory);
  void shrink();

  std::unordered_map<std::uint32_t, Directory> directories_;
  std::unordered_map<std::string, std::uint8_t> paths_;
  std::uint32_t names_ = 0;
  std::uint32_t marked_ = 0;  // directories with a type
};

// Hash of bytes that a stranger chooses: seeded per process, so that nobody can aim at collisions.
std::uint64_t seededHash(std::string_view bytes, std::uint64_t with = 0);

}  // namespace sv
