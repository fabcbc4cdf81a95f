#include "engine/pack.h"

#include <dirent.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <memory>

namespace sv {

std::string packHead() {
  std::string out;
  ByteWriter w(out);
  w.raw("SVPK");
  w.u16(1);
  w.u16(0);
  return out;
}

std::string packRecordHead(std::uint32_t ordinal, std::uint32_t length, std::uint64_t offset) {
  std::string out;
  ByteWriter w(out);
  w.u32(ordinal);
  w.u32(length);
  w.u64(offset);
  return out;
}

PackReader::PackReader(PackOptions options) : options_(std::move(options)) {
  for (ByteReader all(options_.items); !all.empty();) {
    ByteReader in = all.item();
    Item item;
    item.ordinal = in.u32();
    item.whole = in.u8() == 1;
    in.skip(3);
    item.ino = in.u64();
    const RecordView record = RecordView::parse(in.sized());
    if (record.kind() != Kind::kFile) throwFormat("a pack item that is no file");
    item.path = record.path();
    item.size = record.size();
    item.mtimeNs = record.mtimeNs();
    item.ctimeNs = record.ctimeNs();
    item.recordIno = record.ino();
    for (ByteReader runs(in.sized()); !runs.empty();) {
      const std::uint64_t offset = runs.u64();
      const std::uint64_t length = runs.u64();
      const std::uint64_t after = item.runs.empty() ? 0 : item.runs.back().first + item.runs.back().second;
      if (offset < after || length == 0 || offset > item.size || length > item.size - offset)
        throwFormat("runs of a pack item that overlap or leave the file");
      item.runs.emplace_back(offset, length);
    }
    items_.push_back(std::move(item));
  }
  options_.items.clear();
  options_.items.shrink_to_fit();
}

void PackReader::changed(const Item& item) {
  throw Error("CONTENT_CHANGED", "CONTENT_CHANGED: " + printablePath(item.path) + " is not what the generation says", 0,
              {}, item.path);
}

bool PackReader::fits(const Item& item, int fd) const {
  const Stat stat = statFd(fd);
  if (stat.kind != Kind::kFile || stat.size != item.size || stat.mtimeNs != item.mtimeNs) return false;
  if (item.ino != 0 && stat.ino != item.ino) return false;
  return !options_.strict || (stat.ctimeNs == item.ctimeNs && stat.ino == item.recordIno);
}

// The place of a file's version: what a newer generation replaced waits in retired/<seq>, the oldest that is not
// older than ours has it; else the tree has it. A rename between two looks sends us round once more.
Fd PackReader::find(const Item& item) const {
  for (int round = 0; round < 3; ++round) {
    if (!options_.retired.empty()) {
      std::vector<std::uint64_t> folders;
      const std::unique_ptr<DIR, int (*)(DIR*)> directory(opendir(options_.retired.c_str()), closedir);
      while (directory != nullptr) {
        const dirent* entry = readdir(directory.get());
        if (entry == nullptr) break;
        const std::string_view name = entry->d_name;
        std::uint64_t seq = 0;
        const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), seq);
        if (error == std::errc() && end == name.data() + name.size() && seq >= options_.seq) folders.push_back(seq);
      }
      std::sort(folders.begin(), folders.end());
      for (const std::uint64_t seq : folders) {
        const std::string folder = options_.retired + '/' + std::to_string(seq);
        const Fd root(open(folder.c_str(), O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
        if (!root.valid()) continue;
        Fd fd = tryOpenBeneath(root.get(), item.path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
        if (fd.valid() && fits(item, fd.get())) return fd;
      }
    }
    const Fd root = openRoot(options_.root);
    Fd fd = tryOpenBeneath(root.get(), item.path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
    if (fd.valid() && fits(item, fd.get())) return fd;
    if (options_.strict) break;
  }
  changed(item);
}

void PackReader::addPieces(std::uint32_t index, std::uint64_t begin, std::uint64_t end) {
  while (begin < end) {
    const auto length = static_cast<std::uint32_t>(std::min<std::uint64_t>(kPackPiece, end - begin));
    pieces_.push_back({end_, index, length, begin});
    end_ += kPackRecordHead + length;
    data_ += length;
    begin += length;
  }
}

std::uint64_t PackReader::plan() {
  if (planned_) return end_ + kPackRecordHead;
  pieces_.clear();
  end_ = kPackHead;
  data_ = 0;
  for (std::uint32_t i = 0; i < items_.size(); ++i) {
    const Item& item = items_[i];
    // Holes are looked for where they can matter; a small file is one stretch.
    const bool look = item.size >= kChunkBytes;
    if (!look && !options_.strict && item.runs.empty()) {
      if (item.whole) addPieces(i, 0, item.size);
      continue;
    }
    const Fd fd = find(item);
    const auto stretch = [&](std::uint64_t at, std::uint64_t until) {
      while (at < until) {
        const auto [begin, end] = look && item.whole ? nextData(fd.get(), at, until) : std::pair{at, until};
        addPieces(i, begin, end);
        at = end;
      }
    };
    if (item.whole) stretch(0, item.size);
    for (const auto& [offset, length] : item.runs)
      if (!item.whole) stretch(offset, offset + length);
  }
  planned_ = true;
  return end_ + kPackRecordHead;
}

void PackReader::verify(const Item& item, int fd) const {
  if (!fits(item, fd)) changed(item);
}

std::string PackReader::read(std::uint64_t offset, std::size_t max) {
  (void)plan();
  std::string out;
  const std::uint64_t total = end_ + kPackRecordHead;
  const auto take = [&](std::uint64_t at, std::string_view bytes) {
    // The part of `bytes` (at `at` in the stream) that lies in [offset, offset + max).
    const std::uint64_t end = at + bytes.size();
    if (end <= offset) return;
    const std::size_t skip = offset > at ? static_cast<std::size_t>(offset - at) : 0;
    out.append(bytes.substr(skip, max - out.size()));
  };
  if (offset >= total) return out;
  out.reserve(static_cast<std::size_t>(std::min<std::uint64_t>(max, total - offset)));
  take(0, packHead());
  auto piece = std::upper_bound(pieces_.begin(), pieces_.end(), offset,
                                [](std::uint64_t at, const Piece& p) { return at < p.at + kPackRecordHead + p.length; });
  for (; piece != pieces_.end() && out.size() < max; ++piece) {
    const Item& item = items_[piece->item];
    take(piece->at, packRecordHead(item.ordinal, piece->length, piece->offset));
    if (out.size() >= max) break;
    if (!open_.valid() || openItem_ != piece->item) {
      open_ = find(item);
      openItem_ = piece->item;
    }
    const std::uint64_t dataAt = piece->at + kPackRecordHead;
    const std::uint64_t skip = offset > dataAt ? offset - dataAt : 0;
    const std::size_t want = static_cast<std::size_t>(std::min<std::uint64_t>(piece->length - skip, max - out.size()));
    const std::size_t had = out.size();
    out.resize(had + want);
    if (preadFull(open_.get(), out.data() + had, want, piece->offset + skip) < want) changed(item);
    const bool last = std::next(piece) == pieces_.end() || std::next(piece)->item != piece->item;
    if (item.size > kWindowBytes) {
      // Sent once, not needed again: a long seed must not push everything else out of memory.
      (void)posix_fadvise(open_.get(), static_cast<off_t>(piece->offset), static_cast<off_t>(skip + want), POSIX_FADV_DONTNEED);
    }
    if (skip + want == piece->length && (last || options_.strict)) {
      // After the last byte: it still is the file that was described, so what was sent is that version.
      if (options_.strict) verify(item, open_.get());
      if (last) open_ = Fd();
    }
  }
  if (out.size() < max) take(end_, packRecordHead(kPackEnd, 0, data_));
  return out;
}

}  // namespace sv
