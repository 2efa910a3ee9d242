#include <c10/core/DeviceType.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <optional>
extern "C" {
__attribute__((visibility("default"))) const void* fake_cuda_hooks = nullptr;
}
namespace at {
struct CUDAHooksInterface;
namespace accelerator {
__attribute__((visibility("default"))) std::optional<c10::DeviceType> getAccelerator(bool checked) {
    return c10::DeviceType::CUDA;
}
}  // namespace accelerator
namespace detail {
__attribute__((visibility("default"))) const CUDAHooksInterface& getCUDAHooks() {
    if (fake_cuda_hooks) return *(const CUDAHooksInterface*)fake_cuda_hooks;
    typedef const CUDAHooksInterface& (*Fn)();
    static Fn real = [] {
        void* h = dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_LAZY);
        void* f = h ? dlsym(h, "_ZN2at6detail12getCUDAHooksEv") : nullptr;
        if (!f) {
            fprintf(stderr, "no real hooks\n");
            abort();
        }
        return (Fn)f;
    }();
    return real();
}
}  // namespace detail
}  // namespace at
