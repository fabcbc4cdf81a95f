# Toolchain for building the addon for arm64 on another machine (Debian: g++-aarch64-linux-gnu):
#   npx cmake-js compile -d native -O build/arm64 -a arm64 --CDCMAKE_TOOLCHAIN_FILE=arm64.cmake
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_ASM_COMPILER aarch64-linux-gnu-gcc)
