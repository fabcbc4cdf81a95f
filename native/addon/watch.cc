// Border of filtering, scanning and watching.
#include <napi.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "addon/job.h"
#include "addon/parts.h"
#include "engine/filter.h"
#include "engine/scan.h"
#include "engine/watch.h"

namespace sv::addon {
namespace {

[[noreturn]] void throwClosed(Napi::Env env, const char* what) {
  throw Napi::Error(env, toJsError(env, std::make_exception_ptr(
                                            Error("CLOSED", std::string("CLOSED: the ") + what + " was closed"))));
}

std::uint32_t volumeOf(const Napi::Value& value) {
  if (!value.IsNumber()) throw Napi::TypeError::New(value.Env(), "volume must be a number");
  const double number = value.As<Napi::Number>().DoubleValue();
  if (!(number >= 0 && number <= 0xffffffff) || number != static_cast<double>(static_cast<std::uint32_t>(number))) {
    throw Napi::RangeError::New(value.Env(), "volume must be an integer from 0 to 2^32-1");
  }
  return static_cast<std::uint32_t>(number);
}

// ---- filter ----

constexpr napi_type_tag kFilterTag = {0x53561f0a3c1d4b7e, 0x9c2a64c7f1e0d835};

class JsFilter : public Napi::ObjectWrap<JsFilter> {
 public:
  static Napi::Function define(Napi::Env env) {
    return DefineClass(env, "Filter", {InstanceMethod<&JsFilter::match>("match")});
  }

  explicit JsFilter(const Napi::CallbackInfo& info) : Napi::ObjectWrap<JsFilter>(info) {
    const Napi::Env env = info.Env();
    guarded(env, [&] {
      try {
        filter_ = Filter::compile(patterns(info[0], "include"), patterns(info[1], "exclude"));
      } catch (const PatternError& error) {
        Napi::Object value = toJsError(env, std::current_exception()).As<Napi::Object>();
        value.Set("pattern", Napi::Buffer<char>::Copy(env, error.pattern.data(), error.pattern.size()));
        value.Set("reason", Napi::String::New(env, error.reason));
        throw Napi::Error(env, value);
      }
    });
    info.This().As<Napi::Object>().TypeTag(&kFilterTag);
  }

  static std::shared_ptr<const Filter> of(const Napi::Value& value) {
    if (!value.IsObject() || !value.As<Napi::Object>().CheckTypeTag(&kFilterTag)) {
      throw Napi::TypeError::New(value.Env(), "filter must come from compileFilter()");
    }
    return Unwrap(value.As<Napi::Object>())->filter_;
  }

 private:
  static std::vector<std::string> patterns(const Napi::Value& value, const char* what) {
    if (!value.IsArray()) throw Napi::TypeError::New(value.Env(), std::string(what) + " must be an array of Buffers");
    const auto array = value.As<Napi::Array>();
    std::vector<std::string> out;
    for (std::uint32_t i = 0; i < array.Length(); ++i) out.push_back(bytesOf(array.Get(i), what));
    return out;
  }

  Napi::Value match(const Napi::CallbackInfo& info) {
    return guarded(info.Env(), [&]() -> Napi::Value {
      const Verdict verdict = filter_->match(bytesOf(info[0], "path"), info[1].ToBoolean());
      return Napi::Number::New(info.Env(), static_cast<double>(verdict));
    });
  }

  std::shared_ptr<const Filter> filter_;
};

// ---- scanner ----

class JsScanner : public Napi::ObjectWrap<JsScanner> {
 public:
  static Napi::Function define(Napi::Env env) {
    return DefineClass(env, "Scanner",
                       {InstanceMethod<&JsScanner::next>("next"), InstanceMethod<&JsScanner::close>("close")});
  }

