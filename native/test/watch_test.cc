// The watcher against a real kernel: what the marks say must be enough to bring an old picture of a tree up to date,
// whatever was done to it meanwhile.
#include "engine/watch.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "engine/fs.h"
#include "engine/marks.h"
#include "engine/record.h"
#include "engine/scan.h"

namespace sv {
namespace {

namespace fs = std::filesystem;

struct Mark {
  std::uint8_t type;
  std::uint8_t bits;
  std::string path;
  bool operator<(const Mark& other) const {
    return std::tie(path, type, bits) < std::tie(other.path, other.type, other.bits);
  }
};

std::vector<Mark> parseMarks(const std::string& packed) {
  std::vector<Mark> out;
  for (ByteReader in(packed); !in.empty();) {
    ByteReader item = in.item();
    Mark mark{};
    mark.type = item.u8();
    mark.bits = item.u8();
    EXPECT_EQ(item.u16(), 0);
    mark.path = item.sized();
    EXPECT_TRUE(item.empty());
    out.push_back(std::move(mark));
  }
  std::sort(out.begin(), out.end());
  return out;
}

bool below(const std::string& path, const std::string& directory) {
  return directory.empty() ? !path.empty()
                           : path.size() > directory.size() && path.starts_with(directory) && path[directory.size()] == '/';
}
std::string parentOf(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  return slash == std::string::npos ? "" : path.substr(0, slash);
}

// Whether a path will be looked at because of these marks.
bool covered(const std::vector<Mark>& marks, const std::string& path) {
  return std::any_of(marks.begin(), marks.end(), [&](const Mark& mark) {
    if (mark.path == path) return true;
    if (mark.type == mark::kDirectory) return !path.empty() && parentOf(path) == mark.path;
    return mark.type == mark::kSubtree && below(path, mark.path);
  });
}
std::uint8_t bitsOf(const std::vector<Mark>& marks, const std::string& path) {
  std::uint8_t bits = 0;
  for (const Mark& mark : marks) {
    if (mark.path == path) bits = static_cast<std::uint8_t>(bits | mark.bits);
  }
  return bits;
}

class WatchTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "sv-watch-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    top = name;
    root = top + "/live";
    fs::create_directory(root);
    fs::create_directory(top + "/outside");
  }
  void TearDown() override {
    stalled = false;
    watcher.reset();
    std::error_code ignored;
    fs::remove_all(top, ignored);
  }

  void start(Watcher::Options options = {}, const std::vector<std::string>& include = {},
             const std::vector<std::string>& exclude = {}) {
    if (!options.onWake) options.onWake = [this] { ++wakes; };
    watcher = std::make_unique<Watcher>(std::move(options));
    filter = Filter::compile(include, exclude);
    added = add(1, root);
    learn();
  }
  Watcher::Added add(std::uint32_t number, const std::string& where) {
    std::promise<Watcher::Added> promise;
    watcher->add(number, where, filter, [&](std::exception_ptr error, const Watcher::Added& result) {
      if (error) {
        promise.set_exception(error);
      } else {
        promise.set_value(result);
      }
    });
    return promise.get_future().get();
  }
  template <typename Call>
  void wait(Call call) {
    std::promise<void> promise;
    call([&](std::exception_ptr error) {
      if (error) {
        promise.set_exception(error);
      } else {
        promise.set_value();
      }
    });
    promise.get_future().get();
  }
  void barrier() {
    wait([&](Watcher::Done done) { watcher->barrier(std::move(done)); });
  }
  std::vector<Mark> marks() {
    barrier();
    return parseMarks(watcher->take(1));
  }
  Watcher::State state() { return watcher->state(1); }

  std::string at(const std::string& path) const { return path.empty() ? root : root + "/" + path; }
  void make(const std::string& path) const { fs::create_directories(at(path)); }
  void put(const std::string& path, const std::string& text = "x") const {
    std::ofstream(at(path), std::ios::binary | std::ios::trunc) << text;
  }
  void move(const std::string& from, const std::string& to) const {
    ASSERT_EQ(rename(at(from).c_str(), at(to).c_str()), 0) << from << " -> " << to << " " << errno;
  }
  void drop(const std::string& path) const { fs::remove_all(at(path)); }

