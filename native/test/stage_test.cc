#include "engine/stage.h"

#include <sys/mount.h>
#include <sys/xattr.h>

#include <algorithm>
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
  std::uint32_t id;
  std::uint8_t status;
  std::uint8_t slotKind;
  std::uint16_t err;
  std::uint64_t read;
  std::uint64_t written;
  Record record;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> runs;
};

std::string contentHash(const std::string& data) {
  ContentHasher hasher(data.size());
  hasher.add(data);
  return hasher.finish();
}

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
    item(items, 7, path, slot, base);
    return results(stage(options, items)).at(0);
  }
  static void item(std::string& items, std::uint32_t id, const std::string& path, std::uint64_t slot,
                   const std::optional<Record>& base = {}) {
    ItemWriter w(items);
    w.u32(id);
    w.u64(slot);
    w.u8(base ? 1 : 0);
    w.zeros(3);
    w.sized(path);
    w.sized(base ? test::packed(*base) : "");
  }
  static std::vector<Staged> results(const std::string& out) {
    std::vector<Staged> list;
    for (ByteReader all(out); !all.empty();) {
      ByteReader in = all.item();
      Staged r;
      r.id = in.u32();
      r.status = in.u8();
      r.slotKind = in.u8();
      r.err = in.u16();
      r.read = in.u64();
      r.written = in.u64();
      r.record = RecordView::parse(in.sized()).record();
      for (ByteReader runs(in.sized()); !runs.empty();) {
        const std::uint64_t offset = runs.u64();
        r.runs.emplace_back(offset, runs.u64());
      }
      list.push_back(std::move(r));
    }
    return list;
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

TEST_F(Stage, D14_F7_NothingIsReadThroughALinkOnTheWay) {
  s.write("outside/f", "secret");
  ASSERT_EQ(symlink("../outside", s.at("live/d").c_str()), 0);
  ASSERT_EQ(symlink(s.at("outside").c_str(), s.at("live/absolute").c_str()), 0);
  for (const char* path : {"d/f", "absolute/f"}) EXPECT_EQ(one(path).status, 1) << path;
  EXPECT_EQ(one("../outside/f").status, 3);
  EXPECT_EQ(s.count("slots"), 0U);
}

TEST_F(Stage, D20_AnEmptyFileIsASlotOfNoBytes) {
  s.write("live/f", noise(1'000'000, 1));
  const Staged first = one("f", 1);
  toBase("f", first.record);
  s.write("live/f", "");
  const Staged r = one("f", 2, first.record);
  EXPECT_EQ(r.status, 0);
  EXPECT_EQ(r.slotKind, 1);
  EXPECT_EQ(r.record.size, 0U);
  EXPECT_EQ(r.record.hash, blake3(""));
  EXPECT_EQ(slot(2), "");
}

TEST_F(Stage, D19_ContentThatChangedBehindAnEqualSizeAndTimeIsSeen) {
  s.write("live/f", "one");
  const timespec times[2] = {{0, UTIME_OMIT}, {1'700'000'000, 123'456'789}};
  ASSERT_EQ(utimensat(AT_FDCWD, s.at("live/f").c_str(), times, 0), 0);
  const Staged first = one("f", 1);
  s.write("live/f", "two");
  ASSERT_EQ(utimensat(AT_FDCWD, s.at("live/f").c_str(), times, 0), 0);
  const Staged second = one("f", 2);
  EXPECT_EQ(first.record.mtimeNs, 1'700'000'000'123'456'789);
  EXPECT_EQ(second.record.mtimeNs, first.record.mtimeNs);
  EXPECT_NE(second.record.ctimeNs, first.record.ctimeNs);
  EXPECT_EQ(second.record.hash, blake3("two"));
  EXPECT_EQ(slot(2), "two");
}

// A later write in the same timer tick would leave the recorded times as they are.
TEST_F(Stage, D19_AFileWrittenJustNowIsGivenATick) {
  for (std::uint64_t i = 0; i < 20; ++i) {
    s.write("live/f", std::to_string(i));
    const Staged r = one("f", i);
    ASSERT_EQ(r.status, 0);
    EXPECT_GE(realtimeNs() - r.record.ctimeNs, 10'000'000);
  }
}

TEST_F(Stage, D17_ASlotIsForItsOwnerOnlyWhateverTheFileIs) {
  s.write("live/f", "x");
  ASSERT_EQ(chmod(s.at("live/f").c_str(), 04755), 0);
  const Staged r = one("f");
  EXPECT_EQ(r.record.mode, 04755);
  const Fd copy(open(s.at("slots/" + slotName(1)).c_str(), O_RDONLY));
  EXPECT_EQ(statFd(copy.get()).mode, 0600);
}

TEST_F(Stage, D18_AttributesAreInTheRecord) {
  s.write("live/f", "x");
  if (setxattr(s.at("live/f").c_str(), "user.color", "blue", 4, 0) != 0) GTEST_SKIP() << "no user attributes here";
  const Fd fd(open(s.at("live/f").c_str(), O_RDONLY));
  const Staged r = one("f");
  EXPECT_FALSE(r.record.xattrs.empty());
  EXPECT_EQ(r.record.xattrs, readXattrs(fd.get()));
}

TEST_F(Stage, D11_SlotsOnAnotherFileSystem) {
  char folder[] = "/dev/shm/sv-test-XXXXXX";
  if (mkdtemp(folder) == nullptr) GTEST_SKIP() << "no /dev/shm";
  options.slots = folder;
  const std::string file = std::string(folder) + '/' + slotName(1);
  s.write("live/f", noise(3'000'000, 6));
  EXPECT_EQ(one("f").status, 0);
  EXPECT_TRUE(Scratch::readAbsolute(file) == s.read("live/f"));
  std::filesystem::remove_all(folder);
}

TEST_F(Stage, ResultsComeInTheOrderOfTheItems) {
  std::string items;
  s.write("live/a", "a");
  s.write("live/z", noise(2'000'000, 1));
  s.dir("live/dir");
  const std::vector<std::pair<const char*, int>> files = {{"z", 0}, {"none", 1}, {"a", 0}, {"dir", 4}, {"a/b", 1}};
  for (std::uint32_t i = 0; i < files.size(); ++i) item(items, 900 - i, files[i].first, i);
  const std::vector<Staged> list = results(stage(options, items));
  ASSERT_EQ(list.size(), files.size());
  for (std::uint32_t i = 0; i < files.size(); ++i) {
    EXPECT_EQ(list[i].id, 900 - i);
    EXPECT_EQ(list[i].status, files[i].second);
    EXPECT_EQ(list[i].record.path, files[i].first);
  }
  EXPECT_EQ(s.count("slots"), 2U);
  EXPECT_EQ(results(stage(options, "")).size(), 0U);
}

TEST_F(Stage, AListThatIsCutShortLeavesNoSlot) {
  s.write("live/a", "a");
  std::string items;
  item(items, 1, "a", 1);
  item(items, 2, "a", 2);
  items.pop_back();
  EXPECT_EQ(test::codeOf([&] { (void)stage(options, items); }), "FORMAT_INVALID");
  EXPECT_EQ(s.count("slots"), 0U);
}

TEST_F(Stage, ASlotThatIsThereAlreadyIsNeverTouched) {
  s.write("live/a", "new");
  s.write("slots/" + slotName(2), "somebody's");
  std::string items;
  item(items, 1, "a", 1);
  item(items, 2, "a", 2);
  EXPECT_EQ(test::codeOf([&] { (void)stage(options, items); }), "EEXIST");
  EXPECT_EQ(slot(2), "somebody's");
  EXPECT_EQ(s.count("slots"), 1U);
}

TEST_F(Stage, D26_FilesThatVanishOneByOneAreGoneAndTheOthersStaged) {
  constexpr std::uint32_t kFiles = 400;
  std::string items;
  for (std::uint32_t i = 0; i < kFiles; ++i) {
    s.write("live/f" + std::to_string(i), noise(20'000, i));
    item(items, i, "f" + std::to_string(i), i);
  }
  std::thread remover([&] {
    for (std::uint32_t i = 0; i < kFiles; i += 2) unlink(s.at("live/f" + std::to_string(i)).c_str());
  });
  const std::vector<Staged> list = results(stage(options, items));
  remover.join();
  std::size_t slots = 0;
  for (const Staged& r : list) {
    EXPECT_TRUE(r.status == 0 || (r.status == 1 && r.id % 2 == 0)) << r.id << ' ' << int{r.status};
    if (r.status != 0) continue;
    ++slots;
    EXPECT_TRUE(slot(r.id) == noise(20'000, r.id));
  }
  EXPECT_EQ(s.count("slots"), slots);
}

TEST_F(Stage, D16_OneUnreadableFileAmongAHundred) {
  if (!test::isRoot()) GTEST_SKIP() << "needs root to become somebody else";
  ASSERT_EQ(chmod(s.path().c_str(), 0755), 0);
  std::string items;
  for (std::uint32_t i = 0; i < 100; ++i) {
    s.write("live/f" + std::to_string(i), "x");
    item(items, i, "f" + std::to_string(i), i);
  }
  ASSERT_EQ(chmod(s.at("live/f42").c_str(), 0), 0);
  ASSERT_EQ(chown(s.at("slots").c_str(), 65534, 65534), 0);
  ASSERT_EQ(seteuid(65534), 0);
  std::vector<Staged> list;
  const std::string code = test::codeOf([&] { list = results(stage(options, items)); });
  ASSERT_EQ(seteuid(0), 0);
  EXPECT_EQ(code, "");
  ASSERT_EQ(list.size(), 100U);
  for (const Staged& r : list) {
    EXPECT_EQ(r.status, r.id == 42 ? 3 : 0) << r.id;
    EXPECT_EQ(r.err, r.id == 42 ? EACCES : 0);
  }
  EXPECT_EQ(s.count("slots"), 99U);
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

// The kernel's copy tells neither side; one bad sector must not stop all other files.
TEST_F(Stage, D16_ABadSectorConcernsItsFileOnly) {
  s.write("live/bad", noise(3'000'000, 1));
  s.write("live/good", "fine");
  systemCalls().clone = [](int, int) {
    errno = EOPNOTSUPP;
    return -1;
  };
  systemCalls().copyFileRange = [](int in, off64_t* i, int out, off64_t* o, std::size_t, unsigned f) -> ssize_t {
    if (*i < 2'000'000) return copy_file_range(in, i, out, o, 1'000'000, f);
    errno = EIO;
    return -1;
  };
  systemCalls().pread = [](int fd, void* data, std::size_t length, off64_t offset) -> ssize_t {
    if (offset < 2'000'000) return pread64(fd, data, length, offset);
    errno = EIO;
    return -1;
  };
  std::string items;
  item(items, 1, "bad", 1);
  item(items, 2, "good", 2);
  const std::vector<Staged> list = results(stage(options, items));
  EXPECT_EQ(list[0].status, 3);
  EXPECT_EQ(list[0].err, EIO);
  EXPECT_EQ(list[1].status, 0);
  EXPECT_EQ(s.count("slots"), 1U);
}

TEST_F(Stage, AFaultOfTheSlotsDiskEndsTheCall) {
  s.write("live/f", "x");
  systemCalls().pwrite = [](int, const void*, std::size_t, off64_t) -> ssize_t {
    errno = EIO;
    return -1;
  };
  EXPECT_EQ(test::codeOf([&] { (void)one("f"); }), "EIO");
  EXPECT_EQ(s.count("slots"), 0U);
}

TEST_F(Stage, ENOSPC_OnAFullDiskRemovesAllSlotsOfTheCall) {
  if (!test::isRoot()) GTEST_SKIP() << "needs root to mount";
  if (mount("none", options.slots.c_str(), "tmpfs", 0, "size=1m") != 0) GTEST_SKIP() << "no mounts here";
  std::string items;
  for (std::uint32_t i = 0; i < 5; ++i) {
    s.write("live/f" + std::to_string(i), noise(400'000, i));
    item(items, i, "f" + std::to_string(i), i);
  }
  EXPECT_EQ(test::codeOf([&] { (void)stage(options, items); }), "ENOSPC");
  EXPECT_EQ(s.count("slots"), 0U);
  ASSERT_EQ(umount(options.slots.c_str()), 0);
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

TEST_F(Stage, D10_AHoleOfAGigabyteIsNotRead) {
  s.write("live/f", "");
  ASSERT_EQ(truncate(s.at("live/f").c_str(), 1 << 30), 0);
  const Fd fd(open(s.at("live/f").c_str(), O_WRONLY));
  pwriteFull(fd.get(), "island", 6, 1 << 29);
  const Staged first = one("f");
  EXPECT_EQ(first.status, 0);
  EXPECT_LE(first.read, 1U << 20);
  toBase("f", first.record);
  pwriteFull(fd.get(), "island", 6, 1 << 28);
  const Staged second = one("f", 2, first.record);
  EXPECT_EQ(second.slotKind, 2);
  EXPECT_LE(second.read, 2U << 20);
  EXPECT_LE(second.written, 8192U);
}

// Written and not on the disk yet: the data has no block, and some file systems called that a hole.
TEST_F(Stage, D10_G14_DataThatWasJustWrittenIsNoHole) {
  for (std::uint64_t i = 0; i < 20; ++i) {
    const std::string data = noise(700'000, static_cast<std::uint32_t>(i));
    s.write("live/f" + std::to_string(i), data);
    EXPECT_EQ(one("f" + std::to_string(i), i).record.hash, contentHash(data));
    EXPECT_TRUE(slot(i) == data);
  }
}

TEST_F(Stage, G14_WhereHolesAreNotBelievedZerosAreStillNotWritten) {
  s.write("live/f", "");
  ASSERT_EQ(truncate(s.at("live/f").c_str(), 16 << 20), 0);
  const Fd fd(open(s.at("live/f").c_str(), O_WRONLY));
  const std::string island = noise(100'001, 3);
  pwriteFull(fd.get(), island.data(), island.size(), 5'000'001);
  systemCalls().seek = [](int, off64_t, int) -> off64_t {
    errno = ENXIO;
    return -1;
  };
  systemCalls().statfs = [](int, struct statfs* out) {
    out->f_type = 0x2fc12fc1;
    return 0;
  };
  EXPECT_EQ(one("f").status, 0);
  EXPECT_TRUE(slot() == s.read("live/f"));
  const Fd copy(open(s.at("slots/" + slotName(1)).c_str(), O_RDONLY));
  EXPECT_LE(statFd(copy.get()).blocks * 512, 2 * island.size());
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

// What a patch slot makes of `base`.
std::string patched(std::string base, const std::string& patch, std::size_t size) {
  base.resize(size, '\0');
  for (std::size_t at = kPackHead;;) {
    ByteReader head(std::string_view(patch).substr(at, kPackRecordHead));
    const std::uint32_t ordinal = head.u32();
    const std::uint32_t field = head.u32();
    const std::uint64_t offset = head.u64();
    at += kPackRecordHead;
    if (ordinal == kPackEnd) return base;
    const std::uint32_t length = field & ~kZeroRun;
    if ((field & kZeroRun) != 0) {
      base.replace(offset, length, length, '\0');
    } else {
      base.replace(offset, length, patch, at, length);
      at += length;
    }
  }
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
    EXPECT_TRUE(patched(original, slot(2), data.size()) == data) << change.name;
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
  std::jthread writer([&](const std::stop_token& stop) {
    const Fd fd(open(s.at("live/log").c_str(), O_WRONLY | O_APPEND));
    for (int i = 0; !stop.stop_requested(); ++i) {
      const std::string line = "line " + std::to_string(i) + '\n';
      writeFull(fd.get(), line.data(), line.size());
      usleep(300);
    }
  });
  const Staged r = one("log");
  writer.request_stop();
  writer.join();
  ASSERT_EQ(r.status, 0);
  const std::string staged = slot();
  EXPECT_EQ(staged.size(), r.record.size);
  EXPECT_TRUE(s.read("live/log").starts_with(staged));
  EXPECT_EQ(staged.back(), '\n') << "a write of one line is never cut";
}

// The same for a log that the base has already: only what came is staged.
TEST_F(Stage, C3_APatchOfALogThatGrowsIsAStateThatItHad) {
  s.write("live/log", noise(8'000'000, 1));
  const Staged first = one("log", 1);
  toBase("log", first.record);
  const std::string base = s.read("base/log");
  std::jthread writer([&](const std::stop_token& stop) {
    const Fd fd(open(s.at("live/log").c_str(), O_WRONLY | O_APPEND));
    for (int i = 0; !stop.stop_requested(); ++i) {
      const std::string line = "line " + std::to_string(i) + '\n';
      writeFull(fd.get(), line.data(), line.size());
      usleep(2000);
    }
  });
  // On a busy machine the writer may come late.
  while (s.read("live/log").size() == base.size()) usleep(1000);
  int staged = 0;
  for (std::uint64_t i = 2; i < 12; ++i) {
    const Staged r = one("log", i, first.record);
    if (r.status != 0) continue;
    ++staged;
    EXPECT_EQ(r.slotKind, 2);
    const std::string now = patched(base, slot(i), r.record.size);
    EXPECT_EQ(r.record.hash, contentHash(now));
    EXPECT_TRUE(s.read("live/log").starts_with(now));
    EXPECT_EQ(now.back(), '\n');
  }
  writer.request_stop();
  writer.join();
  EXPECT_GE(staged, 5);
}

// The file changes between two calls of the copy: each of these is a moment that a real writer hits now and then.
class StageMidway : public Stage {
 protected:
  void SetUp() override {
    Stage::SetUp();
    action = nullptr;
    times = 0;
    systemCalls().clone = [](int, int) {
      errno = EOPNOTSUPP;
      return -1;
    };
    systemCalls().copyFileRange = [](int in, off64_t* i, int out, off64_t* o, std::size_t n, unsigned f) -> ssize_t {
      const ssize_t done = copy_file_range(in, i, out, o, std::min<std::size_t>(n, 1'000'000), f);
      if (times > 0) {
        --times;
        action();
      }
      return done;
    };
  }
  static inline std::function<void()> action;
  static inline int times;
};

TEST_F(StageMidway, D25_AFileThatIsCutIsReadAgain) {
  s.write("live/f", noise(3'000'000, 1));
  action = [&] { ASSERT_EQ(truncate(s.at("live/f").c_str(), 1'500'001), 0); };
  times = 1;
  const Staged r = one("f");
  EXPECT_EQ(r.status, 0);
  EXPECT_EQ(r.record.size, 1'500'001U);
  EXPECT_TRUE(slot() == s.read("live/f"));
}

TEST_F(StageMidway, D25_AFileThatIsReplacedIsReadAgain) {
  s.write("live/f", noise(3'000'000, 1));
  s.write("live/new", noise(2'000'000, 2));
  action = [&] { std::filesystem::rename(s.at("live/new"), s.at("live/f")); };
  times = 1;
  const Staged r = one("f");
  EXPECT_EQ(r.status, 0);
  EXPECT_TRUE(slot() == noise(2'000'000, 2));
}

TEST_F(StageMidway, D26_AFileThatVanishesHalfwayIsGone) {
  s.write("live/f", noise(3'000'000, 1));
  action = [&] { unlink(s.at("live/f").c_str()); };
  times = 1;
  EXPECT_EQ(one("f").status, 1);
  EXPECT_EQ(s.count("slots"), 0U);
}

TEST_F(StageMidway, D25_WhatIsWrittenBehindTheReaderIsNotMixedIn) {
  const std::string before = noise(3'000'000, 1);
  s.write("live/f", before);
  // The first and the last megabyte change after the first has been read.
  action = [&] {
    const Fd fd(open(s.at("live/f").c_str(), O_WRONLY));
    pwriteFull(fd.get(), "AAAA", 4, 10);
    pwriteFull(fd.get(), "BBBB", 4, 2'900'000);
  };
  times = 1;
  const Staged r = one("f");
  EXPECT_EQ(r.status, 0);
  EXPECT_TRUE(slot() == s.read("live/f"));
}

TEST_F(StageMidway, D25_AFileThatNeverHoldsStillIsBusyAndItsTimesAreNotTaken) {
  s.write("live/f", noise(3'000'000, 1));
  options.retries = 1;
  static int round;
  action = [&] {
    const Fd fd(open(s.at("live/f").c_str(), O_WRONLY));
    ++round;
    pwriteFull(fd.get(), &round, sizeof round, 100);
  };
  times = 1000;
  const Staged r = one("f");
  EXPECT_EQ(r.status, 2);
  EXPECT_EQ(r.slotKind, 0);
  EXPECT_EQ(s.count("slots"), 0U);
}

TEST_F(StageMidway, D25_AFileThatGoesOnChangingLooksChangedAtTheNextLook) {
  s.write("live/f", noise(3'000'000, 1));
  action = [&] {
    const Fd fd(open(s.at("live/f").c_str(), O_WRONLY | O_APPEND));
    writeFull(fd.get(), "more\n", 5);
  };
  times = 2;
  const Staged r = one("f");
  EXPECT_EQ(r.status, 0);
  EXPECT_TRUE(s.read("live/f").starts_with(slot()));
  const Fd root = openRoot(options.root);
  EXPECT_NE(statBeneath(root.get(), "f").ctimeNs, r.record.ctimeNs);
}

TEST_F(Stage, D25_HashOnlyTakesAStillFileOnly) {
  options.hashOnly = true;
  options.retries = 1;
  s.write("live/f", noise(3'000'000, 1));
  static std::string path;
  path = s.at("live/f");
  systemCalls().pread = [](int fd, void* data, std::size_t length, off64_t offset) -> ssize_t {
    const Fd log(open(path.c_str(), O_WRONLY | O_APPEND));
    writeFull(log.get(), "x", 1);
    return pread64(fd, data, length, offset);
  };
  EXPECT_EQ(one("f").status, 2);
  systemCalls() = saved_;
  const Staged r = one("f");
  EXPECT_EQ(r.status, 0);
  EXPECT_EQ(r.record.hash, contentHash(s.read("live/f")));
}

// The writer of the next test against a base: the patch must not be torn either.
TEST_F(Stage, D25_APatchOfAFileRewrittenInPlaceIsConsistentOrBusyNeverTorn) {
  const std::size_t size = 1'200'000;
  s.write("live/f", std::string(size, '\0'));
  const Staged first = one("f", 1);
  toBase("f", first.record);
  std::jthread writer([&](const std::stop_token& stop) {
    const Fd fd(open(s.at("live/f").c_str(), O_WRONLY));
    for (std::uint64_t i = 1; !stop.stop_requested(); ++i) {
      pwriteFull(fd.get(), &i, sizeof i, 0);
      pwriteFull(fd.get(), &i, sizeof i, size - sizeof i);
      usleep(static_cast<unsigned>(i % 5 * 400));
    }
  });
  for (std::uint64_t i = 0; i < 30; ++i) {
    const Staged r = one("f", 100 + i, first.record);
    if (r.status != 0) {
      EXPECT_EQ(r.status, 2);
      continue;
    }
    if (r.slotKind != 2) continue;
    const std::string copy = patched(std::string(size, '\0'), slot(100 + i), size);
    std::uint64_t head;
    std::uint64_t tail;
    std::memcpy(&head, copy.data(), 8);
    std::memcpy(&tail, copy.data() + size - 8, 8);
    EXPECT_TRUE(head == tail || head == tail + 1) << head << ' ' << tail;
    EXPECT_EQ(r.record.hash, contentHash(copy));
  }
  writer.request_stop();
  writer.join();
}

// A writer that always writes the same counter at the begin and at the end: a copy with two counters is torn.
TEST_F(Stage, D25_AFileRewrittenInPlaceIsConsistentOrBusyNeverTorn) {
  const std::size_t size = 1'200'000;
  s.write("live/f", std::string(size, '\0'));
  // The writer slows down after each busy look, so that some looks find a still moment however slow this build reads.
  std::atomic<unsigned> pauseUs = 400;
  std::jthread writer([&](const std::stop_token& stop) {
    const Fd fd(open(s.at("live/f").c_str(), O_WRONLY));
    for (std::uint64_t i = 1; !stop.stop_requested(); ++i) {
      pwriteFull(fd.get(), &i, sizeof i, 0);
      pwriteFull(fd.get(), &i, sizeof i, size - sizeof i);
      usleep(static_cast<unsigned>(i % 5) * pauseUs);
    }
  });
  int torn = 0;
  int staged = 0;
  for (std::uint64_t i = 0; i < 30; ++i) {
    const Staged r = one("f", 100 + i);
    if (r.status != 0) {
      EXPECT_EQ(r.status, 2);
      pauseUs = std::min(2 * pauseUs, 400'000U);
      continue;
    }
    ++staged;
    pauseUs = 400;
    const std::string copy = slot(100 + i);
    std::uint64_t head;
    std::uint64_t tail;
    std::memcpy(&head, copy.data(), 8);
    std::memcpy(&tail, copy.data() + size - 8, 8);
    // Between the two writes of one round the file itself has two neighbouring counters: that is a state it had.
    if (head != tail && head != tail + 1) ++torn;
  }
  writer.request_stop();
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
