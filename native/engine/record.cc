#include "engine/record.h"

#include <limits>

#include "engine/error.h"

namespace sv {
namespace {

constexpr std::uint8_t kKnownFlags =
    flag::kHash | flag::kChunksFull | flag::kChunksSparse | flag::kSparse | flag::kMoved | flag::kLarge;
constexpr std::uint64_t kMaxSize = std::uint64_t{1} << 53;  // a JavaScript number holds it exactly

std::uint32_t length32(std::size_t length) {
  if (length > std::numeric_limits<std::uint32_t>::max()) throwFormat("a field is longer than 4 GiB");
  return static_cast<std::uint32_t>(length);
}

void checkChunks(const RecordView& view) {
  const bool full = view.has(flag::kChunksFull);
  const bool sparse = view.has(flag::kChunksSparse);
  const std::size_t bytes = view.chunks().size();
  if (full && sparse) throwFormat("a record has both kinds of chunk list");
  if (!full && !sparse) {
    if (bytes != 0) throwFormat("a record has a chunk list without its flag");
    return;
  }
  const std::uint64_t count = chunkCount(view.size());
  if (full && (bytes % kChunkHashBytes != 0 || bytes / kChunkHashBytes != count)) {
    throwFormat("a chunk list does not fit the size of its file");
  }
  if (!sparse) return;
  if (bytes % kSparseChunkBytes != 0) throwFormat("a list of changed chunks is cut short");
  std::int64_t before = -1;
  for (ByteReader reader(view.chunks()); !reader.empty(); reader.skip(kChunkHashBytes)) {
    const std::int64_t index = reader.u32();
    if (index <= before) throwFormat("changed chunks are out of order");
    if (static_cast<std::uint64_t>(index) >= count) throwFormat("a changed chunk lies beyond the end of its file");
    before = index;
  }
}

}  // namespace

void throwFormat(const std::string& what) { throw Error("FORMAT_INVALID", "FORMAT_INVALID: " + what); }

void ByteWriter::sized(std::string_view bytes) {
  u32(length32(bytes.size()));
  raw(bytes);
}

RecordView RecordView::take(std::string_view& bytes) {
  if (bytes.size() < kRecordHead) throwFormat("a record is cut short");
  std::uint32_t total;
  std::memcpy(&total, bytes.data(), sizeof total);
  if (total < kRecordHead || total > bytes.size()) throwFormat("a record is cut short");
  const RecordView view(bytes.substr(0, total));
  const std::uint64_t sum = std::uint64_t{kRecordHead} + view.pathLen() + view.targetLen() + view.xattrsLen() +
                            view.at<std::uint32_t>(108);
  if (sum != total) throwFormat("the lengths in a record do not add up");
  if (view.at<std::uint8_t>(4) > static_cast<std::uint8_t>(Kind::kUnreadable)) throwFormat("unknown kind of record");
  if ((view.flags() & ~kKnownFlags) != 0) throwFormat("unknown flag in a record");
  if (view.mode() > 07777) throwFormat("a record has a mode beyond 07777");
  if (view.size() > kMaxSize) throwFormat("a record has a size beyond 2^53");
  checkChunks(view);
  bytes.remove_prefix(total);
  return view;
}

RecordView RecordView::parse(std::string_view bytes) {
  const RecordView view = take(bytes);
  if (!bytes.empty()) throwFormat("there are bytes after a record");
  return view;
}

Record RecordView::record() const {
  Record out;
  out.kind = kind();
  out.flags = flags();
  out.mode = mode();
  out.uid = uid();
  out.gid = gid();
  out.size = size();
  out.mtimeNs = mtimeNs();
  out.ino = ino();
  out.ctimeNs = ctimeNs();
  out.linkGroup = linkGroup();
  out.seq = seq();
  if (has(flag::kHash)) out.hash = hash();
  out.path = path();
  out.target = target();
  out.xattrs = xattrs();
  out.chunks = chunks();
  return out;
}

void RecordWriter::append(const Record& record) {
  const std::size_t total = kRecordHead + record.path.size() + record.target.size() + record.xattrs.size() +
                            record.chunks.size();
  if (!record.hash.empty() && record.hash.size() != kHashBytes) throwFormat("a content hash is not 32 bytes");
  ByteWriter out(out_);
  out.u32(length32(total));
  out.u8(static_cast<std::uint8_t>(record.kind));
  out.u8(record.flags);
  out.u16(static_cast<std::uint16_t>(record.mode & 07777));
  out.u32(record.uid);
  out.u32(record.gid);
  out.u64(record.kind == Kind::kDirectory ? 0 : record.size);
  out.i64(record.mtimeNs);
  out.u64(record.ino);
  out.i64(record.ctimeNs);
  out.u64(record.linkGroup);
  out.u64(record.seq);
  if (record.hash.empty()) {
    out.zeros(kHashBytes);
  } else {
    out.raw(record.hash);
  }
  out.u32(length32(record.path.size()));
  out.u32(length32(record.target.size()));
  out.u32(length32(record.xattrs.size()));
  out.u32(length32(record.chunks.size()));
  out.raw(record.path);
  out.raw(record.target);
  out.raw(record.xattrs);
  out.raw(record.chunks);
}

}  // namespace sv