  // ---- a consumer: keeps a picture of the tree and renews only what the marks name ----
  using Picture = std::map<std::string, std::string>;  // path -> identity
  Picture scan(const std::string& directory, bool deep) const {
    Picture out;
    Scanner scanner(root, directory, filter, deep);
    std::string packed;
    while (scanner.next(1 << 16, packed)) {
    }
    for (std::string_view rest = packed; !rest.empty();) {
      const RecordView record = RecordView::take(rest);
      out[std::string(record.path())] = std::string(record.bytes().substr(4, 12)) + std::string(record.identity());
    }
    return out;
  }
  void learn() { picture = scan("", true); }
  void forget(const std::string& path, bool itself) {
    for (auto it = picture.begin(); it != picture.end();) {
      const bool hit = below(it->first, path) || (itself && it->first == path);
      it = hit ? picture.erase(it) : std::next(it);
    }
  }
  void renew(const std::vector<Mark>& list) {
    for (const Mark& mark : list) {
      if (mark.type == mark::kSubtree) {
        forget(mark.path, true);
        picture.merge(scan(mark.path, true));
      } else if (mark.type == mark::kDirectory) {
        Picture now = scan(mark.path, false);
        for (auto it = picture.begin(); it != picture.end();) {
          const std::string path = it->first;
          const bool child = !path.empty() && parentOf(path) == mark.path;
          ++it;
          if (child && !now.contains(path)) {
            forget(path, true);
            it = picture.upper_bound(path);
          }
        }
        for (auto& [path, identity] : now) picture[path] = identity;
      } else {
        std::string packed;
        ByteWriter(packed).sized(mark.path);
        const std::string records = statPaths(root, packed);
        const RecordView record = RecordView::parse(records);
        if (record.kind() == Kind::kAbsent) {
          forget(mark.path, true);
        } else {
          if (record.kind() != Kind::kDirectory) forget(mark.path, false);
          if (filter->match(mark.path, record.kind() == Kind::kDirectory) != Verdict::kNone) {
            picture[mark.path] = std::string(record.bytes().substr(4, 12)) + std::string(record.identity());
          }
        }
      }
    }
  }
  // The picture after the marks is the tree.
  void expectUpToDate(const std::string& what = "") {
    renew(marks());
    const Picture truth = scan("", true);
    for (const auto& [path, identity] : truth) {
      const auto it = picture.find(path);
      ASSERT_TRUE(it != picture.end()) << what << " never heard of " << path;
      // Excluded entries change the mtime of a directory that is kept; that alone is no reason for a mark.
      if (!filter->everything() && identity[0] == static_cast<char>(Kind::kDirectory)) continue;
      ASSERT_EQ(it->second, identity) << what << " not renewed: " << path;
    }
    for (const auto& [path, identity] : picture) {
      ASSERT_TRUE(truth.contains(path)) << what << " still believes in " << path;
    }
  }
  // A file made in any directory is seen, and no watch is left over.
  void expectWatched(const std::string& what = "") {
    (void)marks();
    std::vector<std::string> directories{""};
    for (const auto& entry : fs::recursive_directory_iterator(root)) {
      if (entry.is_directory() && !entry.is_symlink()) {
        directories.push_back(entry.path().string().substr(root.size() + 1));
      }
    }
    std::vector<std::string> probes;
    for (const std::string& directory : directories) {
      if (!filter->reaches(directory)) continue;
      std::string probe = directory.empty() ? std::string("probe") : directory + "/probe";
      if (filter->match(probe, false) != Verdict::kNone) probes.push_back(std::move(probe));
    }
    // A few at a time: the queue of a test may be short.
    for (std::size_t from = 0; from < probes.size(); from += 16) {
      const std::size_t to = std::min(probes.size(), from + 16);
      for (std::size_t i = from; i < to; ++i) put(probes[i]);
      const std::vector<Mark> list = marks();
      for (std::size_t i = from; i < to; ++i) {
        EXPECT_TRUE(std::any_of(list.begin(), list.end(), [&](const Mark& mark) {
          return mark.path == probes[i] || (mark.type == mark::kDirectory && mark.path == parentOf(probes[i]));
        })) << what << " no event from " << probes[i];
        fs::remove(at(probes[i]));
      }
      renew(marks());
    }
    const auto reachable = static_cast<std::size_t>(std::count_if(
        directories.begin(), directories.end(), [&](const std::string& path) { return filter->reaches(path); }));
    EXPECT_EQ(state().watches, reachable) << what;
    EXPECT_EQ(state().unwatched, 0U) << what;
  }

  std::string top;
  std::string root;
  std::shared_ptr<const Filter> filter;
  std::unique_ptr<Watcher> watcher;
  Watcher::Added added;
  std::atomic<int> wakes{0};
  std::atomic<bool> stalled{false};  // the reader waits before it reads
  Picture picture;
};

// ---- single operations (what the kernel does and does not report) ----

TEST_F(WatchTest, ExistingContentMakesNoMarksAndAllDirectoriesAreWatched) {
  make("a/b/c");
  put("a/b/f");
  start();
  EXPECT_EQ(added.directories, 4U);
  EXPECT_EQ(state().watches, 4U);
  struct stat st {};
  ASSERT_EQ(stat(root.c_str(), &st), 0);
  EXPECT_EQ(added.ino, st.st_ino);
  EXPECT_TRUE(marks().empty());
  EXPECT_EQ(state().dirty, 0U);
  EXPECT_EQ(wakes, 0);
}

TEST_F(WatchTest, WritesThroughAnOpenFileAreContent) {
  put("f");
  start();
  const Fd fd(open(at("f").c_str(), O_RDWR));
  ASSERT_EQ(pwrite(fd.get(), "abc", 3, 0), 3);
  EXPECT_EQ(bitsOf(marks(), "f"), mark::kContent);
  ASSERT_EQ(ftruncate(fd.get(), 1), 0);
  EXPECT_EQ(bitsOf(marks(), "f"), mark::kContent);
  ASSERT_EQ(fallocate(fd.get(), 0, 0, 8192), 0);
  EXPECT_EQ(bitsOf(marks(), "f"), mark::kContent);
  EXPECT_TRUE(marks().empty());
}

