// A part for the tests of the job pool alone (test/unit/jobs.test.ts); never in the shipped addon.
#include <unistd.h>

#include <new>
#include <string>
#include <utility>

#include "addon/job.h"
#include "addon/parts.h"

namespace {

// run(milliseconds, mode): a job that sleeps, then answers 100,000 bytes or fails as `mode` says.
Napi::Value run(const Napi::CallbackInfo& info) {
  const auto milliseconds = info[0].As<Napi::Number>().Uint32Value();
  const std::string mode = info[1].As<Napi::String>();
  return sv::addon::runJob(
      info.Env(),
      [milliseconds, mode] {
        ::usleep(milliseconds * 1000);
        if (mode == "errno") {
          errno = ENOSPC;
          sv::throwErrno("openat2", "a\xff");
        }
        if (mode == "engine") throw sv::Error("FORMAT_INVALID", "not a record");
        if (mode == "memory") throw std::bad_alloc();
        return std::string(100000, 'x');
      },
      [mode](Napi::Env env, std::string bytes) -> Napi::Value {
        if (mode == "finish") throw Napi::TypeError::New(env, "finish failed");
        return sv::addon::takeBuffer(env, std::move(bytes));
      });
}

void initTestJobs(Napi::Env env, Napi::Object exports) { exports.Set("run", Napi::Function::New(env, run)); }

}  // namespace

SV_ADDON_PART(initTestJobs)