  explicit JsScanner(const Napi::CallbackInfo& info) : Napi::ObjectWrap<JsScanner>(info) {
    guarded(info.Env(), [&] {
      state_->root = bytesOf(info[0], "root");
      state_->directory = bytesOf(info[1], "directory");
      state_->filter = JsFilter::of(info[2]);
      state_->deep = info[3].ToBoolean();
    });
  }

 private:
  // Shared with the job that is running. The tree is opened by the first job, not on the JS thread.
  struct State {
    std::string root;
    std::string directory;
    std::shared_ptr<const Filter> filter;
    bool deep = true;
    std::mutex use;  // one job at a time
    std::unique_ptr<Scanner> scanner;
    std::atomic<Scanner*> running{nullptr};
    std::atomic<bool> closed{false};
  };

  Napi::Value next(const Napi::CallbackInfo& info) {
    const Napi::Env env = info.Env();
    if (state_->closed) throwClosed(env, "scan");
    if (!info[0].IsNumber()) throw Napi::TypeError::New(env, "maxBytes must be a number");
    const auto wanted = info[0].As<Napi::Number>().Int64Value();
    const auto maxBytes = static_cast<std::size_t>(std::min<std::int64_t>(std::max<std::int64_t>(wanted, 1), 64 << 20));
    return runJob(
        env,
        [state = state_, maxBytes] {
          const std::lock_guard lock(state->use);
          if (state->closed) throw Error("CANCELLED", "CANCELLED: the scan was closed");
          try {
            if (state->scanner == nullptr) {
              state->scanner = std::make_unique<Scanner>(state->root, state->directory, state->filter, state->deep);
              state->running = state->scanner.get();
              if (state->closed) state->scanner->cancel();
            }
            std::string out;
            const bool more = state->scanner->next(maxBytes, out);
            return std::make_pair(more, std::move(out));
          } catch (...) {
            state->closed = true;  // what was given so far is not the whole tree, and the rest is not either
            throw;
          }
        },
        [](Napi::Env at, std::pair<bool, std::string> result) -> Napi::Value {
          if (!result.first) return at.Null();
          return takeBuffer(at, std::move(result.second));
        });
  }

  Napi::Value close(const Napi::CallbackInfo& info) {
    state_->closed = true;
    if (Scanner* scanner = state_->running) scanner->cancel();
    return info.Env().Undefined();
  }

  std::shared_ptr<State> state_ = std::make_shared<State>();
};

// ---- watcher ----

// The way from the watcher's threads to the JS thread: a doorbell that is rung at most once until JS has answered.
class Bell : public std::enable_shared_from_this<Bell> {
 public:
  using Finish = std::function<Napi::Value(Napi::Env)>;

  Bell(Napi::Env env, const Napi::Function& onWake) : env_(env), onWake_(Napi::Persistent(onWake)) {
    const napi_status status =
        napi_create_threadsafe_function(env, nullptr, nullptr, Napi::String::New(env, "simple-volume watcher"), 0, 1,
                                        nullptr, nullptr, this, answer, &tsfn_);
    if (status != napi_ok) throw Napi::Error::New(env, "cannot create the thread-safe function of the watcher");
    napi_unref_threadsafe_function(env, tsfn_);
  }

  // JS thread: a promise that settle() of the same number settles.
  std::pair<std::uint64_t, Napi::Promise> promise() {
    const std::uint64_t number = ++count_;
    auto deferred = Napi::Promise::Deferred::New(env_);
    const Napi::Promise out = deferred.Promise();
    pending_.emplace(number, deferred);
    if (pending_.size() == 1) napi_ref_threadsafe_function(env_, tsfn_);
    return {number, out};
  }
  // JS thread: the promise is not needed after all.
  void forget(std::uint64_t number) {
    if (pending_.erase(number) == 1 && pending_.empty()) napi_unref_threadsafe_function(env_, tsfn_);
  }

  // Any thread.
  void settle(std::uint64_t number, std::exception_ptr failure, Finish finish) {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    settled_.push_back({number, std::move(failure), std::move(finish)});
    ring();
  }
  void wake() {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    wake_ = true;
    ring();
  }

