// Included first by `cdna-simulator compile` where no HIP headers are installed.
#pragma once
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __host__ __attribute__((host))
#define __shared__ __attribute__((shared))
#define __constant__ __attribute__((constant))

namespace simulator {
template <int kWhat>
struct Index {
  struct Part {
    int dim;
    __device__ operator unsigned() const {
      if (kWhat == 0) {
        return dim == 0   ? __builtin_amdgcn_workitem_id_x()
               : dim == 1 ? __builtin_amdgcn_workitem_id_y()
                          : __builtin_amdgcn_workitem_id_z();
      }
      if (kWhat == 1) {
        return dim == 0   ? __builtin_amdgcn_workgroup_id_x()
               : dim == 1 ? __builtin_amdgcn_workgroup_id_y()
                          : __builtin_amdgcn_workgroup_id_z();
      }
      return dim == 0   ? __builtin_amdgcn_workgroup_size_x()
             : dim == 1 ? __builtin_amdgcn_workgroup_size_y()
                        : __builtin_amdgcn_workgroup_size_z();
    }
  };
  Part x{0}, y{1}, z{2};
};
}  // namespace simulator
#define threadIdx (simulator::Index<0>{})
#define blockIdx (simulator::Index<1>{})
#define blockDim (simulator::Index<2>{})

static inline __device__ void __syncthreads() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
