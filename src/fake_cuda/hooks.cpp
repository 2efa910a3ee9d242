// Preloaded: torch's CPU build takes the fake device for its accelerator.
#include <c10/core/DeviceType.h>
#include <dlfcn.h>

#include <cstdlib>
#include <optional>

#define EXPORTED __attribute__((visibility("default")))
extern "C" EXPORTED const void* fake_cuda_hooks = nullptr;  // device.cpp sets it

namespace at {
struct CUDAHooksInterface;
namespace accelerator {
EXPORTED std::optional<c10::DeviceType> getAccelerator(bool) { return c10::DeviceType::CUDA; }
}  // namespace accelerator
namespace detail {
EXPORTED const CUDAHooksInterface& getCUDAHooks() {
    if (fake_cuda_hooks) return *(const CUDAHooksInterface*)fake_cuda_hooks;
    void* library = dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_LAZY);
    void* original = library ? dlsym(library, "_ZN2at6detail12getCUDAHooksEv") : nullptr;
    if (!original) abort();
    return ((const CUDAHooksInterface& (*)())original)();
}
}  // namespace detail
}  // namespace at
