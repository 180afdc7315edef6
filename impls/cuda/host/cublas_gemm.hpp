// Matrix products by cuBLAS. The only file that needs its headers is cublas_gemm.cu; without it PARITREE_NO_CUBLAS selects our own kernels.
#pragma once

#include "launch.hpp"

namespace paritree::cuda {

void* cublas_open(void* stream);
void cublas_close(void* handle);
void cublas_gemm(void* handle, const Device::Gemm& gemm, Precision precision);

}  // namespace paritree::cuda
