#include "engine/hash.h"

#include "engine/stage.h"
#include "test/support.h"

namespace sv {
namespace {

std::string hex(std::string_view bytes) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string out;
  for (const char c : bytes) {
    out += kHex[static_cast<unsigned char>(c) >> 4];
    out += kHex[static_cast<unsigned char>(c) & 15];
  }
  return out;
}

// The input of BLAKE3's official test vectors: bytes 0, 1, ... 250, 0, ...
std::string vectorInput(std::size_t length) {
  std::string out(length, '\0');
  for (std::size_t i = 0; i < length; ++i) out[i] = static_cast<char>(i % 251);
  return out;
}

TEST(Blake3, MatchesTheOfficialVectors) {
  EXPECT_EQ(hex(blake3("")), "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262");
  EXPECT_EQ(hex(blake3(vectorInput(1))), "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213");
  EXPECT_EQ(hex(blake3(vectorInput(1024))), "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7");
  EXPECT_EQ(hex(blake3(vectorInput(102400))), "bc3e3d41a1146b069abffad3c0d44860cf664390afce4d9661f7902e7943e085");
}

TEST(ContentHasher, TheSplitOfTheInputDoesNotMatter) {
  for (const std::size_t size : {0U, 1U, 65535U, 65536U, 65537U, 131072U, 1'000'003U}) {
    const std::string data = test::noise(size, 5);
    ContentHasher whole(size);
    whole.add(data);
    const std::string expected = whole.finish();
    for (const std::size_t step : {1000U, 65536U, 99'991U}) {
      ContentHasher pieces(size);
      for (std::size_t at = 0; at < size; at += step) pieces.add(std::string_view(data).substr(at, step));
      EXPECT_EQ(pieces.finish(), expected) << size << ' ' << step;
    }
    if (size <= 65536) {
      EXPECT_EQ(expected, blake3(data));
      EXPECT_TRUE(whole.chunks().empty());
    } else {
      EXPECT_EQ(whole.chunks().size(), chunkCount(size) * kChunkHashBytes);
      EXPECT_EQ(expected, rootOfChunks(whole.chunks()));
      EXPECT_EQ(whole.chunks().substr(0, 16), hashChunk(std::string_view(data).substr(0, 65536)));
    }
  }
}

TEST(ContentHasher, HolesCountAsZeros) {
  const std::size_t size = 5 * 65536 + 777;
  std::string data(size, '\0');
  const std::string island = test::noise(1000, 9);
  data.replace(70'000, island.size(), island);
  ContentHasher plain(size);
  plain.add(data);
  ContentHasher holes(size);
  holes.addZeros(70'000);
  holes.add(island);
  holes.addZeros(size - 71'000);
  EXPECT_EQ(holes.finish(), plain.finish());
  EXPECT_EQ(holes.chunks(), plain.chunks());
  ContentHasher small(100);
  small.addZeros(100);
  EXPECT_EQ(small.finish(), blake3(std::string(100, '\0')));
}

TEST(ContentHasher, AHoleOfManyGigabytesCostsNearlyNothing) {
  const std::uint64_t size = 64ULL << 30;
  ContentHasher hasher(size);
  const std::int64_t started = realtimeNs();
  hasher.addZeros(size);
  const std::string hash = hasher.finish();
  EXPECT_LT(realtimeNs() - started, 10'000'000'000);
  EXPECT_EQ(hasher.chunks().size(), chunkCount(size) * kChunkHashBytes);
  EXPECT_EQ(hash, rootOfChunks(hasher.chunks()));
  EXPECT_EQ(hasher.chunks().substr(0, kChunkHashBytes), hashChunk(std::string(kChunkBytes, '\0')));
}

TEST(ContentHasher, AnotherLengthThanAnnouncedIsAnError) {
  ContentHasher hasher(10);
  hasher.add("123");
  EXPECT_EQ(test::codeOf([&] { (void)hasher.finish(); }), "FORMAT_INVALID");
}

TEST(HashFile, StreamsAWholeFile) {
  const test::Scratch s;
  const std::string data = test::noise(2'500'000, 3);
  EXPECT_EQ(hashFile(s.write("f", data)), blake3(data));
  EXPECT_EQ(test::codeOf([&] { (void)hashFile(s.at("none")); }), "ENOENT");
  EXPECT_EQ(test::codeOf([&] { (void)hashFile(s.dir("dir")); }), "EISDIR");
  // Nobody writes to it: a blocking open would never end.
  ASSERT_EQ(mkfifo(s.at("fifo").c_str(), 0600), 0);
  EXPECT_EQ(test::codeOf([&] { (void)hashFile(s.at("fifo")); }), "EINVAL");
}

}  // namespace
}  // namespace sv