  // JS thread: settles what is waiting and takes the bell down.
  void close(bool environmentEnds) {
    if (!environmentEnds) drain(env_);
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    closed_ = true;
    settled_.clear();
    onWake_.Reset();
    if (!environmentEnds && !pending_.empty()) napi_unref_threadsafe_function(env_, tsfn_);
    pending_.clear();
    napi_release_threadsafe_function(tsfn_, napi_tsfn_abort);
  }

 private:
  struct Settled {
    std::uint64_t number;
    std::exception_ptr failure;
    Finish finish;
  };

  void ring() {
    if (rung_) return;
    rung_ = true;
    // The queue has no limit, and at most one call is in it.
    if (napi_call_threadsafe_function(tsfn_, nullptr, napi_tsfn_nonblocking) != napi_ok) rung_ = false;
  }

  static void answer(napi_env rawEnv, napi_value, void* context, void*) {
    if (rawEnv == nullptr) return;
    const auto self = static_cast<Bell*>(context)->shared_from_this();
    const Napi::Env env(rawEnv);
    const Napi::HandleScope scope(env);
    try {
      if (self->drain(env) && !self->onWake_.IsEmpty()) (void)self->onWake_.Call({});
    } catch (const Napi::Error& error) {
      // What the callback threw becomes an uncaught exception, as with any event handler. An empty error: the
      // environment is ending and runs no JavaScript any more.
      if (!error.IsEmpty()) (void)napi_throw(rawEnv, error.Value());
    }
  }

  // True when JS is to be woken.
  bool drain(Napi::Env env) {
    std::vector<Settled> settled;
    bool wake;
    {
      const std::lock_guard lock(mutex_);
      rung_ = false;
      wake = std::exchange(wake_, false);
      settled.swap(settled_);
    }
    for (Settled& each : settled) {
      const auto it = pending_.find(each.number);
      if (it == pending_.end()) continue;
      const Napi::Promise::Deferred deferred = it->second;
      forget(each.number);
      try {
        if (each.failure) {
          deferred.Reject(toJsError(env, each.failure));
        } else {
          deferred.Resolve(each.finish ? each.finish(env) : env.Undefined());
        }
      } catch (const Napi::Error&) {
        // Execution is being terminated (worker.terminate()): nobody waits any more.
        if (env.IsExceptionPending()) (void)env.GetAndClearPendingException();
      }
    }
    return wake;
  }

  Napi::Env env_;
  Napi::FunctionReference onWake_;
  napi_threadsafe_function tsfn_ = nullptr;
  std::uint64_t count_ = 0;                                  // JS thread only
  std::map<std::uint64_t, Napi::Promise::Deferred> pending_;  // JS thread only
  std::mutex mutex_;
  std::vector<Settled> settled_;
  bool wake_ = false;
  bool rung_ = false;
  bool closed_ = false;
};

class JsWatcher : public Napi::ObjectWrap<JsWatcher> {
 public:
  static Napi::Function define(Napi::Env env) {
    return DefineClass(env, "Watcher",
                       {InstanceMethod<&JsWatcher::add>("add"), InstanceMethod<&JsWatcher::remove>("remove"),
                        InstanceMethod<&JsWatcher::state>("state"), InstanceMethod<&JsWatcher::take>("take"),
                        InstanceMethod<&JsWatcher::putBack>("putBack"), InstanceMethod<&JsWatcher::barrier>("barrier"),
                        InstanceMethod<&JsWatcher::retry>("retry"), InstanceMethod<&JsWatcher::close>("close")});
  }

