// Building blocks for the tests of packs, slots and plans: items, operations, and a tree as one comparable text.
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/hash.h"
#include "engine/pack.h"
#include "engine/record.h"
#include "test/support.h"

namespace sv::test {

using Runs = std::vector<std::pair<std::uint64_t, std::uint64_t>>;

// The record of what stands at `path` below `root`, with content hash, chunk list and attributes.
inline Record describe(const std::string& root, const std::string& path) {
  const Fd fd = openRoot(root);
  const Stat stat = statBeneath(fd.get(), path);
  Record record;
  stat.describe(record);
  record.path = path;
  if (stat.kind == Kind::kSymlink) {
    const auto [parent, name] = openParent(fd.get(), path);
    record.target = readLinkAt(parent.get(), name.c_str());
  }
  if (stat.kind == Kind::kDirectory) record.xattrs = readXattrs(openBeneath(fd.get(), path, O_RDONLY).get());
  if (stat.kind != Kind::kFile) return record;
  const Fd file = openBeneath(fd.get(), path, O_RDONLY);
  record.xattrs = readXattrs(file.get());
  ContentHasher hasher(stat.size);
  std::string buffer(1 << 20, '\0');
  for (std::uint64_t at = 0; at < stat.size;) {
    const auto [begin, end] = nextData(file.get(), at, stat.size);
    hasher.addZeros(begin - at);
    for (at = begin; at < end;) {
      const std::size_t n = preadFull(file.get(), buffer.data(), std::min<std::uint64_t>(buffer.size(), end - at), at);
      hasher.add({buffer.data(), n});
      at += n;
    }
  }
  record.hash = hasher.finish();
  record.flags = flag::kHash;
  if (stat.blocks * 512 + 4096 < stat.size) record.flags |= flag::kSparse;
  if (stat.size >= kLargeBytes) {
    record.flags |= flag::kLarge | flag::kChunksFull;
    record.chunks = hasher.chunks();
  }
  return record;
}

// As it travels in a manifest.
inline Record travelling(Record record) {
  record.ino = 0;
  record.ctimeNs = 0;
  return record;
}

// A file's record made of its content.
inline Record fileRecord(const std::string& path, std::string_view content) {
  Record record;
  record.kind = Kind::kFile;
  record.path = path;
  record.mode = 0640;
  record.size = content.size();
  record.mtimeNs = 1'700'000'000'123'456'789;
  ContentHasher hasher(content.size());
  hasher.add(content);
  record.hash = hasher.finish();
  record.flags = flag::kHash;
  if (content.size() >= kLargeBytes) {
    record.flags |= flag::kLarge | flag::kChunksFull;
    record.chunks = hasher.chunks();
  }
  return record;
}

inline std::string packItem(std::uint32_t ordinal, const Record& record, const Runs* runs = nullptr, std::uint64_t ino = 0) {
  std::string out;
  {
    ItemWriter w(out);
    w.u32(ordinal);
    w.u8(runs == nullptr ? 1 : 2);
    w.zeros(3);
    w.u64(ino);
    w.sized(packed(record));
    std::string list;
    ByteWriter l(list);
    if (runs != nullptr)
      for (const auto& [offset, length] : *runs) {
        l.u64(offset);
        l.u64(length);
      }
    w.sized(list);
  }
  return out;
}

inline std::string unpackItem(std::uint32_t ordinal, std::uint64_t slot, const Record& record, const Record* base = nullptr) {
  std::string out;
  {
    ItemWriter w(out);
    w.u32(ordinal);
    w.u8(base == nullptr ? 1 : 2);
    w.zeros(3);
    w.u64(slot);
    w.sized(packed(record));
    w.sized(base == nullptr ? std::string() : packed(*base));
  }
  return out;
}

struct Unpacked {
  std::uint32_t ordinal;
  std::uint8_t status;
  std::uint16_t err;
  Record record;
};
inline std::vector<Unpacked> unpacked(std::string_view results) {
  std::vector<Unpacked> out;
  for (ByteReader all(results); !all.empty();) {
    ByteReader in = all.item();
    Unpacked u;
    u.ordinal = in.u32();
    u.status = in.u8();
    in.skip(1);
    u.err = in.u16();
    u.record = RecordView::parse(in.sized()).record();
    out.push_back(std::move(u));
  }
  return out;
}

inline std::string readAll(PackReader& reader, std::size_t window = 1 << 20) {
  std::string out;
  for (;;) {
    const std::string piece = reader.read(out.size(), window);
    if (piece.empty()) return out;
    out += piece;
  }
}

// A pack written by hand.
class PackText {
 public:
  PackText() : text_(packHead()) {}
  PackText& data(std::uint32_t ordinal, std::uint64_t offset, std::string_view bytes) {
    text_ += packRecordHead(ordinal, static_cast<std::uint32_t>(bytes.size()), offset);
    text_ += bytes;
    total_ += bytes.size();
    return *this;
  }
  PackText& zeros(std::uint32_t ordinal, std::uint64_t offset, std::uint32_t length) {
    text_ += packRecordHead(ordinal, length | kZeroRun, offset);
    return *this;
  }
  PackText& raw(std::string_view bytes) {
    text_ += bytes;
    return *this;
  }
  std::string end() const { return text_ + packRecordHead(kPackEnd, 0, total_); }
  const std::string& cut() const { return text_; }

 private:
  std::string text_;
  std::uint64_t total_ = 0;
};

enum class Op : std::uint8_t {
  kTake = 1, kRemove, kRmdir, kMkdir, kPut, kSymlink, kLink, kPatch, kPatchCopy, kMeta
};

inline std::string operation(Op op, const Record& record, std::uint64_t slot = 0, std::string_view arg = {}, bool keepOld = false) {
  std::string out;
  {
    ItemWriter w(out);
    w.u8(static_cast<std::uint8_t>(op));
    w.u8(keepOld ? 1 : 0);
    w.u16(0);
    w.u32(static_cast<std::uint32_t>(arg.size()));
    w.u64(slot);
    w.raw(arg);
    w.raw(packed(record));
  }
  return out;
}

inline Record absent(const std::string& path) {
  Record record;
  record.path = path;
  return record;
}

// Everything about a tree that a generation is about, one line an entry; hard links by the first of their names.
inline std::string snapshot(const std::string& root) {
  std::map<std::string, std::string> lines;
  std::map<std::uint64_t, std::string> inodes;
  std::vector<std::string> paths{""};
  for (const auto& entry : std::filesystem::recursive_directory_iterator(root))
    paths.push_back(entry.path().string().substr(root.size() + 1));
  std::sort(paths.begin(), paths.end());
  for (const std::string& path : paths) {
    const Record record = describe(root, path);
    std::string line = path + " kind " + std::to_string(static_cast<int>(record.kind)) + " mode " + std::to_string(record.mode) +
                       " " + std::to_string(record.uid) + ":" + std::to_string(record.gid) + " size " +
                       std::to_string(record.size) + " mtime " + std::to_string(record.mtimeNs) + " -> " + record.target + " x ";
    for (const char c : record.xattrs + record.hash) line += std::to_string(static_cast<unsigned char>(c)) + ",";
    if (record.linkGroup != 0) line += " = " + inodes.try_emplace(record.linkGroup, path).first->second;
    lines[path] = line;
  }
  std::string out;
  for (const auto& [path, line] : lines) out += line + "\n";
  return out;
}

}  // namespace sv::test
