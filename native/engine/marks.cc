#include "engine/marks.h"

#include <algorithm>
#include <cstring>
#include <random>

namespace sv {

std::uint64_t seededHash(std::string_view bytes, std::uint64_t with) {
  static const std::uint64_t seed = [] {
    std::random_device device;
    return (static_cast<std::uint64_t>(device()) << 32) ^ device();
  }();
  // Multiply and fold (the 128-bit product's halves), 8 bytes at a time.
  constexpr std::uint64_t kOdd = 0x9e3779b97f4a7c15;
  const auto fold = [](std::uint64_t a, std::uint64_t b) {
    __extension__ using Wide = unsigned __int128;
    const Wide product = static_cast<Wide>(a) * b;
    return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
  };
  std::uint64_t hash = fold(seed ^ with, kOdd) ^ seed;
  std::size_t at = 0;
  for (; at + 8 <= bytes.size(); at += 8) {
    std::uint64_t word;
    std::memcpy(&word, bytes.data() + at, 8);
    hash = fold(hash ^ word, seed | 1) ^ kOdd;
  }
  std::uint64_t tail = bytes.size();
  for (; at < bytes.size(); ++at) tail = (tail << 8) | static_cast<std::uint8_t>(bytes[at]);
  return fold(hash ^ tail, kOdd ^ seed);
}

// ---- NameSet ----

std::size_t NameSet::find(std::string_view name) const {
  if (table_.empty()) {
    for (std::size_t offset = 0; offset < blob_.size(); offset += 2 + at(offset).size()) {
      if (at(offset) == name) return offset;
    }
    return kNone;
  }
  const std::size_t mask = table_.size() - 1;
  for (std::size_t slot = seededHash(name) & mask; table_[slot] != 0; slot = (slot + 1) & mask) {
    if (at(table_[slot] - 1) == name) return table_[slot] - 1;
  }
  return kNone;
}

bool NameSet::has(std::string_view name, std::uint8_t bits) const {
  if ((bits_ & bits) != bits) return false;
  const std::size_t offset = find(name);
  return offset != kNone && (static_cast<std::uint8_t>(blob_[offset]) & bits) == bits;
}

bool NameSet::add(std::string_view name, std::uint8_t bits) {
  bits_ = static_cast<std::uint8_t>(bits_ | bits);
  const std::size_t offset = find(name);
  if (offset != kNone) {
    blob_[offset] = static_cast<char>(static_cast<std::uint8_t>(blob_[offset]) | bits);
    return false;
  }
  const auto entry = static_cast<std::uint32_t>(blob_.size());
  blob_.push_back(static_cast<char>(bits));
  blob_.push_back(static_cast<char>(static_cast<std::uint8_t>(name.size())));
  blob_.append(name);
  ++count_;
  if (count_ <= kScan) return true;
  if (table_.size() >= std::size_t{count_} * 2) {
    place(entry);
    return true;
  }
  table_.assign(std::max<std::size_t>(32, table_.size() * 2), 0);
  for (std::size_t each = 0; each < blob_.size(); each += 2 + at(each).size()) place(static_cast<std::uint32_t>(each));
  return true;
}

void NameSet::place(std::uint32_t offset) {
  const std::size_t mask = table_.size() - 1;
  std::size_t slot = seededHash(at(offset)) & mask;
  while (table_[slot] != 0) slot = (slot + 1) & mask;
  table_[slot] = offset + 1;
}

void NameSet::clear() {
  blob_ = {};
  table_ = {};
  count_ = 0;
  bits_ = 0;
}

// ---- Marks ----

bool Marks::has(std::uint32_t directory, std::string_view name, std::uint8_t bits) const {
  const auto it = directories_.find(directory);
  return it != directories_.end() && it->second.names.has(name, bits);
}

void Marks::addName(std::uint32_t directory, std::string_view name, std::uint8_t bits) {
  Directory& entry = directories_[directory];
  if (entry.children) {
    entry.childrenBits = static_cast<std::uint8_t>(entry.childrenBits | bits);
    return;
  }
  if (entry.subtree && (bits & mark::kDeleted) == 0) return;
  if (!entry.names.add(name, bits)) return;
  ++names_;
  if (entry.names.size() > kMaxNamesPerDirectory) collapse(entry);
  if (names_ > kMaxNames) shrink();
}

void Marks::collapse(Directory& directory) {
  names_ -= directory.names.size();
  if (!directory.marked()) ++marked_;
  directory.children = true;
  directory.childrenBits = static_cast<std::uint8_t>(directory.childrenBits | directory.names.allBits());
  directory.names.clear();
}

// The fullest directories first, until a quarter is free again.
void Marks::shrink() {
  std::vector<std::pair<std::uint32_t, Directory*>> order;
  order.reserve(directories_.size());
  for (auto& [id, directory] : directories_) {
    if (directory.names.size() > 0) order.emplace_back(directory.names.size(), &directory);
  }
  std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  for (const auto& [size, directory] : order) {
    if (names_ <= kMaxNames / 4 * 3) return;
    collapse(*directory);
  }
}

void Marks::addDirectory(std::uint32_t directory, std::uint8_t type, std::uint8_t bits) {
  Directory& entry = directories_[directory];
  if (!entry.marked()) ++marked_;
  bool& set = type == mark::kSubtree ? entry.subtree : entry.children;
  std::uint8_t& old = type == mark::kSubtree ? entry.subtreeBits : entry.childrenBits;
  set = true;
  old = static_cast<std::uint8_t>(old | bits);
}

void Marks::addPath(std::string_view path, std::uint8_t type, std::uint8_t bits) {
  std::string key(1, static_cast<char>(type));
  key += path;
  std::uint8_t& entry = paths_[std::move(key)];
  entry = static_cast<std::uint8_t>(entry | bits);
}

void Marks::forget(std::uint32_t directory) {
  const auto it = directories_.find(directory);
  if (it == directories_.end()) return;
  names_ -= it->second.names.size();
  if (it->second.marked()) --marked_;
  directories_.erase(it);
}

void Marks::clear() {
  directories_ = {};
  paths_ = {};
  names_ = 0;
  marked_ = 0;
}

}  // namespace sv
