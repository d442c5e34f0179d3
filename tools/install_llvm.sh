#!/usr/bin/env bash
# Installs the compiler and tools for AMD targets (clang 22, LLVM's binary utilities, HIP headers and
# device libraries), where the distribution has them and we may install packages.
# Says what to do otherwise. No GPU driver and no ROCm installation is involved.
set -euo pipefail

packages=(clang-22 clang-tools-22 lld-22 llvm-22 llvm-22-dev hipcc libamdhip64-dev
  rocm-device-libs)
missing=()
for package in "${packages[@]}"; do
  dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ]; then exit 0; fi
if ! command -v apt-get >/dev/null || [ "$(id -u)" -ne 0 ]; then
  echo "error: these packages are needed and cannot be installed from here: ${missing[*]}" >&2
  echo "On Debian or Ubuntu: sudo apt-get install ${missing[*]}" >&2
  exit 1
fi
echo "installing ${missing[*]}"
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}" >/dev/null