TEST_F(WatchTest, ModeOwnerTimesAndAttributesAreAttributes) {
  put("f");
  make("d");
  start();
  ASSERT_EQ(chmod(at("f").c_str(), 0600), 0);
  EXPECT_EQ(bitsOf(marks(), "f"), mark::kAttributes);
  const timespec times[2] = {{1, 0}, {2, 3}};
  ASSERT_EQ(utimensat(AT_FDCWD, at("f").c_str(), times, 0), 0);
  EXPECT_EQ(bitsOf(marks(), "f"), mark::kAttributes);
  ASSERT_EQ(chmod(at("d").c_str(), 0700), 0);
  EXPECT_EQ(bitsOf(marks(), "d"), mark::kAttributes);
  ASSERT_EQ(chmod(root.c_str(), 0750), 0);
  EXPECT_EQ(bitsOf(marks(), ""), mark::kAttributes);
  if (setxattr(at("d").c_str(), "user.k", "v", 1, 0) == 0) {
    EXPECT_EQ(bitsOf(marks(), "d"), mark::kAttributes);
  }
}

TEST_F(WatchTest, MmapWritesAreSeenAtTheLatestWhenTheWritableFileIsClosed) {
  put("f", std::string(4096, 'a'));
  start();
  {
    const Fd fd(open(at("f").c_str(), O_RDWR));
    void* memory = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
    ASSERT_NE(memory, MAP_FAILED);
    *static_cast<char*>(memory) = 'b';
    ASSERT_EQ(msync(memory, 4096, MS_SYNC), 0);
    munmap(memory, 4096);
  }
  EXPECT_TRUE(covered(marks(), "f"));
}

TEST_F(WatchTest, ATemporaryFileThatIsLinkedInIsAnEntry) {
  start();
  const Fd fd(open(root.c_str(), O_TMPFILE | O_RDWR, 0600));
  if (!fd.valid()) GTEST_SKIP() << "no O_TMPFILE here";
  ASSERT_EQ(write(fd.get(), "abc", 3), 3);
  const std::string link = "/proc/self/fd/" + std::to_string(fd.get());
  ASSERT_EQ(linkat(AT_FDCWD, link.c_str(), AT_FDCWD, at("t").c_str(), AT_SYMLINK_FOLLOW), 0);
  EXPECT_EQ(bitsOf(marks(), "t") & mark::kCreated, mark::kCreated);
}

TEST_F(WatchTest, AFileThatIsDeletedWhileItIsOpenIsADeletionAndNothingMore) {
  put("f");
  start();
  const Fd fd(open(at("f").c_str(), O_RDWR));
  ASSERT_EQ(unlink(at("f").c_str()), 0);
  EXPECT_EQ(bitsOf(marks(), "f") & mark::kDeleted, mark::kDeleted);
  ASSERT_EQ(pwrite(fd.get(), "abc", 3, 0), 3);
  EXPECT_TRUE(marks().empty());
}

TEST_F(WatchTest, EntriesThatComeAndGoMarkTheirDirectoryForItsMtime) {
  make("d");
  put("d/gone");
  start();
  put("d/new");
  const auto first = marks();
  EXPECT_TRUE(covered(first, "d/new"));
  EXPECT_TRUE(covered(first, "d"));
  fs::remove(at("d/gone"));
  const auto second = marks();
  EXPECT_EQ(bitsOf(second, "d/gone"), mark::kDeleted);
  EXPECT_EQ(bitsOf(second, "d"), mark::kAttributes);
  put("top");
  EXPECT_EQ(bitsOf(marks(), ""), mark::kAttributes);
}

TEST_F(WatchTest, RenameOverAFileIsAReplacement_D23) {
  put("t", "old");
  start();
  for (int i = 0; i < 500; ++i) {
    put("t.tmp", std::to_string(i));
    move("t.tmp", "t");
  }
  const auto list = marks();
  EXPECT_EQ(bitsOf(list, "t") & mark::kCreated, mark::kCreated);
  EXPECT_EQ(bitsOf(list, "t.tmp") & mark::kDeleted, mark::kDeleted);
  renew(list);
  EXPECT_FALSE(picture.contains("t.tmp"));
  put("t", "after");
  expectUpToDate();
}

TEST_F(WatchTest, ExchangeOfTwoFilesMarksBoth) {
  put("a", "1");
  put("b", "22");
  start();
  ASSERT_EQ(renameat2(AT_FDCWD, at("a").c_str(), AT_FDCWD, at("b").c_str(), RENAME_EXCHANGE), 0);
  const auto list = marks();
  EXPECT_EQ(bitsOf(list, "a") & (mark::kCreated | mark::kDeleted), mark::kCreated | mark::kDeleted);
  EXPECT_EQ(bitsOf(list, "b") & (mark::kCreated | mark::kDeleted), mark::kCreated | mark::kDeleted);
}

