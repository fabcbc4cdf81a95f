#include "engine/tree.h"

#include "engine/marks.h"

namespace sv {
namespace {

std::uint64_t mixWd(std::int32_t wd) {
  return (static_cast<std::uint64_t>(static_cast<std::uint32_t>(wd)) * 0x9e3779b97f4a7c15) >> 32;
}

}  // namespace

template <typename HashOf>
void Tree::insert(Table& table, std::uint32_t id, HashOf hashOf) {
  if ((table.count + 1) * 4 > table.slots.size() * 3) {
    std::vector<std::uint32_t> old(table.slots.empty() ? 64 : table.slots.size() * 2, kNoNode);
    old.swap(table.slots);
    table.count = 0;
    for (const std::uint32_t each : old) {
      if (each != kNoNode) insert(table, each, hashOf);
    }
  }
  const std::size_t mask = table.slots.size() - 1;
  std::size_t slot = hashOf(id) & mask;
  while (table.slots[slot] != kNoNode) slot = (slot + 1) & mask;
  table.slots[slot] = id;
  ++table.count;
}

// Linear probing without tombstones: what stands behind the gap moves up if it may.
template <typename HashOf>
void Tree::erase(Table& table, std::uint32_t id, HashOf hashOf) {
  const std::size_t mask = table.slots.size() - 1;
  std::size_t gap = hashOf(id) & mask;
  while (table.slots[gap] != id) {
    if (table.slots[gap] == kNoNode) return;
    gap = (gap + 1) & mask;
  }
  for (std::size_t slot = (gap + 1) & mask; table.slots[slot] != kNoNode; slot = (slot + 1) & mask) {
    const std::size_t home = hashOf(table.slots[slot]) & mask;
    if (((slot - home) & mask) >= ((slot - gap) & mask)) {
      table.slots[gap] = table.slots[slot];
      gap = slot;
    }
  }
  table.slots[gap] = kNoNode;
  --table.count;
}

std::uint64_t Tree::nameHash(std::uint32_t id) const { return seededHash(name(id), nodes_[id].parent); }
std::uint64_t Tree::wdHash(std::uint32_t id) const { return mixWd(nodes_[id].wd); }

std::uint32_t Tree::store(std::string_view name) {
  if (garbage_ > 64 * 1024 && garbage_ > names_.size() / 2) compactNames();
  const auto at = static_cast<std::uint32_t>(names_.size());
  names_ += name;
  return at;
}

void Tree::compactNames() {
  std::string packed;
  packed.reserve(names_.size() - garbage_);
  for (Node& node : nodes_) {
    if (!node.used) continue;
    const auto at = static_cast<std::uint32_t>(packed.size());
    packed.append(names_, node.nameAt, node.nameLength);
    node.nameAt = at;
  }
  names_ = std::move(packed);
  garbage_ = 0;
}

std::uint32_t Tree::make(std::uint32_t parent, std::string_view name, std::uint16_t volume) {
  std::uint32_t id;
  if (free_.empty()) {
    id = static_cast<std::uint32_t>(nodes_.size());
    nodes_.emplace_back();
  } else {
    id = free_.back();
    free_.pop_back();
    const std::uint16_t epoch = nodes_[id].epoch;
    nodes_[id] = Node{};
    nodes_[id].epoch = epoch;
  }
  ++used_;
  nodes_[id].volume = volume;
  if (parent == kNoNode) {
    nodes_[id].root = true;
    nodes_[id].used = true;
  } else {
    link(id, parent, name);
  }
  return id;
}

void Tree::link(std::uint32_t id, std::uint32_t parent, std::string_view name) {
  ++version_;
  const std::uint32_t at = store(name);  // may compact: a detached node has no name then
  Node& node = nodes_[id];
  node.used = true;
  node.nameAt = at;
  node.nameLength = static_cast<std::uint8_t>(name.size());
  node.parent = parent;
  node.previous = kNoNode;
  node.next = nodes_[parent].first;
  if (node.next != kNoNode) nodes_[node.next].previous = id;
  nodes_[parent].first = id;
  insert(byName_, id, [this](std::uint32_t each) { return nameHash(each); });
}

void Tree::detach(std::uint32_t id) {
  Node& node = nodes_[id];
  if (node.parent == kNoNode) return;
  ++version_;
  erase(byName_, id, [this](std::uint32_t each) { return nameHash(each); });
  if (node.previous != kNoNode) {
    nodes_[node.previous].next = node.next;
  } else {
    nodes_[node.parent].first = node.next;
  }
  if (node.next != kNoNode) nodes_[node.next].previous = node.previous;
  garbage_ += node.nameLength;
  node.nameLength = 0;
  node.arrived = false;
  node.parent = node.next = node.previous = kNoNode;
}

void Tree::release(std::uint32_t id) {
  detach(id);
  setWd(id, -1);
  Node& node = nodes_[id];
  node.used = false;
  ++version_;
  ++node.epoch;
  --used_;
  free_.push_back(id);
  if (used_ != 0) return;
  names_ = {};
  garbage_ = 0;
}

std::uint32_t Tree::child(std::uint32_t parent, std::string_view name) const {
  if (byName_.count == 0) return kNoNode;
  const std::size_t mask = byName_.slots.size() - 1;
  for (std::size_t slot = seededHash(name, parent) & mask; byName_.slots[slot] != kNoNode; slot = (slot + 1) & mask) {
    const std::uint32_t id = byName_.slots[slot];
    if (nodes_[id].parent == parent && this->name(id) == name) return id;
  }
  return kNoNode;
}

std::uint32_t Tree::byWd(std::int32_t wd) const {
  if (byWd_.count == 0) return kNoNode;
  const std::size_t mask = byWd_.slots.size() - 1;
  for (std::size_t slot = mixWd(wd) & mask; byWd_.slots[slot] != kNoNode; slot = (slot + 1) & mask) {
    if (nodes_[byWd_.slots[slot]].wd == wd) return byWd_.slots[slot];
  }
  return kNoNode;
}

void Tree::setWd(std::uint32_t id, std::int32_t wd) {
  const auto hash = [this](std::uint32_t each) { return wdHash(each); };
  if (nodes_[id].wd >= 0) erase(byWd_, id, hash);
  nodes_[id].wd = wd;
  if (wd >= 0) insert(byWd_, id, hash);
}

bool Tree::path(std::uint32_t id, std::string& out) const {
  std::size_t length = 0;
  std::uint32_t at = id;
  for (; nodes_[at].parent != kNoNode; at = nodes_[at].parent) length += nodes_[at].nameLength + 1U;
  if (!nodes_[at].root) return false;
  out.resize(length > 0 ? length - 1 : 0);
  std::size_t end = out.size();
  for (at = id; nodes_[at].parent != kNoNode; at = nodes_[at].parent) {
    const std::string_view part = name(at);
    end -= part.size();
    part.copy(out.data() + end, part.size());
    if (end > 0) out[--end] = '/';
  }
  return true;
}

bool Tree::attached(std::uint32_t id, bool* underSubtree) const {
  bool marked = false;
  for (;; id = nodes_[id].parent) {
    marked = marked || nodes_[id].subtree;
    if (nodes_[id].parent == kNoNode) break;
  }
  if (underSubtree != nullptr) *underSubtree = marked;
  return nodes_[id].root;
}

std::size_t Tree::memory() const {
  return nodes_.capacity() * sizeof(Node) + free_.capacity() * 4 + names_.capacity() +
         (byName_.slots.capacity() + byWd_.slots.capacity()) * 4;
}

}  // namespace sv
