// Border of the mounts.
#include <napi.h>

#include "addon/job.h"
#include "addon/parts.h"
#include "engine/mount.h"

namespace sv::addon {

namespace {

template <void (*Work)(std::string_view, std::string_view)>
Napi::Value twoPaths(const Napi::CallbackInfo& info) {
  std::string one = bytesOf(info[0], "source");
  std::string two = bytesOf(info[1], "target");
  return runJob(
      info.Env(), [one = std::move(one), two = std::move(two)] { Work(one, two); },
      [](Napi::Env env) { return env.Undefined(); });
}

Napi::Value remountJob(const Napi::CallbackInfo& info) {
  std::string target = bytesOf(info[0], "target");
  if (!info[1].IsArray()) throw Napi::TypeError::New(info.Env(), "options must be an array of strings");
  const Napi::Array list = info[1].As<Napi::Array>();
  std::vector<std::string> names;
  for (std::uint32_t i = 0; i < list.Length(); ++i) names.push_back(list.Get(i).ToString());
  const unsigned long flags = mountFlags({names.begin(), names.end()});
  return runJob(
      info.Env(), [target = std::move(target), flags] { remountBind(target, flags); },
      [](Napi::Env env) { return env.Undefined(); });
}

Napi::Value unmountJob(const Napi::CallbackInfo& info) {
  std::string target = bytesOf(info[0], "target");
  return runJob(
      info.Env(), [target = std::move(target)] { unmount(target); },
      [](Napi::Env env) { return env.Undefined(); });
}

template <Napi::Value (*Body)(const Napi::CallbackInfo&)>
Napi::Value call(const Napi::CallbackInfo& info) {
  return guarded(info.Env(), [&] { return Body(info); });
}

void initMount(Napi::Env env, Napi::Object exports) {
  exports.Set("bindMount", Napi::Function::New(env, call<twoPaths<bindMount>>, "bindMount"));
  exports.Set("remountBind", Napi::Function::New(env, call<remountJob>, "remountBind"));
  exports.Set("coverMount", Napi::Function::New(env, call<twoPaths<coverMount>>, "coverMount"));
  exports.Set("unmount", Napi::Function::New(env, call<unmountJob>, "unmount"));
}

}  // namespace

SV_ADDON_PART(initMount)

}  // namespace sv::addon
