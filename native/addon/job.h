// Work off the JavaScript thread: a small thread pool of our own (libuv's stays free for file and DNS calls of
// Node), and the way back through one thread-safe function per environment.
#pragma once

#include <napi.h>

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "engine/error.h"

namespace sv::addon {

// Prepares an environment (main thread or worker) for jobs. Called once by addon.cc.
void initJobs(Napi::Env env);

// The JavaScript Error of an exception: `code`, `errno` (negative, as Node's own errors have it), `syscall` and
// `path` (Buffer) where it is an sv::Error that has them; other exceptions get code "INTERNAL", memory exhaustion
// "ENOMEM".
Napi::Value toJsError(Napi::Env env, std::exception_ptr exception);

// A Buffer with these bytes. Large ones are handed over without a copy.
Napi::Buffer<char> takeBuffer(Napi::Env env, std::string&& bytes);

// The bytes of an argument that is a Buffer or another Uint8Array; throws a TypeError naming `what` if it is not.
std::string bytesOf(const Napi::Value& value, const char* what);

// Sets how many threads work on jobs, 1 to 16 (default 2). Only threads started later are concerned, so it is
// called before the first job.
void setJobThreads(unsigned count);

namespace detail {

// `work` runs on the pool, `finish` on the JS thread of `env` and makes the value of the promise.
Napi::Promise runErased(Napi::Env env, std::function<void()> work, std::function<Napi::Value(Napi::Env)> finish);

}  // namespace detail

// Runs `work` on the pool and returns a promise. What `work` throws rejects it (see toJsError); what it returns
// goes to `finish(env, result)`, which runs on the JS thread and makes the value of the promise. For a `work`
// without a result, `finish` takes the environment alone.
//
// Neither callable may hold a Napi value, and none may point into a JavaScript buffer: the environment (a worker)
// can end while `work` runs, then its result is dropped and `finish` is never called. Copy arguments in first.
// A pending job keeps the process alive, an idle pool does not.
template <typename Work, typename Finish>
Napi::Promise runJob(Napi::Env env, Work work, Finish finish) {
  using Result = std::invoke_result_t<Work&>;
  if constexpr (std::is_void_v<Result>) {
    return detail::runErased(env, std::function<void()>(std::move(work)),
                             std::function<Napi::Value(Napi::Env)>(std::move(finish)));
  } else {
    auto result = std::make_shared<std::unique_ptr<Result>>();
    return detail::runErased(
        env, [result, work = std::move(work)]() mutable { *result = std::make_unique<Result>(work()); },
        [result, finish = std::move(finish)](Napi::Env at) mutable -> Napi::Value {
          return finish(at, std::move(**result));
        });
  }
}

// Runs a synchronous function body at the border: exceptions of the engine become JavaScript exceptions.
template <typename Body>
auto guarded(Napi::Env env, Body body) -> decltype(body()) {
  try {
    return body();
  } catch (const Napi::Error&) {
    throw;
  } catch (...) {
    throw Napi::Error(env, toJsError(env, std::current_exception()));
  }
}

}  // namespace sv::addon
