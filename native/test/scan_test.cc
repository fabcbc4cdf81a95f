#include "engine/scan.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "engine/error.h"

namespace sv {
namespace {

namespace fs = std::filesystem;

class ScanTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "sv-scan-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    root = name;
  }
  void TearDown() override {
    std::error_code ignored;
    fs::remove_all(root, ignored);
  }
  void make(const std::string& path) const { fs::create_directories(root + "/" + path); }
  void put(const std::string& path, const std::string& text = "x") const { std::ofstream(root + "/" + path) << text; }

  std::vector<Record> scan(const std::string& directory = "", bool deep = true, std::size_t bytes = 1 << 16) const {
    Scanner scanner(root, directory, filter, deep);
    std::vector<Record> out;
    for (;;) {
      std::string packed;
      const bool more = scanner.next(bytes, packed);
      for (std::string_view rest = packed; !rest.empty();) out.push_back(RecordView::take(rest).record());
      if (!more) return out;
    }
  }
  static std::vector<std::string> paths(const std::vector<Record>& records) {
    std::vector<std::string> out;
    for (const Record& record : records) out.push_back(record.path);
    return out;
  }
  std::vector<Record> stat(const std::vector<std::string>& list) const {
    std::string packed;
    for (const std::string& path : list) ByteWriter(packed).sized(path);
    const std::string records = statPaths(root, packed);
    std::vector<Record> out;
    for (std::string_view rest = records; !rest.empty();) out.push_back(RecordView::take(rest).record());
    return out;
  }

  std::string root;
  std::shared_ptr<const Filter> filter = Filter::compile({}, {});
};

TEST_F(ScanTest, PathsComeInMemcmpOrderWhateverTheNames) {
  make("a");
  put("a/x");
  make("a/sub");
  put("a/sub/y");
  put("a-b");
  put("a0");
  put("a.txt");
  make("a!");
  put("a!/z");
  make("b/\xff");
  put("b/\xff/q");
  put("b/\x01");
  const std::vector<std::string> got = paths(scan());
  std::vector<std::string> sorted = got;
  std::sort(sorted.begin(), sorted.end());  // std::string compares bytes as unsigned
  EXPECT_EQ(got, sorted);
  EXPECT_EQ(got.size(), 14U);
  EXPECT_EQ(got.front(), "");
  EXPECT_EQ(paths(scan("", true, 1)), got);
}

TEST_F(ScanTest, RandomTreesAreCompleteAndInOrder) {
  unsigned seed = 1;
  const auto next = [&](unsigned n) {
    seed = seed * 1103515245 + 12345;
    return (seed >> 16) % n;
  };
  const char alphabet[] = {'!', '-', '.', '0', 'a', char(0xff)};
  for (int round = 0; round < 5; ++round) {
    for (int i = 0; i < 150; ++i) {
      std::string path;
      const unsigned depth = 1 + next(4);
      for (unsigned k = 0; k < depth; ++k) {
        if (k > 0) path += '/';
        path += 'n';
        const unsigned length = next(3);
        for (unsigned c = 0; c < length; ++c) path += alphabet[next(sizeof alphabet)];
      }
      std::error_code ignored;
      fs::create_directories(root + "/" + path, ignored);
    }
    std::vector<std::string> truth{""};
    for (const auto& entry : fs::recursive_directory_iterator(root)) truth.push_back(entry.path().string().substr(root.size() + 1));
    std::sort(truth.begin(), truth.end());
    EXPECT_EQ(paths(scan("", true, 500)), truth);
  }
}

