#include "engine/unpack.h"

#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

#include "engine/pack.h"
#include "test/transfer_support.h"

namespace sv {
namespace {

using test::codeOf;
using test::describe;
using test::fileRecord;
using test::noise;
using test::packItem;
using test::PackText;
using test::readAll;
using test::Runs;
using test::Scratch;
using test::travelling;
using test::Unpacked;
using test::unpacked;
using test::unpackItem;

enum : std::uint8_t { kOk = 0, kHash = 1, kBase = 3, kMissing = 4 };

class Unpack : public ::testing::Test {
 protected:
  Unpack() {
    source = s.dir("source");
    slots = s.dir("slots");
    base = s.dir("base");
  }
  UnpackOptions with(std::string items) const { return {slots, base, std::move(items)}; }
  std::vector<Unpacked> run(const std::string& items, std::string_view pack, std::size_t piece = 1 << 16) const {
    Unpacker unpacker(with(items));
    for (std::size_t at = 0; at < pack.size(); at += piece) unpacker.write(pack.substr(at, piece));
    return unpacked(unpacker.end());
  }
  // Code with which the pack is refused; no slot may be left then.
  std::string refused(const std::string& items, std::string_view pack) {
    const std::string code = codeOf([&] {
      Unpacker unpacker(with(items));
      unpacker.write(pack);
      (void)unpacker.end();
    });
    EXPECT_EQ(s.count("slots"), 0U);
    return code;
  }
  void clearSlots() {
    for (const auto& entry : std::filesystem::directory_iterator(slots)) std::filesystem::remove(entry);
  }
  std::string slot(std::uint64_t n) const { return Scratch::readAbsolute(slots + "/" + slotName(n)); }

