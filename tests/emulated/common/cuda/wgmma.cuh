#pragma once

namespace rocm_kernels {
namespace cuda {

constexpr int kWgmmaRows = 64;

}  // namespace cuda
}  // namespace rocm_kernels
