#include "addon/job.h"

#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

namespace sv::addon {
namespace {

// ---- the pool: one per process, never destroyed (a job may still run while the process exits) ----

class Pool {
 public:
  static Pool& instance() {
    static Pool* const pool = new Pool;  // reachable for ever, so no leak checker minds
    return *pool;
  }

  void limit(unsigned count) {
    const std::lock_guard lock(mutex_);
    limit_ = std::clamp(count, 1U, 16U);
  }

  void post(std::function<void()> task) {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(task));
    if (idle_ < queue_.size() && threads_ < limit_) {
      try {
        start();
      } catch (...) {
        // No thread to be had: with others at work the job waits for them, with none it can never run.
        if (threads_ == 0) {
          queue_.pop_back();
          throw;
        }
      }
    }
    ready_.notify_one();
  }

 private:
  void start() {
    // Signals are the main thread's: a pool thread blocks them all.
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      std::thread([this] { loop(); }).detach();
      ++threads_;
    } catch (...) {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  [[noreturn]] void loop() {
    pthread_setname_np(pthread_self(), "sv-job");
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock lock(mutex_);
        ++idle_;
        ready_.wait(lock, [this] { return !queue_.empty(); });
        --idle_;
        task = std::move(queue_.front());
        queue_.pop_front();
      }
      task();
    }
  }

  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<std::function<void()>> queue_;
  unsigned limit_ = 2;
  unsigned threads_ = 0;
  std::size_t idle_ = 0;
};

// ---- one per environment ----

struct Job {
  explicit Job(Napi::Env env) : deferred(Napi::Promise::Deferred::New(env)) {}
  Napi::Promise::Deferred deferred;
  std::function<Napi::Value(Napi::Env)> finish;
  std::exception_ptr failure;
};

class Environment : public std::enable_shared_from_this<Environment> {
 public:
  explicit Environment(Napi::Env env) : env_(env) {}

  void open() {
    const napi_status status = napi_create_threadsafe_function(
        env_, nullptr, nullptr, Napi::String::New(env_, "simple-volume job"), 0, 1, nullptr, nullptr, this, settle,
        &tsfn_);
    if (status != napi_ok) throw Napi::Error::New(env_, "cannot create the thread-safe function of the job pool");
    napi_unref_threadsafe_function(env_, tsfn_);
  }

  // JS thread, while the environment is being torn down: from here on results are dropped.
  void close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    napi_release_threadsafe_function(tsfn_, napi_tsfn_abort);
  }

  // JS thread.
  void began() {
    if (pending_++ == 0) napi_ref_threadsafe_function(env_, tsfn_);
  }
  void ended() {
    if (--pending_ == 0) napi_unref_threadsafe_function(env_, tsfn_);
  }

  bool closed() {
    const std::lock_guard lock(mutex_);
    return closed_;
  }

  // Pool thread. `close` and this exclude each other, so the thread-safe function is alive whenever it is called.
  void deliver(std::unique_ptr<Job> job) {
    const std::lock_guard lock(mutex_);
    if (closed_) {
      // The promise and its handles died with the environment; only our own memory is left to free.
      return;
    }
    if (napi_call_threadsafe_function(tsfn_, job.get(), napi_tsfn_nonblocking) == napi_ok) (void)job.release();
  }

 private:
  static void settle(napi_env rawEnv, napi_value, void* context, void* data) {
    const std::unique_ptr<Job> job(static_cast<Job*>(data));
    if (rawEnv == nullptr) return;  // tear-down: nothing can be settled any more
    auto* self = static_cast<Environment*>(context);
    const Napi::Env env(rawEnv);
    self->ended();
    try {
      const Napi::HandleScope scope(env);
      settleNow(env, *job);
    } catch (...) {
      // Settling itself failed: execution is being terminated (worker.terminate()), nobody waits any more. In that
      // state every call of the wrapper may throw again, so the plain C interface is used and its status ignored.
      bool pending = false;
      napi_value ignored = nullptr;
      if (napi_is_exception_pending(rawEnv, &pending) == napi_ok && pending) {
        napi_get_and_clear_last_exception(rawEnv, &ignored);
      }
    }
  }

  static void settleNow(Napi::Env env, Job& job) {
    Napi::Value value;
    try {
      if (job.failure) std::rethrow_exception(job.failure);
      value = job.finish(env);
    } catch (const Napi::Error& error) {
      job.deferred.Reject(error.Value());
      return;
    } catch (...) {
      job.deferred.Reject(toJsError(env, std::current_exception()));
      return;
    }
    job.deferred.Resolve(value);
  }

  Napi::Env env_;
  napi_threadsafe_function tsfn_ = nullptr;
  std::size_t pending_ = 0;  // JS thread only
  std::mutex mutex_;
  bool closed_ = false;
};