TEST_F(WatchTest, ExchangeOfTwoDirectoriesKeepsBothWatched) {
  make("a/x");
  make("b/y");
  start();
  for (int i = 0; i < 20; ++i) {
    ASSERT_EQ(renameat2(AT_FDCWD, at("a").c_str(), AT_FDCWD, at("b").c_str(), RENAME_EXCHANGE), 0);
    expectUpToDate();
    expectWatched();
  }
  put("a/x/f");
  fs::rename(at("a/x/f"), at("b/f"));
  expectUpToDate();
}

TEST_F(WatchTest, ExchangeOfAFileAndADirectory_C4) {
  put("f");
  make("d/sub");
  start();
  ASSERT_EQ(renameat2(AT_FDCWD, at("f").c_str(), AT_FDCWD, at("d").c_str(), RENAME_EXCHANGE), 0);
  expectUpToDate();
  expectWatched();
  drop("f");
  put("f");
  drop("d");
  make("d");
  expectUpToDate();
  expectWatched();
}

TEST_F(WatchTest, WritesThroughABindMountOfTheTreeAreSeen) {
  make("d");
  start();
  const std::string other = top + "/outside";
  if (mount(root.c_str(), other.c_str(), nullptr, MS_BIND, nullptr) != 0) GTEST_SKIP() << "no mounts here";
  std::ofstream(other + "/d/f") << "x";
  const auto list = marks();
  umount2(other.c_str(), MNT_DETACH);
  EXPECT_TRUE(covered(list, "d/f"));
}

TEST_F(WatchTest, WhatIsMountedInsideIsNotEntered) {
  make("d/m");
  const std::string point = at("d/m");
  if (mount("none", point.c_str(), "tmpfs", 0, "size=1m") != 0) GTEST_SKIP() << "no mounts here";
  fs::create_directory(point + "/inside");
  start();
  EXPECT_EQ(added.directories, 3U - 1U);
  std::ofstream(point + "/inside/f") << "x";
  EXPECT_TRUE(marks().empty());
  umount2(point.c_str(), MNT_DETACH);
}

// ---- directories (A.2, G.1-G.12, D21, D22) ----

TEST_F(WatchTest, NothingIsLostInNewDirectories_D21_G1) {
  start();
  for (int i = 0; i < 300; ++i) {
    const std::string base = "n" + std::to_string(i);
    make(base + "/2/3/4/5");
    put(base + "/2/3/4/5/something");
    if (i % 30 == 0) expectUpToDate();
  }
  expectUpToDate();
  expectWatched();
}

TEST_F(WatchTest, MkdirWriteRemoveInOneBreath_G2) {
  start();
  for (int i = 0; i < 300; ++i) {
    make("d");
    put("d/f", std::to_string(i));
    if (i % 3 == 0) {
      const auto list = marks();
      EXPECT_TRUE(covered(list, "d/f")) << i;
      renew(list);
    }
    drop("d");
  }
  make("d");
  put("d/f");
  expectUpToDate();
  expectWatched();
}

TEST_F(WatchTest, ATreeThatIsMovedInIsWatchedWhole_G3) {
  const std::string tree = top + "/outside/tree";
  for (int i = 0; i < 21; ++i) fs::create_directories(tree + "/d" + std::to_string(i) + "/e");
  std::ofstream(tree + "/d20/e/f") << "x";
  start();
  fs::rename(tree, at("tree"));
  const auto list = marks();
  EXPECT_TRUE(covered(list, "tree/d20/e/f"));
  EXPECT_EQ(state().watches, 1U + 1U + 42U);
  put("tree/d20/e/f", "changed");
  EXPECT_TRUE(covered(marks(), "tree/d20/e/f"));
}

TEST_F(WatchTest, ARenamedDirectoryHasItsNewPathAtOnce_G4_G6) {
  start();
  make("a");
  move("a", "b");
  put("b/c");
  const auto list = marks();
  EXPECT_TRUE(covered(list, "b/c"));
  EXPECT_FALSE(covered(list, "a/c"));
  make("d");
  put("d/f");
  (void)marks();
  move("d", "x");
  move("x", "d");
  put("d/f", "again");
  EXPECT_TRUE(covered(marks(), "d/f"));
  expectWatched();
}

TEST_F(WatchTest, EventsBelowARenamedDirectoryCarryTheNewPath_D22) {
  make("d/sub/deep");
  start();
  move("d", "e");
  move("e", "f");
  (void)marks();
  put("f/sub/deep/x");
  const auto list = marks();
  EXPECT_EQ(bitsOf(list, "f/sub/deep/x") & mark::kCreated, mark::kCreated);
  for (const Mark& mark : list) EXPECT_TRUE(mark.path.starts_with("f")) << mark.path;
  for (int i = 0; i < 1000; ++i) move(i % 2 == 0 ? "f" : "g", i % 2 == 0 ? "g" : "f");
  expectWatched();
  EXPECT_EQ(state().watches, 4U);
}

