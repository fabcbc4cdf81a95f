// Module entry: puts every part's functions on the exports. Translation only; the engine knows nothing of Node.
#include <napi.h>

#include "addon/job.h"
#include "addon/parts.h"

#ifndef SIMPLE_VOLUME_VERSION
#define SIMPLE_VOLUME_VERSION "0.0.0"
#endif

namespace {

Napi::Value version(const Napi::CallbackInfo& info) { return Napi::String::New(info.Env(), SIMPLE_VOLUME_VERSION); }

Napi::Object init(Napi::Env env, Napi::Object exports) {
  exports.Set("version", Napi::Function::New(env, version, "version"));
  sv::addon::initJobs(env);
  for (const sv::addon::PartInit part : sv::addon::parts()) part(env, exports);
  return exports;
}

}  // namespace

NODE_API_MODULE(simple_volume, init)
