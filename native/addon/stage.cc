// Border of staging, hashing, durability and tree removal.
#include <napi.h>

#include "addon/job.h"
#include "addon/parts.h"
#include "engine/fs.h"
#include "engine/hash.h"
#include "engine/stage.h"

namespace sv::addon {

namespace {

std::string field(const Napi::Object& object, const char* name) { return bytesOf(object.Get(name), name); }

std::string optionalField(const Napi::Object& object, const char* name) {
  const Napi::Value value = object.Get(name);
  return value.IsNull() || value.IsUndefined() ? std::string() : bytesOf(value, name);
}

Napi::Value stageJob(const Napi::CallbackInfo& info) {
  const Napi::Object object = info[0].As<Napi::Object>();
  StageOptions options;
  options.root = field(object, "root");
  options.hashOnly = object.Get("hashOnly").ToBoolean();
  options.slots = options.hashOnly ? std::string() : field(object, "slots");
  options.base = optionalField(object, "base");
  if (object.Get("retries").IsNumber()) options.retries = object.Get("retries").As<Napi::Number>();
  std::string items = bytesOf(info[1], "items");
  return runJob(
      info.Env(), [options, items = std::move(items)] { return stage(options, items); },
      [](Napi::Env env, std::string out) { return takeBuffer(env, std::move(out)); });
}

Napi::Value hashFileJob(const Napi::CallbackInfo& info) {
  std::string path = bytesOf(info[0], "path");
  return runJob(
      info.Env(), [path = std::move(path)] { return hashFile(path); },
      [](Napi::Env env, std::string out) { return takeBuffer(env, std::move(out)); });
}

Napi::Value hashBytesNow(const Napi::CallbackInfo& info) {
  return takeBuffer(info.Env(), blake3(bytesOf(info[0], "data")));
}

template <void (*Work)(std::string_view)>
Napi::Value pathJob(const Napi::CallbackInfo& info) {
  std::string path = bytesOf(info[0], "path");
  return runJob(
      info.Env(), [path = std::move(path)] { Work(path); }, [](Napi::Env env) { return env.Undefined(); });
}

Napi::Value removeTreeJob(const Napi::CallbackInfo& info) {
  std::string root = bytesOf(info[0], "root");
  std::string path = bytesOf(info[1], "path");
  return runJob(
      info.Env(),
      [root = std::move(root), path = std::move(path)]() -> std::uint64_t {
        Fd top;
        try {
          top = openRoot(root);
        } catch (const Error& error) {
          if (error.err == ENOENT) return 0;  // nothing there, nothing to remove
          throw;
        }
        return removeTree(top.get(), path);
      },
      [](Napi::Env env, std::uint64_t count) { return Napi::Number::New(env, static_cast<double>(count)); });
}

Napi::Value probeJob(const Napi::CallbackInfo& info) {
  std::string path = bytesOf(info[0], "directory");
  return runJob(
      info.Env(), [path = std::move(path)] { return probe(path); },
      [](Napi::Env env, Probe p) {
        Napi::Object out = Napi::Object::New(env);
        out.Set("type", p.type);
        out.Set("reflink", p.reflink);
        out.Set("xattrs", p.xattrs);
        out.Set("dev", static_cast<double>(p.dev));
        return out;
      });
}

Napi::Value bootMsNow(const Napi::CallbackInfo& info) { return Napi::Number::New(info.Env(), bootMs()); }

template <Napi::Value (*Body)(const Napi::CallbackInfo&)>
Napi::Value call(const Napi::CallbackInfo& info) {
  return guarded(info.Env(), [&] { return Body(info); });
}

void initStage(Napi::Env env, Napi::Object exports) {
  exports.Set("stage", Napi::Function::New(env, call<stageJob>, "stage"));
  exports.Set("hashFile", Napi::Function::New(env, call<hashFileJob>, "hashFile"));
  exports.Set("hashBytes", Napi::Function::New(env, call<hashBytesNow>, "hashBytes"));
  exports.Set("syncFs", Napi::Function::New(env, call<pathJob<syncFs>>, "syncFs"));
  exports.Set("syncFile", Napi::Function::New(env, call<pathJob<syncFile>>, "syncFile"));
  exports.Set("removeTree", Napi::Function::New(env, call<removeTreeJob>, "removeTree"));
  exports.Set("probe", Napi::Function::New(env, call<probeJob>, "probe"));
  exports.Set("bootMs", Napi::Function::New(env, call<bootMsNow>, "bootMs"));
}

}  // namespace

SV_ADDON_PART(initStage)

}  // namespace sv::addon
