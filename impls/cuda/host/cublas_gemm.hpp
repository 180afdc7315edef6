// Matrix products by cuBLAS. The only file that needs its headers is cublas_gemm.cu; without it PARITREE_NO_CUBLAS selects our own kernels.
#pragma once

#include "launch.hpp"

namespace paritree::cuda {

// The workspace is the caller's: inside a captured graph the library must not take memory of its own.
constexpr int64_t kCublasWorkspace = int64_t{32} << 20;  // bytes; what cuBLAS takes by itself on sm_90
void* cublas_open(void* stream, void* workspace);
void cublas_close(void* handle);
void cublas_gemm(void* handle, const Device::Gemm& gemm, Precision precision);

}  // namespace paritree::cuda
