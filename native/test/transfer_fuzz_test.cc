// Mutated packs, items, plans and records by the thousand, always the same ones (a seed a case). What must hold: no
// undefined behaviour (run under the sanitizers), only Errors of known codes, a slot that is called right has the
// hash that its record says, and nothing outside the folders that were given is touched.
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <random>
#include <set>

#include "engine/apply.h"
#include "engine/unpack.h"
#include "test/transfer_support.h"

namespace sv {
namespace {

using test::describe;
using test::fileRecord;
using test::noise;
using test::Op;
using test::operation;
using test::packItem;
using test::PackText;
using test::Runs;
using test::Scratch;
using test::snapshot;
using test::unpacked;
using test::unpackItem;

class Mutator {
 public:
  explicit Mutator(std::uint32_t seed) : random_(seed) {}

  std::size_t below(std::size_t n) { return n == 0 ? 0 : random_() % n; }

  std::string of(std::string bytes) {
    for (std::size_t changes = 1 + below(4); changes > 0 && !bytes.empty(); --changes) {
      const std::size_t at = below(bytes.size());
      switch (below(7)) {
        case 0: bytes[at] = static_cast<char>(bytes[at] ^ (1 << below(8))); break;
        case 1: bytes[at] = static_cast<char>(random_()); break;
        case 2: bytes.erase(at, 1 + below(20)); break;
        case 3: bytes.insert(at, bytes.substr(below(bytes.size()), 1 + below(40))); break;
        case 4: bytes.resize(at); break;
        case 5: {
          static constexpr std::uint32_t kValues[] = {0, 1, 2, 15, 16, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF, 0x100000, 0x100001, 65536};
          const std::uint32_t value = kValues[below(std::size(kValues))];
          const std::size_t place = at - at % 4;
          if (place + 4 <= bytes.size()) std::memcpy(bytes.data() + place, &value, 4);
          break;
        }
        default: {
          const std::size_t other = below(bytes.size());
          std::swap(bytes[at], bytes[other]);
        }
      }
    }
    return bytes;
  }

 private:
  std::mt19937 random_;
};

const std::set<std::string> kCodes{"FORMAT_INVALID", "OPS_INVALID", "ENOSPC", "EEXIST",  "ENOENT", "ENOTDIR", "EISDIR",       "EINVAL",
                                   "ELOOP",          "EXDEV",       "EFBIG",  "EBUSY",   "EPERM",  "ENOTEMPTY", "ENAMETOOLONG", "CONTENT_CHANGED"};

// In memory where there is room: thousands of small trees are made and removed.
std::string scratchFolder() {
  char inMemory[] = "/dev/shm/sv-fuzz-XXXXXX";
  if (const char* made = mkdtemp(inMemory)) return made;
  char onDisk[] = "/tmp/sv-fuzz-XXXXXX";
  const char* made = mkdtemp(onDisk);
  return made != nullptr ? made : "/tmp";
}

class TransferFuzz : public ::testing::Test {
 protected:
  TransferFuzz() : s(scratchFolder()) {
    s.write("outside/f", "theirs");
    s.dir("slots");
    s.dir("base");
    outside = snapshot(s.at("outside"));
  }
  ~TransferFuzz() override {
    EXPECT_EQ(snapshot(s.at("outside")), outside);
    std::filesystem::remove_all(s.path());
  }

  void clear(const char* folder) const {
    std::filesystem::remove_all(s.at(folder));
    s.dir(folder);
  }
  // What makes a case too expensive to be run is the size that it claims, and that is bounded elsewhere.
  static bool affordable(std::string_view items, std::size_t skip) {
    try {
      for (ByteReader all(items); !all.empty();) {
        ByteReader in = all.item();
        in.skip(skip);
        if (RecordView::parse(in.sized()).size() > (64U << 20)) return false;
      }
    } catch (const Error&) {
    }
    return true;
  }