TEST_F(WatchTest, TheOldNameOfARenamedOrRemovedDirectoryWorksAgain_G5_G8) {
  make("d/s");
  put("d/f");
  start();
  move("d", "old");
  make("d");
  put("d/f2");
  expectUpToDate();
  drop("d");
  make("d");
  put("d/f3");
  expectUpToDate();
  expectWatched();
}

TEST_F(WatchTest, NothingStaysOfATreeThatIsRenamedAndRemoved_G7) {
  start();
  for (int round = 0; round < 5; ++round) {
    for (int i = 0; i < 30; ++i) make("t/etc/d" + std::to_string(i) + "/e");
    for (int i = 0; i < 30; ++i) put("t/etc/d" + std::to_string(i) + "/e/f");
    move("t/etc", "t/aaa");
    drop("t/aaa");
    expectUpToDate();
  }
  EXPECT_EQ(picture.size(), 2U);
  EXPECT_EQ(state().watches, 2U);
}

TEST_F(WatchTest, ManyLevelsAtOnce_G11) {
  start();
  std::string path;
  for (int i = 0; i < 200; ++i) path += (i == 0 ? "l" : "/l") + std::to_string(i % 10);
  make(path);
  put(path + "/f");
  expectUpToDate();
  expectWatched();
  drop("l0");
  expectUpToDate();
  EXPECT_EQ(state().watches, 1U);
}

TEST_F(WatchTest, ATreeThatIsMovedOutIsForgotten) {
  make("d/s/t");
  start();
  fs::rename(at("d"), top + "/outside/d");
  const auto list = marks();
  EXPECT_EQ(bitsOf(list, "d"), mark::kDeleted);
  EXPECT_EQ(state().watches, 1U);
  std::ofstream(top + "/outside/d/s/t/f") << "x";
  EXPECT_TRUE(marks().empty());
  fs::rename(top + "/outside/d", at("d"));
  expectUpToDate();
  expectWatched();
}

TEST_F(WatchTest, ATreeThatMovesFromOneVolumeToAnother) {
  make("d/s");
  start();
  const std::string second = top + "/second";
  fs::create_directory(second);
  add(2, second);
  fs::rename(at("d"), second + "/d");
  barrier();
  EXPECT_EQ(bitsOf(parseMarks(watcher->take(1)), "d") & mark::kDeleted, mark::kDeleted);
  EXPECT_TRUE(covered(parseMarks(watcher->take(2)), "d/s"));
  EXPECT_EQ(state().watches, 1U);
  EXPECT_EQ(watcher->state(2).watches, 3U);
  std::ofstream(second + "/d/s/f") << "x";
  barrier();
  EXPECT_TRUE(covered(parseMarks(watcher->take(2)), "d/s/f"));
  EXPECT_TRUE(parseMarks(watcher->take(1)).empty());
}

TEST_F(WatchTest, RenameOverAnEmptyDirectory) {
  make("a/s");
  make("b");
  start();
  for (int i = 0; i < 20; ++i) {
    ASSERT_EQ(rename(at("a").c_str(), at("b").c_str()), 0);
    expectUpToDate();
    move("b", "a");
    make("b");
    expectUpToDate();
  }
  expectWatched();
}

TEST_F(WatchTest, DirectoriesThatLiveForAMoment_C5) {
  start();
  for (int i = 0; i < 3000; ++i) {
    ASSERT_EQ(mkdir(at("d").c_str(), 0755), 0);
    ASSERT_EQ(rmdir(at("d").c_str()), 0);
  }
  expectUpToDate();
  EXPECT_EQ(state().watches, 1U);
  EXPECT_FALSE(state().rootLost);
}

TEST_F(WatchTest, ADirectoryThatIsRemovedWhileSomebodyHoldsItOpen) {
  make("d");
  start();
  const Fd held(open(at("d").c_str(), O_RDONLY | O_DIRECTORY));
  ASSERT_EQ(rmdir(at("d").c_str()), 0);
  EXPECT_EQ(bitsOf(marks(), "d") & mark::kDeleted, mark::kDeleted);
  make("d");
  put("d/f");
  expectUpToDate();
  expectWatched();
}

TEST_F(WatchTest, DeletionsLeaveEvidence) {
  make("d/s");
  for (int i = 0; i < 20; ++i) put("d/s/f" + std::to_string(i));
  start();
  drop("d");
  EXPECT_EQ(bitsOf(marks(), "d"), mark::kDeleted);
  make("d");
  const auto list = marks();
  EXPECT_TRUE(std::any_of(list.begin(), list.end(),
                          [](const Mark& mark) { return mark.type == mark::kSubtree && mark.path == "d"; }));
}

TEST_F(WatchTest, AnUnreadableDirectoryIsCountedAndComesBack) {
  if (geteuid() == 0) GTEST_SKIP() << "root reads everything";
  make("d/s");
  chmod(at("d").c_str(), 0);
  start();
  EXPECT_EQ(state().unwatched, 1U);
  EXPECT_EQ(state().watchErrno, EACCES);
  chmod(at("d").c_str(), 0755);
  expectUpToDate();
  expectWatched();
}

// ---- names ----

