#include "engine/unpack.h"

#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "engine/pack.h"

namespace sv {

namespace {

constexpr std::uint64_t kBlock = 4096;
// A record's u32 length holds the chunk list of a file of at most 16 TiB, so nobody can describe a larger one.
constexpr std::uint64_t kMaxFile = std::uint64_t{16} << 40;

std::string_view chunkAt(std::string_view list, std::uint64_t chunk) {
  return list.substr(static_cast<std::size_t>(chunk * kChunkHashBytes), kChunkHashBytes);
}

bool allZero(const char* bytes, std::size_t length) {
  return length == 0 || (bytes[0] == 0 && std::memcmp(bytes, bytes + 1, length - 1) == 0);
}

}  // namespace

// The check of one patch. Chunks are looked at in ascending order, like the data comes: `upTo` verifies those that
// nothing more can come for, `open` puts one together from the base, and what comes is laid over it.
struct Unpacker::Patch {
  Patch(const Item& i, const std::string& tree) : item(i), count(chunkCount(i.record.size())) {
    if (!lists()) return;
    try {
      if (!openBase(tree)) verdict = kBase;
    } catch (const Error& error) {
      ioError(error);
    }
  }

  // The new full list from the base's and the manifest's. False: it was made against another base than ours.
  bool lists() {
    const std::string_view had = item.base.chunks();
    changed.resize(static_cast<std::size_t>(count), false);
    if (item.record.has(flag::kChunksFull)) {
      full = item.record.chunks();
      for (std::uint64_t c = 0; c < count; ++c) {
        changed[static_cast<std::size_t>(c)] = c >= chunkCount(item.base.size()) || chunkAt(full, c) != chunkAt(had, c);
      }
    } else {
      full = had.substr(0, static_cast<std::size_t>(count * kChunkHashBytes));
      full.resize(static_cast<std::size_t>(count * kChunkHashBytes), '\0');
      for (ByteReader in(item.record.chunks()); !in.empty();) {
        const std::uint32_t c = in.u32();
        full.replace(c * kChunkHashBytes, kChunkHashBytes, in.bytes(kChunkHashBytes));
        changed[c] = true;
      }
    }
    // In a file of another length the last chunks are other ones too, whatever the lists say.
    if (item.base.size() != item.record.size()) {
      const std::uint64_t first = std::min(chunkCount(item.base.size()), count);
      for (std::uint64_t c = first == 0 ? 0 : first - 1; c < count; ++c) changed[static_cast<std::size_t>(c)] = true;
    }
    if (rootOfChunks(full) == item.record.hash()) return true;
    verdict = kBase;
    return false;
  }

