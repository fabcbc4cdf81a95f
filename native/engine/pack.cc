#include "engine/pack.h"

#include <dirent.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>

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
    const std::uint8_t kind = in.u8();
    if (kind != 1 && kind != 2) throwFormat("a pack item of an unknown kind");
    item.whole = kind == 1;
    in.skip(3);
    item.ino = in.u64();
    const RecordView record = RecordView::parse(in.sized());
    if (record.kind() != Kind::kFile) throwFormat("a pack item that is no file");
    if (record.path().empty() || record.path().find('\0') != std::string_view::npos) throwFormat("a pack item without a path");
    if (item.ordinal == kPackEnd) throwFormat("an ordinal that is not allowed");
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

bool PackReader::fits(const Item& item, const Stat& stat) const {
  if (stat.kind != Kind::kFile || stat.size != item.size) return false;
  if (item.ino != 0 && stat.ino != item.ino) return false;
  if (options_.strict) {
    return stat.mtimeNs == item.mtimeNs && stat.ctimeNs == item.ctimeNs &&
           (item.recordIno == 0 || stat.ino == item.recordIno);
  }
  return item.ino != 0 || stat.mtimeNs == item.mtimeNs;
}

// The file of `item` beneath `root`, invalid when another or none is there. Only what is known to be a regular file
// is opened: opening a FIFO waits and opening a device can do anything. A failure that says nothing about what is
// there (EIO, EMFILE, EACCES ...) throws: it must never look like a file that changed.
Fd PackReader::tryOpen(int root, const Item& item) const {
  const auto nothing = [](int err) {
    return err == ENOENT || err == ENOTDIR || err == ELOOP || err == ENAMETOOLONG || err == ENXIO;
  };
  const auto [parent, name] = tryOpenParent(root, item.path);
  if (!parent.valid()) {
    if (nothing(errno)) return {};
    throwErrno("openat2", item.path);
  }
  if (!fits(item, statAt(parent.get(), name.c_str()))) return {};
  Fd fd = tryOpenBeneath(parent.get(), name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
  if (!fd.valid()) {
    if (nothing(errno)) return {};
    throwErrno("openat2", item.path);
  }
  if (!fits(item, statFd(fd.get()))) return {};
  return fd;
}

// The place of a file's version: what a newer generation replaced waits in retired/<seq>, the oldest that is not
// older than ours has it; else the tree has it. A rename between two looks sends us round once more.
Fd PackReader::find(const Item& item) const {
  for (int round = 0; round < 3; ++round) {
    if (!options_.retired.empty()) {
      std::vector<std::uint64_t> folders;
      const std::unique_ptr<DIR, int (*)(DIR*)> directory(opendir(options_.retired.c_str()), closedir);
      if (directory == nullptr && errno != ENOENT) throwErrno("opendir", options_.retired);
      while (directory != nullptr) {
        errno = 0;
        const dirent* entry = readdir(directory.get());
        if (entry == nullptr) {
          if (errno != 0) throwErrno("readdir", options_.retired);
          break;
        }
        const std::string_view name = entry->d_name;
        std::uint64_t seq = 0;
        const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), seq);
        if (error == std::errc() && end == name.data() + name.size() && seq >= options_.seq) folders.push_back(seq);
      }
      std::sort(folders.begin(), folders.end());
      for (const std::uint64_t seq : folders) {
        const std::string folder = options_.retired + '/' + std::to_string(seq);
        const Fd root(open(folder.c_str(), O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
        if (!root.valid()) {
          if (errno == ENOENT || errno == ENOTDIR) continue;
          throwErrno("open", folder);
        }
        Fd fd = tryOpen(root.get(), item);
        if (fd.valid()) return fd;
      }
    }
    Fd fd = tryOpen(openRoot(options_.root).get(), item);
    if (fd.valid()) return fd;
  }
  changed(item);
}

namespace {
// Bytes of the stream that `length` bytes of data take.
std::uint64_t inStream(std::uint64_t length) {
  return length + (length + kPackPiece - 1) / kPackPiece * kPackRecordHead;
}
// A hole shorter than this is sent as the zeros that it reads as: a record costs more to keep in mind than it saves,
// and whoever receives a sparse file leaves blocks of zeros out.
constexpr std::uint64_t kMinHole = 64 * 1024;
}  // namespace

std::uint64_t PackReader::Extent::end() const { return at + (zeros ? kPackRecordHead : inStream(length)); }

void PackReader::addExtent(std::uint32_t index, std::uint64_t begin, std::uint64_t end) {
  if (begin >= end) return;
  extents_.push_back({end_, begin, end - begin, index, false});
  end_ = extents_.back().end();
  data_ += end - begin;
}

// Where a file grew by a hole, or got one punched, the run says so without sending the zeros.
void PackReader::addZeros(std::uint32_t index, std::uint64_t begin, std::uint64_t end) {
  constexpr std::uint64_t kMost = 1ULL << 30;  // fits beside the flag in the record's length
  while (begin < end) {
    const std::uint64_t length = std::min(kMost, end - begin);
    extents_.push_back({end_, begin, length, index, true});
    end_ = extents_.back().end();
    begin += length;
  }
}

std::uint64_t PackReader::plan() {
  if (planned_) return end_ + kPackRecordHead;
  extents_.clear();
  end_ = kPackHead;
  data_ = 0;
  for (std::uint32_t i = 0; i < items_.size(); ++i) {
    const Item& item = items_[i];
    if (!item.whole) {
      if (item.runs.empty() && !options_.strict) continue;
      const Fd fd = find(item);
      for (const auto& [offset, length] : item.runs) {
        for (std::uint64_t at = offset; at < offset + length;) {
          const auto data = nextData(fd.get(), at, offset + length);
          addZeros(i, at, data.first);
          addExtent(i, data.first, data.second);
          at = data.second;
        }
      }
      continue;
    }
    // A small file is one stretch, whatever holes it has.
    if (item.size < kChunkBytes) {
      if (options_.strict) (void)find(item);
      addExtent(i, 0, item.size);
      continue;
    }
    const Fd fd = find(item);
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    for (std::uint64_t at = 0; at < item.size;) {
      const auto data = nextData(fd.get(), at, item.size);
      if (data.first >= item.size) break;
      if (begin == end || data.first - end >= kMinHole) {
        addExtent(i, begin, end);
        begin = data.first;
      }
      end = at = data.second;
    }
    addExtent(i, begin, end);
  }
  extents_.shrink_to_fit();
  planned_ = true;
  return end_ + kPackRecordHead;
}

// Makes item `index` the open one.
void PackReader::use(std::uint32_t index) {
  if (open_.valid() && openItem_ == index) return;
  window_.reset();
  open_ = Fd();  // first: never two files open
  open_ = find(items_[index]);
  openItem_ = index;
  // Sent once, not needed again: a long seed must not push everything else out of memory.
  if (items_[index].whole && items_[index].size > kDropBytes) window_ = std::make_unique<CacheWindow>(open_.get(), false);
}

void PackReader::verify(std::uint32_t index) const {
  if (!fits(items_[index], statFd(open_.get()))) changed(items_[index]);
}

std::string PackReader::read(std::uint64_t offset, std::size_t max) {
  const std::uint64_t total = plan();
  std::string out;
  if (offset >= total || max == 0) return out;
  out.reserve(static_cast<std::size_t>(std::min<std::uint64_t>(max, total - offset)));
  // Appends the part of `bytes` (at `at` in the stream) that lies in the window.
  const auto take = [&](std::uint64_t at, std::string_view bytes) {
    const std::uint64_t position = offset + out.size();
    if (out.size() >= max || at > position || at + bytes.size() <= position) return;
    out.append(bytes.substr(static_cast<std::size_t>(position - at), max - out.size()));
  };
  take(0, packHead());
  auto extent = std::upper_bound(extents_.begin(), extents_.end(), offset,
                                 [](std::uint64_t at, const Extent& e) { return at < e.end(); });
  for (; extent != extents_.end() && out.size() < max; ++extent) {
    const Item& item = items_[extent->item];
    if (extent->zeros) {
      take(extent->at, packRecordHead(item.ordinal, static_cast<std::uint32_t>(extent->length) | kZeroRun, extent->offset));
      continue;
    }
    constexpr std::uint64_t kStride = kPackRecordHead + kPackPiece;
    const std::uint64_t position = offset + out.size();
    std::uint64_t piece = position > extent->at ? (position - extent->at) / kStride : 0;
    for (; piece * kPackPiece < extent->length && out.size() < max; ++piece) {
      const std::uint64_t from = piece * kPackPiece;
      const std::uint64_t length = std::min<std::uint64_t>(kPackPiece, extent->length - from);
      const std::uint64_t headAt = extent->at + piece * kStride;
      take(headAt, packRecordHead(item.ordinal, static_cast<std::uint32_t>(length), extent->offset + from));
      if (out.size() >= max) return out;
      use(extent->item);
      const std::uint64_t skip = offset + out.size() - (headAt + kPackRecordHead);
      const auto want = static_cast<std::size_t>(std::min<std::uint64_t>(length - skip, max - out.size()));
      const std::size_t had = out.size();
      out.resize(had + want);
      if (preadFull(open_.get(), out.data() + had, want, extent->offset + from + skip) < want) changed(item);
      if (window_) window_->advance(extent->offset + from + skip + want);
      if (skip + want == length && options_.strict) verify(extent->item);
    }
    const bool last = std::next(extent) == extents_.end() || std::next(extent)->item != extent->item;
    if (last && offset + out.size() == extent->end() && open_.valid()) {
      if (window_) window_->end(item.size);
      window_.reset();
      open_ = Fd();
    }
  }
  take(end_, packRecordHead(kPackEnd, 0, data_));
  return out;
}

}  // namespace sv
