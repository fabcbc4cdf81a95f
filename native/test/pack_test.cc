#include "engine/pack.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <thread>

#include "test/transfer_support.h"

namespace sv {
namespace {

using test::describe;
using test::noise;
using test::packItem;
using test::PackText;
using test::readAll;
using test::Runs;
using test::Scratch;

class Pack : public ::testing::Test {
 protected:
  Pack() { root = s.dir("data"); }

  PackOptions with(std::string items, bool strict = false) const {
    PackOptions o;
    o.root = root;
    o.retired = s.has("retired") ? s.at("retired") : "";
    o.seq = 5;
    o.items = std::move(items);
    o.strict = strict;
    return o;
  }
  std::string whole(const std::string& path, std::uint32_t ordinal = 0) const {
    return packItem(ordinal, describe(root, path));
  }
  // The Error that reading it all ends with.
  static Error failure(PackOptions options) {
    PackReader reader(std::move(options));
    try {
      (void)readAll(reader);
    } catch (const Error& error) {
      return error;
    }
    return Error("", "none");
  }
  void expectChanged(const PackOptions& options, const std::string& path) {
    const Error error = failure(options);
    EXPECT_EQ(error.code, "CONTENT_CHANGED") << path;
    EXPECT_EQ(error.path, path);
  }

