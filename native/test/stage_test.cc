#include "engine/stage.h"

#include <sys/mount.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <optional>
#include <thread>

#include "engine/hash.h"
#include "engine/pack.h"
#include "test/support.h"

namespace sv {
namespace {

using test::noise;
using test::Scratch;

struct Staged {
  std::uint8_t status;
  std::uint8_t slotKind;
  std::uint16_t err;
  std::uint64_t written;
  Record record;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> runs;
};

class Stage : public ::testing::Test {
 protected:
  Stage() {
    options.root = s.dir("live");
    options.slots = s.dir("slots");
    options.base = s.dir("base");
  }
  void SetUp() override { saved_ = systemCalls(); }
  void TearDown() override { systemCalls() = saved_; }

  Staged one(const std::string& path, std::uint64_t slot = 1, const std::optional<Record>& base = {}) {
    std::string items;
    {
      ItemWriter w(items);
      w.u32(7);
      w.u64(slot);
      w.u8(base ? 1 : 0);
      w.zeros(3);
      w.sized(path);
      w.sized(base ? test::packed(*base) : "");
    }
    const std::string out = stage(options, items);
    ByteReader in = ByteReader(out).item();
    Staged r;
    EXPECT_EQ(in.u32(), 7U);
    r.status = in.u8();
    r.slotKind = in.u8();
    r.err = in.u16();
    (void)in.u64();
    r.written = in.u64();
    r.record = RecordView::parse(in.sized()).record();
    for (ByteReader runs(in.sized()); !runs.empty();) {
      const std::uint64_t offset = runs.u64();
      r.runs.emplace_back(offset, runs.u64());
    }
    return r;
  }
  std::string slot(std::uint64_t number = 1) { return s.read("slots/" + slotName(number)); }
  // The staged version becomes the base that the next one is compared with.
  void toBase(const std::string& path, const Record& record, std::uint64_t number = 1) {
    std::filesystem::rename(s.at("slots/" + slotName(number)), s.at("base/" + path));
    const Fd fd(open(s.at("base/" + path).c_str(), O_RDONLY));
    const std::string bytes = test::packed(record);
    (void)setMeta(fd.get(), RecordView::parse(bytes));
  }