TEST_F(WatchTest, NamesAreBytes_D9_D4) {
  const std::string directory("bad-\xff\xfe", 6);
  make(directory);
  start();
  const std::string name = directory + "/new\nline\x01";
  put(name);
  EXPECT_TRUE(covered(marks(), name));
  const std::string longest(255, 'n');
  put(longest);
  EXPECT_TRUE(covered(marks(), longest));
}

// ---- filters ----

TEST_F(WatchTest, OnlyDirectoriesThatTheFilterReachesAreWatched_D2_D3) {
  make("world/region/sub");
  make("world/players");
  make("logs/old");
  start({}, {"world/region/*.mca", "*.json"});
  EXPECT_EQ(state().watches, 3U);
  put("world/region/r.0.mca");
  put("world/region/other");
  put("server.json");
  put("logs/x");
  const auto list = marks();
  EXPECT_TRUE(covered(list, "world/region/r.0.mca"));
  EXPECT_TRUE(covered(list, "server.json"));
  EXPECT_FALSE(covered(list, "world/region/other"));
  EXPECT_FALSE(covered(list, "logs/x"));
}

TEST_F(WatchTest, ExcludedDirectoriesCostNoWatchAndMakeNoMarks_D3_D28) {
  make("save/cache/a/b");
  make("other/cache");
  start({}, {}, {"**/cache", "tmp/**"});
  EXPECT_EQ(state().watches, 3U);
  put("save/cache/f");
  make("save/cache/c");
  make("tmp/x/y");
  put("tmp/f");
  const auto list = marks();
  EXPECT_FALSE(covered(list, "save/cache/f"));
  EXPECT_FALSE(covered(list, "tmp/f"));
  EXPECT_TRUE(covered(list, "tmp"));
  EXPECT_EQ(state().watches, 3U);
}

TEST_F(WatchTest, NewDirectoriesAreJudgedByTheirWholePath_C8) {
  start({}, {"save/**"});
  make("save/a/b/c");
  make("elsewhere/save/d");
  (void)marks();
  put("save/a/b/c/f");
  EXPECT_TRUE(covered(marks(), "save/a/b/c/f"));
  EXPECT_EQ(state().watches, 5U);
}

TEST_F(WatchTest, ARenameAcrossTheFilterChangesWhatIsWatched) {
  make("keep/a/b");
  make("skip/c/d");
  start({}, {}, {"skip"});
  EXPECT_EQ(state().watches, 4U);
  move("keep/a", "skip/a");
  expectUpToDate();
  EXPECT_EQ(state().watches, 2U);
  move("skip/c", "keep/c");
  expectUpToDate();
  expectWatched();
  start({}, {"x/**/*.dat"});
  make("x/1/2");
  expectUpToDate();
  move("x", "y");
  expectUpToDate();
  EXPECT_EQ(state().watches, 1U);
  move("y", "x");
  put("x/1/2/f.dat");
  expectUpToDate();
  EXPECT_EQ(state().watches, 4U);
}

// ---- limits ----

TEST_F(WatchTest, AnOverflowCostsTimeNeverAChange_D27_C6_G12) {
  make("d/e");
  put("d/e/f");
  Watcher::Options options;
  options.maxQueuedEvents = 64;
  options.beforeRead = [this] {
    while (stalled) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  start(std::move(options));
  stalled = true;
  for (int i = 0; i < 500; ++i) put("f" + std::to_string(i));
  move("d", "moved");
  make("moved/new/deep");
  put("moved/new/deep/f");
  fs::rename(at("moved/e"), top + "/outside/e");
  make("moved/e/again");
  stalled = false;
  const auto list = marks();
  if (state().overflows == 0) GTEST_SKIP() << "max_queued_events may not be set here";
  EXPECT_TRUE(covered(list, "f499"));
  renew(list);
  expectUpToDate();
  expectWatched("after the overflow");
  EXPECT_EQ(state().watches, 6U);
}

TEST_F(WatchTest, StormsWithOverflowsEndUpToDate_D27) {
  Watcher::Options options;
  options.maxQueuedEvents = 128;
  start(std::move(options));
  std::thread writer([&] {
    for (int i = 0; i < 60; ++i) {
      const std::string base = "s" + std::to_string(i % 7);
      make(base + "/a/b");
      for (int k = 0; k < 40; ++k) put(base + "/a/b/f" + std::to_string(k));
      const std::string other = "s" + std::to_string((i + 3) % 7) + "/a";
      if (fs::exists(at(other))) fs::rename(at(other), at("m" + std::to_string(i)));
      if (i % 5 == 4) fs::remove_all(at("m" + std::to_string(i - 2)));
    }
  });
  for (int i = 0; i < 10; ++i) renew(marks());
  writer.join();
  expectUpToDate();
  expectWatched();
}

TEST_F(WatchTest, WithoutWatchesLeftItSaysSoAndRecovers_D28_C7) {
  for (int i = 0; i < 20; ++i) make("d" + std::to_string(i) + "/e");
  Watcher::Options options;
  options.maxWatches = 11;
  start(std::move(options));
  EXPECT_EQ(added.directories, 41U);
  EXPECT_EQ(state().watches, 11U);
  EXPECT_EQ(state().unwatched, 30U);
  EXPECT_EQ(state().watchErrno, ENOSPC);
  std::vector<std::string> gone;
  for (int i = 0; i < 20; ++i) drop("d" + std::to_string(i));
  make("d7/e");
  wait([&](Watcher::Done done) { watcher->retry(std::move(done)); });
  expectUpToDate();
  EXPECT_EQ(state().unwatched, 0U);
  EXPECT_EQ(state().watchErrno, 0);
  expectWatched();
}

// The limit of open files stands for fs.inotify.max_user_instances: inotify_init1 says EMFILE for both (inotify_init(2)),
// and using up the instances of the user would disturb everybody else on the machine.
TEST_F(WatchTest, TheInstanceLimitIsAnErrorWithItsName_D28) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit lowest = before;
  lowest.rlim_cur = 0;
  std::string code;
  std::string message;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &lowest), 0);
  try {
    const Watcher none({});
  } catch (const Error& error) {
    code = error.code;
    message = error.what();
  }
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(code, "EMFILE");
  EXPECT_NE(message.find("inotify_init1"), std::string::npos) << message;
}