struct EnvironmentHolder {
  std::shared_ptr<Environment> environment;
};

Environment& environmentOf(Napi::Env env) {
  auto* holder = env.GetInstanceData<EnvironmentHolder>();
  return *holder->environment;
}

}  // namespace

void initJobs(Napi::Env env) {
  auto environment = std::make_shared<Environment>(env);
  environment->open();
  env.SetInstanceData(new EnvironmentHolder{environment});
  // Clean-up hooks run last in, first out: this one runs before Node closes the thread-safe function made above.
  env.AddCleanupHook([environment] { environment->close(); });
}

void setJobThreads(unsigned count) { Pool::instance().limit(count); }

Napi::Value toJsError(Napi::Env env, std::exception_ptr exception) {
  const auto make = [env](const char* message, const std::string& code) {
    Napi::Object error = Napi::Error::New(env, message).Value();
    error.Set("code", Napi::String::New(env, code));
    return error;
  };
  try {
    std::rethrow_exception(std::move(exception));
  } catch (const Error& error) {
    Napi::Object value = make(error.what(), error.code);
    if (error.err != 0) value.Set("errno", Napi::Number::New(env, -error.err));
    if (!error.syscall.empty()) value.Set("syscall", Napi::String::New(env, error.syscall));
    if (!error.path.empty()) {
      value.Set("path", Napi::Buffer<char>::Copy(env, error.path.data(), error.path.size()));
    }
    return value;
  } catch (const std::bad_alloc&) {
    return make("ENOMEM: not enough memory", "ENOMEM");
  } catch (const std::exception& error) {
    return make(error.what(), "INTERNAL");
  } catch (...) {
    return make("unknown exception in the native engine", "INTERNAL");
  }
}

Napi::Buffer<char> takeBuffer(Napi::Env env, std::string&& bytes) {
  constexpr std::size_t kHandOver = 64 * 1024;  // below, a copy is cheaper than a finalizer
  if (bytes.size() < kHandOver) return Napi::Buffer<char>::Copy(env, bytes.data(), bytes.size());
  auto* held = new std::string(std::move(bytes));
  return Napi::Buffer<char>::New(
      env, held->data(), held->size(), [](Napi::Env, char*, std::string* owner) { delete owner; }, held);
}

std::string bytesOf(const Napi::Value& value, const char* what) {
  if (!value.IsTypedArray() || value.As<Napi::TypedArray>().TypedArrayType() != napi_uint8_array) {
    throw Napi::TypeError::New(value.Env(), std::string(what) + " must be a Buffer");
  }
  const auto array = value.As<Napi::Uint8Array>();
  if (array.ByteLength() == 0) return {};
  return std::string(reinterpret_cast<const char*>(array.Data()), array.ByteLength());
}

namespace detail {

Napi::Promise runErased(Napi::Env env, std::function<void()> work, std::function<Napi::Value(Napi::Env)> finish) {
  const std::shared_ptr<Environment> environment = environmentOf(env).shared_from_this();
  // std::function wants a copyable callable, so the job's ownership goes through a shared pointer.
  auto slot = std::make_shared<std::unique_ptr<Job>>(std::make_unique<Job>(env));
  (*slot)->finish = std::move(finish);
  const Napi::Promise promise = (*slot)->deferred.Promise();
  Pool::instance().post([environment, slot, work = std::move(work)]() mutable {
    std::unique_ptr<Job> job = std::move(*slot);
    if (environment->closed()) return;
    try {
      work();
    } catch (...) {
      job->failure = std::current_exception();
    }
    work = nullptr;  // what it captured is freed here, on this thread, before the JS thread hears of the result
    environment->deliver(std::move(job));
  });
  environment->began();
  return promise;
}

}  // namespace detail
}  // namespace sv::addon
