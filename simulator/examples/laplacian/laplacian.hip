// The Laplacian of a field u on a grid of nx x ny x nz points, in four steps of tuning.
//
//   f(i,j,k) = u(i,j,k) * c + (u(i-1,j,k) + u(i+1,j,k)) * x + (u(i,j-1,k) + u(i,j+1,k)) * y
//            + (u(i,j,k-1) + u(i,j,k+1)) * z          x = 1/hx^2, y = 1/hy^2, z = 1/hz^2, c =
//            -2(x+y+z)
//
// for the points inside; i runs fastest in memory. Seven values are read and one is written a
// point, but each value of u serves seven points: what caches and registers keep decides the speed.
//
// The steps are those of AMD's "Finite difference method" notes; docs/tutorial.md walks through
// them with what was published for an MI250X and what the simulator says.
#include <hip/hip_runtime.h>

namespace {

struct Grid {
  int nx, ny, nz;
  double x, y, z, c;
};

template <bool kStreaming>
__device__ void store(double* to, double value) {
  if constexpr (kStreaming) {
    __builtin_nontemporal_store(value, to);
  } else {
    *to = value;
  }
}

// Newer compilers read a point and its left neighbour with one instruction. What was published was
// compiled by one that took two, so the calibration hides that the addresses are related.
__device__ const double* apart(const double* p) {
#ifdef SEPARATE_LOADS
  asm("" : "+v"(p));
#endif
  return p;
}

// One thread a point, in the order in which one writes the formula.
template <bool kStreaming>
__device__ void direct(double* f, const double* u, Grid g) {
  int i = threadIdx.x + blockIdx.x * blockDim.x, j = blockIdx.y, k = blockIdx.z;
  if (i == 0 || i >= g.nx - 1 || j == 0 || j >= g.ny - 1 || k == 0 || k >= g.nz - 1) return;
  const int slice = g.nx * g.ny;
  size_t at = i + g.nx * j + size_t(slice) * k;
  double sum = u[at] * g.c + (*apart(&u[at - 1]) + u[at + 1]) * g.x +
               (u[at - g.nx] + u[at + g.nx]) * g.y + (u[at - slice] + u[at + slice]) * g.z;
  store<kStreaming>(&f[at], sum);
}

// One thread m points along j: a row serves its neighbours from a register. The reads go through
// memory in rising order: the plane below, then rows j-1 to j+m, then the plane above.
template <int m, bool kStreaming>
__device__ void tiled(double* f, const double* u, Grid g) {
  int i = threadIdx.x + blockIdx.x * blockDim.x, j = m * blockIdx.y, k = blockIdx.z;
  if (i == 0 || i >= g.nx - 1 || k == 0 || k >= g.nz - 1) return;
  const int slice = g.nx * g.ny;
  size_t at = i + g.nx * j + size_t(slice) * k;
  double sum[m];
  for (int n = 0; n < m; ++n) sum[n] = u[at - slice + n * g.nx] * g.z;
  if (j > 0) sum[0] += u[at - g.nx] * g.y;
  for (int n = 0; n < m; ++n) {
    sum[n] += *apart(&u[at + n * g.nx - 1]) * g.x;
    double center = u[at + n * g.nx];
    sum[n] += center * g.c;
    sum[n] += u[at + n * g.nx + 1] * g.x;
    if (n > 0) sum[n - 1] += center * g.y;
    if (n < m - 1) sum[n + 1] += center * g.y;
  }
  if (j < g.ny - m) sum[m - 1] += u[at + m * g.nx] * g.y;
  for (int n = 0; n < m; ++n) sum[n] += u[at + slice + n * g.nx] * g.z;
  for (int n = 0; n < m; ++n) {
    if (n + j > 0 && n + j < g.ny - 1) store<kStreaming>(&f[at + n * g.nx], sum[n]);
  }
}

}  // namespace

extern "C" {

__global__ void baseline(double* f, const double* u, Grid g) { direct<false>(f, u, g); }
__global__ void baseline_streaming(double* f, const double* u, Grid g) { direct<true>(f, u, g); }

#define TILED(m)                                                                              \
  __global__ void tiled_##m(double* f, const double* u, Grid g) { tiled<m, false>(f, u, g); } \
  __global__ void __launch_bounds__(256) bounded_##m(double* f, const double* u, Grid g) {    \
    tiled<m, false>(f, u, g);                                                                 \
  }
TILED(1)
TILED(2)
TILED(4)
TILED(8)
TILED(16)

__global__ void __launch_bounds__(256) streaming_8(double* f, const double* u, Grid g) {
  tiled<8, true>(f, u, g);
}

}  // extern "C"