TEST_F(WatchTest, ManyNamesInOneDirectoryBecomeOneMark_G9) {
  make("d");
  start();
  const std::size_t before = watcher->memory();
  for (int i = 0; i < 5000; ++i) put("d/f" + std::to_string(i));
  const auto list = marks();
  EXPECT_LE(list.size(), 3U);
  EXPECT_TRUE(covered(list, "d/f4999"));
  EXPECT_TRUE(std::any_of(list.begin(), list.end(), [](const Mark& mark) {
    return mark.type == mark::kDirectory && mark.path == "d" && (mark.bits & mark::kDeleted) == 0;
  }));
  EXPECT_EQ(watcher->memory(), before);
  renew(list);
  expectUpToDate();
}

TEST_F(WatchTest, TenThousandDirectoriesAndManyFilesAreCheap) {
  for (int i = 0; i < 100; ++i) {
    for (int k = 0; k < 100; ++k) make("dir" + std::to_string(i) + "/sub" + std::to_string(k));
  }
  start();
  EXPECT_EQ(added.directories, 10101U);
  EXPECT_LT(watcher->memory(), 1500U * 1024U);
  std::printf("user memory for %d directories: %zu bytes\n", 10101, watcher->memory());
  wait([&](Watcher::Done done) { watcher->remove(1, std::move(done)); });
  EXPECT_THROW(watcher->state(1), Error);
}

// ---- the root ----

TEST_F(WatchTest, ALostRootIsSaid_A9) {
  start();
  fs::rename(root, top + "/elsewhere");
  barrier();
  EXPECT_TRUE(state().rootLost);
  EXPECT_GE(wakes, 1);
  fs::rename(top + "/elsewhere", root);
  wait([&](Watcher::Done done) { watcher->remove(1, std::move(done)); });
  add(1, root);
  EXPECT_FALSE(state().rootLost);
  fs::remove_all(root);
  barrier();
  EXPECT_TRUE(state().rootLost);
}

TEST_F(WatchTest, AnUnmountedRootIsSaid_D31) {
  if (mount("none", root.c_str(), "tmpfs", 0, "size=1m") != 0) GTEST_SKIP() << "no mounts here";
  make("d");
  start();
  ASSERT_EQ(umount(root.c_str()), 0) << "the watcher must not keep the file system busy";
  barrier();
  EXPECT_TRUE(state().rootLost);
}

TEST_F(WatchTest, AMissingRootCannotBeAdded) {
  start();
  EXPECT_THROW(add(2, top + "/missing"), Error);
  EXPECT_THROW(watcher->state(2), Error);
  EXPECT_THROW(add(3, root + "/inside"), Error);
  EXPECT_THROW(add(1, top + "/outside"), Error);
  EXPECT_THROW(add(4, "relative"), Error);
}

// ---- the interface ----

TEST_F(WatchTest, MarksCanBeGivenBack) {
  start();
  put("f");
  barrier();
  const std::string taken = watcher->take(1);
  EXPECT_EQ(state().dirty, 0U);
  EXPECT_LT(state().firstMs, 0);
  watcher->putBack(1, taken);
  EXPECT_GE(state().dirty, 1U);
  EXPECT_GE(state().firstMs, 0);
  const auto again = marks();
  EXPECT_TRUE(covered(again, "f"));
  EXPECT_EQ(bitsOf(again, "f"), bitsOf(parseMarks(taken), "f"));
  EXPECT_THROW(watcher->putBack(1, "garbage"), Error);
  EXPECT_THROW(watcher->putBack(9, taken), Error);
}

TEST_F(WatchTest, WakesOnceWhenAVolumeBecomesDirty) {
  start();
  for (int i = 0; i < 100; ++i) put("f", std::to_string(i));
  barrier();
  EXPECT_EQ(wakes, 1);
  EXPECT_GE(state().events, 100U);
  (void)watcher->take(1);
  put("f");
  barrier();
  EXPECT_EQ(wakes, 2);
}

