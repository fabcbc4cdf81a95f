// The packed entry of an index or a manifest, and the length-prefixed lists that cross the addon's border
// (docs/formats.md). All little-endian; the parse of untrusted bytes is bounds-checked and never copies.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

namespace sv {

static_assert(std::endian::native == std::endian::little, "the formats are little-endian and read in place");

// What is at a path. The numbers are part of the format.
enum class Kind : std::uint8_t {
  kAbsent = 0,
  kFile = 1,
  kDirectory = 2,
  kSymlink = 3,
  kSpecial = 4,     // fifo, socket, device
  kUnreadable = 5,  // errno in `uid`
};

namespace flag {
inline constexpr std::uint8_t kHash = 1;
inline constexpr std::uint8_t kChunksFull = 2;
inline constexpr std::uint8_t kChunksSparse = 4;
inline constexpr std::uint8_t kSparse = 8;
inline constexpr std::uint8_t kMoved = 16;  // manifests only: `target` is the path that the content had in the base
inline constexpr std::uint8_t kLarge = 32;
}  // namespace flag

inline constexpr std::size_t kRecordHead = 112;                // bytes before the path
inline constexpr std::size_t kHashBytes = 32;                  // content hash
inline constexpr std::uint64_t kLargeBytes = 1024 * 1024;      // from this size on a file keeps a chunk list
inline constexpr std::uint32_t kChunkBytes = 64 * 1024;        // one chunk of a large file
inline constexpr std::size_t kChunkHashBytes = 16;             // hash of one chunk
inline constexpr std::size_t kSparseChunkBytes = 4 + kChunkHashBytes;
inline constexpr std::size_t kMaxPathBytes = 4096;
// A larger file is reported and not replicated: its chunk list (16 bytes for 64 KiB) would take more than 32 MiB of
// memory on a board that may have 1 GiB, and anybody can make one with truncate(1).
inline constexpr std::uint64_t kMaxFileBytes = 128ULL << 30;

// Number of chunks of a file of `size` bytes.
constexpr std::uint64_t chunkCount(std::uint64_t size) { return size / kChunkBytes + (size % kChunkBytes != 0 ? 1 : 0); }

// Throws Error FORMAT_INVALID saying what is wrong.
[[noreturn]] void throwFormat(const std::string& what);

// One record that owns its bytes; for building.
struct Record {
  Kind kind = Kind::kAbsent;
  std::uint8_t flags = 0;
  std::uint16_t mode = 0;  // 07777
  std::uint32_t uid = 0;   // errno of an unreadable entry
  std::uint32_t gid = 0;
  std::uint64_t size = 0;
  std::int64_t mtimeNs = 0;
  std::uint64_t ino = 0;
  std::int64_t ctimeNs = 0;
  std::uint64_t linkGroup = 0;
  std::uint64_t seq = 0;
  std::string hash;  // empty, or 32 bytes with flag::kHash
  std::string path;
  std::string target;
  std::string xattrs;
  std::string chunks;
};

// One record seen in place. Valid as long as the bytes that it was parsed from.
class RecordView {
 public:
  RecordView() = default;

  // Parses the record at the start of `bytes` and removes it from them. Throws FORMAT_INVALID when it is cut short,
  // its lengths don't add up, its kind or flags are unknown, or a chunk list does not fit its flags and size.
  static RecordView take(std::string_view& bytes);

  // Parses `bytes`, which must be exactly one record.
  static RecordView parse(std::string_view bytes);

  Kind kind() const { return static_cast<Kind>(at<std::uint8_t>(4)); }
  std::uint8_t flags() const { return at<std::uint8_t>(5); }
  bool has(std::uint8_t bit) const { return (flags() & bit) != 0; }
  std::uint16_t mode() const { return at<std::uint16_t>(6); }
  std::uint32_t uid() const { return at<std::uint32_t>(8); }
  std::uint32_t gid() const { return at<std::uint32_t>(12); }
  std::uint64_t size() const { return at<std::uint64_t>(16); }
  std::int64_t mtimeNs() const { return at<std::int64_t>(24); }
  std::uint64_t ino() const { return at<std::uint64_t>(32); }
  std::int64_t ctimeNs() const { return at<std::int64_t>(40); }
  std::uint64_t linkGroup() const { return at<std::uint64_t>(48); }
  std::uint64_t seq() const { return at<std::uint64_t>(56); }
  std::string_view hash() const { return bytes_.substr(64, kHashBytes); }  // meaningful with flag::kHash
  std::string_view path() const { return bytes_.substr(kRecordHead, pathLen()); }
  std::string_view target() const { return bytes_.substr(kRecordHead + pathLen(), targetLen()); }
  std::string_view xattrs() const { return bytes_.substr(kRecordHead + pathLen() + targetLen(), xattrsLen()); }
  std::string_view chunks() const { return bytes_.substr(bytes_.size() - at<std::uint32_t>(108)); }