  Scratch s;
  std::string root;
};

// Keeps the mtime of a file over a change of its content, as an application may (D19).
void keepingTime(const std::string& file, const std::function<void()>& change) {
  struct stat before {};
  ASSERT_EQ(stat(file.c_str(), &before), 0);
  change();
  const timespec times[2] = {before.st_atim, before.st_mtim};
  ASSERT_EQ(utimensat(AT_FDCWD, file.c_str(), times, 0), 0);
}

TEST_F(Pack, StreamIsTheRecordsOfTheFormat) {
  s.write("data/a", "hello");
  s.write("data/e", "");
  s.write("data/b", "xy");
  PackReader reader(with(whole("a", 3) + whole("e", 4) + whole("b", 9)));
  const std::string expected = PackText().data(3, 0, "hello").data(9, 0, "xy").end();
  EXPECT_EQ(reader.plan(), expected.size());
  EXPECT_EQ(readAll(reader), expected);
}

TEST_F(Pack, AnyWindowGivesTheSameBytes) {
  std::string items;
  std::uint32_t ordinal = 0;
  for (const std::size_t size : {0, 1, 65535, 65536, 65537, 1 << 20, (1 << 20) + 1, 3 << 20}) {
    const std::string name = "f" + std::to_string(size);
    s.write("data/" + name, noise(size, static_cast<std::uint32_t>(size)));
    items += whole(name, ordinal++);
  }
  PackReader reader(with(items));
  const std::uint64_t total = reader.plan();
  const std::string all = reader.read(0, static_cast<std::size_t>(total) + 100);
  ASSERT_EQ(all.size(), total);
  for (const std::size_t window : {1009U, 4096U, 65536U, 1048576U, 1048592U}) EXPECT_TRUE(readAll(reader, window) == all) << window;
  // Windows that begin and end in the middle of heads, in any order.
  for (std::uint64_t at = total; at > 0; at -= std::min<std::uint64_t>(at, 99991)) {
    const std::uint64_t from = at - std::min<std::uint64_t>(at, 40);
    EXPECT_TRUE(reader.read(from, 57) == all.substr(from, 57)) << from;
  }
  EXPECT_EQ(reader.read(total, 10), "");
  EXPECT_EQ(reader.read(total + 1000, 10), "");
}

TEST_F(Pack, ByteByByteEqualsTheWhole) {
  s.write("data/a", "hello");
  s.write("data/b", noise(200, 1));
  PackReader reader(with(whole("a", 0) + whole("b", 1)));
  EXPECT_EQ(readAll(reader, 1), readAll(reader));
}

TEST_F(Pack, D10HoleOfOneGiBTravelsAsNothing) {
  const std::string file = s.write("data/hole", "");
  ASSERT_EQ(truncate(file.c_str(), 1L << 30), 0);
  {
    const Fd fd(open(file.c_str(), O_WRONLY));
    pwriteFull(fd.get(), "tail", 4, (1U << 30) - 4);
    pwriteFull(fd.get(), "mid", 3, 500U << 20);
  }
  PackReader reader(with(whole("hole")));
  EXPECT_LT(reader.plan(), 64U << 10);
  const std::string all = readAll(reader);
  EXPECT_NE(all.find("mid"), std::string::npos);
  EXPECT_NE(all.find("tail"), std::string::npos);
}

TEST_F(Pack, RunsOfALargeFileTravelAlone) {
  const std::string content = noise(3 << 20, 5);
  s.write("data/db", content);
  const Runs runs{{4096, 8192}, {1 << 20, 2 << 20}};
  PackReader reader(with(packItem(7, describe(root, "db"), &runs)));
  const std::string_view c = content;
  EXPECT_EQ(readAll(reader), PackText()
                                 .data(7, 4096, c.substr(4096, 8192))
                                 .data(7, 1 << 20, c.substr(1 << 20, 1 << 20))
                                 .data(7, 2 << 20, c.substr(2 << 20, 1 << 20))
                                 .end());
}

TEST_F(Pack, OldVersionIsServedFromTheLowestRetiredFolderThatIsNotOlder) {
  s.write("data/f", "version at 5");
  const Record record = describe(root, "f");
  // Version 5 was replaced in generation 7; 9 replaced version 7. Folder 3 is older than what is served.
  for (const char* folder : {"retired/3", "retired/7", "retired/9", "retired/x7", "retired/07"}) s.dir(folder);
  std::filesystem::rename(s.at("data/f"), s.at("retired/7/f"));
  s.write("retired/3/f", "version at 1");
  s.write("retired/9/f", "version at 7");
  s.write("data/f", "version at 9");
  PackReader reader(with(packItem(0, record)));
  EXPECT_EQ(readAll(reader), PackText().data(0, 0, "version at 5").end());
}

TEST_F(Pack, OtherFileInARetiredFolderIsPassedOver) {
  s.write("data/f", "mine");
  const Record record = describe(root, "f");
  s.write("retired/6/f", "another length");
  s.dir("retired/8/f");
  PackReader reader(with(packItem(0, record)));
  EXPECT_EQ(readAll(reader), PackText().data(0, 0, "mine").end());
}

TEST_F(Pack, WhatIsNotTheDescribedFileIsChangedAndNamed) {
  s.write("data/f", "content");
  const std::string items = whole("f");
  const std::string file = s.at("data/f");
  std::filesystem::remove(file);
  expectChanged(with(items), "f");
  s.write("data/f", "content!");
  expectChanged(with(items), "f");  // another size
  s.write("data/f", "CONTENT");
  expectChanged(with(items), "f");  // same size, another mtime
  std::filesystem::remove(file);
  s.write("elsewhere", "content");
  std::filesystem::create_symlink(s.at("elsewhere"), file);
  expectChanged(with(items), "f");
  std::filesystem::remove(file);
  s.dir("data/f");
  expectChanged(with(items), "f");
  std::filesystem::remove(file);
  ASSERT_EQ(mkfifo(file.c_str(), 0600), 0);
  expectChanged(with(items), "f");  // and does not wait for a writer (D15)
}

TEST_F(Pack, D14SymbolicLinkOnTheWayIsNotFollowed) {
  s.write("outside/f", "content");
  s.write("data/d/f", "content");
  Record record = describe(root, "d/f");
  std::filesystem::remove_all(s.at("data/d"));
  std::filesystem::create_symlink(s.at("outside"), s.at("data/d"));
  record.mtimeNs = describe(s.at("outside"), "f").mtimeNs;
  expectChanged(with(packItem(0, record)), "d/f");
}

TEST_F(Pack, InodeStandsForAPinnedFileWhoseTimesWereSet) {
  s.write("data/f", "content");
  const Record record = describe(root, "f");
  std::filesystem::last_write_time(s.at("data/f"), std::filesystem::file_time_type::clock::now() + std::chrono::hours(1));
  PackReader reader(with(packItem(0, record, nullptr, record.ino)));
  EXPECT_EQ(readAll(reader), PackText().data(0, 0, "content").end());
  expectChanged(with(packItem(0, record, nullptr, record.ino + 1)), "f");
}

TEST_F(Pack, D19StrictSeesContentChangedUnderTheSameMtime) {
  s.write("data/f", "content");
  const std::string items = whole("f");
  std::this_thread::sleep_for(std::chrono::milliseconds(10));
  keepingTime(s.at("data/f"), [&] { s.write("data/f", "CONTENT"); });
  PackReader trusting(with(items));
  EXPECT_NO_THROW((void)readAll(trusting));
  expectChanged(with(items, true), "f");
}

TEST_F(Pack, StrictLooksAgainAfterTheLastByte) {
  s.write("data/f", noise(200'000, 1));
  PackReader reader(with(whole("f"), true));
  (void)reader.read(0, 100'000);
  std::this_thread::sleep_for(std::chrono::milliseconds(10));
  keepingTime(s.at("data/f"), [&] { s.write("data/f", noise(200'000, 2)); });
  EXPECT_EQ(test::codeOf([&] { (void)reader.read(100'000, 1 << 20); }), "CONTENT_CHANGED");
}

TEST_F(Pack, A6ShortFileIsNeverPadded) {
  s.write("data/f", noise(200'000, 1));
  PackReader reader(with(whole("f")));
  (void)reader.read(0, 100'000);
  ASSERT_EQ(truncate(s.at("data/f").c_str(), 150'000), 0);
  EXPECT_EQ(test::codeOf([&] { (void)reader.read(100'000, 1 << 20); }), "CONTENT_CHANGED");
}

TEST_F(Pack, A10FailureToOpenIsNotAChange) {
  s.write("data/f", "content");
  PackReader reader(with(whole("f")));
  (void)reader.plan();
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit none = before;
  none.rlim_cur = 3;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  const std::string code = test::codeOf([&] { (void)readAll(reader); });
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(code, "EMFILE");
  EXPECT_EQ(readAll(reader), PackText().data(0, 0, "content").end());
}

TEST_F(Pack, HoldsOneFileOpenAtMost) {
  std::string items;
  for (std::uint32_t i = 0; i < 50; ++i) {
    s.write("data/" + std::to_string(i), noise(70'000, i));
    items += whole(std::to_string(i), i);
  }
  const auto open = [] {
    std::size_t n = 0;
    for ([[maybe_unused]] const auto& e : std::filesystem::directory_iterator("/proc/self/fd")) ++n;
    return n;
  };
  const std::size_t before = open();
  PackReader reader(with(items));
  for (std::uint64_t at = 0;; at += 10'000) {
    if (reader.read(at, 10'000).empty()) break;
    EXPECT_LE(open(), before + 1);
  }
  EXPECT_EQ(open(), before);
}

TEST_F(Pack, FileThatIsRetiredWhileAPackIsReadIsFoundAlways) {
  s.dir("retired/6");
  std::string items;
  for (std::uint32_t i = 0; i < 400; ++i) {
    s.write("data/" + std::to_string(i), noise(500, i));
    items += whole(std::to_string(i), i);
  }
  PackReader calm(with(items));
  const std::string expected = readAll(calm);
  std::thread mover([&] {
    for (int i = 0; i < 400; ++i) {
      std::filesystem::rename(s.at("data/" + std::to_string(i)), s.at("retired/6/" + std::to_string(i)));
      s.write("data/" + std::to_string(i), noise(500, 77));
    }
  });
  PackReader reader(with(items));
  EXPECT_TRUE(readAll(reader, 999) == expected);
  mover.join();
}

TEST_F(Pack, HostileItemsAreRefused) {
  s.write("data/f", noise(100'000, 1));
  const Record record = describe(root, "f");
  const auto code = [&](const std::string& items) {
    return test::codeOf([&] { const PackReader reader(with(items)); });
  };
  const Runs beyond{{99'000, 2000}};
  const Runs overlapping{{0, 5000}, {4096, 10}};
  const Runs empty{{10, 0}};
  const Runs wrapping{{~std::uint64_t{0} - 1, 10}};
  for (const Runs* runs : {&beyond, &overlapping, &empty, &wrapping}) EXPECT_EQ(code(packItem(0, record, runs)), "FORMAT_INVALID");
  std::string kind = packItem(0, record);
  kind[8] = 3;
  EXPECT_EQ(code(kind), "FORMAT_INVALID");
  EXPECT_EQ(code(packItem(kPackEnd, record)), "FORMAT_INVALID");
  Record directory = record;
  directory.kind = Kind::kDirectory;
  EXPECT_EQ(code(packItem(0, directory)), "FORMAT_INVALID");
  const std::string good = packItem(0, record);
  for (std::size_t n = 1; n < good.size(); ++n) EXPECT_EQ(code(good.substr(0, n)), "FORMAT_INVALID") << n;
}

}  // namespace
}  // namespace sv
