// The memory, streams, random numbers and device guard of a CUDA device that is made of host memory.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <set>

using namespace at;
static py::object* on_event = nullptr;  // called with (kind, op, detail)
static int num_gpus() {
    const char* n = getenv("LOCAL_WORLD_SIZE");
    return n ? atoi(n) : 1;
}
static void report(const char* kind, const std::string& op, const std::string& detail) {
    if (!on_event) return;
    if (!Py_IsInitialized()) return;
    py::gil_scoped_acquire gil;
    try {
        (*on_event)(kind, op, detail);
    } catch (py::error_already_set& e) {
        e.restore();
        PyErr_Print();
    }
}
// ---- pending device-to-host copies: done only when something waits
struct Pending {
    Tensor dst;
    Tensor snapshot;
};
static std::recursive_mutex mu;
static std::vector<Pending> pending;
struct Source {
    Tensor src;
    Tensor copy;
    std::string where;
};
static std::vector<Source> sources;  // pinned host memory that a device copy still reads
static void flush() {
    std::vector<Pending> todo;
    std::vector<Source> check;
    {
        std::lock_guard<std::recursive_mutex> l(mu);
        todo.swap(pending);
        check.swap(sources);
    }
    c10::impl::ExcludeDispatchKeyGuard g(c10::autograd_dispatch_keyset);
    for (auto& p : todo) p.dst.copy_(p.snapshot);
    for (auto& s : check)
        if (!at::equal(s.src.nan_to_num(), s.copy.nan_to_num())) report("RACE_H2D", "copy_", s.where);
}
// ---- allocator
static std::atomic<int64_t> allocated{0}, peak{0};
struct FakeAlloc final : c10::Allocator {
    c10::DataPtr allocate(size_t n) override {
        static thread_local int dummy;
        void* p = nullptr;
        if (n) {
            if (posix_memalign(&p, 512, n)) throw std::bad_alloc();
            memset(p, 0xff, n);
        }
        allocated += n;
        int64_t now = allocated;
        if (now > peak) peak = now;
        struct H {
            void* p;
            size_t n;
        };
        auto* h = new H{p, n};
        extern c10::DeviceIndex fake_current();
        return {p, h,
                +[](void* c) {
                    auto* h = (H*)c;
                    allocated -= h->n;
                    free(h->p);
                    delete h;
                },
                c10::Device(c10::DeviceType::CUDA, fake_current())};
    }
    c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
    void copy_data(void* d, const void* s, std::size_t n) const override { memcpy(d, s, n); }
};
static FakeAlloc alloc;
static thread_local c10::DeviceIndex cur = 0;
c10::DeviceIndex fake_current() { return cur; }
// pinned
static std::map<char*, size_t> pinned;
struct PinAlloc final : c10::Allocator {
    c10::DataPtr allocate(size_t n) override {
        void* p = nullptr;
        if (posix_memalign(&p, 512, n ? n : 1)) throw std::bad_alloc();
        memset(p, 0x7f, n);
        {
            std::lock_guard<std::recursive_mutex> l(mu);
            pinned[(char*)p] = n ? n : 1;
        }
        return {p, p,
                +[](void* c) {
                    {
                        std::lock_guard<std::recursive_mutex> l(mu);
                        pinned.erase((char*)c);
                    }
                    free(c);
                },
                c10::Device(c10::DeviceType::CPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
    void copy_data(void* d, const void* s, std::size_t n) const override { memcpy(d, s, n); }
};
static PinAlloc pinalloc;
static bool is_pinned(const void* d) {
    std::lock_guard<std::recursive_mutex> l(mu);
    auto it = pinned.upper_bound((char*)d);
    if (it == pinned.begin()) return false;
    --it;
    return (char*)d < it->first + it->second;
}
// ---- guard
struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
    Device exchangeDevice(Device d) const override {
        auto o = cur;
        cur = d.index();
        return {c10::DeviceType::CUDA, o};
    }
    Device getDevice() const override { return {c10::DeviceType::CUDA, cur}; }
    void setDevice(Device d) const override { cur = d.index(); }
    void uncheckedSetDevice(Device d) const noexcept override { cur = d.index(); }
    Stream getStream(Device d) const override {
        return Stream(Stream::DEFAULT, Device(c10::DeviceType::CUDA, d.index() < 0 ? cur : d.index()));
    }
    Stream getDefaultStream(Device d) const override { return getStream(d); }
    Stream getStreamFromGlobalPool(Device d, bool) const override {
        return Stream(Stream::UNSAFE, Device(c10::DeviceType::CUDA, d.index() < 0 ? cur : d.index()), 7);
    }
    Stream getNewStream(Device d, int) const override { return getStreamFromGlobalPool(d, false); }
    Stream exchangeStream(Stream s) const override { return getStream(s.device()); }
    DeviceIndex deviceCount() const noexcept override { return num_gpus(); }
    void record(void** e, const Stream&, const DeviceIndex, const EventFlag) const override {
        if (!*e) *e = new int(1);
    }
    void block(void*, const Stream&) const override {}
    bool queryEvent(void*) const override {
        flush();
        return true;
    }
    void destroyEvent(void* e, const DeviceIndex) const noexcept override { delete (int*)e; }
    bool queryStream(const Stream&) const override {
        flush();
        return true;
    }
    void synchronizeStream(const Stream&) const override {
        flush();
        report("SYNC", "stream.synchronize", "");
    }
    void synchronizeEvent(void*) const override {
        flush();
        report("EVENT_WAIT", "event.synchronize", "");
    }
    void synchronizeDevice(const DeviceIndex) const override {
        flush();
        report("SYNC", "device.synchronize", "");
    }
    void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
    double elapsedTime(void*, void*, const DeviceIndex) const override { return 1.0; }
};
static Guard guard_impl;
static c10::impl::DeviceGuardImplRegistrar reg_guard(c10::DeviceType::CUDA, &guard_impl);
// ---- generator
struct Gen final : CPUGeneratorImpl {
    Gen(int i) : CPUGeneratorImpl(67280421310721) { device_ = Device(c10::DeviceType::CUDA, i); }
};
static Generator& cpu_twin() {
    static Generator g = at::detail::createCPUGenerator(1234);
    return g;
}
static const Generator& default_gen(int i) {
    static std::vector<Generator> all = [] {
        std::vector<Generator> v;
        for (int k = 0; k < 16; k++) v.push_back(make_generator<Gen>(k));
        return v;
    }();
    return all[i < 0 ? 0 : i];
}
namespace at {
struct FakeHooks : CUDAHooksInterface {
    FakeHooks(CUDAHooksArgs) {}
    void init() const override {}
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasCUDA() const override { return true; }
    bool hasPrimaryContext(DeviceIndex) const override { return true; }
    DeviceIndex deviceCount() const override { return num_gpus(); }
    void setCurrentDevice(DeviceIndex d) const override { cur = d; }
    DeviceIndex getCurrentDevice() const override { return cur; }
    DeviceIndex exchangeDevice(DeviceIndex d) const override {
        auto o = cur;
        cur = d;
        return o;
    }
    DeviceIndex maybeExchangeDevice(DeviceIndex d) const override {
        auto o = cur;
        cur = d;
        return o;
    }
    DeviceIndex current_device() const override { return cur; }
    int getNumGPUs() const override { return num_gpus(); }
    bool isPinnedPtr(const void* d) const override { return is_pinned(d); }
    Allocator* getPinnedMemoryAllocator() const override { return &pinalloc; }
    Allocator* getCUDADeviceAllocator() const override { return &alloc; }
    Device getDeviceFromPtr(void*) const override { return Device(kCUDA, cur); }
    const Generator& getDefaultGenerator(DeviceIndex i) const override { return default_gen(i); }
    Generator getNewGenerator(DeviceIndex i) const override { return make_generator<Gen>(i < 0 ? 0 : i); }
    void deviceSynchronize(DeviceIndex) const override {
        flush();
        report("SYNC", "deviceSynchronize", "");
    }
    std::string showConfig() const override { return "fake"; }
};
}  // namespace at
// ---- aliases
static c10::TensorImpl* rawp(const Tensor& t) { return t.unsafeGetTensorImpl(); }
static Tensor to_cpu_alias(const Tensor& t) {
    auto keep = t.storage();
    auto st = c10::Storage(c10::Storage::use_byte_size_t(), keep.nbytes(),
                           c10::DataPtr(
                               const_cast<void*>(keep.data()), new c10::Storage(keep),
                               +[](void* c) { delete (c10::Storage*)c; }, c10::Device(c10::DeviceType::CPU)),
                           c10::GetCPUAllocator(), true);
    auto out =
        at::detail::make_tensor<c10::TensorImpl>(std::move(st), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
    rawp(out)->set_storage_offset(t.storage_offset());
    rawp(out)->set_sizes_and_strides(t.sizes(), t.strides());
    if (t.is_conj()) out._set_conj(true);
    if (t.is_neg()) out._set_neg(true);
    if (rawp(t)->is_wrapped_number()) rawp(out)->set_wrapped_number(true);
    return out;
}
static Tensor to_cuda_wrap(const Tensor& t) {
    auto keep = t.storage();
    auto st = c10::Storage(c10::Storage::use_byte_size_t(), keep.nbytes(),
                           c10::DataPtr(
                               const_cast<void*>(keep.data()), new c10::Storage(keep),
                               +[](void* c) { delete (c10::Storage*)c; }, c10::Device(c10::DeviceType::CUDA, cur)),
                           &alloc, true);
    auto out =
        at::detail::make_tensor<c10::TensorImpl>(std::move(st), c10::DispatchKeySet(c10::DispatchKey::CUDA), t.dtype());
    rawp(out)->set_storage_offset(t.storage_offset());
    rawp(out)->set_sizes_and_strides(t.sizes(), t.strides());
    return out;
}