  Scratch s;
  StageOptions options;
  SystemCalls saved_;
};

TEST_F(Stage, CopiesAndDescribesAFile) {
  s.write("live/f", "hello");
  const Staged r = one("f");
  EXPECT_EQ(r.status, 0);
  EXPECT_EQ(r.slotKind, 1);
  EXPECT_EQ(slot(), "hello");
  EXPECT_EQ(r.record.hash, blake3("hello"));
  EXPECT_EQ(r.record.size, 5U);
  EXPECT_EQ(r.record.path, "f");
}

TEST_F(Stage, D15_C2_SpecialFilesAreNeverOpened) {
  ASSERT_EQ(mkfifo(s.at("live/fifo").c_str(), 0600), 0);
  s.dir("live/dir");
  ASSERT_EQ(symlink("/etc/passwd", s.at("live/link").c_str()), 0);
  for (const char* path : {"fifo", "dir", "link"}) EXPECT_EQ(one(path).status, 4) << path;
  EXPECT_EQ(s.count("slots"), 0U);
}

TEST_F(Stage, D26_AVanishedFileIsGoneAndNoError) {
  EXPECT_EQ(one("none").status, 1);
  s.write("live/f", "x");
  EXPECT_EQ(one("f/below").status, 1);
}

TEST_F(Stage, D16_AnUnreadableFileConcernsItselfOnly) {
  if (!test::isRoot()) GTEST_SKIP() << "needs root";
  s.write("live/f", std::string(400'000, 'x'));
  systemCalls().pread = [](int, void*, std::size_t, off64_t) -> ssize_t {
    errno = EIO;
    return -1;
  };
  systemCalls().copyFileRange = [](int, off64_t*, int, off64_t*, std::size_t, unsigned) -> ssize_t {
    errno = EINVAL;
    return -1;
  };
  const Staged r = one("f");
  EXPECT_EQ(r.status, 3);
  EXPECT_EQ(r.err, EIO);
  EXPECT_EQ(s.count("slots"), 0U);
}

TEST_F(Stage, ENOSPC_OnTheSlotsEndsTheCallAndLeavesNothing) {
  s.write("live/f", "x");
  systemCalls().pwrite = [](int, const void*, std::size_t, off64_t) -> ssize_t {
    errno = ENOSPC;
    return -1;
  };
  EXPECT_EQ(test::codeOf([&] { (void)one("f"); }), "ENOSPC");
  EXPECT_EQ(s.count("slots"), 0U);
}

TEST_F(Stage, D10_HolesAreKept) {
  s.write("live/f", "");
  ASSERT_EQ(truncate(s.at("live/f").c_str(), 64 << 20), 0);
  const Fd fd(open(s.at("live/f").c_str(), O_WRONLY));
  pwriteFull(fd.get(), "island", 6, 33 << 20);
  const Staged r = one("f");
  EXPECT_EQ(r.status, 0);
  EXPECT_NE(r.record.flags & flag::kSparse, 0);
  EXPECT_EQ(slot(), s.read("live/f"));
  const Fd copy(open(s.at("slots/" + slotName(1)).c_str(), O_RDONLY));
  EXPECT_LE(statFd(copy.get()).blocks, 64U);
}

TEST_F(Stage, EqualContentNeedsNoSlot) {
  s.write("live/f", "same");
  const Staged first = one("f", 1);
  toBase("f", first.record);
  ASSERT_EQ(utimensat(AT_FDCWD, s.at("live/f").c_str(), nullptr, 0), 0);
  const Staged r = one("f", 2, first.record);
  EXPECT_EQ(r.status, 0);
  EXPECT_EQ(r.slotKind, 0);
  EXPECT_EQ(s.count("slots"), 0U);
}

// Every kind of change of a large file: what base and patch give must be the file.
TEST_F(Stage, ALargeFileIsStagedAsTheBlocksThatDiffer) {
  const std::size_t size = 3'000'017;
  const std::string original = noise(size, 1);
  struct Change {
    const char* name;
    std::function<void(std::string&)> make;
  };
  const std::vector<Change> changes = {
      {"one byte", [](std::string& d) { d[1'500'000] ^= 1; }},
      {"first and last", [](std::string& d) { d[0] ^= 1, d.back() ^= 1; }},
      {"grown", [](std::string& d) { d += noise(200'000, 2); }},
      {"shrunk", [](std::string& d) { d.resize(2'000'003); }},
      {"zeroed", [](std::string& d) { d.replace(1'000'000, 300'000, 300'000, '\0'); }},
      {"shrunk and changed at the new end", [](std::string& d) { d.resize(1'999'999), d.back() ^= 1; }},
  };
  for (const Change& change : changes) {
    s.write("live/f", original);
    const Staged first = one("f", 1);
    toBase("f", first.record);
    std::string data = original;
    change.make(data);
    s.write("live/f", data);
    const Staged r = one("f", 2, first.record);
    ASSERT_EQ(r.status, 0) << change.name;
    EXPECT_EQ(r.slotKind, 2) << change.name;
    EXPECT_LT(r.written, data.size() / 2) << change.name;
    ContentHasher hasher(data.size());
    hasher.add(data);
    EXPECT_EQ(r.record.hash, hasher.finish()) << change.name;
    EXPECT_EQ(r.record.chunks, hasher.chunks()) << change.name;
    std::string patched = original;
    patched.resize(data.size(), '\0');
    const std::string patch = slot(2);
    for (std::size_t at = kPackHead;;) {
      ByteReader head(std::string_view(patch).substr(at, kPackRecordHead));
      const std::uint32_t ordinal = head.u32();
      const std::uint32_t field = head.u32();
      const std::uint64_t offset = head.u64();
      at += kPackRecordHead;
      if (ordinal == kPackEnd) break;
      const std::uint32_t length = field & ~kZeroRun;
      if ((field & kZeroRun) != 0) {
        patched.replace(offset, length, length, '\0');
      } else {
        patched.replace(offset, length, patch, at, length);
        at += length;
      }
    }
    EXPECT_TRUE(patched == data) << change.name;
    std::filesystem::remove(s.at("slots/" + slotName(2)));
  }
}

TEST_F(Stage, AFileThatChangedALotIsCopiedWhole) {
  s.write("live/f", noise(2'000'000, 1));
  const Staged first = one("f", 1);
  toBase("f", first.record);
  s.write("live/f", noise(2'000'000, 2));
  const Staged r = one("f", 2, first.record);
  EXPECT_EQ(r.slotKind, 1);
  EXPECT_EQ(slot(2), s.read("live/f"));
}

TEST_F(Stage, ABaseThatIsNotTheRecordedOneIsNotPatchedAgainst) {
  s.write("live/f", noise(2'000'000, 1));
  const Staged first = one("f", 1);
  s.write("base/f", noise(2'000'000, 9));
  s.write("live/f", noise(2'000'000, 1) + "tail");
  const Staged r = one("f", 2, first.record);
  EXPECT_EQ(r.slotKind, 1);
}

TEST_F(Stage, HashOnlyCopiesNothingAndTellsChangedChunks) {
  options.hashOnly = true;
  std::string data = noise(1'500'000, 1);
  s.write("live/f", data);
  const Staged first = one("f");
  data[700'000] ^= 1;
  s.write("live/f", data);
  const Staged r = one("f", 2, first.record);
  EXPECT_EQ(r.slotKind, 0);
  ASSERT_EQ(r.runs.size(), 1U);
  EXPECT_EQ(r.runs[0].first, 700'000U / kChunkBytes * kChunkBytes);
  EXPECT_EQ(s.count("slots"), 0U);
}

TEST_F(Stage, C3_ALogThatOnlyGrowsIsStagedAtAStateThatItHad) {
  s.write("live/log", noise(20'000'000, 1));
  std::atomic<bool> stop = false;
  std::thread writer([&] {
    const Fd fd(open(s.at("live/log").c_str(), O_WRONLY | O_APPEND));
    for (int i = 0; !stop; ++i) {
      const std::string line = "line " + std::to_string(i) + '\n';
      writeFull(fd.get(), line.data(), line.size());
      usleep(300);
    }
  });
  const Staged r = one("log");
  stop = true;
  writer.join();
  ASSERT_EQ(r.status, 0);
  const std::string staged = slot();
  EXPECT_EQ(staged.size(), r.record.size);
  EXPECT_TRUE(s.read("live/log").starts_with(staged));
  EXPECT_EQ(staged.back(), '\n') << "a write of one line is never cut";
}

// A writer that always writes the same counter at the begin and at the end: a copy with two counters is torn.
TEST_F(Stage, D25_AFileRewrittenInPlaceIsConsistentOrBusyNeverTorn) {
  const std::size_t size = 1'200'000;
  s.write("live/f", std::string(size, '\0'));
  std::atomic<bool> stop = false;
  std::thread writer([&] {
    const Fd fd(open(s.at("live/f").c_str(), O_WRONLY));
    for (std::uint64_t i = 1; !stop; ++i) {
      pwriteFull(fd.get(), &i, sizeof i, 0);
      pwriteFull(fd.get(), &i, sizeof i, size - sizeof i);
      usleep(static_cast<unsigned>(i % 5 * 400));
    }
  });
  int torn = 0;
  int staged = 0;
  for (std::uint64_t i = 0; i < 30; ++i) {
    const Staged r = one("f", 100 + i);
    if (r.status != 0) {
      EXPECT_EQ(r.status, 2);
      continue;
    }
    ++staged;
    const std::string copy = slot(100 + i);
    std::uint64_t head;
    std::uint64_t tail;
    std::memcpy(&head, copy.data(), 8);
    std::memcpy(&tail, copy.data() + size - 8, 8);
    // Between the two writes of one round the file itself has two neighbouring counters: that is a state it had.
    if (head != tail && head != tail + 1) ++torn;
  }
  stop = true;
  writer.join();
  EXPECT_EQ(torn, 0);
  EXPECT_GT(staged, 0);
}

TEST_F(Stage, OnReflinksAFileIsClonedAtOneMoment) {
  if (!test::isRoot()) GTEST_SKIP() << "needs root to mount";
  const std::string image = s.at("xfs.img");
  const std::string mount = s.dir("xfs");
  const std::string make = "truncate -s 400M " + image + " && mkfs.xfs -q " + image + " 2>/dev/null && mount -o loop " + image + ' ' + mount;
  if (system(make.c_str()) != 0) GTEST_SKIP() << "no mkfs.xfs or loop device here";
  {
    const Scratch xfs(mount);
    options.root = xfs.dir("live");
    options.slots = xfs.dir("slots");
    options.base = xfs.dir("base");
    EXPECT_TRUE(probe(mount).reflink);
    xfs.write("live/f", noise(5'000'000, 4));
    const Staged r = one("f");
    EXPECT_EQ(r.status, 0);
    EXPECT_EQ(r.written, 0U) << "a clone writes nothing";
    EXPECT_EQ(xfs.read("slots/" + slotName(1)), xfs.read("live/f"));
  }
  EXPECT_EQ(umount2(mount.c_str(), MNT_DETACH), 0);
}

}  // namespace
}  // namespace sv
