// Memory that the allocator holds and nobody uses goes back to the system.
#include <malloc.h>
#include <napi.h>

#include "addon/job.h"
#include "addon/parts.h"

namespace sv::addon {
namespace {

// malloc_trim(3) also gives back whole pages in the middle of the heap, which free(3) alone never does. It holds the
// allocator's lock for about a millisecond for 20 MiB.
Napi::Value trimMemory(const Napi::CallbackInfo& info) {
  return runJob(
      info.Env(),
      [] {
#ifdef __GLIBC__
        malloc_trim(0);
#endif
      },
      [](Napi::Env env) { return env.Undefined(); });
}

void initMemory(Napi::Env env, Napi::Object exports) {
  exports.Set("trimMemory", Napi::Function::New(env, trimMemory, "trimMemory"));
}

}  // namespace

SV_ADDON_PART(initMemory)

}  // namespace sv::addon