  Scratch s;
  std::string source;
  std::string slots;
  std::string base;
};

// A large file in two versions, the second told as a patch against the first.
class Patch : public Unpack {
 protected:
  void SetUp() override {
    old = noise(2'000'000, 1);
    next = old;
    next.replace(100, 5, "HELLO");
    next.replace(65'530, 13, "over the edge");
    next.replace(1'900'000, 4096, std::string(4096, '\0'));
    s.write("base/db", old);
    oldRecord = describe(base, "db");
    record = sparse(next, {{0, 4096}, {61'440, 8192}, {1'896'448, 8192}});
  }
  // The record of `content` with the hashes of only those chunks that the runs touch (and the last).
  Record sparse(const std::string& content, const Runs& list) {
    runs = list;
    Record full = fileRecord("db", content);
    Record out = full;
    out.flags = static_cast<std::uint8_t>((out.flags & ~flag::kChunksFull) | flag::kChunksSparse);
    out.chunks.clear();
    std::vector<bool> touched(chunkCount(content.size()), false);
    for (const auto& [offset, length] : list)
      for (std::uint64_t c = offset / kChunkBytes; c <= (offset + length - 1) / kChunkBytes; ++c) touched[c] = true;
    touched.back() = true;
    ByteWriter w(out.chunks);
    for (std::uint32_t c = 0; c < touched.size(); ++c)
      if (touched[c]) {
        w.u32(c);
        w.raw(std::string_view(full.chunks).substr(c * kChunkHashBytes, kChunkHashBytes));
      }
    return out;
  }
  std::string pack(const std::string& content) const {
    PackText text;
    for (const auto& [offset, length] : runs) text.data(4, offset, std::string_view(content).substr(offset, length));
    return text.end();
  }
  std::string items() const { return unpackItem(4, 9, record, &oldRecord); }
  std::uint8_t status(std::string_view bytes) {
    const auto results = run(items(), bytes);
    EXPECT_EQ(results.size(), 1U);
    EXPECT_EQ(s.count("slots"), results.at(0).status == kOk ? 1U : 0U);
    return results.at(0).status;
  }

  std::string old;
  std::string next;
  Runs runs;
  Record oldRecord;
  Record record;
};

TEST_F(Unpack, D20OddFilesMakeTheRoundTrip) {
  std::vector<std::string> names;
  for (const std::size_t size : {0, 1, 4095, 4096, 65535, 65536, 65537, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 5'000'000}) {
    names.push_back("f" + std::to_string(size));
    s.write("source/" + names.back(), noise(size, static_cast<std::uint32_t>(size + 1)));
  }
  for (const char* name : {"hole", "zeros", "holes", "tail"}) names.emplace_back(name);
  s.write("source/hole", "");
  ASSERT_EQ(truncate(s.at("source/hole").c_str(), 1L << 30), 0);
  s.write("source/zeros", std::string(3 << 20, '\0'));
  s.write("source/holes", "");
  s.write("source/tail", "begin");
  ASSERT_EQ(truncate(s.at("source/tail").c_str(), 10L << 20), 0);
  {
    const Fd fd(open(s.at("source/holes").c_str(), O_WRONLY));
    for (std::uint64_t at = 0; at < (32U << 20); at += 1U << 20) pwriteFull(fd.get(), noise(5000, 3).data(), 5000, at + 8192);
    for (std::uint64_t at = 0; at < (1U << 20); at += 16384) pwriteFull(fd.get(), "x", 1, at + (40U << 20));  // short holes
  }
  std::string send;
  std::string receive;
  for (std::uint32_t i = 0; i < names.size(); ++i) {
    const Record record = describe(source, names[i]);
    send += packItem(i, record);
    receive += unpackItem(i, 100 + i, travelling(record));
  }
  PackReader reader({source, "", 1, send, false});
  const auto results = run(receive, readAll(reader), 100'003);
  ASSERT_EQ(results.size(), names.size());
  for (std::uint32_t i = 0; i < names.size(); ++i) {
    const std::string& name = names[i];
    EXPECT_EQ(results[i].ordinal, i);
    EXPECT_EQ(results[i].status, kOk) << name;
    const Record there = describe(source, name);
    const Record here = describe(slots, slotName(100 + i));
    EXPECT_EQ(there.hash, here.hash) << name;
    EXPECT_EQ(there.size, here.size) << name;
    EXPECT_EQ(results[i].record.chunks, there.chunks) << name;
    EXPECT_EQ(here.mode, 0600) << name;  // D17: never wider than it will be
    const Fd a = openBeneath(openRoot(source).get(), name, O_PATH);
    const Fd b = openBeneath(openRoot(slots).get(), slotName(100 + i), O_PATH);
    EXPECT_LE(statFd(b.get()).blocks, statFd(a.get()).blocks * 2 + 16) << name;  // D10
  }
}

TEST_F(Unpack, EverySplitOfAPackGivesTheSame) {
  const Record a = fileRecord("a", "hello");
  const Record e = fileRecord("e", "");
  const Record b = fileRecord("b", std::string("x\0y", 3) + std::string(20, '\0'));
  const std::string items = unpackItem(1, 1, a) + unpackItem(2, 2, e) + unpackItem(3, 3, b);
  const std::string pack = PackText().data(1, 0, "he").data(1, 2, "llo").data(3, 0, "x").data(3, 2, "y").zeros(3, 5, 18).end();
  for (std::size_t first = 0; first <= pack.size(); ++first) {
    clearSlots();
    Unpacker unpacker(with(items));
    unpacker.write(pack.substr(0, first));
    unpacker.write(pack.substr(first));
    const auto results = unpacked(unpacker.end());
    ASSERT_EQ(results.size(), 3U);
    for (const Unpacked& r : results) EXPECT_EQ(r.status, kOk) << first;
    EXPECT_EQ(slot(1), "hello");
    EXPECT_EQ(slot(2), "");
    EXPECT_EQ(slot(3), std::string("x\0y", 3) + std::string(20, '\0'));
  }
  clearSlots();
  for (const Unpacked& r : run(items, pack, 1)) EXPECT_EQ(r.status, kOk);
}

TEST_F(Unpack, AnyFlippedByteIsDetected) {
  const Record a = fileRecord("a", "some text");
  const Record b = fileRecord("b", noise(300, 1));
  const std::string items = unpackItem(1, 1, a) + unpackItem(2, 2, b);
  const std::string content = noise(300, 1);
  const std::string pack =
      PackText().data(1, 0, "some text").data(2, 0, std::string_view(content).substr(0, 200)).data(2, 200, std::string_view(content).substr(200)).end();
  for (std::size_t at = 0; at < pack.size(); ++at) {
    for (const int bit : {0, 7}) {
      clearSlots();
      std::string bad = pack;
      bad[at] = static_cast<char>(bad[at] ^ (1 << bit));
      bool detected = false;
      try {
        for (const Unpacked& r : run(items, bad)) detected |= r.status != kOk;
      } catch (const Error& error) {
        EXPECT_EQ(error.code, "FORMAT_INVALID");
        detected = true;
      }
      EXPECT_TRUE(detected) << at;
    }
  }
}

TEST_F(Unpack, A5CutShortAnywhereIsRefusedAndLeavesNothing) {
  const Record a = fileRecord("a", noise(100, 1));
  const Record b = fileRecord("b", noise(50, 2));
  const std::string items = unpackItem(1, 1, a) + unpackItem(2, 2, b);
  const std::string pack = PackText().data(1, 0, noise(100, 1)).data(2, 0, noise(50, 2)).end();
  for (std::size_t n = 0; n < pack.size(); ++n) EXPECT_EQ(refused(items, std::string_view(pack).substr(0, n)), "FORMAT_INVALID") << n;
}

TEST_F(Unpack, HostilePacksAreRefusedAndLeaveNothing) {
  const Record a = fileRecord("a", noise(100, 1));
  const Record b = fileRecord("b", noise(50, 2));
  const std::string items = unpackItem(1, 1, a) + unpackItem(2, 2, b);
  const auto head = [](std::uint32_t ordinal, std::uint32_t length, std::uint64_t offset) {
    return PackText().raw(packRecordHead(ordinal, length, offset)).end();
  };
  EXPECT_EQ(refused(items, head(1, 10, 95)), "FORMAT_INVALID");                        // beyond the size
  EXPECT_EQ(refused(items, head(1, 10, ~std::uint64_t{0} - 3)), "FORMAT_INVALID");     // wraps around
  EXPECT_EQ(refused(items, head(1, 0x7FFFFFFF, 0)), "FORMAT_INVALID");                 // huge
  EXPECT_EQ(refused(items, head(1, kZeroRun | 0x7FFFFFFF, 0)), "FORMAT_INVALID");      // huge, of zeros
  EXPECT_EQ(refused(items, head(1, 0, 0)), "FORMAT_INVALID");                          // nothing
  EXPECT_EQ(refused(items, head(1, kZeroRun, 0)), "FORMAT_INVALID");                   // nothing, of zeros
  EXPECT_EQ(refused(items, head(3, 1, 0)), "FORMAT_INVALID");                          // not asked for
  EXPECT_EQ(refused(items, PackText().data(2, 0, "x").data(1, 0, "y").end()), "FORMAT_INVALID");   // order
  EXPECT_EQ(refused(items, PackText().data(1, 10, "xy").data(1, 11, "z").end()), "FORMAT_INVALID");  // overlap
  EXPECT_EQ(refused(items, PackText().data(1, 10, "xy").data(1, 0, "z").end()), "FORMAT_INVALID");   // back
  EXPECT_EQ(refused(items, PackText().end() + "x"), "FORMAT_INVALID");                 // goes on after its end
  EXPECT_EQ(refused(items, PackText().raw(packRecordHead(kPackEnd, 0, 1)).cut()), "FORMAT_INVALID");  // wrong sum
  EXPECT_EQ(refused(items, PackText().raw(packRecordHead(kPackEnd, 1, 0)).cut()), "FORMAT_INVALID");
  EXPECT_EQ(refused(items, "SVPK\x02" + std::string(20, '\0')), "FORMAT_INVALID");     // another version
  EXPECT_EQ(refused(items, "<html>404 Not Found</html>"), "FORMAT_INVALID");
}

TEST_F(Unpack, HostileItemsAreRefused) {
  const Record file = fileRecord("a", "abc");
  const auto code = [&](const std::string& items) { return codeOf([&] { const Unpacker u(with(items)); }); };
  Record bad = file;
  bad.kind = Kind::kSymlink;
  EXPECT_EQ(code(unpackItem(0, 1, bad)), "FORMAT_INVALID");
  bad = file;
  bad.flags = 0;
  bad.hash.clear();
  EXPECT_EQ(code(unpackItem(0, 1, bad)), "FORMAT_INVALID");
  bad = file;
  bad.size = std::uint64_t{1} << 50;
  EXPECT_EQ(code(unpackItem(0, 1, bad)), "FORMAT_INVALID");
  bad.size = std::uint64_t{15} << 40;
  EXPECT_EQ(code(unpackItem(0, 1, bad)), "ENOSPC");
  EXPECT_EQ(code(unpackItem(0, 1, file, &file)), "FORMAT_INVALID");  // a patch without chunks
  std::string kind = unpackItem(0, 1, file);
  kind[8] = 9;
  EXPECT_EQ(code(kind), "FORMAT_INVALID");
  const std::string good = unpackItem(0, 1, file);
  for (std::size_t n = 1; n < good.size(); ++n) EXPECT_EQ(code(good.substr(0, n)), "FORMAT_INVALID") << n;
}

TEST_F(Unpack, WrongContentConcernsItsOwnItemOnly) {
  const std::string items =
      unpackItem(1, 1, fileRecord("a", "right")) + unpackItem(2, 2, fileRecord("b", "right")) + unpackItem(3, 3, fileRecord("c", "right"));
  const auto results = run(items, PackText().data(1, 0, "right").data(2, 0, "wrong").end());
  EXPECT_EQ(results.at(0).status, kOk);
  EXPECT_EQ(results.at(1).status, kHash);
  EXPECT_EQ(results.at(2).status, kMissing);
  EXPECT_EQ(s.count("slots"), 1U);
  EXPECT_EQ(slot(1), "right");
}

TEST_F(Unpack, SlotThatExistsIsNeverTouched) {
  s.write("slots/" + slotName(1), "precious");
  EXPECT_EQ(codeOf([&] { (void)run(unpackItem(1, 2, fileRecord("b", "x")) + unpackItem(2, 1, fileRecord("a", "y")),
                                   PackText().data(1, 0, "x").data(2, 0, "y").end()); }),
            "EEXIST");
  EXPECT_EQ(slot(1), "precious");
  EXPECT_EQ(s.count("slots"), 1U);
  std::filesystem::remove(s.at("slots/" + slotName(1)));
  s.write("outside", "precious");
  std::filesystem::create_symlink(s.at("outside"), s.at("slots/" + slotName(1)));
  EXPECT_EQ(codeOf([&] { (void)run(unpackItem(1, 1, fileRecord("a", "y")), PackText().data(1, 0, "y").end()); }), "EEXIST");
  EXPECT_EQ(s.read("outside"), "precious");
}

TEST_F(Unpack, AbortRemovesTheSlotsAndAfterTheEndNothing) {
  const std::string items = unpackItem(1, 1, fileRecord("a", "x")) + unpackItem(2, 2, fileRecord("b", "y"));
  const std::string pack = PackText().data(1, 0, "x").data(2, 0, "y").end();
  {
    Unpacker unpacker(with(items));
    unpacker.write(std::string_view(pack).substr(0, pack.size() - 17));
    EXPECT_EQ(s.count("slots"), 2U);
    unpacker.abort();
    EXPECT_EQ(s.count("slots"), 0U);
    EXPECT_EQ(codeOf([&] { unpacker.write("x"); }), "CLOSED");
    EXPECT_EQ(codeOf([&] { (void)unpacker.end(); }), "CLOSED");
  }
  Unpacker unpacker(with(items));
  unpacker.write(pack);
  (void)unpacker.end();
  unpacker.abort();
  EXPECT_EQ(s.count("slots"), 2U);
}

TEST_F(Unpack, A6D30FullDiskIsToldByItsCodeAndLeavesNothing) {
  if (!test::isRoot()) GTEST_SKIP() << "mounts a small file system";
  ASSERT_EQ(mount("none", slots.c_str(), "tmpfs", 0, "size=1m"), 0);
  const std::string content = noise(600'000, 1);
  const Record record = fileRecord("a", content);
  // Announced sizes that cannot fit are refused at once ...
  const std::string two = unpackItem(1, 1, record) + unpackItem(2, 2, record);
  EXPECT_EQ(codeOf([&] { const Unpacker u(with(two)); }), "ENOSPC");
  // ... and a disk that fills meanwhile when it is full.
  {
    Unpacker unpacker(with(unpackItem(1, 1, record)));
    const Fd other(open((slots + "/other").c_str(), O_WRONLY | O_CREAT, 0600));
    pwriteFull(other.get(), content.data(), 600'000, 0);
    PackText text;
    text.data(1, 0, content);
    EXPECT_EQ(codeOf([&] { unpacker.write(text.end()); }), "ENOSPC");
  }
  EXPECT_EQ(s.count("slots"), 1U);
  ASSERT_EQ(umount(slots.c_str()), 0);
}

TEST_F(Patch, ComesOutRightWithTheNewFullChunkList) {
  const auto results = run(items(), pack(next), 777);
  ASSERT_EQ(results.size(), 1U);
  EXPECT_EQ(results[0].status, kOk);
  EXPECT_TRUE(results[0].record.chunks == fileRecord("db", next).chunks);
  EXPECT_TRUE((results[0].record.flags & flag::kChunksFull) != 0);
  EXPECT_TRUE((results[0].record.flags & flag::kChunksSparse) == 0);
  // The slot is the patch in the format of a pack, for apply.
  EXPECT_EQ(slot(9).substr(0, 8), packHead());
  EXPECT_TRUE(Scratch::readAbsolute(base + "/db") == old);
}

TEST_F(Patch, FullListOfChunksServesAsWell) {
  record = fileRecord("db", next);
  EXPECT_EQ(status(pack(next)), kOk);
}

TEST_F(Patch, GrownAndShrunkFilesAndRunsOfZeros) {
  // grown, the new part being partly zeros that no run covers
  next = old + std::string(100'000, '\0') + "end";
  record = fileRecord("db", next);
  runs = {{2'099'999, 4}};
  EXPECT_EQ(status(pack(next)), kOk);
  clearSlots();
  // shrunk into the middle of a chunk
  next = old.substr(0, 1'500'000);
  record = fileRecord("db", next);
  runs.clear();
  EXPECT_EQ(status(pack(next)), kOk);
  clearSlots();
  next = old;
  next.replace(131'072, 70'000, std::string(70'000, '\0'));
  record = sparse(next, {{131'072, 70'000}});
  EXPECT_EQ(status(PackText().zeros(4, 131'072, 70'000).end()), kOk);
}

TEST_F(Patch, EveryWrongByteIsDetected) {
  const std::string good = pack(next);
  for (std::size_t at = 8; at < good.size(); at += 509) {
    clearSlots();
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 0x20);
    bool detected = false;
    try {
      detected = run(items(), bad).at(0).status != kOk;
    } catch (const Error&) {
      detected = true;
    }
    EXPECT_TRUE(detected) << at;
  }
}

TEST_F(Patch, ChangedChunkForWhichNothingCameIsDetected) {
  runs.pop_back();
  EXPECT_EQ(status(pack(next)), kHash);
}

TEST_F(Patch, RunInAChunkThatDidNotChangeMustNotChangeIt) {
  runs.insert(runs.begin() + 2, {1'000'000, 4096});
  EXPECT_EQ(status(pack(next)), kOk);  // the same bytes as the base has
  clearSlots();
  std::string other = next;
  other[1'000'001] ^= 1;
  EXPECT_EQ(status(pack(other)), kHash);
}

TEST_F(Patch, BaseThatIsNotTheIndexedOneIsToldApart) {
  const std::string good = pack(next);
  const auto again = [&](const std::string& content) {
    clearSlots();
    s.write("base/db", content);
    return status(good);
  };
  std::string drifted = old;
  drifted[1'300'000] ^= 1;  // in a chunk that the patch does not touch
  EXPECT_EQ(again(drifted), kBase);
  drifted = old;
  drifted[200] ^= 1;  // in one that it does
  EXPECT_EQ(again(drifted), kBase);
  EXPECT_EQ(again(old + "x"), kBase);
  // Rewritten with the same content: read, found equal, good.
  EXPECT_EQ(again(old), kOk);
  clearSlots();
  std::filesystem::remove(s.at("base/db"));
  EXPECT_EQ(status(good), kBase);
  s.write("outside/db", old);
  std::filesystem::create_symlink(s.at("outside/db"), s.at("base/db"));
  EXPECT_EQ(status(good), kBase);
}

TEST_F(Patch, ListMadeAgainstAnotherBaseIsToldApart) {
  std::string foreign = next;
  foreign[1'700'000] ^= 1;  // an unchanged chunk, for the source
  record = sparse(foreign, runs);
  EXPECT_EQ(status(pack(foreign)), kBase);
}

TEST_F(Patch, HostileSparseListsAreRefused) {
  const auto list = [&](std::initializer_list<std::uint32_t> indexes) {
    std::string out;
    ByteWriter w(out);
    for (const std::uint32_t i : indexes) {
      w.u32(i);
      w.zeros(kChunkHashBytes);
    }
    return out;
  };
  for (const auto& chunks : {list({5, 5}), list({6, 2}), list({40}), list({1}).substr(0, 19)}) {
    record.chunks = chunks;
    EXPECT_EQ(codeOf([&] { const Unpacker u(with(items())); }), "FORMAT_INVALID");
  }
}

}  // namespace
}  // namespace sv