TEST_F(WatchTest, CloseCompletesWhatIsPendingAndIsIdempotent) {
  make("a/b");
  Watcher::Options options;
  options.beforeRead = [this] {
    while (stalled) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  start(std::move(options));
  stalled = true;
  put("f");
  std::promise<std::string> code;
  watcher->barrier([&](std::exception_ptr error) {
    try {
      std::rethrow_exception(error);
    } catch (const Error& e) {
      code.set_value(e.code);
    }
  });
  std::thread closer([&] { watcher->close(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  stalled = false;
  closer.join();
  EXPECT_EQ(code.get_future().get(), "CLOSED");
  watcher->close();
  EXPECT_THROW(add(2, top + "/outside"), Error);
}

// The look at a new directory finds its path leading to the directory of the same name that an exchange above has just
// put there, before the events of that are read: it must not take that one for its own.
TEST_F(WatchTest, ADirectoryIsNotMistakenForItsNamesakeWhenThoseAboveAreExchanged_A7) {
  make("one");
  make("two/same/deep");
  std::atomic<bool> armed{false};
  std::jthread releaser;
  Watcher::Options options;
  options.beforeRead = [this] {
    while (stalled) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  options.beforeLook = [&] {
    if (!armed.exchange(false)) return;
    stalled = true;
    ASSERT_EQ(renameat2(AT_FDCWD, at("one").c_str(), AT_FDCWD, at("two").c_str(), RENAME_EXCHANGE), 0);
    releaser = std::jthread([this] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      stalled = false;
    });
  };
  start(std::move(options));
  armed = true;
  make("one/same");
  renew(marks());  // a barrier of before the exchange waits for no event of it
  ASSERT_FALSE(armed);
  expectUpToDate();
  expectWatched();
  drop("two/same");
  expectUpToDate("after one of them went");
  expectWatched("after one of them went");
}

// ---- everything at once ----

// Random operations by several writers while a consumer keeps up; at rest the consumer's picture is the tree and every
// directory is watched exactly once.
void storm(const std::string& root, const std::string& outside, unsigned seed, int operations,
           const std::string& prefix) {
  std::mt19937 random(seed);
  const auto pick = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  const auto somewhere = [&] {
    std::string path = root;
    const int depth = 1 + pick(4);
    for (int i = 0; i < depth; ++i) path += "/" + prefix + std::string(1, static_cast<char>('a' + pick(4)));
    return path;
  };
  std::error_code ignored;
  for (int i = 0; i < operations; ++i) {
    const std::string one = somewhere();
    const std::string two = somewhere();
    switch (pick(12)) {
      case 0:
      case 1:
      case 2:
        fs::create_directories(one, ignored);
        break;
      case 3:
      case 4: {
        fs::create_directories(fs::path(one).parent_path(), ignored);
        std::ofstream(one) << i;
        break;
      }
      case 5:
      case 6:
        (void)rename(one.c_str(), two.c_str());
        break;
      case 7:
        (void)renameat2(AT_FDCWD, one.c_str(), AT_FDCWD, two.c_str(), RENAME_EXCHANGE);
        break;
      case 8:
        fs::remove_all(one, ignored);
        break;
      case 9:
        (void)rename(one.c_str(), (outside + "/" + prefix + std::to_string(pick(5))).c_str());
        break;
      case 10:
        (void)rename((outside + "/" + prefix + std::to_string(pick(5))).c_str(), two.c_str());
        break;
      default:
        (void)chmod(one.c_str(), static_cast<mode_t>(0700 | pick(0100)));
    }
  }
}

class WatchStorm : public WatchTest, public ::testing::WithParamInterface<int> {};

TEST_P(WatchStorm, TheConsumersPictureIsTheTreeAtRest) {
  const int seed = GetParam();
  Watcher::Options options;
  if (seed % 3 == 1) options.maxQueuedEvents = 256;
  const bool filtered = seed % 4 == 3;
  start(std::move(options), {}, filtered ? std::vector<std::string>{"**/xb", "xa/xc/**", "yd/*/ya"} : std::vector<std::string>{});
  for (int round = 0; round < 6; ++round) {
    std::atomic<bool> running{true};
    std::thread consumer([&] {
      while (running) renew(marks());
    });
    const auto run = [&](unsigned salt, const char* prefix) {
      storm(root, top + "/outside", static_cast<unsigned>(seed * 100 + round) * 7 + salt, 300, prefix);
    };
    std::thread first([&] { run(1, "x"); });
    // The same names for both in odd seeds: they get into each other's way.
    std::thread second([&] { run(2, seed % 2 == 0 ? "y" : "x"); });
    first.join();
    second.join();
    running = false;
    consumer.join();
    expectUpToDate("seed " + std::to_string(seed));
    if (HasFatalFailure()) return;
    expectWatched("seed " + std::to_string(seed) + " round " + std::to_string(round));
    if (HasFailure()) return;
    learn();
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, WatchStorm, ::testing::Range(0, 12));

}  // namespace
}  // namespace sv
