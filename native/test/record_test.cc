#include "engine/record.h"

#include <gtest/gtest.h>

#include <random>
#include <string>

#include "engine/error.h"

namespace sv {
namespace {

Record sample() {
  Record record;
  record.kind = Kind::kFile;
  record.flags = flag::kHash | flag::kChunksFull | flag::kLarge;
  record.mode = 04755;
  record.uid = 1000;
  record.gid = 2000;
  record.size = 3 * kChunkBytes + 1;
  record.mtimeNs = -5;
  record.ino = 0xfedcba9876543210;
  record.ctimeNs = 1'700'000'000'123'456'789;
  record.linkGroup = 7;
  record.seq = 41;
  record.hash = std::string(32, 'h');
  record.path = std::string("d/\xff\xfe\n", 5);
  record.xattrs = "xattrs";
  record.chunks = std::string(4 * kChunkHashBytes, 'c');
  return record;
}

std::string codeOf(const std::string& bytes) {
  try {
    std::string_view rest = bytes;
    while (!rest.empty()) (void)RecordView::take(rest);
  } catch (const Error& error) {
    return error.code;
  }
  return "";
}

TEST(RecordFormat, IsWhatTheFormatSays) {
  std::string out;
  RecordWriter(out).append(sample());
  ASSERT_EQ(out.size(), kRecordHead + 5 + 6 + 64);
  EXPECT_EQ(out.substr(0, 8), std::string({char(187), 0, 0, 0, 1, char(35), char(0xed), 9}));
  EXPECT_EQ(out.substr(112, 5), sample().path);
}

TEST(RecordFormat, AllFieldsSurviveTheRoundTrip) {
  std::string out;
  RecordWriter writer(out);
  writer.append(sample());
  Record link;
  link.kind = Kind::kSymlink;
  link.target = "../x";
  link.size = 4;
  writer.append(link);
  std::string_view rest = out;
  const RecordView first = RecordView::take(rest);
  const RecordView second = RecordView::take(rest);
  EXPECT_TRUE(rest.empty());
  const Record back = first.record();
  const Record want = sample();
  EXPECT_EQ(back.kind, want.kind);
  EXPECT_EQ(back.flags, want.flags);
  EXPECT_EQ(back.mode, want.mode);
  EXPECT_EQ(back.uid, want.uid);
  EXPECT_EQ(back.gid, want.gid);
  EXPECT_EQ(back.size, want.size);
  EXPECT_EQ(back.mtimeNs, want.mtimeNs);
  EXPECT_EQ(back.ino, want.ino);
  EXPECT_EQ(back.ctimeNs, want.ctimeNs);
  EXPECT_EQ(back.linkGroup, want.linkGroup);
  EXPECT_EQ(back.seq, want.seq);
  EXPECT_EQ(back.hash, want.hash);
  EXPECT_EQ(back.path, want.path);
  EXPECT_EQ(back.xattrs, want.xattrs);
  EXPECT_EQ(back.chunks, want.chunks);
  EXPECT_EQ(second.target(), "../x");
  EXPECT_EQ(second.path(), "");
  std::string again;
  RecordWriter(again).append(first);
  EXPECT_EQ(again, std::string(first.bytes()));
}

TEST(RecordFormat, EveryCutIsRefused) {
  std::string out;
  RecordWriter(out).append(sample());
  for (std::size_t length = 1; length < out.size(); ++length) EXPECT_EQ(codeOf(out.substr(0, length)), "FORMAT_INVALID") << length;
  EXPECT_THROW(RecordView::parse(out + "x"), Error);
}

TEST(RecordFormat, WrongLengthsKindsFlagsAndChunkListsAreRefused) {
  const auto broken = [](auto change) {
    std::string out;
    RecordWriter(out).append(sample());
    change(out);
    return codeOf(out);
  };
  EXPECT_EQ(broken([](std::string&) {}), "");
  EXPECT_EQ(broken([](std::string& b) { b[96] = 6; }), "FORMAT_INVALID");
  EXPECT_EQ(broken([](std::string& b) { b[99] = char(0xff); }), "FORMAT_INVALID");
  EXPECT_EQ(broken([](std::string& b) { b[4] = 6; }), "FORMAT_INVALID");
  EXPECT_EQ(broken([](std::string& b) { b[5] = char(0x80); }), "FORMAT_INVALID");
  EXPECT_EQ(broken([](std::string& b) { b[7] = char(0xff); }), "FORMAT_INVALID");
  EXPECT_EQ(broken([](std::string& b) { b[23] = 1; }), "FORMAT_INVALID");                        // size beyond 2^53
  EXPECT_EQ(broken([](std::string& b) { b[16] = 0; b[17] = 0; b[18] = 1; }), "FORMAT_INVALID");  // fewer chunks
  EXPECT_EQ(broken([](std::string& b) { b[5] = flag::kHash; }), "FORMAT_INVALID");               // list without flag
  EXPECT_EQ(broken([](std::string& b) { b[5] = flag::kChunksFull | flag::kChunksSparse; }), "FORMAT_INVALID");
}

TEST(RecordFormat, ChangedChunksMustBeInOrderAndInsideTheFile) {
  const auto sparse = [](std::initializer_list<std::uint32_t> indexes) {
    Record record = sample();
    record.flags = flag::kChunksSparse;
    record.chunks.clear();
    for (const std::uint32_t index : indexes) {
      ByteWriter writer(record.chunks);
      writer.u32(index);
      writer.zeros(kChunkHashBytes);
    }
    std::string out;
    RecordWriter(out).append(record);
    return codeOf(out);
  };
  EXPECT_EQ(sparse({}), "");
  EXPECT_EQ(sparse({0, 3}), "");
  EXPECT_EQ(sparse({3, 0}), "FORMAT_INVALID");
  EXPECT_EQ(sparse({1, 1}), "FORMAT_INVALID");
  EXPECT_EQ(sparse({4}), "FORMAT_INVALID");
}

TEST(RecordFormat, RandomBytesNeverReadBeyondTheEnd) {
  std::mt19937 random(1);
  std::string good;
  RecordWriter(good).append(sample());
  for (int i = 0; i < 20000; ++i) {
    std::string bytes = good;
    for (int k = 0; k < 4; ++k) bytes[random() % bytes.size()] = static_cast<char>(random());
    // An allocation of exactly that size lets the address sanitizer see a read beyond it.
    const std::string exact(bytes.data(), 1 + random() % bytes.size());
    std::string_view rest = exact;
    try {
      const Record record = RecordView::take(rest).record();
      EXPECT_LE(record.path.size(), exact.size());
    } catch (const Error& error) {
      EXPECT_EQ(error.code, "FORMAT_INVALID");
    }
  }
}

TEST(Lists, ItemsAndSizedFieldsRoundTripAndAreBoundsChecked) {
  std::string out;
  {
    ItemWriter item(out);
    item.u32(7);
    item.sized("path");
  }
  {
    ItemWriter item(out);
    item.u64(1);
  }
  ByteReader reader(out);
  ByteReader first = reader.item();
  EXPECT_EQ(first.u32(), 7U);
  EXPECT_EQ(first.sized(), "path");
  EXPECT_TRUE(first.empty());
  ByteReader second = reader.item();
  EXPECT_EQ(second.u64(), 1U);
  EXPECT_TRUE(reader.empty());
  EXPECT_THROW(second.u8(), Error);
  EXPECT_THROW(ByteReader(std::string_view("\x03\0\0\0", 4)).item(), Error);
  EXPECT_THROW(ByteReader(std::string_view("\x09\0\0\0", 4)).sized(), Error);
}

}  // namespace
}  // namespace sv