  Scratch s;
  std::string outside;
};

TEST_F(TransferFuzz, Packs) {
  const std::string old = noise(150'000, 1);
  s.write("base/db", old);
  const Record oldRecord = [&] {
    Record r = fileRecord("db", old);
    const Record there = describe(s.at("base"), "db");
    ContentHasher hasher(old.size());
    hasher.add(old);
    (void)hasher.finish();
    r.chunks = hasher.chunks();
    r.flags |= flag::kChunksFull;
    r.mtimeNs = there.mtimeNs;
    return r;
  }();
  std::string next = old;
  next.replace(70'000, 5, "patch");
  Record patched = fileRecord("db", next);
  {
    ContentHasher hasher(next.size());
    hasher.add(next);
    (void)hasher.finish();
    ByteWriter w(patched.chunks);
    w.u32(1);
    w.raw(std::string_view(hasher.chunks()).substr(kChunkHashBytes, kChunkHashBytes));
    patched.flags |= flag::kChunksSparse;
  }
  Record holes = fileRecord("holes", "a" + std::string(9000, '\0') + "b");
  holes.flags |= flag::kSparse;
  const std::string items = unpackItem(1, 1, fileRecord("a", "hello")) + unpackItem(2, 2, fileRecord("e", "")) +
                            unpackItem(5, 3, patched, &oldRecord) + unpackItem(7, 4, holes);
  const std::string pack =
      PackText().data(1, 0, "hel").data(1, 3, "lo").data(5, 69'632, std::string_view(next).substr(69'632, 4096)).data(7, 0, "a").zeros(7, 4096, 4096).data(7, 9001, "b").end();
  std::size_t right = 0;
  std::size_t refused = 0;
  for (std::uint32_t seed = 0; seed < 10'000; ++seed) {
    SCOPED_TRACE(seed);
    Mutator mutator(seed);
    const std::string badItems = seed % 3 == 0 ? mutator.of(items) : items;
    const std::string badPack = seed % 3 == 0 ? pack : mutator.of(pack);
    if (!affordable(badItems, 17)) continue;
    try {
      Unpacker unpacker({s.at("slots"), s.at("base"), badItems});
      for (std::size_t at = 0; at < badPack.size();) {
        const std::size_t n = 1 + mutator.below(600);
        unpacker.write(std::string_view(badPack).substr(at, n));
        at += n;
      }
      ByteReader in(badItems);
      for (const test::Unpacked& result : unpacked(unpacker.end())) {
        ByteReader item = in.item();
        item.skip(4);
        const bool whole = item.u8() == 1;
        item.skip(3);
        const std::string slot = slotName(item.u64());
        ASSERT_EQ(s.has("slots/" + slot), result.status == 0);
        if (result.status != 0 || !whole) continue;
        const Record there = describe(s.at("slots"), slot);
        ASSERT_EQ(there.hash, result.record.hash);
        ASSERT_EQ(there.size, result.record.size);
        ++right;
      }
    } catch (const Error& error) {
      ASSERT_TRUE(kCodes.count(error.code) == 1) << error.what();
      ASSERT_EQ(s.count("slots"), 0U);
      ++refused;
    }
    for (const auto& entry : std::filesystem::directory_iterator(s.at("slots"))) std::filesystem::remove(entry);
  }
  EXPECT_GT(right, 1000U);
  EXPECT_GT(refused, 1000U);
  EXPECT_TRUE(s.read("base/db") == old);
}

TEST_F(TransferFuzz, Plans) {
  Record file = fileRecord("d/f", "content");
  ByteWriter x(file.xattrs);
  x.u16(6);
  x.u32(1);
  x.raw("user.av");
  Record directory;
  directory.kind = Kind::kDirectory;
  directory.path = "d";
  directory.mode = 0755;
  Record l;
  l.kind = Kind::kSymlink;
  l.path = "d/evil";
  l.target = "../../outside";
  l.size = l.target.size();
  const std::string plan = operation(Op::kTake, fileRecord("old", "old"), 1, {}, true) + operation(Op::kRemove, test::absent("gone"), 0, {}, true) +
                           operation(Op::kRmdir, test::absent("gone-dir")) + operation(Op::kMkdir, directory) + operation(Op::kPut, file, 2) +
                           operation(Op::kPut, fileRecord("new", "old"), 1) + operation(Op::kSymlink, l) +
                           operation(Op::kLink, fileRecord("l", "old"), 0, "new") + operation(Op::kPatch, fileRecord("p", "patXe"), 3) +
                           operation(Op::kPatchCopy, fileRecord("p2", "patXe"), 3) + operation(Op::kMeta, directory);
  std::size_t done = 0;
  std::size_t refused = 0;
  for (std::uint32_t seed = 0; seed < 2000; ++seed) {
    SCOPED_TRACE(seed);
    clear("tree");
    clear("slots");
    clear("retired");
    std::filesystem::create_symlink(s.at("outside"), s.at("tree/stale"));
    s.write("tree/old", "old");
    s.write("tree/gone", "gone");
    s.dir("tree/gone-dir");
    s.write("tree/p", "patch");
    s.write("tree/p2", "patch");
    s.write("slots/" + slotName(2), "content");
    Mutator mutator(seed);
    const std::string patch = PackText().data(0, 3, "X").end();
    s.write("slots/" + slotName(3), seed % 4 == 0 ? mutator.of(patch) : patch);
    s.write("ops", seed % 4 == 0 ? plan : mutator.of(plan));
    try {
      (void)apply({s.at("tree"), s.at("slots"), s.at("retired"), s.at("ops"), "", 1});
      (void)apply({s.at("tree"), s.at("slots"), s.at("retired"), s.at("ops"), s.at("out"), 2});
      ++done;
    } catch (const Error& error) {
      ASSERT_TRUE(kCodes.count(error.code) == 1) << error.what();
      ++refused;
    }
    if (seed % 100 == 0) {
      ASSERT_EQ(snapshot(s.at("outside")), outside);
    }
  }
  EXPECT_GT(done, 150U);
  EXPECT_GT(refused, 150U);
}

TEST_F(TransferFuzz, RecordsAndPackItems) {
  s.write("base/f", noise(70'000, 1));
  s.write("base/g", "small");
  const Runs runs{{4096, 4096}, {60'000, 10'000}};
  const Record f = describe(s.at("base"), "f");
  const std::string items = packItem(1, f) + packItem(2, f, &runs, f.ino) + packItem(3, describe(s.at("base"), "g"));
  Record list = fileRecord("large", noise(1'100'000, 2));
  list.xattrs = f.xattrs;
  const std::string record = test::packed(list);
  std::size_t served = 0;
  for (std::uint32_t seed = 0; seed < 8000; ++seed) {
    SCOPED_TRACE(seed);
    Mutator mutator(seed);
    try {
      const std::string bad = mutator.of(record);
      const RecordView view = RecordView::parse(bad);
      ASSERT_EQ(view.record().path.size(), view.path().size());
    } catch (const Error& error) {
      ASSERT_EQ(error.code, "FORMAT_INVALID");
    }
    try {
      PackReader reader({s.at("base"), "", 1, mutator.of(items), seed % 2 == 0});
      const std::uint64_t total = reader.plan();
      ASSERT_LE(total, 1U << 20);
      ASSERT_EQ(test::readAll(reader, 10'000).size(), total);
      ++served;
    } catch (const Error& error) {
      ASSERT_TRUE(kCodes.count(error.code) == 1) << error.what();
    }
  }
  EXPECT_GT(served, 100U);
}

}  // namespace
}  // namespace sv
