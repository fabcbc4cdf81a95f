#include "engine/stage.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "engine/fs.h"
#include "engine/hash.h"
#include "engine/pack.h"
#include "engine/record.h"

namespace sv {

namespace {

constexpr std::uint64_t kStep = 1024 * 1024;      // bytes compared or copied at a time; a multiple of the chunk
constexpr std::uint64_t kBlock = 4096;
constexpr std::uint64_t kJoin = 16 * 1024;        // changed blocks this near are sent as one
constexpr std::uint64_t kSmall = 256 * 1024;      // up to here one buffer, one read, one write
constexpr std::int64_t kTickNs = 10'000'000;      // two timer ticks at HZ=250: younger time stamps may repeat

enum Status : std::uint8_t { kOk = 0, kGone = 1, kBusy = 2, kFailed = 3, kNotFile = 4 };
enum SlotKind : std::uint8_t { kNone = 0, kWhole = 1, kPatch = 2 };

struct Run {
  std::uint64_t offset;
  std::uint64_t length;
};

struct Result {
  Status status = kOk;
  SlotKind slotKind = kNone;
  int err = 0;
  std::uint64_t read = 0;
  std::uint64_t written = 0;
  Record record;
  std::vector<Run> runs;
};

// Faults of the slots' side end the whole call; this marks them on their way up.
struct SlotError {
  Error error;
};

template <typename F>
auto onSlots(F f) {
  try {
    return f();
  } catch (const Error& error) {
    throw SlotError{error};
  }
}

bool allZero(const char* data, std::size_t length) {
  return length == 0 || (data[0] == 0 && std::memcmp(data, data + 1, length - 1) == 0);
}

// What one attempt to copy a file found.
enum class Attempt { kStable, kChanged };

class Stager {
 public:
  explicit Stager(const StageOptions& options) : options_(options), root_(openRoot(options.root)) {
    if (!options.hashOnly) slots_ = onSlots([&] { return openRoot(options.slots); });
    if (!options.base.empty()) base_ = openRoot(options.base);
  }

  std::string run(std::string_view items) {
    std::string out;
    try {
      for (ByteReader all(items); !all.empty();) {
        ByteReader item = all.item();
        const std::uint32_t id = item.u32();
        const std::uint64_t slot = item.u64();
        const bool patch = (item.u8() & 1) != 0;
        item.skip(3);
        const std::string_view path = item.sized();
        const std::string_view baseBytes = item.sized();
        std::optional<RecordView> base;
        if (!baseBytes.empty()) base = RecordView::parse(baseBytes);
        Result result = file(path, slot, patch, base);
        result.record.path = path;
        ItemWriter writer(out);
        writer.u32(id);
        writer.u8(result.status);
        writer.u8(result.slotKind);
        writer.u16(static_cast<std::uint16_t>(result.err));
        writer.u64(result.read);
        writer.u64(result.written);
        std::string record;
        RecordWriter(record).append(result.record);
        writer.sized(record);
        writer.u32(static_cast<std::uint32_t>(result.runs.size() * 16));
        for (const Run& run : result.runs) {
          writer.u64(run.offset);
          writer.u64(run.length);
        }
      }
    } catch (...) {
      for (const std::uint64_t slot : made_) (void)unlinkat(slots_.get(), slotName(slot).c_str(), 0);
      throw;
    }
    return out;
  }

