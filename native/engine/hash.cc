#include "engine/hash.h"

#include <algorithm>
#include <map>
#include <mutex>

#include "blake3/blake3.h"
#include "engine/record.h"

namespace sv {

namespace {
constexpr char kContext[] = "simple-volume 2026 chunk list v1";
std::string finishHash(const blake3_hasher& hasher, std::size_t length) {
  std::string out(length, '\0');
  blake3_hasher_finalize(&hasher, reinterpret_cast<std::uint8_t*>(out.data()), length);
  return out;
}
}  // namespace

struct Blake3::State {
  blake3_hasher hasher;
};

Blake3::Blake3() : state_(std::make_unique<State>()) { blake3_hasher_init(&state_->hasher); }
Blake3::~Blake3() = default;
Blake3::Blake3(Blake3&&) noexcept = default;
Blake3& Blake3::operator=(Blake3&&) noexcept = default;
void Blake3::add(std::string_view data) { blake3_hasher_update(&state_->hasher, data.data(), data.size()); }
std::string Blake3::finish() const { return finishHash(state_->hasher, kHashBytes); }

std::string blake3(std::string_view data) {
  Blake3 hasher;
  hasher.add(data);
  return hasher.finish();
}

std::string hashChunk(std::string_view chunk) {
  blake3_hasher hasher;
  blake3_hasher_init(&hasher);
  blake3_hasher_update(&hasher, chunk.data(), chunk.size());
  return finishHash(hasher, kChunkHashBytes);
}

const std::string& hashZeroChunk(std::size_t length) {
  static const std::string whole = hashChunk(std::string(kChunkBytes, '\0'));
  if (length == kChunkBytes) return whole;
  // Last chunks only: a handful of lengths in practice, bounded by the chunk size in any case.
  static std::mutex mutex;
  static std::map<std::size_t, std::string> others;
  const std::lock_guard lock(mutex);
  auto [it, fresh] = others.try_emplace(length);
  if (fresh) it->second = hashChunk(std::string(length, '\0'));
  return it->second;
}

std::string rootOfChunks(std::string_view chunks) {
  blake3_hasher hasher;
  blake3_hasher_init_derive_key(&hasher, kContext);
  blake3_hasher_update(&hasher, chunks.data(), chunks.size());
  return finishHash(hasher, kHashBytes);
}

ContentHasher::ContentHasher(std::uint64_t size) : size_(size), chunked_(size > kChunkBytes) {}

void ContentHasher::flush() {
  if (filled_ == 0) return;
  if (zero_) {
    chunks_ += hashZeroChunk(filled_);
  } else {
    pending_.resize(filled_, '\0');
    chunks_ += hashChunk(pending_);
  }
  pending_.clear();
  filled_ = 0;
  zero_ = true;
}

void ContentHasher::add(std::string_view data) {
  added_ += data.size();
  if (!chunked_) {
    pending_.append(data);
    return;
  }
  while (!data.empty()) {
    if (filled_ == 0 && data.size() >= kChunkBytes) {
      chunks_ += hashChunk(data.substr(0, kChunkBytes));
      data.remove_prefix(kChunkBytes);
      continue;
    }
    const std::size_t n = std::min<std::size_t>(data.size(), kChunkBytes - filled_);
    pending_.resize(filled_, '\0');
    pending_.append(data.substr(0, n));
    zero_ = false;
    filled_ += n;
    data.remove_prefix(n);
    if (filled_ == kChunkBytes) flush();
  }
}

void ContentHasher::addZeros(std::uint64_t length) {
  added_ += length;
  if (!chunked_) {
    pending_.append(static_cast<std::size_t>(length), '\0');
    return;
  }
  while (length > 0) {
    const std::size_t n = static_cast<std::size_t>(std::min<std::uint64_t>(length, kChunkBytes - filled_));
    filled_ += n;
    length -= n;
    if (filled_ == kChunkBytes) flush();
  }
}

std::string ContentHasher::finish() {
  if (added_ != size_) throwFormat("a content of another length than its hash was made for");
  if (!chunked_) return blake3(pending_);
  flush();
  return rootOfChunks(chunks_);
}

}  // namespace sv
