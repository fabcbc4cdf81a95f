// Border of serving, receiving and applying.
#include <napi.h>

#include <cmath>
#include <memory>
#include <mutex>

#include "addon/job.h"
#include "addon/parts.h"
#include "engine/apply.h"
#include "engine/pack.h"
#include "engine/unpack.h"

namespace sv::addon {

namespace {

std::string field(const Napi::Object& object, const char* name) { return bytesOf(object.Get(name), name); }
std::string optionalField(const Napi::Object& object, const char* name) {
  const Napi::Value value = object.Get(name);
  return value.IsNull() || value.IsUndefined() ? std::string() : bytesOf(value, name);
}

// One engine object, used by one job at a time. It goes when it is closed and no job needs it any more, whenever the
// garbage collector may come for the wrapper: it holds files open.
template <typename T>
struct Owned {
  std::unique_ptr<T> object;
  std::mutex mutex;     // held by the job that uses the object
  unsigned jobs = 0;    // pending; JS thread only
  bool closed = false;  // JS thread only

  void dropIfDone() {
    if (closed && jobs == 0) object.reset();
  }
};

Napi::Value rejected(Napi::Env env, const char* code, const char* message) {
  const auto deferred = Napi::Promise::Deferred::New(env);
  deferred.Reject(toJsError(env, std::make_exception_ptr(Error(code, message))));
  return deferred.Promise();
}

// kOne: a second call at the same time is refused (BUSY). kLast: the same, and calls after it are refused (CLOSED).
// kAbort: waits for the job that runs; comes at any time, any number of times.
enum class Call { kOne, kLast, kAbort };

// Runs `work` on the object in a job; it gets null where the object is gone (kAbort only).
template <typename T, typename Work, typename Finish>
Napi::Value exclusive(Napi::Env env, const std::shared_ptr<Owned<T>>& owned, Call call, Work work, Finish finish) {
  if (call != Call::kAbort && owned->closed) return rejected(env, "CLOSED", "CLOSED: already closed");
  if (call != Call::kAbort && owned->jobs > 0) return rejected(env, "BUSY", "BUSY: one call at a time");
  if (call != Call::kOne) owned->closed = true;
  ++owned->jobs;
  Napi::Promise promise = runJob(
      env,
      [owned, work = std::move(work)]() mutable {
        const std::lock_guard lock(owned->mutex);
        return work(owned->object.get());
      },
      [finish = std::move(finish)](Napi::Env at, auto result) mutable -> Napi::Value { return finish(at, std::move(result)); });
  // When the promise settles, before the caller's own continuation runs.
  const auto clear = Napi::Function::New(env, [owned](const Napi::CallbackInfo&) {
    --owned->jobs;
    owned->dropIfDone();
  });
  promise.Get("then").As<Napi::Function>().Call(promise, {clear, clear});
  return promise;
}

// A whole number of at least `least` and at most `most`; RangeError or TypeError naming it otherwise.
std::uint64_t numberOf(const Napi::Value& value, const char* what, double least, double most) {
  if (!value.IsNumber()) throw Napi::TypeError::New(value.Env(), std::string(what) + " must be a number");
  const double number = value.As<Napi::Number>().DoubleValue();
  if (!(number >= least && number <= most) || std::floor(number) != number)
    throw Napi::RangeError::New(value.Env(), std::string(what) + " is out of range");
  return static_cast<std::uint64_t>(number);
}

Napi::Object objectOf(const Napi::CallbackInfo& info) {
  if (!info[0].IsObject()) throw Napi::TypeError::New(info.Env(), "options must be an object");
  return info[0].As<Napi::Object>();
}

constexpr double kMaxSafe = 9007199254740991.0;
constexpr double kMaxRead = 64.0 * 1024 * 1024;

class JsPackReader : public Napi::ObjectWrap<JsPackReader> {
 public:
  static Napi::Function define(Napi::Env env) {
    return DefineClass(env, "PackReader",
                       {InstanceMethod<&JsPackReader::plan>("plan"), InstanceMethod<&JsPackReader::read>("read"),
                        InstanceMethod<&JsPackReader::close>("close")});
  }
  explicit JsPackReader(const Napi::CallbackInfo& info) : Napi::ObjectWrap<JsPackReader>(info) {
    guarded(info.Env(), [&] {
      const Napi::Object object = objectOf(info);
      PackOptions options;
      options.root = field(object, "root");
      options.retired = optionalField(object, "retired");
      options.seq = numberOf(object.Get("seq"), "seq", 0, kMaxSafe);
      options.items = field(object, "items");
      options.strict = object.Get("strict").ToBoolean();
      owned_->object = std::make_unique<PackReader>(std::move(options));
    });
  }

