#include "engine/unpack.h"

#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "engine/pack.h"

namespace sv {

namespace {

std::uint64_t read64(std::string_view bytes, std::size_t at) {
  std::uint64_t value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}
std::uint32_t read32(std::string_view bytes, std::size_t at) {
  std::uint32_t value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

}  // namespace

Unpacker::Unpacker(UnpackOptions options) : options_(std::move(options)), slots_(openRoot(options_.slots)) {
  std::uint64_t wanted = 0;
  for (ByteReader all(options_.items); !all.empty();) {
    ByteReader in = all.item();
    Item item;
    item.ordinal = in.u32();
    item.patch = in.u8() == 2;
    in.skip(3);
    item.slot = in.u64();
    item.record = in.sized();
    item.base = in.sized();
    const RecordView record = RecordView::parse(item.record);
    if (record.kind() != Kind::kFile || !record.has(flag::kHash)) throwFormat("an unpack item that is no hashed file");
    if (record.size() > (1ULL << 53)) throwFormat("an unpack item of absurd size");
    if (item.patch) {
      const RecordView base = RecordView::parse(item.base);
      if (base.kind() != Kind::kFile || !base.has(flag::kChunksFull)) throwFormat("a patch without the base's chunk list");
      if (!record.has(flag::kChunksFull) && !record.has(flag::kChunksSparse)) throwFormat("a patch without chunk hashes");
    } else {
      wanted += record.has(flag::kSparse) ? 0 : record.size();
    }
    items_.push_back(std::move(item));
  }
  options_.items.clear();
  options_.items.shrink_to_fit();
  // Early: better nothing than half. What is left for metadata is the caller's floor.
  struct statvfs fs {};
  if (fstatvfs(slots_.get(), &fs) == 0 && wanted > fs.f_bavail * static_cast<std::uint64_t>(fs.f_frsize))
    throw errnoError(ENOSPC, "statvfs", options_.slots);
}

void Unpacker::begin(std::size_t index) {
  Item& item = items_[index];
  slot_ = Fd(openat(slots_.get(), slotName(item.slot).c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!slot_.valid()) throwErrno("openat", slotName(item.slot));
  begun_ = true;
  position_ = 0;
  runs_.clear();
  item.status = kIo;
  const std::uint64_t size = RecordView::parse(item.record).size();
  if (item.patch) {
    const std::string head = packHead();
    writeFull(slot_.get(), head.data(), head.size());
    slotAt_ = head.size();
    hasher_.reset();
  } else {
    hasher_ = std::make_unique<ContentHasher>(size);
  }
  window_ = size > kWindowBytes && !item.patch ? std::make_unique<CacheWindow>(slot_.get(), true) : nullptr;
}

// The current item has all that it gets: verify.
void Unpacker::finish() {
  Item& item = items_[current_];
  const RecordView record = RecordView::parse(item.record);
  if (item.patch) {
    std::string end = packRecordHead(kPackEnd, 0, 0);
    std::uint64_t bytes = 0;
    for (const Run& run : runs_) bytes += run.at != 0 ? run.length : 0;
    std::memcpy(end.data() + 8, &bytes, sizeof bytes);
    writeFull(slot_.get(), end.data(), end.size());
    finishPatch(item, record);
  } else {
    hasher_->addZeros(record.size() - position_);
    if (ftruncate(slot_.get(), static_cast<off_t>(record.size())) != 0) throwErrno("ftruncate");
    item.status = hasher_->finish() == record.hash() ? kOk : kHash;
    if (item.status == kOk && record.has(flag::kChunksFull) && record.chunks() != hasher_->chunks()) item.status = kHash;
    item.full = hasher_->chunks();
    if (window_) window_->end(record.size());
  }
  slot_ = Fd();
  hasher_.reset();
  window_.reset();
  begun_ = false;
  ++current_;
}

void Unpacker::finishPatch(Item& item, const RecordView& record) {
  const RecordView base = RecordView::parse(item.base);
  const std::uint64_t size = record.size();
  const std::uint64_t count = chunkCount(size);
  std::string full(base.chunks());
  full.resize(static_cast<std::size_t>(count * kChunkHashBytes), '\0');
  std::vector<bool> announced(static_cast<std::size_t>(count), false);
  if (record.has(flag::kChunksFull)) {
    for (std::uint64_t c = 0; c < count; ++c) {
      const std::size_t at = static_cast<std::size_t>(c * kChunkHashBytes);
      if (c >= chunkCount(base.size()) || full.compare(at, kChunkHashBytes, record.chunks().substr(at, kChunkHashBytes)) != 0)
        announced[static_cast<std::size_t>(c)] = true;
    }
    full = record.chunks();
  } else {
    std::uint64_t previous = 0;
    bool first = true;
    for (ByteReader in(record.chunks()); !in.empty();) {
      const std::uint32_t c = in.u32();
      const std::string_view hash = in.bytes(kChunkHashBytes);
      if (c >= count || (!first && c <= previous)) throwFormat("sparse chunk list out of order or beyond the file");
      first = false;
      previous = c;
      announced[c] = true;
      full.replace(c * kChunkHashBytes, kChunkHashBytes, hash);
    }
  }
  if (rootOfChunks(full) != record.hash()) {
    // The list was made against another base than ours (or is wrong): the caller takes the whole file.
    item.status = kBase;
    return;
  }
  for (const Run& run : runs_)
    for (std::uint64_t c = run.offset / kChunkBytes; c <= (run.offset + run.length - 1) / kChunkBytes; ++c)
      if (!announced[static_cast<std::size_t>(c)]) throwFormat("a run outside the chunks that changed");
  Fd old;
  if (!options_.base.empty()) {
    const Fd root = openRoot(options_.base);
    // The base's own path, not the new one: the same file (moves come as whole entries).
    old = tryOpenBeneath(root.get(), base.path(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
  }
  if (!old.valid()) {
    item.status = kBase;
    return;
  }
  const Stat stat = statFd(old.get());
  if (stat.kind != Kind::kFile || stat.size != base.size()) {
    item.status = kBase;
    return;
  }
  std::vector<char> buffer(kChunkBytes);
  std::size_t run = 0;
  for (std::uint64_t c = 0; c < count; ++c) {
    if (!announced[static_cast<std::size_t>(c)]) continue;
    const std::uint64_t at = c * kChunkBytes;
    const std::size_t length = static_cast<std::size_t>(std::min<std::uint64_t>(kChunkBytes, size - at));
    const std::size_t had = at < stat.size ? preadFull(old.get(), buffer.data(), length, at) : 0;
    if (had < length) std::memset(buffer.data() + had, 0, length - had);
    while (run < runs_.size() && runs_[run].offset + runs_[run].length <= at) ++run;
    for (std::size_t r = run; r < runs_.size() && runs_[r].offset < at + length; ++r) {
      const std::uint64_t from = std::max(at, runs_[r].offset);
      const std::uint64_t to = std::min(at + length, runs_[r].offset + runs_[r].length);
      char* place = buffer.data() + (from - at);
      const std::size_t n = static_cast<std::size_t>(to - from);
      if (runs_[r].at == 0)
        std::memset(place, 0, n);
      else if (preadFull(slot_.get(), place, n, runs_[r].at + (from - runs_[r].offset)) < n)
        throw errnoError(EIO, "pread");
    }
    if (std::string_view(full).substr(static_cast<std::size_t>(c * kChunkHashBytes), kChunkHashBytes) !=
        hashChunk({buffer.data(), length})) {
      item.status = kHash;
      return;
    }
  }
  item.status = kOk;
  item.full = std::move(full);
}

void Unpacker::head(std::string_view bytes) {
  const std::uint32_t ordinal = read32(bytes, 0);
  const std::uint32_t lengthField = read32(bytes, 4);
  const std::uint64_t offset = read64(bytes, 8);
  if (ordinal == kPackEnd) {
    if (lengthField != 0 || offset != dataTotal_) throwFormat("the end of the pack does not add up");
    if (begun_) finish();
    while (current_ < items_.size()) {
      // Nothing came: an empty file, all holes, or a patch that only changes the size.
      begin(current_);
      finish();
    }
    ended_ = true;
    return;
  }
  const bool zeros = (lengthField & kZeroRun) != 0;
  const std::uint32_t length = lengthField & ~kZeroRun;
  if (length == 0 || (!zeros && length > kPackPiece)) throwFormat("a pack record of a length that is not allowed");
  if (!begun_ || items_[current_].ordinal != ordinal) {
    std::size_t next = begun_ ? current_ + 1 : current_;
    while (next < items_.size() && items_[next].ordinal != ordinal) ++next;
    if (next >= items_.size()) throwFormat("a pack record of an entry that was not asked for or comes out of order");
    if (begun_) finish();
    while (current_ < next) {
      begin(current_);
      finish();
    }
    begin(current_);
  }
  Item& item = items_[current_];
  const std::uint64_t size = RecordView::parse(item.record).size();
  if (offset < position_ || offset > size || length > size - offset)
    throwFormat("a pack record that overlaps or leaves the file");
  if (item.patch) {
    const std::string head = packRecordHead(0, lengthField, offset);
    writeFull(slot_.get(), head.data(), head.size());
    slotAt_ += head.size();
    runs_.push_back({offset, length, zeros ? 0 : slotAt_});
  } else {
    hasher_->addZeros(offset - position_);
    if (zeros) hasher_->addZeros(length);
  }
  position_ = offset + length;
  dataAt_ = offset;
  dataLeft_ = zeros ? 0 : length;
  if (!zeros) dataTotal_ += length;
}

void Unpacker::data(std::string_view bytes) {
  if (items_[current_].patch) {
    writeFull(slot_.get(), bytes.data(), bytes.size());
    slotAt_ += bytes.size();
  } else {
    hasher_->add(bytes);
    pwriteFull(slot_.get(), bytes.data(), bytes.size(), dataAt_);
    dataAt_ += bytes.size();
    if (window_) window_->advance(dataAt_);
  }
  dataLeft_ -= bytes.size();
}

void Unpacker::write(std::string_view bytes) {
  while (!bytes.empty()) {
    if (ended_) throwFormat("bytes after the end of the pack");
    if (dataLeft_ > 0) {
      const std::size_t n = static_cast<std::size_t>(std::min<std::uint64_t>(dataLeft_, bytes.size()));
      data(bytes.substr(0, n));
      bytes.remove_prefix(n);
      continue;
    }
    const std::size_t need = headSeen_ ? kPackRecordHead : kPackHead;
    const std::size_t n = std::min(need - partial_.size(), bytes.size());
    partial_.append(bytes.substr(0, n));
    bytes.remove_prefix(n);
    if (partial_.size() < need) return;
    const std::string whole = std::move(partial_);
    partial_.clear();
    if (!headSeen_) {
      if (whole != packHead()) throwFormat("not a pack of version 1");
      headSeen_ = true;
    } else {
      head(whole);
    }
  }
}

std::string Unpacker::end() {
  if (!ended_) throwFormat("the pack is cut short");
  std::string out;
  for (const Item& item : items_) {
    ItemWriter w(out);
    w.u32(item.ordinal);
    w.u8(item.status);
    w.u8(0);
    w.u16(static_cast<std::uint16_t>(item.err));
    Record record = RecordView::parse(item.record).record();
    if (item.status == kOk && record.size >= kLargeBytes) {
      record.chunks = item.full;
      record.flags = static_cast<std::uint8_t>((record.flags & ~flag::kChunksSparse) | flag::kChunksFull | flag::kLarge);
    }
    std::string packed;
    RecordWriter(packed).append(record);
    w.sized(packed);
  }
  return out;
}

void Unpacker::abort() noexcept {
  slot_ = Fd();
  const std::size_t made = std::min(items_.size(), current_ + (begun_ ? 1 : 0));
  for (std::size_t i = 0; i < made; ++i) (void)unlinkat(slots_.get(), slotName(items_[i].slot).c_str(), 0);
  current_ = 0;
  begun_ = false;
  ended_ = false;
}

}  // namespace sv