TEST_F(ScanTest, RecordsSayWhatIsThere) {
  put("f", "hello");
  chmod((root + "/f").c_str(), 04751);
  put("h1");
  fs::create_hard_link(root + "/h1", root + "/h2");
  ASSERT_EQ(symlink("nowhere", (root + "/l").c_str()), 0);
  ASSERT_EQ(mkfifo((root + "/p").c_str(), 0600), 0);
  make("d");
  std::map<std::string, Record> by;
  for (Record& record : scan()) by[record.path] = record;
  EXPECT_EQ(by["f"].kind, Kind::kFile);
  EXPECT_EQ(by["f"].mode, 04751);
  EXPECT_EQ(by["f"].size, 5U);
  EXPECT_EQ(by["f"].linkGroup, 0U);
  EXPECT_NE(by["h1"].linkGroup, 0U);
  EXPECT_EQ(by["h1"].linkGroup, by["h2"].linkGroup);
  EXPECT_EQ(by["l"].kind, Kind::kSymlink);
  EXPECT_EQ(by["l"].size, 7U);
  EXPECT_EQ(by["p"].kind, Kind::kSpecial);  // and nobody waited for a writer (D15)
  EXPECT_EQ(by["d"].kind, Kind::kDirectory);
  EXPECT_EQ(by["d"].size, 0U);
  struct ::stat st {};
  ASSERT_EQ(lstat((root + "/f").c_str(), &st), 0);
  EXPECT_EQ(by["f"].mtimeNs, st.st_mtim.tv_sec * 1'000'000'000 + st.st_mtim.tv_nsec);
  EXPECT_EQ(by["f"].ino, st.st_ino);
}

TEST_F(ScanTest, ShallowGivesTheDirectoryAndItsChildren) {
  make("d/e/f");
  put("d/x");
  put("d/e/y");
  EXPECT_EQ(paths(scan("d", false)), (std::vector<std::string>{"d", "d/e", "d/x"}));
  EXPECT_EQ(paths(scan("d", true)), (std::vector<std::string>{"d", "d/e", "d/e/f", "d/e/y", "d/x"}));
  EXPECT_EQ(paths(scan("d/x", true)), (std::vector<std::string>{"d/x"}));
  EXPECT_TRUE(scan("missing").empty());
  EXPECT_TRUE(scan("d/x/y").empty());
}

TEST_F(ScanTest, TheFilterDecidesWhatIsReadAtAll) {
  make("save/a");
  make("save/cache/deep");
  put("save/a/f");
  put("save/cache/deep/g");
  make("other/x");
  put("top.json");
  filter = Filter::compile({"save", "*.json"}, {"save/cache/**"});
  EXPECT_EQ(paths(scan()), (std::vector<std::string>{"", "save", "save/a", "save/a/f", "save/cache", "top.json"}));
  EXPECT_TRUE(scan("other").empty());
  EXPECT_TRUE(scan("save/cache/deep").empty());
}

TEST_F(ScanTest, LinksAreNeverFollowed_D13_D14) {
  make("real");
  put("real/f");
  ASSERT_EQ(symlink("real", (root + "/link").c_str()), 0);
  ASSERT_EQ(symlink("/", (root + "/slash").c_str()), 0);
  EXPECT_EQ(paths(scan()), (std::vector<std::string>{"", "link", "real", "real/f", "slash"}));
  EXPECT_TRUE(scan("link/f").empty());
  EXPECT_TRUE(scan("slash/etc").empty());
  const auto records = stat({"link", "link/f", "slash/etc/passwd", "real/f"});
  EXPECT_EQ(records[0].kind, Kind::kSymlink);
  EXPECT_EQ(records[0].target, "real");
  EXPECT_EQ(records[1].kind, Kind::kAbsent);
  EXPECT_EQ(records[2].kind, Kind::kAbsent);
  EXPECT_EQ(records[3].kind, Kind::kFile);
}

TEST_F(ScanTest, StatTellsAbsentFromUnreadable_A10) {
  put("f");
  make("d");
  const auto records = stat({"", "f", "missing", "f/below", "missing/below", std::string(300, 'n'), "d"});
  ASSERT_EQ(records.size(), 7U);
  EXPECT_EQ(records[0].kind, Kind::kDirectory);
  EXPECT_EQ(records[1].kind, Kind::kFile);
  for (std::size_t i = 2; i < 6; ++i) EXPECT_EQ(records[i].kind, Kind::kAbsent) << i;
  EXPECT_EQ(records[2].path, "missing");
  EXPECT_EQ(records[6].kind, Kind::kDirectory);
  EXPECT_THROW(statPaths(root + "/none", ""), Error);
  EXPECT_THROW(statPaths(root, "\x05"), Error);
  EXPECT_THROW(Scanner(root + "/none", "", filter, true), Error);
}

TEST_F(ScanTest, StatCarriesAttributes_D18) {
  put("f");
  make("d");
  if (setxattr((root + "/f").c_str(), "user.k", "value", 5, 0) != 0) GTEST_SKIP() << "no xattrs here";
  ASSERT_EQ(setxattr((root + "/d").c_str(), "user.d", "", 0, 0), 0);
  const auto records = stat({"f", "d"});
  EXPECT_EQ(records[0].xattrs, std::string("\x06\0\x05\0\0\0user.kvalue", 17));
  EXPECT_EQ(records[1].xattrs, std::string("\x06\0\0\0\0\0user.d", 12));
}

TEST_F(ScanTest, SpecialFilesDoNotBlock_C2) {
  ASSERT_EQ(mkfifo((root + "/p").c_str(), 0600), 0);
  EXPECT_EQ(stat({"p"})[0].kind, Kind::kSpecial);
}

TEST_F(ScanTest, WhatIsMountedInsideIsReportedAndNotEntered) {
  make("d/m");
  put("d/m/hidden");
  if (mount("none", (root + "/d/m").c_str(), "tmpfs", 0, "size=1m") != 0) GTEST_SKIP() << "no mounts here";
  put("d/m/inside");
  const auto records = scan();
  const auto single = stat({"d/m", "d/m/inside"});
  umount2((root + "/d/m").c_str(), MNT_DETACH);
  ASSERT_EQ(paths(records), (std::vector<std::string>{"", "d", "d/m"}));
  for (const Record& record : {records[2], single[0], single[1]}) {
    EXPECT_EQ(record.kind, Kind::kUnreadable);
    EXPECT_EQ(record.uid, static_cast<std::uint32_t>(EXDEV));
  }
}

TEST_F(ScanTest, DeeperThanAPathMayBeIsReportedOnce) {
  const std::string name(200, 'n');
  const Fd top(open(root.c_str(), O_RDONLY | O_DIRECTORY));
  Fd at(dup(top.get()));
  for (int i = 0; i < 25; ++i) {
    ASSERT_EQ(mkdirat(at.get(), name.c_str(), 0755), 0);
    at = Fd(openat(at.get(), name.c_str(), O_RDONLY | O_DIRECTORY));
  }
  const auto records = scan();
  ASSERT_EQ(records.size(), 22U);
  EXPECT_EQ(records[20].kind, Kind::kDirectory);
  EXPECT_EQ(records[21].kind, Kind::kUnreadable);
  EXPECT_EQ(records[21].uid, static_cast<std::uint32_t>(ENAMETOOLONG));
  removeTree(top.get(), name);
}

TEST_F(ScanTest, ManyLevelsNeedFewDescriptors) {
  std::string path;
  for (int i = 0; i < 400; ++i) path += (i > 0 ? "/d" : "d");
  make(path);
  put("d/e");
  const auto records = scan("", true, 300);
  EXPECT_EQ(records.size(), 402U);
  EXPECT_EQ(records.back().path, "d/e");
}

TEST_F(ScanTest, AFolderOfManyNamesIsFine) {
  for (int i = 0; i < 20000; ++i) {
    const int fd = open((root + "/f" + std::to_string(i)).c_str(), O_CREAT | O_WRONLY, 0600);
    close(fd);
  }
  Scanner scanner(root, "", filter, true);
  std::size_t count = 0;
  std::string before;
  for (;;) {
    std::string packed;
    const bool more = scanner.next(64 * 1024, packed);
    EXPECT_LE(packed.size(), 66U * 1024);
    for (std::string_view rest = packed; !rest.empty(); ++count) {
      const std::string path(RecordView::take(rest).path());
      if (count > 0) {
        EXPECT_LT(before, path);
      }
      before = path;
    }
    if (!more) break;
  }
  EXPECT_EQ(count, 20001U);
}

TEST_F(ScanTest, ACancelledWalkIsAnErrorNotAnEnd) {
  for (int i = 0; i < 100; ++i) put("f" + std::to_string(i));
  Scanner scanner(root, "", filter, true);
  std::string packed;
  EXPECT_TRUE(scanner.next(200, packed));
  scanner.cancel();
  EXPECT_THROW(scanner.next(200, packed), Error);
}

TEST_F(ScanTest, EntriesThatVanishDuringTheWalkAreLeftOut_D26) {
  for (int i = 0; i < 50; ++i) make("d" + std::to_string(100 + i) + "/e");
  Scanner scanner(root, "", filter, true);
  std::string packed;
  EXPECT_TRUE(scanner.next(1000, packed));
  for (int i = 20; i < 50; ++i) fs::remove_all(root + "/d" + std::to_string(100 + i));
  while (scanner.next(1000, packed)) {
  }
  std::size_t count = 0;
  for (std::string_view rest = packed; !rest.empty(); ++count) (void)RecordView::take(rest);
  EXPECT_EQ(count, 41U);
}

}  // namespace
}  // namespace sv