  explicit JsWatcher(const Napi::CallbackInfo& info) : Napi::ObjectWrap<JsWatcher>(info) {
    const Napi::Env env = info.Env();
    if (!info[0].IsFunction()) throw Napi::TypeError::New(env, "onWake must be a function");
    Watcher::Options options;
    if (info[1].IsObject()) {
      const auto object = info[1].As<Napi::Object>();
      const auto number = [&](const char* name) -> unsigned {
        const Napi::Value value = object.Get(name);
        return value.IsNumber() ? value.As<Napi::Number>().Uint32Value() : 0;
      };
      options.maxQueuedEvents = number("maxQueuedEvents");
      options.maxWatches = number("maxWatches");
    }
    const auto bell = std::make_shared<Bell>(env, info[0].As<Napi::Function>());
    options.onWake = [bell] { bell->wake(); };
    try {
      engine_ = guarded(env, [&] { return std::make_shared<Watcher>(std::move(options)); });
    } catch (...) {
      bell->close(false);
      throw;
    }
    bell_ = bell;
    // The process or the worker may end with the watcher open: its threads end first.
    Napi::Env(env).AddCleanupHook([bell, weak = std::weak_ptr<Watcher>(engine_)] {
      if (const auto engine = weak.lock()) engine->close();
      bell->close(true);
    });
    Ref();  // lives until close(): a watcher that nobody holds still rings
  }

 private:
  Watcher& engine(Napi::Env env) {
    if (closed_) throwClosed(env, "watcher");
    return *engine_;
  }

  // Runs `start(number)`, which makes the engine settle the promise.
  template <typename Start>
  Napi::Value promised(Napi::Env env, Start start) {
    auto [number, promise] = bell_->promise();
    try {
      start(number);
    } catch (...) {
      bell_->settle(number, std::current_exception(), nullptr);
    }
    (void)env;
    return promise;
  }
  Watcher::Done settler(std::uint64_t number) {
    return [bell = bell_, number](std::exception_ptr failure) { bell->settle(number, std::move(failure), nullptr); };
  }

  Napi::Value add(const Napi::CallbackInfo& info) {
    const Napi::Env env = info.Env();
    Watcher& watcher = engine(env);
    const std::uint32_t volume = volumeOf(info[0]);
    const std::string root = bytesOf(info[1], "root");
    const auto filter = JsFilter::of(info[2]);
    return promised(env, [&](std::uint64_t number) {
      watcher.add(volume, root, filter,
                  [bell = bell_, number](std::exception_ptr failure, const Watcher::Added& added) {
                    bell->settle(number, std::move(failure), [added](Napi::Env at) -> Napi::Value {
                      Napi::Object out = Napi::Object::New(at);
                      out.Set("directories", static_cast<double>(added.directories));
                      out.Set("dev", static_cast<double>(added.dev));
                      out.Set("ino", static_cast<double>(added.ino));
                      return out;
                    });
                  });
    });
  }
  Napi::Value remove(const Napi::CallbackInfo& info) {
    Watcher& watcher = engine(info.Env());
    const std::uint32_t volume = volumeOf(info[0]);
    return promised(info.Env(), [&](std::uint64_t number) { watcher.remove(volume, settler(number)); });
  }
  Napi::Value barrier(const Napi::CallbackInfo& info) {
    Watcher& watcher = engine(info.Env());
    return promised(info.Env(), [&](std::uint64_t number) { watcher.barrier(settler(number)); });
  }
  Napi::Value retry(const Napi::CallbackInfo& info) {
    Watcher& watcher = engine(info.Env());
    return promised(info.Env(), [&](std::uint64_t number) { watcher.retry(settler(number)); });
  }

