// Content hashes (docs/formats.md, "Content hash"): BLAKE3, with a chunk list above 64 KiB so that a change of one
// block is verified by reading one chunk.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace sv {

// BLAKE3, 32 bytes.
std::string blake3(std::string_view data);

// BLAKE3 of a stream.
class Blake3 {
 public:
  Blake3();
  ~Blake3();
  Blake3(Blake3&&) noexcept;
  Blake3& operator=(Blake3&&) noexcept;
  void add(std::string_view data);
  std::string finish() const;  // 32 bytes

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Hash of one chunk (at most 64 KiB), 16 bytes.
std::string hashChunk(std::string_view chunk);
// Hash of a chunk of `length` zeros.
const std::string& hashZeroChunk(std::size_t length);
// Content hash of a file of more than 64 KiB from its chunk list (16 bytes each).
std::string rootOfChunks(std::string_view chunks);

// The content hash of a file whose bytes come in order. Stretches of zeros (holes) can be added by length alone.
class ContentHasher {
 public:
  explicit ContentHasher(std::uint64_t size);
  void add(std::string_view data);
  void addZeros(std::uint64_t length);
  std::uint64_t added() const { return added_; }
  // 32 bytes. All of `size` bytes must have been added.
  std::string finish();
  // The chunk list; empty for files up to 64 KiB.
  const std::string& chunks() const { return chunks_; }

 private:
  void flush();
  std::uint64_t size_;
  std::uint64_t added_ = 0;
  bool chunked_;
  bool zero_ = true;     // the chunk being filled holds only zeros added by length
  std::string pending_;  // of the chunk being filled; short when zero_
  std::size_t filled_ = 0;
  std::string chunks_;
};

}  // namespace sv
