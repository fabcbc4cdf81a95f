// Border of the sizes.
#include "engine/size.h"

#include <napi.h>

#include "addon/job.h"
#include "addon/parts.h"

namespace sv::addon {

namespace {

Napi::Value makeTreeJob(const Napi::CallbackInfo& info) {
  std::string path = bytesOf(info[0], "path");
  const auto mode = static_cast<mode_t>(info[1].ToNumber().Uint32Value() & 07777);
  return runJob(
      info.Env(), [path = std::move(path), mode] { return makeTree(path, mode); },
      [](Napi::Env env, bool made) { return Napi::Boolean::New(env, made); });
}

Napi::Value joinTreeJob(const Napi::CallbackInfo& info) {
  std::string directory = bytesOf(info[0], "directory");
  std::string tree = bytesOf(info[1], "tree");
  return runJob(
      info.Env(), [directory = std::move(directory), tree = std::move(tree)] { joinTree(directory, tree); },
      [](Napi::Env env) { return env.Undefined(); });
}

Napi::Value limitTreeJob(const Napi::CallbackInfo& info) {
  std::string tree = bytesOf(info[0], "tree");
  const double bytes = info[1].ToNumber().DoubleValue();
  if (!(bytes >= 0 && bytes <= 9007199254740991.0)) throw Napi::RangeError::New(info.Env(), "bytes is not a size");
  if (!info[2].IsArray()) throw Napi::TypeError::New(info.Env(), "others must be an array of paths");
  const Napi::Array list = info[2].As<Napi::Array>();
  std::vector<std::string> others;
  for (std::uint32_t i = 0; i < list.Length(); ++i) others.push_back(bytesOf(list.Get(i), "others"));
  return runJob(
      info.Env(),
      [tree = std::move(tree), bytes, others = std::move(others)] {
        return limitTree(tree, static_cast<std::uint64_t>(bytes), others);
      },
      [](Napi::Env env, SizeLimit limit) {
        Napi::Object out = Napi::Object::New(env);
        out.Set("enforced", limit.enforced);
        out.Set("reason", limit.reason);
        out.Set("used", static_cast<double>(limit.used));
        return out;
      });
}

template <Napi::Value (*Body)(const Napi::CallbackInfo&)>
Napi::Value call(const Napi::CallbackInfo& info) {
  return guarded(info.Env(), [&] { return Body(info); });
}

void initSize(Napi::Env env, Napi::Object exports) {
  exports.Set("makeTree", Napi::Function::New(env, call<makeTreeJob>, "makeTree"));
  exports.Set("joinTree", Napi::Function::New(env, call<joinTreeJob>, "joinTree"));
  exports.Set("limitTree", Napi::Function::New(env, call<limitTreeJob>, "limitTree"));
}

}  // namespace

SV_ADDON_PART(initSize)

}  // namespace sv::addon
