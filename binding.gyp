# What a plain `npm install` builds (through native/install.mjs). native/CMakeLists.txt builds the same sources for
# tests, sanitizers and cross-compiling.
{
  'targets': [
    {
      'target_name': 'simple_volume',
      'sources': ['<!@(node native/sources.mjs <(target_arch))'],
      'include_dirs': ['native', 'native/vendor'],
      'defines': [
        'NAPI_VERSION=8',
        'NAPI_CPP_EXCEPTIONS',
        'NODE_API_SWALLOW_UNTHROWABLE_EXCEPTIONS',
        '_FILE_OFFSET_BITS=64',
        "SIMPLE_VOLUME_VERSION=\"<!(node -p \"require('./package.json').version\")\"",
      ],
      # The flags of Node itself that do not fit here.
      'cflags!': ['-fno-exceptions', '-O3', '-fno-omit-frame-pointer'],
      'cflags_cc!': ['-fno-exceptions', '-fno-rtti', '-std=gnu++17', '-std=gnu++20'],
      'cflags': [
        '-O2', '-fPIC', '-fvisibility=hidden', '-fstack-protector-strong', '-fstack-clash-protection',
        '-U_FORTIFY_SOURCE', '-D_FORTIFY_SOURCE=2', '-D_GLIBCXX_ASSERTIONS',
      ],
      'cflags_c': ['-std=c11', '-w'],
      'cflags_cc': [
        '-std=gnu++2a', '-fexceptions', '-frtti', '-Wall', '-Wextra', '-Wshadow',
        "-isystem <!(node -p \"require('path').resolve(require('node-addon-api').include_dir)\")",
      ],
      # nodelete: a worker thread that ends must not unload the library under a job that still runs.
      'ldflags': ['-Wl,-z,relro', '-Wl,-z,now', '-Wl,-z,noexecstack', '-Wl,-z,nodelete', '-pthread'],
      'conditions': [['target_arch=="x64"', {'cflags': ['-fcf-protection']}]],
    }
  ]
}