  // The file of the base record. Untouched since the index was written: trusted. Otherwise read and compared.
  bool openBase(const std::string& tree) {
    if (tree.empty()) return false;
    const auto [parent, name] = tryOpenParent(openRoot(tree).get(), item.base.path());
    if (!parent.valid()) return false;
    if (statAt(parent.get(), name.c_str()).kind != Kind::kFile) return false;
    old = tryOpenBeneath(parent.get(), name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
    if (!old.valid()) return false;
    const Stat stat = statFd(old.get());
    if (stat.kind != Kind::kFile || stat.size != item.base.size()) return false;
    const bool sameFile = item.base.ino() == 0 || (stat.ino == item.base.ino() && stat.ctimeNs == item.base.ctimeNs());
    if (sameFile && stat.mtimeNs == item.base.mtimeNs()) return true;
    CacheWindow window(old.get(), false);
    for (std::uint64_t at = 0; at < stat.size; at += kChunkBytes) {
      const std::size_t had = readBase(at, kChunkBytes);
      if (hashChunk({chunk.data(), had}) != chunkAt(item.base.chunks(), at / kChunkBytes)) return false;
      if (stat.size > kWindowBytes) window.advance(at);
    }
    return true;
  }

  std::size_t readBase(std::uint64_t at, std::size_t length) {
    return at < item.base.size()
               ? preadFull(old.get(), chunk.data(),
                           static_cast<std::size_t>(std::min<std::uint64_t>(length, item.base.size() - at)), at)
               : 0;
  }

  std::size_t lengthOf(std::uint64_t c) const {
    return static_cast<std::size_t>(std::min<std::uint64_t>(kChunkBytes, item.record.size() - c * kChunkBytes));
  }

  void load(std::uint64_t c) {
    const std::size_t had = readBase(c * kChunkBytes, lengthOf(c));
    std::memset(chunk.data() + had, 0, lengthOf(c) - had);
    loaded = true;
  }

  void check(std::uint64_t c) {
    if (hashChunk({chunk.data(), lengthOf(c)}) == chunkAt(full, c)) return;
    // Whose fault: the base's, if it is not what the index says.
    verdict = kHash;
    if (c >= chunkCount(item.base.size())) return;
    const std::size_t had = readBase(c * kChunkBytes, kChunkBytes);
    if (hashChunk({chunk.data(), had}) != chunkAt(item.base.chunks(), c)) verdict = kBase;
  }

  // Nothing more comes for the chunks before `c`.
  void upTo(std::uint64_t c) {
    for (; next < c && verdict == kOk; ++next) {
      if (!loaded) {
        if (!changed[static_cast<std::size_t>(next)]) continue;
        load(next);
      }
      check(next);
      loaded = false;
    }
  }

  // Lays `length` bytes over the base, zeros when `bytes` is null.
  void overlay(std::uint64_t offset, std::uint64_t length, const char* bytes) {
    try {
      while (length > 0 && verdict == kOk) {
        const std::uint64_t c = offset / kChunkBytes;
        upTo(c);
        if (verdict != kOk) return;
        const auto at = static_cast<std::size_t>(offset - c * kChunkBytes);
        const auto n = static_cast<std::size_t>(std::min<std::uint64_t>(length, lengthOf(c) - at));
        if (!loaded && n < lengthOf(c)) load(c);
        loaded = true;
        if (bytes == nullptr) {
          std::memset(chunk.data() + at, 0, n);
        } else {
          std::memcpy(chunk.data() + at, bytes, n);
          bytes += n;
        }
        offset += n;
        length -= n;
      }
    } catch (const Error& error) {
      ioError(error);
    }
  }

  void finish() {
    try {
      upTo(count);
    } catch (const Error& error) {
      ioError(error);
    }
  }

  void ioError(const Error& error) {
    verdict = kIo;
    err = error.err != 0 ? error.err : EIO;
  }

  const Item& item;
  const std::uint64_t count;
  Fd old;
  std::string full;           // the new list
  std::vector<bool> changed;  // must be looked at even if nothing comes
  std::uint64_t next = 0;     // the first chunk that is not verified
  bool loaded = false;        // `chunk` holds chunk `next`
  std::vector<char> chunk = std::vector<char>(kChunkBytes);
  Status verdict = kOk;
  int err = 0;
};

Unpacker::Unpacker(UnpackOptions options) : options_(std::move(options)), slots_(openRoot(options_.slots)) {
  std::uint64_t wanted = 0;
  for (ByteReader all(options_.items); !all.empty();) {
    ByteReader in = all.item();
    Item item;
    item.ordinal = in.u32();
    const std::uint8_t kind = in.u8();
    if (kind != 1 && kind != 2) throwFormat("an unpack item of an unknown kind");
    if (item.ordinal == kPackEnd) throwFormat("an ordinal that is not allowed");
    item.patch = kind == 2;
    in.skip(3);
    item.slot = in.u64();
    item.recordBytes = in.sized();
    item.baseBytes = in.sized();
    items_.push_back(std::move(item));
  }
  for (Item& item : items_) {
    item.record = RecordView::parse(item.recordBytes);
    const RecordView& record = item.record;
    if (record.kind() != Kind::kFile || !record.has(flag::kHash)) throwFormat("an unpack item that is no hashed file");
    if (record.size() > kMaxFile) throwFormat("an unpack item of more than 16 TiB");
    if (item.patch) {
      item.base = RecordView::parse(item.baseBytes);
      if (item.base.kind() != Kind::kFile || !item.base.has(flag::kChunksFull) || item.base.size() <= kChunkBytes)
        throwFormat("a patch without the base's chunk list");
      if (record.size() <= kChunkBytes || (!record.has(flag::kChunksFull) && !record.has(flag::kChunksSparse)))
        throwFormat("a patch without chunk hashes");
    } else if (!record.has(flag::kSparse)) {
      wanted += record.size();
    }
  }
  options_.items.clear();
  options_.items.shrink_to_fit();
  // Early: better nothing than half. What is left for metadata is the caller's floor.
  struct statvfs fs {};
  if (fstatvfs(slots_.get(), &fs) == 0 && wanted > fs.f_bavail * static_cast<std::uint64_t>(fs.f_frsize))
    throw errnoError(ENOSPC, "statvfs", options_.slots);
}

Unpacker::~Unpacker() = default;

// The slot of the current item.
void Unpacker::begin() {
  Item& item = items_[current_];
  const std::uint64_t size = item.record.size();
  position_ = 0;
  writtenTo_ = 0;
  patchBytes_ = 0;
  begun_ = true;
  const std::string name = slotName(item.slot);
  slot_ = Fd(openat(slots_.get(), name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!slot_.valid()) throwErrno("openat", name);
  item.made = true;
  if (item.patch) {
    const std::string magic = packHead();
    writeFull(slot_.get(), magic.data(), magic.size());
    patch_ = std::make_unique<Patch>(item, options_.base);
    return;
  }
  hasher_ = std::make_unique<ContentHasher>(size);
  if (size > kWindowBytes) window_ = std::make_unique<CacheWindow>(slot_.get(), true);
  // Told early that it cannot fit, and laid out in one piece where it can.
  if (size >= kLargeBytes && !item.record.has(flag::kSparse) &&
      fallocate(slot_.get(), FALLOC_FL_KEEP_SIZE, 0, static_cast<off_t>(size)) != 0 &&
      (errno == ENOSPC || errno == EDQUOT || errno == EFBIG))
    throwErrno("fallocate", name);
}

void Unpacker::drop(Item& item) noexcept {
  if (!item.made) return;
  item.made = false;
  (void)unlinkat(slots_.get(), slotName(item.slot).c_str(), 0);
}

// The current item has all that it gets.
void Unpacker::finish() {
  Item& item = items_[current_];
  const RecordView& record = item.record;
  if (item.patch) {
    const std::string last = packRecordHead(kPackEnd, 0, patchBytes_);
    writeFull(slot_.get(), last.data(), last.size());
    patch_->finish();
    item.status = patch_->verdict;
    item.err = patch_->err;
    if (item.status == kOk) item.full = std::move(patch_->full);
  } else {
    const bool nothingCame = position_ == 0;
    hasher_->addZeros(record.size() - position_);
    if (writtenTo_ != record.size() && ftruncate(slot_.get(), static_cast<off_t>(record.size())) != 0)
      throwErrno("ftruncate", slotName(item.slot));
    const bool right = hasher_->finish() == record.hash() &&
                       (!record.has(flag::kChunksFull) || record.chunks() == hasher_->chunks());
    item.status = right ? kOk : nothingCame ? kMissing : kHash;
    if (right && record.size() >= kLargeBytes) item.full = hasher_->chunks();
    if (window_) window_->end(record.size());
  }
  slot_ = Fd();
  hasher_.reset();
  window_.reset();
  patch_.reset();
  if (item.status != kOk) drop(item);
  begun_ = false;
  ++current_;
}

void Unpacker::head(std::string_view bytes) {
  ByteReader in(bytes);
  const std::uint32_t ordinal = in.u32();
  const std::uint32_t lengthField = in.u32();
  const std::uint64_t offset = in.u64();
  // Items for which nothing came are empty files, all holes, or patches that only change the size: they are made too.
  const auto skipTo = [&](std::size_t next) {
    if (begun_) finish();
    while (current_ < next) {
      begin();
      finish();
    }
  };
  if (ordinal == kPackEnd) {
    if (lengthField != 0 || offset != dataTotal_) throwFormat("the end of the pack does not add up");
    skipTo(items_.size());
    complete_ = true;
    return;
  }
  const bool zeros = (lengthField & kZeroRun) != 0;
  const std::uint32_t length = lengthField & ~kZeroRun;
  if (length == 0 || (!zeros && length > kPackPiece)) throwFormat("a pack record of a length that is not allowed");
  if (!begun_ || items_[current_].ordinal != ordinal) {
    std::size_t next = current_ + (begun_ ? 1 : 0);
    while (next < items_.size() && items_[next].ordinal != ordinal) ++next;
    if (next >= items_.size()) throwFormat("a pack record of an entry that was not asked for or comes out of order");
    skipTo(next);
    begin();
  }
  const Item& item = items_[current_];
  const std::uint64_t size = item.record.size();
  if (offset < position_ || offset > size || length > size - offset)
    throwFormat("a pack record that overlaps or leaves the file");
  if (item.patch) {
    const std::string copy = packRecordHead(0, lengthField, offset);
    writeFull(slot_.get(), copy.data(), copy.size());
    if (zeros) patch_->overlay(offset, length, nullptr);
  } else {
    hasher_->addZeros(offset - position_);
    if (zeros) hasher_->addZeros(length);
  }
  position_ = offset + length;
  dataAt_ = offset;
  dataLeft_ = zeros ? 0 : length;
  if (!zeros) dataTotal_ += length;
}

// Into a new file, so what is not written is zeros: a sparse file's blocks of zeros stay holes.
void Unpacker::writeWhole(const Item& item, std::string_view bytes) {
  if (!item.record.has(flag::kSparse)) {
    pwriteFull(slot_.get(), bytes.data(), bytes.size(), dataAt_);
    writtenTo_ = dataAt_ + bytes.size();
    return;
  }
  for (std::size_t at = 0; at < bytes.size();) {
    const auto pieceAt = [&](std::size_t from) {
      return static_cast<std::size_t>(std::min<std::uint64_t>(kBlock - (dataAt_ + from) % kBlock, bytes.size() - from));
    };
    std::size_t n = pieceAt(at);
    if (allZero(bytes.data() + at, n)) {
      at += n;
      continue;
    }
    while (at + n < bytes.size() && !allZero(bytes.data() + at + n, pieceAt(at + n))) n += pieceAt(at + n);
    pwriteFull(slot_.get(), bytes.data() + at, n, dataAt_ + at);
    at += n;
    writtenTo_ = dataAt_ + at;
  }
}

void Unpacker::data(std::string_view bytes) {
  const Item& item = items_[current_];
  if (item.patch) {
    writeFull(slot_.get(), bytes.data(), bytes.size());
    patchBytes_ += bytes.size();
    patch_->overlay(dataAt_, bytes.size(), bytes.data());
  } else {
    hasher_->add(bytes);
    writeWhole(item, bytes);
    if (window_) window_->advance(dataAt_ + bytes.size());
  }
  dataAt_ += bytes.size();
  dataLeft_ -= bytes.size();
}

void Unpacker::take(std::string_view bytes) {
  while (!bytes.empty()) {
    if (complete_) throwFormat("bytes after the end of the pack");
    if (dataLeft_ > 0) {
      const auto n = static_cast<std::size_t>(std::min<std::uint64_t>(dataLeft_, bytes.size()));
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
    if (headSeen_) {
      head(whole);
    } else {
      if (whole != packHead()) throwFormat("not a pack of version 1");
      headSeen_ = true;
    }
  }
}

void Unpacker::write(std::string_view bytes) {
  if (failed_ || done_) throw Error("CLOSED", "CLOSED: the unpacker has ended");
  try {
    take(bytes);
  } catch (...) {
    abort();
    throw;
  }
}

std::string Unpacker::end() {
  if (failed_ || done_) throw Error("CLOSED", "CLOSED: the unpacker has ended");
  if (!complete_) {
    abort();
    throwFormat("the pack is cut short");
  }
  std::string out;
  for (const Item& item : items_) {
    ItemWriter w(out);
    w.u32(item.ordinal);
    w.u8(item.status);
    w.u8(0);
    w.u16(static_cast<std::uint16_t>(item.err));
    std::string packed;
    if (item.status == kOk && item.record.size() >= kLargeBytes) {
      Record record = item.record.record();
      record.chunks = item.full;
      record.flags = static_cast<std::uint8_t>((record.flags & ~flag::kChunksSparse) | flag::kChunksFull | flag::kLarge);
      RecordWriter(packed).append(record);
    } else {
      packed = item.record.bytes();
    }
    w.sized(packed);
  }
  done_ = true;
  return out;
}

void Unpacker::abort() noexcept {
  if (done_) return;
  failed_ = true;
  patch_.reset();
  window_.reset();
  hasher_.reset();
  slot_ = Fd();
  for (Item& item : items_) drop(item);
}

}  // namespace sv
