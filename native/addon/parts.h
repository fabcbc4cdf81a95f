// How a part of the addon announces itself. A part is one file native/addon/<part>.cc that ends with one line:
//
//   SV_ADDON_PART(initWatch)
//
// where `void initWatch(Napi::Env env, Napi::Object exports)` puts its functions on `exports`. The line registers
// the function when the library is loaded; addon.cc calls all of them once per environment (main thread or worker).
#pragma once

#include <napi.h>

#include <vector>

namespace sv::addon {

using PartInit = void (*)(Napi::Env env, Napi::Object exports);

// Every registered part, in no particular order.
inline std::vector<PartInit>& parts() {
  static std::vector<PartInit> list;
  return list;
}

struct PartRegistration {
  explicit PartRegistration(PartInit init) { parts().push_back(init); }
};

}  // namespace sv::addon

#define SV_ADDON_PART(init) \
  static const ::sv::addon::PartRegistration svAddonPartRegistration(init);