 private:
  Result file(std::string_view path, std::uint64_t slot, bool patch, const std::optional<RecordView>& base) {
    Result result;
    try {
      for (unsigned attempt = 0;; ++attempt) {
        result = Result();
        if (once(path, slot, patch, base, result) == Attempt::kStable) return result;
        dropSlot(slot);
        if (attempt >= options_.retries) break;
        static constexpr int kBackOffMs[] = {20, 80, 200};
        std::this_thread::sleep_for(std::chrono::milliseconds(kBackOffMs[std::min(attempt, 2U)]));
      }
      result.status = kBusy;
      result.slotKind = kNone;
      result.runs.clear();
      result.record.chunks.clear();
      result.record.hash.clear();
      result.record.flags = 0;
    } catch (const Error& error) {
      dropSlot(slot);
      result = Result();
      result.err = error.err != 0 ? error.err : EIO;
      const bool gone =
          error.err == ENOENT || error.err == ENOTDIR || error.err == ELOOP || error.err == ENAMETOOLONG;
      result.status = gone ? kGone : kFailed;
    }
    return result;
  }

  // Only what this call made: a slot that was there before belongs to somebody.
  void dropSlot(std::uint64_t slot) {
    if (std::erase(made_, slot) > 0) (void)unlinkat(slots_.get(), slotName(slot).c_str(), 0);
  }