  Napi::Value state(const Napi::CallbackInfo& info) {
    const Napi::Env env = info.Env();
    Watcher& watcher = engine(env);
    const std::uint32_t volume = volumeOf(info[0]);
    return guarded(env, [&]() -> Napi::Value {
      const Watcher::State state = watcher.state(volume);
      const auto time = [env](double ms) -> Napi::Value {
        if (ms < 0) return env.Null();
        return Napi::Number::New(env, ms);
      };
      Napi::Object out = Napi::Object::New(env);
      out.Set("dirty", static_cast<double>(state.dirty));
      out.Set("firstMs", time(state.firstMs));
      out.Set("lastMs", time(state.lastMs));
      out.Set("events", static_cast<double>(state.events));
      out.Set("rootLost", Napi::Boolean::New(env, state.rootLost));
      out.Set("overflows", static_cast<double>(state.overflows));
      out.Set("watches", static_cast<double>(state.watches));
      out.Set("unwatched", static_cast<double>(state.unwatched));
      out.Set("watchErrno", state.watchErrno);
      out.Set("pendingDirs", static_cast<double>(state.pendingDirs));
      return out;
    });
  }
  Napi::Value take(const Napi::CallbackInfo& info) {
    Watcher& watcher = engine(info.Env());
    const std::uint32_t volume = volumeOf(info[0]);
    return guarded(info.Env(), [&]() -> Napi::Value { return takeBuffer(info.Env(), watcher.take(volume)); });
  }
  Napi::Value putBack(const Napi::CallbackInfo& info) {
    Watcher& watcher = engine(info.Env());
    const std::uint32_t volume = volumeOf(info[0]);
    return guarded(info.Env(), [&]() -> Napi::Value {
      watcher.putBack(volume, bytesOf(info[1], "marks"));
      return info.Env().Undefined();
    });
  }

  Napi::Value close(const Napi::CallbackInfo& info) {
    const Napi::Env env = info.Env();
    if (closed_) return closing_.Value();
    closed_ = true;
    // Closing the instance takes a while when it has many watches, so it is a job.
    const Napi::Promise promise = runJob(
        env, [engine = engine_] { engine->close(); },
        [this, bell = bell_](Napi::Env at) -> Napi::Value {
          bell->close(false);
          engine_.reset();
          Unref();
          return at.Undefined();
        });
    closing_ = Napi::Persistent(static_cast<const Napi::Object&>(promise));
    return promise;
  }

  std::shared_ptr<Bell> bell_;
  std::shared_ptr<Watcher> engine_;
  bool closed_ = false;
  Napi::ObjectReference closing_;
};

// ---- functions ----

Napi::Value stat(const Napi::CallbackInfo& info) {
  std::string root = bytesOf(info[0], "root");
  std::string paths = bytesOf(info[1], "paths");
  return runJob(
      info.Env(), [root = std::move(root), paths = std::move(paths)] { return statPaths(root, paths); },
      [](Napi::Env env, std::string records) -> Napi::Value { return takeBuffer(env, std::move(records)); });
}

// The classes' constructors, per environment.
struct Classes {
  Napi::FunctionReference filter;
  Napi::FunctionReference scanner;
  Napi::FunctionReference watcher;
};

void initWatch(Napi::Env env, Napi::Object exports) {
  auto classes = std::make_shared<Classes>();
  classes->filter = Napi::Persistent(JsFilter::define(env));
  classes->scanner = Napi::Persistent(JsScanner::define(env));
  classes->watcher = Napi::Persistent(JsWatcher::define(env));
  exports.Set("compileFilter", Napi::Function::New(
                                   env,
                                   [classes](const Napi::CallbackInfo& info) -> Napi::Value {
                                     return classes->filter.New({info[0], info[1]});
                                   },
                                   "compileFilter"));
  exports.Set("scan", Napi::Function::New(
                          env,
                          [classes](const Napi::CallbackInfo& info) -> Napi::Value {
                            return classes->scanner.New({info[0], info[1], info[2], info[3]});
                          },
                          "scan"));
  exports.Set("createWatcher", Napi::Function::New(
                                   env,
                                   [classes](const Napi::CallbackInfo& info) -> Napi::Value {
                                     return classes->watcher.New({info[0], info[1]});
                                   },
                                   "createWatcher"));
  exports.Set("stat", Napi::Function::New(env, stat, "stat"));
}

}  // namespace

SV_ADDON_PART(initWatch)

}  // namespace sv::addon