  // Size, mtime, inode and ctime: equal means that nothing happened to the file.
  std::string_view identity() const { return bytes_.substr(16, 32); }

  // The whole packed record.
  std::string_view bytes() const { return bytes_; }
  bool empty() const { return bytes_.empty(); }

  // A copy that owns its bytes.
  Record record() const;

 private:
  explicit RecordView(std::string_view bytes) : bytes_(bytes) {}

  template <typename T>
  T at(std::size_t offset) const {
    T value;
    std::memcpy(&value, bytes_.data() + offset, sizeof value);
    return value;
  }
  std::size_t pathLen() const { return at<std::uint32_t>(96); }
  std::size_t targetLen() const { return at<std::uint32_t>(100); }
  std::size_t xattrsLen() const { return at<std::uint32_t>(104); }

  std::string_view bytes_;
};

// Appends little-endian numbers and bytes to a string that somebody else owns.
class ByteWriter {
 public:
  explicit ByteWriter(std::string& out) : out_(out) {}

  template <typename T>
  void put(T value) {
    static_assert(std::is_integral_v<T>);
    char raw[sizeof value];
    std::memcpy(raw, &value, sizeof value);
    out_.append(raw, sizeof raw);
  }
  void u8(std::uint8_t value) { put(value); }
  void u16(std::uint16_t value) { put(value); }
  void u32(std::uint32_t value) { put(value); }
  void u64(std::uint64_t value) { put(value); }
  void i64(std::int64_t value) { put(value); }
  void zeros(std::size_t count) { out_.append(count, '\0'); }
  void raw(std::string_view bytes) { out_.append(bytes); }
  // u32 length, then the bytes.
  void sized(std::string_view bytes);

 protected:
  std::string& out_;
};

// Appends records to a string.
class RecordWriter {
 public:
  explicit RecordWriter(std::string& out) : out_(out) {}

  // Sizes of a directory are written as 0 whatever the struct says (they mean nothing between file systems).
  void append(const Record& record);
  // A record that is packed already.
  void append(const RecordView& view) { out_.append(view.bytes()); }

 private:
  std::string& out_;
};

// Appends one item {u32 length incl. itself, ...} to a string: the length is filled in when the item ends.
//   { ItemWriter item(out); item.u32(id); item.sized(path); }
class ItemWriter : public ByteWriter {
 public:
  explicit ItemWriter(std::string& out) : ByteWriter(out), start_(out.size()) { u32(0); }
  ItemWriter(const ItemWriter&) = delete;
  ItemWriter& operator=(const ItemWriter&) = delete;
  ~ItemWriter() {
    const auto length = static_cast<std::uint32_t>(out_.size() - start_);
    std::memcpy(out_.data() + start_, &length, sizeof length);
  }

 private:
  std::size_t start_;
};

// Reads little-endian numbers and bytes; every read beyond the end throws FORMAT_INVALID.
class ByteReader {
 public:
  explicit ByteReader(std::string_view bytes) : rest_(bytes) {}

  template <typename T>
  T get() {
    static_assert(std::is_integral_v<T>);
    const std::string_view raw = bytes(sizeof(T));
    T value;
    std::memcpy(&value, raw.data(), sizeof value);
    return value;
  }
  std::uint8_t u8() { return get<std::uint8_t>(); }
  std::uint16_t u16() { return get<std::uint16_t>(); }
  std::uint32_t u32() { return get<std::uint32_t>(); }
  std::uint64_t u64() { return get<std::uint64_t>(); }
  std::int64_t i64() { return get<std::int64_t>(); }
  void skip(std::size_t count) { (void)bytes(count); }
  std::string_view bytes(std::size_t count) {
    if (count > rest_.size()) throwFormat("a list is cut short");
    const std::string_view out = rest_.substr(0, count);
    rest_.remove_prefix(count);
    return out;
  }
  // u32 length, then the bytes.
  std::string_view sized() { return bytes(u32()); }
  // An item {u32 length incl. itself, ...}: a reader of what follows the length.
  ByteReader item() {
    const std::uint32_t length = u32();
    if (length < 4) throwFormat("an item is shorter than its own length field");
    return ByteReader(bytes(length - 4));
  }
  bool empty() const { return rest_.empty(); }
  std::string_view rest() const { return rest_; }

 private:
  std::string_view rest_;
};

}  // namespace sv