 private:
  Napi::Value plan(const Napi::CallbackInfo& info) {
    return exclusive(
        info.Env(), owned_, Call::kOne, [](PackReader* reader) { return reader->plan(); },
        [](Napi::Env env, std::uint64_t total) { return Napi::Number::New(env, static_cast<double>(total)); });
  }
  Napi::Value read(const Napi::CallbackInfo& info) {
    const std::uint64_t offset = numberOf(info[0], "offset", 0, kMaxSafe);
    const auto max = static_cast<std::size_t>(numberOf(info[1], "max", 1, kMaxRead));
    return exclusive(
        info.Env(), owned_, Call::kOne, [offset, max](PackReader* reader) { return reader->read(offset, max); },
        [](Napi::Env env, std::string bytes) -> Napi::Value {
          if (bytes.empty()) return env.Null();
          return takeBuffer(env, std::move(bytes));
        });
  }
  Napi::Value close(const Napi::CallbackInfo& info) {
    owned_->closed = true;
    owned_->dropIfDone();
    return info.Env().Undefined();
  }
  std::shared_ptr<Owned<PackReader>> owned_ = std::make_shared<Owned<PackReader>>();
};

class JsUnpacker : public Napi::ObjectWrap<JsUnpacker> {
 public:
  static Napi::Function define(Napi::Env env) {
    return DefineClass(env, "Unpacker",
                       {InstanceMethod<&JsUnpacker::write>("write"), InstanceMethod<&JsUnpacker::end>("end"),
                        InstanceMethod<&JsUnpacker::abort>("abort")});
  }
  explicit JsUnpacker(const Napi::CallbackInfo& info) : Napi::ObjectWrap<JsUnpacker>(info) {
    guarded(info.Env(), [&] {
      const Napi::Object object = objectOf(info);
      UnpackOptions options;
      options.slots = field(object, "slots");
      options.base = optionalField(object, "base");
      options.items = field(object, "items");
      owned_->object = std::make_unique<Unpacker>(std::move(options));
    });
  }

 private:
  Napi::Value write(const Napi::CallbackInfo& info) {
    std::string bytes = bytesOf(info[0], "chunk");
    return exclusive(
        info.Env(), owned_, Call::kOne,
        [bytes = std::move(bytes)](Unpacker* unpacker) {
          unpacker->write(bytes);
          return true;
        },
        [](Napi::Env env, bool) { return env.Undefined(); });
  }
  Napi::Value end(const Napi::CallbackInfo& info) {
    return exclusive(
        info.Env(), owned_, Call::kLast, [](Unpacker* unpacker) { return unpacker->end(); },
        [](Napi::Env env, std::string out) { return takeBuffer(env, std::move(out)); });
  }
  Napi::Value abort(const Napi::CallbackInfo& info) {
    return exclusive(
        info.Env(), owned_, Call::kAbort,
        [](Unpacker* unpacker) {
          if (unpacker != nullptr) unpacker->abort();
          return true;
        },
        [](Napi::Env env, bool) { return env.Undefined(); });
  }
  std::shared_ptr<Owned<Unpacker>> owned_ = std::make_shared<Owned<Unpacker>>();
};

Napi::Value applyJob(const Napi::CallbackInfo& info) {
  return guarded(info.Env(), [&] {
    const Napi::Object object = objectOf(info);
    ApplyOptions options;
    options.root = field(object, "root");
    options.slots = field(object, "slots");
    options.retired = optionalField(object, "retired");
    options.ops = field(object, "ops");
    options.out = optionalField(object, "out");
    options.phase = static_cast<int>(numberOf(object.Get("phase"), "phase", 1, 2));
    return runJob(
        info.Env(), [options] { return apply(options); },
        [](Napi::Env env, ApplyResult r) {
          Napi::Object out = Napi::Object::New(env);
          out.Set("operations", static_cast<double>(r.operations));
          out.Set("bytesWritten", static_cast<double>(r.bytesWritten));
          out.Set("notEmpty", static_cast<double>(r.notEmpty));
          out.Set("xattrsFailed", static_cast<double>(r.xattrsFailed));
          return out;
        });
  });
}

// The classes' constructors, per environment.
struct Classes {
  Napi::FunctionReference reader;
  Napi::FunctionReference unpacker;
};

void initPack(Napi::Env env, Napi::Object exports) {
  auto classes = std::make_shared<Classes>();
  classes->reader = Napi::Persistent(JsPackReader::define(env));
  classes->unpacker = Napi::Persistent(JsUnpacker::define(env));
  exports.Set("createPackReader", Napi::Function::New(
                                      env, [classes](const Napi::CallbackInfo& info) -> Napi::Value { return classes->reader.New({info[0]}); },
                                      "createPackReader"));
  exports.Set("createUnpacker", Napi::Function::New(
                                    env, [classes](const Napi::CallbackInfo& info) -> Napi::Value { return classes->unpacker.New({info[0]}); },
                                    "createUnpacker"));
  exports.Set("apply", Napi::Function::New(env, applyJob, "apply"));
}

}  // namespace

SV_ADDON_PART(initPack)

}  // namespace sv::addon
