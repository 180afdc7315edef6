// cublasGemmStridedBatchedEx on row-major operands: c = a @ b is c^T = b^T @ a^T for a library that thinks in columns.
#include "cublas_gemm.hpp"

#include <cublas_v2.h>
#include <cuda_runtime.h>

namespace paritree::cuda {
namespace {

void check(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS) failed(what, ": ", cublasGetStatusString(status));
}

}  // namespace

void* cublas_open(void* stream, void* workspace) {
  cublasHandle_t handle = nullptr;
  check(cublasCreate(&handle), "cublasCreate");
  check(cublasSetStream(handle, static_cast<cudaStream_t>(stream)), "cublasSetStream");
  check(cublasSetWorkspace(handle, workspace, static_cast<std::size_t>(kCublasWorkspace)), "cublasSetWorkspace");  // after the stream, which resets it
  check(cublasSetMathMode(handle, CUBLAS_PEDANTIC_MATH), "cublasSetMathMode");
  return handle;
}

void cublas_close(void* handle) { cublasDestroy(static_cast<cublasHandle_t>(handle)); }

void cublas_gemm(void* handle, const Device::Gemm& g, Precision precision) {
  const cublasHandle_t blas = static_cast<cublasHandle_t>(handle);
  // pedantic mode forbids reduced precision also where the compute type asks for it
  check(cublasSetMathMode(blas, precision == Precision::float32 ? CUBLAS_PEDANTIC_MATH : CUBLAS_DEFAULT_MATH), "cublasSetMathMode");
  const cublasComputeType_t compute = precision == Precision::float32 ? CUBLAS_COMPUTE_32F_PEDANTIC
                                      : precision == Precision::tf32  ? CUBLAS_COMPUTE_32F_FAST_TF32
                                                                      : CUBLAS_COMPUTE_32F_FAST_16BF;
  const float one = 1.0f, zero = 0.0f;
  check(cublasGemmStridedBatchedEx(blas, g.transposed ? CUBLAS_OP_T : CUBLAS_OP_N, CUBLAS_OP_N, static_cast<int>(g.cols), static_cast<int>(g.rows),
                                   static_cast<int>(g.inner), &one, g.b, CUDA_R_32F, static_cast<int>(g.b_row), g.b_batch, g.a, CUDA_R_32F,
                                   static_cast<int>(g.a_row), g.a_batch, &zero, g.c, CUDA_R_32F, static_cast<int>(g.c_row), g.c_batch,
                                   static_cast<int>(g.batches), compute, CUBLAS_GEMM_DEFAULT),
        "cublasGemmStridedBatchedEx");
}

}  // namespace paritree::cuda