  Fd makeSlot(std::uint64_t slot) {
    return onSlots([&] {
      Fd fd(openat(slots_.get(), slotName(slot).c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
      if (!fd.valid()) throwErrno("openat", slotName(slot));
      made_.push_back(slot);
      return fd;
    });
  }

  Attempt once(std::string_view path, std::uint64_t slot, bool patch, const std::optional<RecordView>& base,
               Result& result) {
    // First a descriptor that opens nothing (a FIFO would block, a device may act), then the very same file through it.
    const Fd place = openBeneath(root_.get(), path, O_PATH | O_NOFOLLOW);
    const Stat found = statFd(place.get());
    if (found.kind != Kind::kFile) {
      found.describe(result.record);
      result.status = kNotFile;
      return Attempt::kStable;
    }
    const std::string link = "/proc/self/fd/" + std::to_string(place.get());
    const Fd in(open(link.c_str(), O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
    // Without /proc: that must not look like a file that is gone.
    if (!in.valid()) throw errnoError(errno == ENOENT ? ENOSYS : errno, "open", path);
    const Stat opened = settled(in.get(), found);
    if (opened.size > kMaxFileBytes) throw errnoError(EFBIG, "statx", path);

    const bool large = opened.size >= kLargeBytes;
    const bool haveBase = base && base->kind() == Kind::kFile && base->has(flag::kHash);
    const bool baseChunks = haveBase && base->size() >= kLargeBytes && base->has(flag::kChunksFull);
    Stat after;
    std::uint64_t size = opened.size;  // as staged
    if (options_.hashOnly) {
      if (!hashContent(in.get(), opened, result, after)) return Attempt::kChanged;
      if (baseChunks && large) diffChunks(base->chunks(), base->size(), result.record.chunks, size, result.runs);
    } else if (patch && large && baseChunks && base_.valid()) {
      const Patched patched = patchContent(in.get(), path, opened, *base, slot, result, after, size);
      if (patched == Patched::kChanged) return Attempt::kChanged;
      if (patched == Patched::kNotWorth) {
        dropSlot(slot);
        result = Result();
        size = opened.size;
        if (!copyContent(in.get(), opened, slot, result, after, size)) return Attempt::kChanged;
      }
    } else {
      if (!copyContent(in.get(), opened, slot, result, after, size)) return Attempt::kChanged;
    }
    // The name must still mean this file.
    const Stat named = statBeneath(root_.get(), path);
    if (named.ino != opened.ino || named.dev != opened.dev) return Attempt::kChanged;
    after.describe(result.record);
    result.record.size = size;
    result.record.xattrs = readXattrs(in.get());
    result.record.flags |= flag::kHash;
    if (size >= kLargeBytes)
      result.record.flags |= flag::kLarge | flag::kChunksFull;
    else
      result.record.chunks.clear();
    if (after.blocks * 512 + kBlock < size) result.record.flags |= flag::kSparse;
    // Equal content needs no slot: the base has it.
    if (!options_.hashOnly && haveBase && base_.valid() && result.slotKind == kWhole && base->size() == size &&
        base->hash() == result.record.hash) {
      dropSlot(slot);
      result.slotKind = kNone;
    }
    return Attempt::kStable;
  }

  // The state of the file from which the reading starts. A write within the same timer tick as the last one leaves no
  // trace in the times (before Linux 6.13), so a file that was written just now is given a moment; one that is written
  // again in that moment gets times that equal no later look, and is read twice.
  static Stat settled(int in, Stat stat) {
    const std::int64_t age = realtimeNs() - stat.ctimeNs;
    if (age >= kTickNs || age < -kTickNs) return stat;
    std::this_thread::sleep_for(std::chrono::nanoseconds(kTickNs - std::max<std::int64_t>(age, 0)));
    const Stat now = statFd(in);
    const bool young = realtimeNs() - now.ctimeNs < kTickNs;
    stat = now;
    if (young) distrust(stat);
    return stat;
  }

  // The file went on changing: its times may already belong to a later state, even to one within the same timer
  // tick, so what is recorded must not look like the file of now.
  static void distrust(Stat& at) { --at.ctimeNs; }

  char* buffer() {
    if (buffer_.empty()) buffer_.resize(kStep);
    return buffer_.data();
  }
  char* second() {
    if (second_.empty()) second_.resize(kStep);
    return second_.data();
  }

  // Whether what was read up to `size` is what the file was at one moment. `opened` is from before the reading.
  // Untouched since: yes. Else `at` becomes the state now, with all of it read (size == now), and `reread` tells
  // whether a second reading finds the same bytes: then they all stood there between the two readings.
  template <typename Tail, typename Reread>
  bool settle(int in, const Stat& opened, Stat& at, std::uint64_t& size, Tail tail, Reread reread) {
    at = statFd(in);
    if (at.sameAs(opened) && size == at.size) return true;
    // Read what was appended meanwhile until the size stands still for a moment.
    for (int i = 0; at.size > size; ++i) {
      if (i >= 16) return false;
      if (!tail(size, at.size)) return false;
      size = at.size;
      at = statFd(in);
    }
    if (at.size < size) return false;  // truncated
    if (!reread(size)) return false;
    distrust(at);
    return true;
  }

  bool hashContent(int in, const Stat& opened, Result& result, Stat& after) {
    const std::uint64_t size = opened.size;
    // Only a still file is taken: live consistency serves the file itself, and what it was while it changed can't be
    // served any more.
    ContentHasher hasher(size);
    CacheWindow window(in, false);
    for (std::uint64_t at = 0; at < size;) {
      const auto [begin, end] = nextData(in, at, size);
      if (begin > at) hasher.addZeros(begin - at);
      for (at = begin; at < end;) {
        const std::size_t want = static_cast<std::size_t>(std::min(kStep, end - at));
        const std::size_t n = preadFull(in, buffer(), want, at);
        if (n < want) return false;
        result.read += n;
        hasher.add({buffer(), n});
        at += n;
        if (size > kWindowBytes) window.advance(at);
      }
    }
    result.record.hash = hasher.finish();
    result.record.chunks = hasher.chunks();
    after = statFd(in);
    return after.sameAs(opened);
  }

  bool copyContent(int in, const Stat& opened, std::uint64_t slot, Result& result, Stat& after, std::uint64_t& size) {
    const Fd out = makeSlot(slot);
    result.slotKind = kWhole;
    if (cloneFile(in, out.get())) {
      // A clone is atomic against writers (ioctl_ficlone(2)): it is a state, whatever the source does now.
      size = statFd(out.get()).size;
      after = statFd(in);
      // If the source was touched since, its times belong to a later state: the next comparison must see that.
      if (!after.sameAs(opened)) {
        after.mtimeNs = opened.mtimeNs;
        after.ctimeNs = opened.ctimeNs;
      }
      return hashSlot(out.get(), size, result);
    }
    if (size <= kSmall) {
      std::string data(static_cast<std::size_t>(size), '\0');
      const std::size_t n = preadFull(in, data.data(), data.size(), 0);
      if (n < data.size()) return false;
      result.read += n;
      const auto tail = [&](std::uint64_t from, std::uint64_t to) {
        if (to > kSmall * 4) return false;
        data.resize(static_cast<std::size_t>(to));
        return preadFull(in, data.data() + from, static_cast<std::size_t>(to - from), from) == to - from;
      };
      const auto reread = [&](std::uint64_t length) {
        std::string second(static_cast<std::size_t>(length), '\0');
        result.read += length;
        return preadFull(in, second.data(), second.size(), 0) == length && second == data;
      };
      if (!settle(in, opened, after, size, tail, reread)) return false;
      writeSparse(out.get(), data, opened.blocks * 512 < opened.size);
      result.written += size;
      ContentHasher hasher(size);
      hasher.add(data);
      result.record.hash = hasher.finish();
      result.record.chunks = hasher.chunks();
      return true;
    }
    const bool holes = tellsHoles(in);
    const auto copy = [&](std::uint64_t from, std::uint64_t to) {
      CacheWindow readWindow(in, false);
      CacheWindow writeWindow(out.get(), true);
      const bool windowed = to - from > kWindowBytes;
      for (std::uint64_t at = from; at < to;) {
        const auto [begin, end] = nextData(in, at, to);
        for (at = begin; at < end;) {
          const std::uint64_t want = std::min(windowed ? kStep * 4 : std::numeric_limits<std::uint64_t>::max(), end - at);
          const std::uint64_t n = holes ? copyTo(in, out.get(), at, want) : copyBlocks(in, out.get(), at, want);
          if (n == 0) return false;
          result.read += n;
          result.written += n;
          at += n;
          if (windowed) {
            writeWindow.advance(at);
            readWindow.advance(at);
          }
        }
      }
      onSlots([&] {
        if (ftruncate(out.get(), static_cast<off_t>(to)) != 0) throwErrno("ftruncate");
        return 0;
      });
      return true;
    };
    if (!copy(0, size)) return false;
    const auto reread = [&](std::uint64_t length) {
      for (std::uint64_t at = 0; at < length;) {
        const auto [begin, end] = dataOfBoth(in, length, out.get(), length, at, length);
        if (begin >= length) break;
        at = begin;
        const std::size_t want = static_cast<std::size_t>(std::min(kStep, end - at));
        if (preadFull(in, buffer(), want, at) < want) return false;
        if (onSlots([&] { return preadFull(out.get(), second(), want, at); }) < want) return false;
        result.read += want;
        if (std::memcmp(buffer(), second(), want) != 0) return false;
        at += want;
      }
      return true;
    };
    if (!settle(in, opened, after, size, copy, reread)) return false;
    return hashSlot(out.get(), size, result);
  }

  // Reading errors are the source's, all others the slots'.
  std::uint64_t copyTo(int in, int out, std::uint64_t offset, std::uint64_t length) {
    try {
      return copyRange(in, out, offset, length);
    } catch (const Error& error) {
      if (error.syscall == "pread") throw;
      throw SlotError{error};
    }
  }

  // Copies without the blocks that are zero, for file systems whose holes can't be asked for: `out` has none there yet.
  std::uint64_t copyBlocks(int in, int out, std::uint64_t offset, std::uint64_t length) {
    const std::size_t want = static_cast<std::size_t>(std::min<std::uint64_t>(kStep, length));
    const std::size_t n = preadFull(in, buffer(), want, offset);
    onSlots([&] {
      writeBlocks(out, {buffer(), n}, offset);
      return 0;
    });
    return n;
  }

  // Blocks that are not zero, neighbours by one call.
  static void writeBlocks(int out, std::string_view data, std::uint64_t offset) {
    for (std::size_t at = 0; at < data.size();) {
      const auto zero = [&](std::size_t from) { return allZero(data.data() + from, std::min<std::size_t>(kBlock, data.size() - from)); };
      if (zero(at)) {
        at += kBlock;
        continue;
      }
      std::size_t end = at + kBlock;
      while (end < data.size() && !zero(end)) end += kBlock;
      end = std::min(end, data.size());
      pwriteFull(out, data.data() + at, end - at, offset + at);
      at = end;
    }
  }

  void writeSparse(int out, const std::string& data, bool holes) {
    onSlots([&] {
      if (!holes) {
        pwriteFull(out, data.data(), data.size(), 0);
        return 0;
      }
      if (ftruncate(out, static_cast<off_t>(data.size())) != 0) throwErrno("ftruncate");
      writeBlocks(out, data, 0);
      return 0;
    });
  }

  bool hashSlot(int slot, std::uint64_t size, Result& result) {
    ContentHasher hasher(size);
    CacheWindow window(slot, true);
    onSlots([&] {
      for (std::uint64_t at = 0; at < size;) {
        const auto [begin, end] = nextData(slot, at, size);
        if (begin > at) hasher.addZeros(begin - at);
        for (at = begin; at < end;) {
          const std::size_t want = static_cast<std::size_t>(std::min(kStep, end - at));
          const std::size_t n = preadFull(slot, buffer(), want, at);
          if (n < want) throw errnoError(EIO, "pread");
          hasher.add({buffer(), n});
          at += n;
          if (size > kWindowBytes) window.advance(at);
        }
      }
      if (size > kWindowBytes) window.end(size);
      return 0;
    });
    result.record.hash = hasher.finish();
    result.record.chunks = hasher.chunks();
    return true;
  }

  // Next stretch of [at, to) in which one of the files has data, blocks whole; {to, to} when both are holes from `at`.
  static std::pair<std::uint64_t, std::uint64_t> dataOfBoth(int a, std::uint64_t sizeOfA, int b, std::uint64_t sizeOfB,
                                                            std::uint64_t at, std::uint64_t to) {
    const auto of = [&](int fd, std::uint64_t size) {
      const std::uint64_t end = std::min(size, to);
      const auto found = nextData(fd, at, end);
      return at >= end || found.first >= end ? std::pair{to, to} : found;
    };
    const auto first = of(a, sizeOfA);
    const auto second = of(b, sizeOfB);
    const auto& nearest = first.first <= second.first ? first : second;
    const std::uint64_t begin = std::max(at, nearest.first - nearest.first % kBlock);
    const std::uint64_t end = std::min(to, (nearest.second + kBlock - 1) / kBlock * kBlock);
    return {std::min(begin, to), std::max(std::min(begin, to), end)};
  }

  enum class Patched { kDone, kChanged, kNotWorth };

  Patched patchContent(int in, std::string_view path, const Stat& opened, const RecordView& base, std::uint64_t slot,
                       Result& result, Stat& after, std::uint64_t& size) {
    const Fd old = tryOpenBeneath(base_.get(), path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
    if (!old.valid()) return Patched::kNotWorth;
    const Stat oldStat = statFd(old.get());
    if (oldStat.kind != Kind::kFile || oldStat.size != base.size() || oldStat.mtimeNs != base.mtimeNs())
      return Patched::kNotWorth;
    const std::uint64_t limit = std::max(size, oldStat.size) / 2;
    std::uint64_t changed = 0;
    const auto compare = [&](std::uint64_t from, std::uint64_t to) {
      CacheWindow inWindow(in, false);
      CacheWindow oldWindow(old.get(), false);
      for (std::uint64_t at = from - from % kBlock; at < to;) {
        // Where both are holes there is nothing to read.
        const auto [begin, end] = dataOfBoth(in, to, old.get(), oldStat.size, at, to);
        if (begin >= to) break;
        at = begin;
        const std::size_t want = static_cast<std::size_t>(std::min(kStep, end - at));
        if (preadFull(in, buffer(), want, at) < want) return false;
        result.read += want;
        const std::size_t had = at < oldStat.size ? preadFull(old.get(), second(), want, at) : 0;
        if (had < want) std::memset(second() + had, 0, want - had);
        // Beyond the base's end everything that is not zero is new; the size itself travels in the record.
        if (std::memcmp(buffer(), second(), want) != 0) {
          for (std::size_t b = 0; b < want; b += kBlock) {
            const std::size_t n = std::min<std::size_t>(kBlock, want - b);
            if (std::memcmp(buffer() + b, second() + b, n) == 0) continue;
            addRun(result.runs, at + b, n);
            changed += n;
          }
        }
        at += want;
        if (to - from > kWindowBytes) {
          inWindow.advance(at);
          oldWindow.advance(at);
        }
        if (changed > limit) return true;
      }
      return true;
    };
    if (!compare(0, size)) return Patched::kChanged;
    // `after` is a moment at which all of the file had been compared. The patch is written from a second reading. A
    // file that was touched meanwhile is taken if, at one moment, it has the size that was compared and a third reading
    // finds base + patch.
    bool still = false;
    for (int i = 0;; ++i) {
      if (changed > limit) return Patched::kNotWorth;
      after = statFd(in);
      if (after.size < size || i >= 16) return Patched::kChanged;
      if (after.size > size) {
        const std::uint64_t from = size;
        size = after.size;
        if (!compare(from, size)) return Patched::kChanged;
        continue;
      }
      if (result.runs.empty() && size == oldStat.size) {
        if (!after.sameAs(opened)) return Patched::kChanged;
        result.record.hash = base.hash();
        result.record.chunks = base.chunks();
        return Patched::kDone;
      }
      dropSlot(slot);
      const Fd out = makeSlot(slot);
      result.slotKind = kPatch;
      if (!writePatch(in, out.get(), size, result)) return Patched::kChanged;
      after = statFd(in);
      if (after.size > size) continue;  // a log that grows: once more with what came
      still = after.sameAs(opened);
      break;
    }
    if (!still) {
      if (after.size != size || !samePatched(in, old.get(), oldStat.size, slot, size, result)) return Patched::kChanged;
      distrust(after);
    }
    return patchedChunks(old.get(), oldStat.size, base, slot, size, result) ? Patched::kDone : Patched::kChanged;
  }

  static void addRun(std::vector<Run>& runs, std::uint64_t offset, std::uint64_t length) {
    const std::uint64_t end = offset + length;
    if (!runs.empty()) {
      Run& last = runs.back();
      if (offset <= last.offset + last.length + kJoin && end - last.offset <= kStep) {
        last.length = std::max(last.length, end - last.offset);
        return;
      }
      offset = std::max(offset, last.offset + last.length);  // runs never overlap
      if (offset >= end) return;
    }
    runs.push_back({offset, end - offset});
  }

  // The runs, read again and written as a pack with ordinal 0. False when the file got shorter.
  bool writePatch(int in, int out, std::uint64_t size, Result& result) {
    std::string head;
    ByteWriter h(head);
    h.raw("SVPK");
    h.u16(1);
    h.u16(0);
    std::uint64_t data = 0;
    bool whole = true;
    onSlots([&] {
      writeFull(out, head.data(), head.size());
      return 0;
    });
    for (Run& run : result.runs) {
      run.length = std::min(run.length, size - run.offset);
      const std::size_t n = static_cast<std::size_t>(run.length);
      if (preadFull(in, buffer(), n, run.offset) < n) {
        whole = false;
        break;
      }
      const bool zeros = allZero(buffer(), n);
      std::string record;
      ByteWriter w(record);
      w.u32(0);
      w.u32(static_cast<std::uint32_t>(n) | (zeros ? kZeroRun : 0));
      w.u64(run.offset);
      onSlots([&] {
        writeFull(out, record.data(), record.size());
        if (!zeros) writeFull(out, buffer(), n);
        return 0;
      });
      if (!zeros) data += n;
      result.written += record.size() + (zeros ? 0 : n);
    }
    if (!whole) return false;
    std::string end;
    ByteWriter w(end);
    w.u32(0xFFFFFFFFU);
    w.u32(0);
    w.u64(data);
    onSlots([&] {
      writeFull(out, end.data(), end.size());
      return 0;
    });
    return true;
  }

  // base + patch in [offset, offset + length).
  void readPatched(int old, std::uint64_t oldSize, int patch, const std::vector<std::pair<Run, std::uint64_t>>& places,
                   std::uint64_t offset, std::size_t length, char* out) {
    const std::size_t had = offset < oldSize ? preadFull(old, out, length, offset) : 0;
    if (had < length) std::memset(out + had, 0, length - had);
    auto it = std::upper_bound(places.begin(), places.end(), offset,
                               [](std::uint64_t at, const auto& place) { return at < place.first.offset + place.first.length; });
    for (; it != places.end() && it->first.offset < offset + length; ++it) {
      const std::uint64_t from = std::max(offset, it->first.offset);
      const std::uint64_t to = std::min(offset + length, it->first.offset + it->first.length);
      if (it->second == 0) {
        std::memset(out + (from - offset), 0, static_cast<std::size_t>(to - from));
      } else {
        onSlots([&] {
          const std::size_t n = static_cast<std::size_t>(to - from);
          if (preadFull(patch, out + (from - offset), n, it->second + (from - it->first.offset)) < n)
            throw errnoError(EIO, "pread");
          return 0;
        });
      }
    }
  }

  // Where each run's bytes lie in the patch slot; 0 for zero runs.
  std::pair<Fd, std::vector<std::pair<Run, std::uint64_t>>> openPatch(std::uint64_t slot, const Result& result) {
    return onSlots([&] {
      Fd fd = openBeneath(slots_.get(), slotName(slot), O_RDONLY | O_NOFOLLOW);
      std::vector<std::pair<Run, std::uint64_t>> places;
      std::uint64_t at = 8;
      for (const Run& run : result.runs) {
        std::uint32_t head[2];
        if (preadFull(fd.get(), head, sizeof head, at) < sizeof head) throw errnoError(EIO, "pread");
        const bool zeros = (head[1] & kZeroRun) != 0;
        places.emplace_back(run, zeros ? 0 : at + 16);
        at += 16 + (zeros ? 0 : run.length);
      }
      return std::pair{std::move(fd), std::move(places)};
    });
  }

  bool samePatched(int in, int old, std::uint64_t oldSize, std::uint64_t slot, std::uint64_t size, Result& result) {
    const auto [patch, places] = openPatch(slot, result);
    std::size_t run = 0;
    for (std::uint64_t at = 0; at < size;) {
      // Data of the file, of its base, or of the patch; holes in all three are equal.
      while (run < places.size() && places[run].first.offset + places[run].first.length <= at) ++run;
      const std::uint64_t patched = run < places.size() ? std::max(at, places[run].first.offset) : size;
      auto [begin, end] = dataOfBoth(in, size, old, oldSize, at, size);
      if (patched < begin) {
        begin = patched;
        end = std::min(size, places[run].first.offset + places[run].first.length);
      }
      if (begin >= size) break;
      at = begin;
      const std::size_t want = static_cast<std::size_t>(std::min(kStep, end - at));
      if (preadFull(in, buffer(), want, at) < want) return false;
      result.read += want;
      readPatched(old, oldSize, patch.get(), places, at, want, second());
      if (std::memcmp(buffer(), second(), want) != 0) return false;
      at += want;
    }
    return true;
  }

  // New chunk list: the base's, with the touched chunks hashed from base + patch (not from the live file).
  bool patchedChunks(int old, std::uint64_t oldSize, const RecordView& base, std::uint64_t slot, std::uint64_t size,
                     Result& result) {
    const auto [patch, places] = openPatch(slot, result);
    std::string chunks(base.chunks());
    const std::uint64_t count = chunkCount(size);
    const std::uint64_t oldCount = chunkCount(oldSize);
    chunks.resize(static_cast<std::size_t>(count * kChunkHashBytes), '\0');
    std::vector<bool> touched(static_cast<std::size_t>(count), false);
    for (const Run& run : result.runs)
      for (std::uint64_t c = run.offset / kChunkBytes; c <= (run.offset + run.length - 1) / kChunkBytes && c < count; ++c)
        touched[static_cast<std::size_t>(c)] = true;
    if (size != oldSize) {
      // The chunk in which the file ended or ends has another length; all new ones are new.
      for (std::uint64_t c = std::min(count, oldCount) > 0 ? std::min(count, oldCount) - 1 : 0; c < count; ++c)
        touched[static_cast<std::size_t>(c)] = true;
    }
    for (std::uint64_t c = 0; c < count; ++c) {
      if (!touched[static_cast<std::size_t>(c)]) continue;
      const std::uint64_t at = c * kChunkBytes;
      const std::size_t n = static_cast<std::size_t>(std::min<std::uint64_t>(kChunkBytes, size - at));
      readPatched(old, oldSize, patch.get(), places, at, n, buffer());
      const std::string hash = allZero(buffer(), n) ? hashZeroChunk(n) : hashChunk({buffer(), n});
      chunks.replace(static_cast<std::size_t>(c * kChunkHashBytes), kChunkHashBytes, hash);
    }
    result.record.chunks = std::move(chunks);
    result.record.hash = rootOfChunks(result.record.chunks);
    return true;
  }

  static void diffChunks(std::string_view oldChunks, std::uint64_t oldSize, std::string_view newChunks,
                         std::uint64_t size, std::vector<Run>& runs) {
    const std::uint64_t count = chunkCount(size);
    for (std::uint64_t c = 0; c < count; ++c) {
      const std::size_t at = static_cast<std::size_t>(c * kChunkHashBytes);
      const bool same = c < chunkCount(oldSize) && oldChunks.substr(at, kChunkHashBytes) == newChunks.substr(at, kChunkHashBytes);
      if (same) continue;
      const std::uint64_t offset = c * kChunkBytes;
      const std::uint64_t length = std::min<std::uint64_t>(kChunkBytes, size - offset);
      if (!runs.empty() && runs.back().offset + runs.back().length == offset)
        runs.back().length += length;
      else
        runs.push_back({offset, length});
    }
  }

  const StageOptions& options_;
  Fd root_;
  Fd slots_;
  Fd base_;
  std::vector<std::uint64_t> made_;
  std::vector<char> buffer_;
  std::vector<char> second_;
};

}  // namespace

std::string stage(const StageOptions& options, std::string_view items) {
  try {
    return Stager(options).run(items);
  } catch (const SlotError& fault) {
    throw fault.error;
  }
}

std::string hashFile(std::string_view path) {
  const std::string name(path);
  const Fd fd(open(name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (!fd.valid()) throwErrno("open", path);
  const Stat stat = statFd(fd.get());
  if (stat.kind != Kind::kFile) throw errnoError(stat.kind == Kind::kDirectory ? EISDIR : EINVAL, "read", path);
  Blake3 hasher;
  std::vector<char> buffer(kStep);
  CacheWindow window(fd.get(), false);
  for (std::uint64_t at = 0;;) {
    const std::size_t n = preadFull(fd.get(), buffer.data(), buffer.size(), at);
    if (n == 0) break;
    hasher.add({buffer.data(), n});
    at += n;
    if (stat.size > kWindowBytes) window.advance(at);
  }
  return hasher.finish();
}

}  // namespace sv
